"""The batches that a sampler draws, as ids or requests, cached for all that read ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.lock import Lock
from twinfeed.samplers import BatchStream
from twinfeed.samplers.stream import growing_ranges, steps_per_draw

STEPS = 32
"""The number of steps whose batches are drawn in one call: it costs hardly more than one step."""

_MAX_IDS = 1 << 20
"""The number of ids that are cached at most: those of the steps that are read ahead, and before."""


def of_all_ranks(sampler: BatchStream, /) -> BatchStream:
    """Return the sampler of the global batches, of which the batches of `sampler` are slices."""
    stream = copy.copy(sampler)
    stream.rank, stream.world_size = 0, 1
    return stream


class Request(NamedTuple):
    """Say which samples a batch has. A worker process makes the batch of a request.

    Attributes:
        epoch: the epoch of the batch.
        step: the step of the batch in its epoch.
        ids: int64[samples], the sample ids that the sampler draws, without padding.
        records: int64[samples], the record id of each sample.
        views: int64[samples], the number of each sample's view or use.
        seeds: uint64[samples], the seed for each sample's transform; None if no seeds are needed.
        mask: bool[batch], False for the rows of padding; None if the batch has none.
        num_records: of the feed, to check that a request is read from its own; None if not known.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> Request.of(ExactOnceBatchSampler(5, batch_size=2), 0, 2).records
    array([4])
    """

    epoch: int
    step: int
    ids: Int64s
    records: Int64s
    views: Int64s
    seeds: npt.NDArray[np.uint64] | None
    mask: npt.NDArray[np.bool_] | None = None
    num_records: int | None = None

    @classmethod
    def of(
        cls,
        sampler: BatchStream,
        epoch: int,
        step: int,
        ids: Int64s | None = None,
        /,
        *,
        seeds: bool = True,
    ) -> Request:
        """Return the request for the batch that a sampler draws for one step.

        Args:
            sampler: draws the sample ids. It also maps each sample id to the record id and to the
                number of the view (variant) of the record, and gives each sample of a step a seed.
            epoch: the epoch of the batch.
            step: the step of the batch.
            ids: the ids of the batch, int64[batch], if they are drawn already.
            seeds: whether to compute the seeds, which only a transform needs.

        >>> from twinfeed.samplers import ExactOnceBatchSampler
        >>> Request.of(ExactOnceBatchSampler(5, batch_size=2), 0, 0).ids
        array([0, 1])
        """
        if ids is None:
            ids = sampler.batch(epoch, step)
        records, views = sampler.records(ids), sampler.views(ids)
        sample_seeds = sampler.seeds(epoch, step) if seeds else None
        request = cls(epoch, step, ids, records, views, sample_seeds, None, sampler.num_records)
        return request.without_padding() if sampler.traits.padded else request

    @classmethod
    def plain(cls, records: Int64s, seeds: npt.NDArray[np.uint64] | None = None, /) -> Request:
        """Return a request for records that no sampler has drawn, of epoch 0, step 0 and view 0.

        The sample ids are the record ids. The default seeds are 0.

        >>> Request.plain(np.array([4])).seeds
        array([0], dtype=uint64)
        """
        if seeds is None:
            seeds = np.zeros(len(records), np.uint64)
        views = np.zeros_like(records)
        return cls(epoch=0, step=0, ids=records, records=records, views=views, seeds=seeds)

    @classmethod
    def joined(cls, requests: Sequence[Request], /) -> Request:
        """Return a request for the samples of several, of the epoch and the step of the first."""
        names = ("ids", "records", "views", "seeds")
        ids, records, views, seeds = (
            np.concatenate([getattr(request, name) for request in requests]) for name in names
        )
        return cls(requests[0].epoch, requests[0].step, ids, records, views, seeds)

    def without_padding(self) -> Request:
        """Return the request as a sampler that pads has drawn it, with its padding as a mask."""
        mask = self.ids >= 0
        return self.where(mask)._replace(mask=mask)

    def where(self, chosen: npt.NDArray[np.bool_], /) -> Request:
        """Return a request for only those samples where `chosen` (bool[samples]) is True."""
        return self._replace(
            ids=self.ids[chosen],
            records=self.records[chosen],
            views=self.views[chosen],
            seeds=None if self.seeds is None else self.seeds[chosen],
            mask=None,
        )


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
        self._lock = Lock()

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
            chunk = self._chunks.get((epoch, number)) or self._draw_chunk(epoch, number)
            out += chunk[first : first + stop - start]
            start = min(stop, (number + 1) * self._chunk_steps)
        return out

    def requests(
        self,
        epoch: int,
        start: int = 0,
        /,
        *,
        seeds: bool = True,
        goes_on: bool = False,
        start_epoch: Callable[[int, int], object] | None = None,
    ) -> Iterator[Request]:
        """Yield the request for each batch of an epoch, from step `start` on; with `goes_on` also
        of all epochs after it, with a call of `start_epoch(epoch, 0)` before each of those.

        The sampler draws several steps at a time, and maps their sample ids to record ids and to
        views (variants of a record), which is faster than step by step.

        >>> from twinfeed.samplers import ExactOnceBatchSampler
        >>> schedule = Schedule(ExactOnceBatchSampler(5, batch_size=2))
        >>> [request.ids.tolist() for request in schedule.requests(0, 1)]
        [[2, 3], [4]]
        """
        sampler = self.sampler
        ids_are_records, pads = sampler.traits.num_ids is None, sampler.traits.padded
        while True:
            sampler.batches(epoch, start, start)  # raises IndexError for a wrong epoch or step
            # Ranges of steps: first short, so that the first batch comes soon, then of STEPS steps.
            for first_step, stop_step in growing_ranges(start, len(sampler), STEPS):
                # `all_ids` has the ids of the batches end to end: batches of 2 and 1 ids are at the
                # slices [0, 2) and [2, 3).
                batches = self.batches(epoch, first_step, stop_step)
                all_ids = np.concatenate(batches)
                records, views = all_ids, np.zeros_like(all_ids)
                if not ids_are_records:
                    records, views = sampler.records(all_ids), sampler.views(all_ids)
                ends = np.cumsum([*map(len, batches)]).tolist()
                for step, batch in enumerate(map(slice, [0, *ends], ends), first_step):
                    ids = all_ids[batch].copy()  # the user may write to the ids of a batch
                    sample_seeds = sampler.seeds(epoch, step) if seeds else None
                    drawn = ids, records[batch], views[batch], sample_seeds
                    request = Request(epoch, step, *drawn)
                    yield request.without_padding() if pads else request
            if not goes_on:
                return
            epoch, start = epoch + 1, 0
            if start_epoch is not None:
                start_epoch(epoch, start)

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

    def _draw_chunk(self, epoch: int, number: int) -> list[Int64s]:
        """Return the batches of a chunk of `_chunk_steps` steps, drawn now and cached; the oldest
        are evicted.
        """
        with self._lock:
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
