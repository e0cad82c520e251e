"""The ids that a stream draws, shared by everything that looks ahead of the loop."""

from __future__ import annotations

import copy
from threading import Lock

import numpy as np

from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.chunks import steps_per_draw

STEPS = 32
"""Steps that are drawn together: this costs hardly more than one step."""

_KEPT = (1 << 20) + (1 << 17)
"""Ids that are kept: what a disk cache looks at ahead, and what passes it lately."""


class Schedule:
    """The ids of any steps of a stream. Those drawn last are kept.

    It keeps a window of steps, and is no queue: passes of frameworks coexist, come out of order,
    and begin anew. Steps before the window are drawn again. Several threads may ask.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> schedule = Schedule(ExactOnceBatchSampler(5, batch_size=2))
    >>> [ids.tolist() for ids in schedule.batches(0, 1, 3)]
    [[2, 3], [4]]
    """

    def __init__(self, sampler: BatchStream, /) -> None:
        self.sampler = sampler
        self._together = min(STEPS, steps_per_draw(sampler.batch_size))
        self._chunks: dict[tuple[int, int], list[Int64s]] = {}
        self._ids = 0
        self._all_ranks: Schedule | None = None
        self._lock = PerProcess(Lock)

    def __reduce__(self) -> tuple[type[Schedule], tuple[BatchStream]]:
        """Pickle without what was drawn."""
        return Schedule, (self.sampler,)

    @property
    def all_ranks(self) -> Schedule:
        """The schedule of all ranks together, from which this rank's batches are cut."""
        if self.sampler.world_size == 1:
            return self
        if self._all_ranks is None:
            stream = copy.copy(self.sampler)
            stream.rank, stream.world_size = 0, 1
            self._all_ranks = Schedule(stream)
        return self._all_ranks

    def batches(self, epoch: int, start: int, stop: int, /) -> list[Int64s]:
        """Return the same as the sampler's `batches`; the arrays belong to the schedule."""
        out: list[Int64s] = []
        while start < stop:
            number, first = divmod(start, self._together)
            out += self._chunk(epoch, number)[first : first + stop - start]
            start = min(stop, (number + 1) * self._together)
        return out

    def records(self, start: int, stop: int, /) -> tuple[Int64s, Int64s]:
        """Return the records of some steps, without padding, and the step of each.

        Here steps are counted over all epochs.
        """
        batches: list[Int64s] = []
        steps_per_epoch = len(self.sampler)
        while start + len(batches) < stop:
            epoch, first = divmod(start + len(batches), steps_per_epoch)
            last = min(steps_per_epoch, first + stop - start - len(batches))
            batches += self.batches(epoch, first, last)
        ids = np.concatenate([np.zeros(0, np.int64), *batches])
        steps = np.repeat(np.arange(start, stop), [len(batch) for batch in batches])
        return self.sampler.records(ids[ids >= 0]), steps[ids >= 0]

    def _chunk(self, epoch: int, number: int) -> list[Int64s]:
        with self._lock():
            chunk = self._chunks.get((epoch, number))
            if chunk is None:
                chunk = self._drawn(epoch, number * self._together)
                self._chunks[epoch, number] = chunk
                self._ids += sum(map(len, chunk))
                while self._ids > _KEPT and len(self._chunks) > 1:
                    oldest = self._chunks.pop(next(iter(self._chunks)))
                    self._ids -= sum(map(len, oldest))
        return chunk

    def _drawn(self, epoch: int, first: int) -> list[Int64s]:
        last = min(first + self._together, len(self.sampler))
        if self._all_ranks is None:
            return self.sampler.batches(epoch, first, last)
        lows, highs = self.sampler.rank_slices(epoch, first, last)
        batches = zip(
            self._all_ranks.batches(epoch, first, last), lows.tolist(), highs.tolist(), strict=True
        )
        return [ids[low:high] for ids, low, high in batches]


class Schedules(dict[BatchStream, Schedule]):
    """The schedule of each stream of a loader, made when it is asked for."""

    def __missing__(self, sampler: BatchStream) -> Schedule:
        return self.setdefault(sampler, Schedule(sampler))

    def __reduce__(self) -> tuple[type[Schedules], tuple[()]]:
        """Pickle without what was drawn."""
        return Schedules, ()
