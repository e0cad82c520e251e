"""What a worker is asked for: the ids of one step, and what the sampler says of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.index import Index
from twinfeed.loaders.index.opened import check_index
from twinfeed.samplers import BatchStream

Int64s = npt.NDArray[np.int64]


class Request(NamedTuple):
    """One rank batch to be read: what a worker needs to know, and no more.

    `ids`, `records` and `views` are int64[batch], -1 for padding; `seeds` is uint64[batch].

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> request_of(ExactOnceBatchSampler(5, batch_size=2), epoch=0, step=2).records
    array([4])
    """

    epoch: int
    step: int
    ids: Int64s
    records: Int64s
    views: Int64s
    seeds: npt.NDArray[np.uint64]

    def where(self, kept: npt.NDArray[np.bool_]) -> Request:
        """Leave the samples where `kept` (bool[batch]) is False out."""
        return self._replace(
            ids=self.ids[kept],
            records=self.records[kept],
            views=self.views[kept],
            seeds=self.seeds[kept],
        )


def request_of(
    sampler: BatchStream, ids: Int64s | None = None, /, *, epoch: int, step: int
) -> Request:
    """Make the request of one step; `ids`, where the caller has drawn them already.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> request_of(ExactOnceBatchSampler(5, batch_size=2), epoch=0, step=0).ids
    array([0, 1])
    """
    if ids is None:
        ids = sampler.batch(epoch, step)
    return Request(
        epoch, step, ids, sampler.records(ids), sampler.views(ids), sampler.seeds(epoch, step)
    )


def plain_request(records: Int64s, seeds: npt.NDArray[np.uint64], /) -> Request:
    """Request records by themselves: no step, no views.

    >>> plain_request(np.array([4]), np.zeros(1, np.uint64)).ids
    array([4])
    """
    return Request(0, 0, records, records, np.zeros_like(records), seeds)


def check_fit(index: Index, sampler: BatchStream, /) -> None:
    """Raise TypeError or ValueError where `sampler` cannot draw from `index`.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> check_fit("train.index", ExactOnceBatchSampler(5, batch_size=2))
    Traceback (most recent call last):
    ...
    TypeError: index must be an Index, got a str: open_index(path) gives one
    """
    check_index(index)
    check_sampler(sampler)
    if sampler.num_records != len(index):
        raise ValueError(
            f"the sampler was made for {sampler.num_records} records, the index has {len(index)}: "
            f"make it with index.labels or len(index); a part of the records is drawn from with "
            f"PKBatchSampler(…, records=ids) or SubsetSampler(records, num_records={len(index)})"
        )


def check_sampler(sampler: BatchStream, /) -> None:
    """Raise TypeError for what is no batch sampler.

    >>> from twinfeed.samplers import RandomSampler
    >>> check_sampler(RandomSampler(10, seed=0))
    Traceback (most recent call last):
    ...
    TypeError: sampler must be a batch sampler of twinfeed.samplers, got a RandomSampler: ...
    """
    if not isinstance(sampler, BatchStream):
        raise TypeError(
            f"sampler must be a batch sampler of twinfeed.samplers, got a "
            f"{type(sampler).__name__}: BatchSampler(order, batch_size=…) makes one of an order"
        )
