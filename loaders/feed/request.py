"""The request of a batch: the ids of one step, and the record, view and seed of each id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.reading.prefetch.schedule import STEPS, Schedule
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.chunks import growing_ranges


class Request(NamedTuple):
    """Say which samples a batch has. A worker process receives a request, and makes the batch.

    Attributes:
        epoch: the epoch of the batch.
        step: the step of the batch in its epoch.
        ids: int64[batch], the sample ids that the sampler draws, -1 for padding.
        records: int64[batch], the record id of each sample, -1 for padding.
        views: int64[batch], the number of each sample's view or use, -1 for padding.
        seeds: uint64[batch], the seed for each sample's transform; None if no seeds are needed.

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
        return cls(epoch, step, ids, records, views, sampler.seeds(epoch, step) if seeds else None)

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

    def where(self, mask: npt.NDArray[np.bool_], /) -> Request:
        """Return a request for only those samples where `mask` (bool[batch]) is True."""
        if mask.all():
            return self
        return self._replace(
            ids=self.ids[mask],
            records=self.records[mask],
            views=self.views[mask],
            seeds=None if self.seeds is None else self.seeds[mask],
        )


def requests(
    schedule: Schedule, epoch: int, start: int = 0, /, *, seeds: bool = True
) -> Iterator[Request]:
    """Yield the request for each batch of an epoch, from step `start` on.

    The sampler draws several steps at a time, and maps their sample ids to record ids and to views
    (variants of a record), which is faster than step by step.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> schedule = Schedule(ExactOnceBatchSampler(5, batch_size=2))
    >>> [request.ids.tolist() for request in requests(schedule, 0, 1)]
    [[2, 3], [4]]
    """
    sampler = schedule.sampler
    sampler.batches(epoch, start, start)  # raises IndexError for a wrong epoch or step
    # Ranges of steps, first short, so that the first batch comes soon, then of up to STEPS steps.
    for first_step, stop_step in growing_ranges(start, len(sampler), STEPS):
        # `all_ids` has the ids of the batches end to end: batches of 2 and 1 ids are at the slices
        # [0, 2) and [2, 3).
        batches = schedule.batches(epoch, first_step, stop_step)
        all_ids = np.concatenate(batches)
        records, views = sampler.records(all_ids), sampler.views(all_ids)
        ends = np.cumsum([len(ids) for ids in batches]).tolist()
        for step, batch in enumerate(map(slice, [0, *ends], ends), first_step):
            ids = all_ids[batch].copy()  # the user may write to the ids of a batch
            sample_seeds = sampler.seeds(epoch, step) if seeds else None
            yield Request(epoch, step, ids, records[batch], views[batch], sample_seeds)
