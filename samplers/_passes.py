"""Passes over a bare stream, which nobody tells what a training loop received."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64
from twinfeed.samplers._cursor import Cursor

if TYPE_CHECKING:
    from twinfeed.samplers._stream import BatchStream


_warned: set[str] = set()


def warn_unsharded(stream: BatchStream, /) -> None:
    """Warn, once a process, where each rank of `torch.distributed` would meet every batch.

    torch is not imported for this: where nothing else has imported torch, there are no ranks.
    """
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    ranks = distributed.get_world_size()
    if ranks > 1 and not stream.sharded and "unsharded" not in _warned:
        _warned.add("unsharded")
        warnings.warn(
            f"there are {ranks} ranks, and each meets every batch of {stream!r}: give each rank "
            f"its part, shard(rank, world_size) of the sampler or the feed; shard(0, 1) says that "
            f"all of them are meant to meet every batch",
            stacklevel=4,
        )


class Passes:
    """Begin each pass at step 0, and move the cursor as the latest pass draws batches."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self._running: Cursor | None = None  # where the latest pass stands, until it has ended
        self._begun = (0, 0)  # an epoch, and how often iteration alone began it

    def __reduce__(self) -> tuple[type[Passes], tuple[Cursor]]:
        """Copy and pickle the place, without the running pass, which belongs to this object."""
        return type(self), (copy.copy(self.cursor),)

    def over(self, stream: BatchStream) -> Iterator[tuple[int, int, Int64]]:
        """Yield (epoch, step, ids) of a pass; nothing happens before the first `next`."""
        epoch, step = self.cursor.begin(whole=True)
        running = self._running = copy.copy(self.cursor)
        self._count(epoch, stream)
        warn_unsharded(stream)
        try:
            for step, ids in enumerate(stream._rest(epoch, step), step):  # noqa: B020
                # Before the batch is yielded: loops that take exactly len() batches never come back
                self._drawn(running, epoch)
                yield epoch, step, ids
        finally:
            if self._running is running:
                self._running = None
                self.cursor.end()

    def _drawn(self, running: Cursor, epoch: int) -> None:
        """Move the cursor, unless a later pass, `set_epoch` or a state has taken it over."""
        running.advance()
        if self._running is not running:
            return
        if self.cursor.epoch == epoch:
            self.cursor.advance()
        if not running.step:
            self._running = None

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Say where the next pass begins; the epoch of the running pass changes nothing."""
        epoch = _validate.whole("epoch", epoch)
        self._begun = (0, 0)
        if self._running is not None and self._running.epoch == epoch:
            self.cursor.seek(epoch, self._running.step)
        else:
            self.cursor.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Say by a state where the next pass begins."""
        self.cursor.load_state_dict(state)
        self._begun = (0, 0)
        self._running = None

    def _count(self, epoch: int, stream: BatchStream) -> None:
        """Warn where iteration alone begins a training epoch a third time.

        The second time is no mistake: sanity checks and Keras draw a batch to look at.
        """
        known, times = self._begun
        times = times + 1 if known == epoch else 1
        self._begun = (epoch, times)
        if times == 3 and not stream.evaluation:
            warnings.warn(
                f"epoch {epoch} of this sampler begins for the third time, so the same batches "
                f"come again: call sampler.set_epoch(epoch) before each pass, or use a loader of "
                f"twinfeed.loaders, which goes on after the batches that the loop received",
                stacklevel=4,
            )
