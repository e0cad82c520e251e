"""Local files: what the kernel is asked to read ahead."""

import threading
from collections.abc import Iterator
from pathlib import Path

from twinfeed.loaders.reading.prefetch.kernel_readahead import KernelReadahead


def test_range_that_is_added_while_thread_ends_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(100))
    queue_was_empty, may_end = threading.Event(), threading.Event()

    class EndsLate(KernelReadahead):
        def _run(self) -> None:
            super()._run()
            queue_was_empty.set()
            may_end.wait(10)

    with open(tmp_path / "shard", "rb") as file:

        def ranges(taken: threading.Event) -> Iterator[tuple[int, int, int]]:
            yield file.fileno(), 0, 100
            taken.set()

        readahead, first, second = EndsLate(), threading.Event(), threading.Event()
        readahead.add(ranges(first))
        assert first.wait(10)
        assert queue_was_empty.wait(10)
        readahead.add(ranges(second))
        assert second.wait(5)
        may_end.set()
        readahead.close()
