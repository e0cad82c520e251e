"""Every record exactly once, for evaluation."""

from __future__ import annotations

from typing import Literal, SupportsIndex

from numpy.typing import ArrayLike

from twinfeed.samplers import _validate
from twinfeed.samplers.batch import BatchSampler
from twinfeed.samplers.orders import Order, SequentialSampler
from twinfeed.samplers.subset import SubsetSampler


class ExactOnceBatchSampler(BatchSampler):
    """Give the ids `0 … n - 1` in stored order, each exactly once over all ranks and steps.

    Nothing is repeated and nothing is dropped. Every rank has the same number of steps, so that
    no collective waits for ever. Zero records are zero steps.

    `final` says what happens where `batch_size` does not divide n:

    - `"smaller"`: the last batch is smaller. A rank may get an empty batch, int64[0].
    - `"pad"`: the last batch is filled with -1, and loaders give a mask.

    Over ranks sum the losses, count the records, and divide once. The mean over an empty batch is
    NaN, and the mean of the ranks' means is wrong.

    Each pass is whole, on every route, except the first pass after a state was loaded. Each pass is
    epoch 0, unless `set_epoch` says otherwise.

    `records` are the ids of some of the n records (int64, in any order), such as one side of
    `split`: then only these come. `seed` is for augmentation seeds alone.

    Five records, batches of four, two ranks::

        step             0            1 "smaller"    1 "pad"
        global           0 1 2 3      4              4 -1 -1 -1
        rank 0           0 1          4              4 -1
        rank 1               2 3      (empty)             -1 -1

    >>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=4).shard(1, 2)]
    [[2, 3], []]
    >>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=4, final="pad")]
    [[0, 1, 2, 3], [4, -1, -1, -1]]
    >>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=2, records=[4, 1, 2])]
    [[1, 2], [4]]
    """

    evaluation = True

    def __init__(
        self,
        n: SupportsIndex,
        /,
        *,
        batch_size: SupportsIndex,
        final: Literal["smaller", "pad"] = "smaller",
        records: ArrayLike | None = None,
        seed: SupportsIndex = 0,
    ) -> None:
        _validate.choice("final", final, ("smaller", "pad"))
        order: Order = SequentialSampler(n)
        if records is not None:
            order = SubsetSampler(_validate.records(records, len(order)), num_records=n)
        order.seed = _validate.seed(seed)
        super().__init__(order, batch_size=batch_size, final=final)

    def __repr__(self) -> str:
        some = "" if len(self._order) == self.num_records else f"{len(self._order):,} of "
        records = some + _validate.counted(self.num_records, "record")
        return f"ExactOnceBatchSampler({records} once, {self._told_size}, final={self._final!r})"
