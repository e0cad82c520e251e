"""Every record exactly once, for evaluation."""

from __future__ import annotations

from collections.abc import Sized
from typing import Literal, Self, SupportsIndex

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
        dataset: a dataset, an index or a source, of which only the length is kept, or that length.
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
    _skips_empty = False  # whether this is a rank without its empty batches

    @validate.show_call("ExactOnceBatchSampler(len(index), batch_size=32)")
    def __init__(
        self,
        dataset: SupportsIndex | Sized,
        *,
        batch_size: SupportsIndex,
        last_batch: Literal["smaller", "pad"] = "smaller",
        records: ArrayLike | None = None,
        seed: SupportsIndex = 0,
    ) -> None:
        validate.choice("last_batch", last_batch, ("smaller", "pad"))
        count = validate.record_count("dataset", dataset, subset=_SUBSET_CALL)
        order: Sampler = SequentialSampler(count)
        if records is not None:
            order = subset = object.__new__(SubsetSampler)
            subset._set_records(validate.sorted_record_ids(records, count), count, None)
        order.seed = validate.seed(seed)
        super().__init__(order, batch_size=batch_size, last_batch=last_batch)
        self.num_samples = len(order)  # records that are evaluated

    def shard(
        self,
        rank: SupportsIndex,
        world_size: SupportsIndex,
        *,
        empty: Literal["keep", "skip"] = "keep",
    ) -> Self:
        """Return a copy of this sampler with one rank's slices of the same global batches.

        Args:
            rank: this rank.
            world_size: the number of ranks.
            empty: what happens if a rank has no record of the last batch. `"keep"`: the rank has an
                empty batch, so that all ranks have the same number of steps. `"skip"`: the rank has
                a batch less, and `len` says so, for passes without collectives. With a collective
                in each step, the other ranks would wait for this one for ever.

        Raises:
            ValueError: the sampler is already that of one rank, or `rank` is not in
                `[0, world_size)`; with `"skip"`, batches are padded, or have fewer ids than there
                are ranks.

        >>> sampler = ExactOnceBatchSampler(5, batch_size=4)
        >>> [list(sampler.shard(rank, 2, empty="skip")) for rank in range(2)]
        [[[0, 1], [4]], [[2, 3]]]
        """
        validate.choice("empty", empty, ("keep", "skip"))
        sampler = super().shard(rank, world_size)
        if empty == "skip" and len(self):
            sampler._skip_empty()
        return sampler

    def _skip_empty(self) -> None:
        """Leave out this rank's last batch if the batch is empty, in every epoch."""
        if self._last_batch == "pad":
            raise ValueError("empty='skip' is for last_batch='smaller': padded batches have rows")
        if self._largest_batch < self.world_size and len(self) > 1:
            raise ValueError(
                f"empty='skip' needs a batch_size of at least the {self.world_size} ranks, got "
                f"{self._largest_batch}: most batches would be empty on some ranks"
            )
        self._fingerprint = self.fingerprint  # that of all ranks, which have a step more
        self._skips_empty = True
        lows, highs = self.rank_slices(0, len(self) - 1, len(self))
        self._steps -= int(lows[0] == highs[0])

    def _inner_position(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the position of a step; the ranks' slices are then the same in every epoch."""
        return (0, step) if self._skips_empty else super()._inner_position(epoch, step)

    def _describe(self) -> str:
        subset = "" if self.num_samples == self.num_records else f"{self.num_samples:,} of "
        records = subset + validate.counted(self.num_records, "record")
        last_batch = f"last_batch={self._last_batch!r}"
        batches = validate.counted(self._inner_steps, "batch")
        batches += f" of {self._largest_batch:,}"
        return f"ExactOnceBatchSampler({records} once, {batches}, {last_batch})"
