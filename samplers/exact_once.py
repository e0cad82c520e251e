"""Every record exactly once, for evaluation."""

from __future__ import annotations

from collections.abc import Sized
from typing import Literal, SupportsIndex

from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.batch import BatchSampler
from twinfeed.samplers.orders import Sampler, SequentialSampler
from twinfeed.samplers.subset import SubsetSampler

# How to draw from some of the records: the advice in an error.
_SUBSET_CALL = "ExactOnceBatchSampler(len(index), records=ids, …)"


class ExactOnceBatchSampler(BatchSampler):
    """The ids `0 … n - 1` in stored order, each exactly once over all ranks and steps.

    Nothing is repeated and nothing is dropped. Every rank has the same number of steps, so that
    no collective waits without end. Zero records are zero steps.

    Over ranks sum the losses, count the records, and divide once. The mean over an empty batch is
    NaN, and the mean of the ranks' means is wrong.

    Each pass is whole, on every route, except the first pass after a state was loaded. Each pass is
    epoch 0, unless `set_epoch` says otherwise.

    Args:
        n: number of records, or a dataset, an index or a source, of which only the length is kept.
        batch_size: ids of a global batch.
        last_batch: what happens if `batch_size` does not divide n. `"smaller"`: the last batch is
            smaller, and a rank may get an empty batch, int64[0]. `"pad"`: the last batch is filled
            with -1, and loaders give a mask. The rows of padding are zeros, empty texts and lists,
            and in a field of bytes those of the stream's first record, which a parser accepts.
        records: the ids of some of the n records (int64, in any order), such as one part of
            `split`, or a mask (bool[n]), such as `labels >= 0`: then only these come.
        seed: only for augmentation seeds.

    Five records, batches of four, two ranks::

        step             0            1 "smaller"    1 "pad"
        global           0 1 2 3      4              4 -1 -1 -1
        rank 0           0 1          4              4 -1
        rank 1               2 3      (empty)             -1 -1

    >>> list(ExactOnceBatchSampler(5, batch_size=4).shard(1, 2))
    [[2, 3], []]
    >>> ExactOnceBatchSampler(5, batch_size=4, last_batch="pad").batch(0, 1).tolist()
    [4, -1, -1, -1]
    >>> list(ExactOnceBatchSampler(5, batch_size=2, records=[4, 1, 2]))
    [[1, 2], [4]]
    """

    evaluation = True

    @validate.show_call("ExactOnceBatchSampler(len(index), batch_size=32)")
    def __init__(
        self,
        n: SupportsIndex | Sized,
        /,
        *,
        batch_size: SupportsIndex,
        last_batch: Literal["smaller", "pad"] = "smaller",
        records: ArrayLike | None = None,
        seed: SupportsIndex = 0,
    ) -> None:
        validate.choice("last_batch", last_batch, ("smaller", "pad"))
        count = validate.record_count("n", n, subset=_SUBSET_CALL)
        order: Sampler = SequentialSampler(count)
        if records is not None:
            order = subset = object.__new__(SubsetSampler)
            subset._set_records(validate.sorted_record_ids(records, count), count, None)
        order.seed = validate.seed(seed)
        super().__init__(order, batch_size=batch_size, last_batch=last_batch)
        self.num_samples = len(order)  # records that are evaluated

    def _describe(self) -> str:
        subset = "" if self.num_samples == self.num_records else f"{self.num_samples:,} of "
        records = subset + validate.counted(self.num_records, "record")
        last_batch = f"last_batch={self._last_batch!r}"
        return f"ExactOnceBatchSampler({records} once, {self._batches_text}, {last_batch})"
