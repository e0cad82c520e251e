"""A cache of the batches of ids that a sampler draws, shared by all that read ahead of the loop."""

from __future__ import annotations

import copy
from threading import Lock

import numpy as np

from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import PerProcess
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.chunks import steps_per_draw

STEPS = 32
"""The number of steps whose batches are drawn in one call: it costs hardly more than one step."""

_MAX_IDS = 1 << 20
"""The number of ids that are cached at most: those of the steps that are read ahead, and before."""


def of_all_ranks(sampler: BatchStream, /) -> BatchStream:
    """Return the sampler of the global batches, of which the batches of `sampler` are slices."""
    stream = copy.copy(sampler)
    stream.rank, stream.world_size = 0, 1
    return stream


class Schedule:
    """The batches of ids that a sampler draws. The chunks of steps drawn last are cached.

    Any step may be requested at any time, by several threads at once, since passes of frameworks
    coexist, run out of order and start again. A step that is not cached is drawn again.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> schedule = Schedule(ExactOnceBatchSampler(5, batch_size=2))
    >>> [ids.tolist() for ids in schedule.batches(0, 1, 3)]
    [[2, 3], [4]]
    """

    def __init__(self, sampler: BatchStream, /) -> None:
        self.sampler = sampler
        self._chunk_steps = min(STEPS, steps_per_draw(sampler.batch_size))
        self._chunks: dict[tuple[int, int], list[Int64s]] = {}  # by epoch and number of the chunk
        self._num_ids = 0  # of all cached chunks
        self._lock = PerProcess(Lock)

    def __reduce__(self) -> tuple[type[Schedule], tuple[BatchStream]]:
        """Pickle without the cached batches."""
        return Schedule, (self.sampler,)

    def batches(self, epoch: int, start: int, stop: int, /) -> list[Int64s]:
        """Return the batches of ids of the steps [start, stop) of an epoch, a list of int64[batch].

        The caller must not write to the arrays, which are cached.
        """
        out: list[Int64s] = []
        while start < stop:
            number, first = divmod(start, self._chunk_steps)  # the chunk, and the step within it
            out += self._chunk(epoch, number)[first : first + stop - start]
            start = min(stop, (number + 1) * self._chunk_steps)
        return out

    def records(self, start: int, stop: int, /) -> tuple[Int64s, Int64s]:
        """Return the record ids of the samples of global steps [start, stop), and the step of each.

        Two arrays, int64[samples], without padding. For example, an epoch has 10 steps: the global
        steps [8, 12) are the steps [8, 10) of epoch 0, and [0, 2) of epoch 1.
        """
        batches: list[Int64s] = []  # of the steps from `start` on, one for each step
        steps_per_epoch = len(self.sampler)
        while start + len(batches) < stop:
            # The next step is `start + len(batches)`, step `first` of its epoch. Draw the steps up
            # to `stop`, or up to the end of the epoch.
            epoch, first = divmod(start + len(batches), steps_per_epoch)
            last = min(steps_per_epoch, first + stop - start - len(batches))
            batches += self.batches(epoch, first, last)
        # A batch has sample ids, -1 for padding. The sampler says which record a sample is of.
        ids = np.concatenate([np.zeros(0, np.int64), *batches])
        steps = np.repeat(np.arange(start, stop), [len(batch) for batch in batches])
        return self.sampler.records(ids[ids >= 0]), steps[ids >= 0]

    def _chunk(self, epoch: int, number: int) -> list[Int64s]:
        """Return the batches of a chunk of `_chunk_steps` steps, cached or drawn now.

        If too many ids are cached, the chunks drawn first are evicted.
        """
        with self._lock():
            chunk = self._chunks.get((epoch, number))
            if chunk is None:
                start = number * self._chunk_steps
                stop = min(start + self._chunk_steps, len(self.sampler))
                self._chunks[epoch, number] = chunk = self.sampler.batches(epoch, start, stop)
                self._num_ids += sum(map(len, chunk))
                while self._num_ids > _MAX_IDS and len(self._chunks) > 1:
                    oldest = self._chunks.pop(next(iter(self._chunks)))
                    self._num_ids -= sum(map(len, oldest))
        return chunk


class Schedules(dict[tuple[int, int], Schedule]):
    """The schedules of a loader's stream: a dict by (rank, world size)."""

    def of(self, sampler: BatchStream, /) -> Schedule:
        """Return the schedule of a rank of the stream, which is created at the first call."""
        rank = sampler.rank, sampler.world_size
        return self.get(rank) or self.setdefault(rank, Schedule(sampler))

    def __reduce__(self) -> tuple[type[Schedules], tuple[()]]:
        """Pickle without the schedules."""
        return Schedules, ()
