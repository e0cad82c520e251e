"""The loader without a framework: batches of numpy arrays."""

from __future__ import annotations

from collections.abc import Generator

from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.loop.feed_loader import ThreadedLoader
from twinfeed.loaders.loop.loader import B


class NumpyLoader(ThreadedLoader[B]):
    """Iterate over the batches of `feed` as numpy arrays.

    Where a pass begins, and what the state counts: see `Loader`.

    Args:
        feed: the feed whose batches are made.
        prefetch: batches kept ready ahead of the step. With 0, the calling thread does all work.
            Default: 2, or 0 for a source of your own that is `in_memory`.
        threads: threads that make one batch each. If the sampler reuses decoded images, the threads
            share one batch, and as many further threads decode images of coming batches.
            Default: the processors this process may use, at most 8; no threads if nothing is
            decoded.
        readahead: bytes to read before their batches need them. Default: 64 MiB while reading waits
            for a disk or a network, and 0 while all pages are in memory. 0 reads nothing ahead.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> with NumpyLoader(Feed(index, ExactOnceBatchSampler(3, batch_size=2))) as loader:
    ...     for batch in loader:
    ...         print(batch["id"], batch["word"], loader.step)
    [0 1] [b'to', b'be'] 1
    [2] [b'or'] 0
    """

    def _start_pass(
        self, epoch: int, start: int
    ) -> Prefetcher[Batch] | Generator[Batch, None, None]:
        return self._prefetched(self._batches(epoch, start))
