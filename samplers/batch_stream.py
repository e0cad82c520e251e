"""The base of batch samplers: batches as a pure function of (epoch, step), and slices of ranks."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Self, SupportsIndex

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.batch_table import batch_table
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.processes import check_not_batched, num_processes, warn_unsharded
from twinfeed.samplers.state import flattened, json_value
from twinfeed.samplers.stream import Stream, StreamPass, growing_ranges, steps_per_draw
from twinfeed.samplers.traits import check_record_ids
from twinfeed.samplers.types import Int64s, UInt64s

# What to do with a DataLoader whose sampler a trainer must not replace: advice of errors.
_UNCHANGED = (
    "a DataLoader that the trainer does not change (Lightning and Fabric: "
    "use_distributed_sampler=False)"
)


class BatchStream(Stream):
    """A stream of batches of sample ids, by (epoch, step) or by iteration, whole or for one rank.

    Every epoch has `len()` steps. `batch(epoch, step)` is pure. `shard(rank, world_size)` gives
    the same stream as one rank sees it: a contiguous slice of every global batch.

    Iterating is for a plain `DataLoader(batch_sampler=…)`. A sampler does not see which batches
    a training loop received, so a pass (one iteration) is an epoch from its first step:

    - After its last batch, the next pass is the next epoch. An evaluation stays in its epoch.
    - A pass that was broken off begins the same epoch again.
    - The first pass after `load_state_dict` is the rest of the loaded epoch.
    - `set_epoch` says where the next pass begins. A running pass never changes.

    torch's workers draw `prefetch_factor * num_workers` batches as soon as an iterator is made. If
    an epoch has no more steps than the workers draw, call `set_epoch` before each pass. A loader of
    `twinfeed.loaders` counts what the loop received, and goes on there.

    Args:
        num_steps: steps of an epoch.
        size: the most ids of an epoch.
        batch_size: ids of the largest global batch.
        seed: the only source of chance.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(10), batch_size=4)
    >>> list(stream)
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> stream.epoch, stream.step
    (1, 0)
    >>> list(stream.shard(0, 2))
    [[0, 1], [4, 5], [8]]
    """

    #: This rank, 0 when not sharded.
    rank: int = 0
    #: Number of ranks, 1 when not sharded.
    world_size: int = 1
    #: A number that divides the size of every global batch of every epoch.
    size_divisor: int = 1

    def __init__(self, *, num_steps: int, size: int, batch_size: int, seed: int) -> None:
        if not num_steps and not self.evaluation:
            number = validate.counted(self.num_records, "record")
            raise ValueError(
                f"an epoch must have at least one batch, got 0 of {number}: change batch_size or "
                f"last_batch, or take ExactOnceBatchSampler, whose epoch may be empty"
            )
        size = validate.integer("samples of an epoch", size, minimum=0)
        self._max_epochs = validate.LIMIT // max(1, size)
        self._steps, self.seed = num_steps, seed
        self._fingerprint: dict[str, Any] = {}  # computed when used; copies share the dict
        self._largest_batch = batch_size  # the ids of the largest global batch
        self._augmentation_key = root_key(seed, "augmentation")
        self.batch_key = root_key(seed, "batch")  # what batch_seed derives the seeds from

    def __len__(self) -> int:
        return self._steps

    def _fields(self) -> dict[str, Any]:
        fields = {
            "sampler": type(self).__name__,
            "stream_version": self.stream_version,
            "steps": self._steps,
            "seed": self.seed,
            **json_value(self.parameters),
        }
        return dict(flattened(fields))

    @abstractmethod
    def _draw(self, epoch: int, start: int, lows: Int64s, highs: Int64s) -> Int64s:
        """Return a slice of each batch from step `start` on, concatenated: of step `start + i` the
        ids `batch[lows[i]:highs[i]]`.
        """

    @abstractmethod
    def _sizes(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the sizes of the global batches of steps `start` to `stop - 1` of an epoch."""

    @abstractmethod
    def _describe(self) -> str:
        """Return the text of the stream of all ranks, in one line: `repr` names the rank too."""

    def _samples_before(self, epoch: int, step: int) -> int:
        """Return the number of ids in all earlier steps; 0 if the ranks divide every batch."""
        return 0

    @property
    def group_sampler(self) -> BatchStream | None:
        """A copy that draws group numbers, such as classes, in place of ids; None without groups.

        If sample 7 is of group 2, and sample 3 of group 0, its batch is 2 0 in place of 7 3: for a
        loader that reads each group from a dataset of its own (tf.data's `choose_from_datasets`).
        `num_records` of the copy is the number of groups.
        """
        return None

    def _check_world(self, world_size: int) -> None:
        """Raise ValueError for a world size that cannot divide the global batch."""

    @property
    def batch_size(self) -> int:
        """Ids of the largest batch of this rank."""
        return -(-self._largest_batch // self.world_size)

    @property
    def drop_last(self) -> bool:
        """True: no batch is smaller. Raise TypeError if a trainer must not distribute the batches.

        Accelerate and Lightning read this property of a sampler before they give each of n
        processes every n-th batch. This is the only place for an error, if that would be wrong.

        Raises:
            TypeError: `shard` was called, batches have several sizes, n does not divide their
                number, or this is an evaluation, which must have every record exactly once.
        """
        processes = num_processes()
        if self.world_size > 1:
            raise TypeError(
                f"this sampler already is rank {self.rank} of {self.world_size}: give the trainer "
                f"the sampler without shard(), or {_UNCHANGED}"
            )
        if self.evaluation or self.fixed_size is None:
            raise TypeError(
                f"a trainer would lose or repeat records of {self!r}: take last_batch='drop', or "
                f"take sampler.shard(rank, world_size) and {_UNCHANGED}"
            )
        if self._steps % processes:
            raise TypeError(
                f"{processes} processes cannot divide {validate.counted(self._steps, 'batch')} of "
                f"an epoch evenly: set batches_per_epoch to a multiple of {processes}, or take "
                f"sampler.shard(rank, world_size) and {_UNCHANGED}"
            )
        return True

    @property
    def fixed_size(self) -> int | None:
        """Size of every batch of this rank, in any epoch; None if sizes may differ."""
        size, remainder = divmod(self._largest_batch, self.world_size)
        # `size_divisor` divides the size of every global batch. If even the largest batch is no
        # larger than this divisor, all batches have this size.
        is_fixed = self.size_divisor == self._largest_batch and not remainder
        return size if is_fixed and self._steps else None

    def batch(self, epoch: SupportsIndex, step: SupportsIndex) -> Int64s:
        """Return the ids of one step, int64[batch]: the global batch, or this rank's slice.

        Raises:
            IndexError: a step outside `[0, len(self))`.
        """
        epoch, step = self._as_ints(epoch, step, self._steps)
        return self._batches(epoch, step, step + 1)[0]

    def batches(
        self, epoch: SupportsIndex, start: SupportsIndex, stop: SupportsIndex
    ) -> list[Int64s]:
        """Return `[batch(epoch, s) for s in range(start, stop)]` in one vectorised call.

        Raises:
            IndexError: a step outside `[0, len(self))`, or `start` after `stop`.
        """
        epoch, start = self._as_ints(epoch, start, self._steps + 1)
        epoch, stop = self._as_ints(epoch, stop, self._steps + 1)
        if start > stop:
            raise IndexError(f"start must be at most stop, got {start} and {stop}")
        return self._batches(epoch, start, stop) if start < stop else []

    def _batches(self, epoch: int, start: int, stop: int) -> list[Int64s]:
        """Return this rank's slices of the batches of steps `start` to `stop - 1`, unchecked."""
        lows, highs = self.rank_slices(epoch, start, stop)
        ids = self._draw(epoch, start, lows, highs)  # of all batches, one after the other
        bounds = [0, *np.cumsum(highs - lows).tolist()]  # of the batches, in `ids`
        # Copies: a trainer may write to a batch, and a view would keep all of `ids` in memory.
        batches = [ids[low:high].copy() for low, high in pairwise(bounds)]
        if self._replacements is not None:
            self._replacements.apply(self, epoch * self._steps + start, batches, lows)
        return batches

    def seeds(self, epoch: SupportsIndex, step: SupportsIndex) -> UInt64s:
        """Return one augmentation seed for each id of `batch(epoch, step)`, uint64[batch].

        A seed is a hash of (seed, epoch, step, index in the global batch), so a sample has the same
        seed on any number of ranks and workers.
        """
        epoch, step = self._as_ints(epoch, step, self._steps)
        (low,), (high,) = self.rank_slices(epoch, step, step + 1)  # of the global batch
        return random_words(derive(self._augmentation_key, epoch, step), np.arange(low, high))

    def batch_seed(self, epoch: SupportsIndex, step: SupportsIndex) -> int:
        """Return the seed of one step, of 64 bits: a hash of (seed, epoch, step).

        It is the same on every rank and worker, and in every framework. Functions that transform
        whole batches get it: `Feed(…, batch_transform=…)`.

        >>> from twinfeed.samplers import BatchSampler, RandomSampler
        >>> stream = BatchSampler(RandomSampler(10, seed=0), batch_size=4)
        >>> stream.batch_seed(0, 1) == stream.shard(1, 2).batch_seed(0, 1)
        True
        """
        return derive(self.batch_key, *self._as_ints(epoch, step, self._steps))

    def shard(self, rank: SupportsIndex, world_size: SupportsIndex) -> Self:
        """Return a copy of this stream with one rank's slices of the same global batches.

        Each rank takes a contiguous slice of every global batch. Slice sizes differ by at most 1.
        The longer slices rotate over the ranks, so that the totals differ by at most 1 too.

        Raises:
            ValueError: the stream is already that of one rank, `rank` is not in `[0, world_size)`,
                or batches cannot be divided among so many ranks.
        """
        if self.world_size != 1:
            raise ValueError(
                f"this sampler is already rank {self.rank} of {self.world_size}: give the sampler "
                f"of all ranks, without shard"
            )
        world_size = validate.integer("world_size", world_size, minimum=1)
        rank = validate.integer("rank", rank, minimum=0, below=world_size)
        self._check_world(world_size)
        stream = copy.copy(self)
        stream.rank, stream.world_size, stream.sharded = rank, world_size, True
        return stream

    def rank_slices(self, epoch: int, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Return where this rank's slice of each global batch of these steps starts and stops.

        Both are int64[steps], indices into the global batch. If batches of 3 ids are divided among
        2 ranks, rank 1 has the slice 2 to 3 of the first batch, and 1 to 3 of the second:

        >>> from twinfeed.samplers import BatchSampler, SequentialSampler
        >>> stream = BatchSampler(SequentialSampler(6), batch_size=3)
        >>> [bounds.tolist() for bounds in stream.shard(1, 2).rank_slices(0, 0, 2)]
        [[2, 1], [3, 3]]
        """
        sizes, world = self._sizes(epoch, start, stop), self.world_size
        if world == 1:
            return np.zeros_like(sizes), sizes
        # A slice has as many ids as a rank would get if all ids were assigned to the ranks in turn
        # (round-robin). So over time all ranks get equally many:
        #     index in batch   0 1 2 | 0 1 2
        #     rank             0 1 0 | 1 0 1    rank 1 gets 1 id, and then 2
        # The number of ids before each batch, and before the end of the last.
        num_ids = np.cumsum(np.append(self._samples_before(epoch, start), sizes))  # [0, 3, 6]
        # The ids of each batch that the ranks before this one get: its slice starts after them.
        slice_starts = np.diff(_num_assigned(num_ids, self.rank, world))  # [2, 1]
        # The ids of each batch that the ranks up to this one get: its slice stops after them.
        slice_stops = np.diff(_num_assigned(num_ids, self.rank + 1, world))  # [3, 3]
        return slice_starts, slice_stops

    @property
    def step(self) -> int:
        """Step of the next batch that the running pass draws, in `[0, len(self))`."""
        return self._cursor.step

    def passes(self) -> Iterator[tuple[int, int, Int64s]]:
        """Yield (epoch, step, ids) for each batch of one iteration, as `iter(self)` would.

        The first call draws one batch, so that it comes soon. Each further call draws twice as many
        batches as the one before, up to a limit, which is faster.
        """
        warn_unsharded(self)
        cursor, own = self._cursor, StreamPass()
        cursor._start_iteration(own)
        most = steps_per_draw(self._largest_batch)
        try:
            for start, stop in growing_ranges(own.step, self._steps, most):
                for step, ids in enumerate(self._batches(own.epoch, start, stop), start):
                    if cursor.epoch != own.epoch:
                        own.check_epoch(cursor)
                    # Before the batch is yielded: a loop that takes exactly len() batches never
                    # resumes this generator.
                    own.step = step + 1
                    yield own.epoch, step, ids
        finally:  # also if the loop is left early
            cursor._end_iteration(own)

    @property
    def _title(self) -> str:
        return self._describe() + (" with replaced ids" if self._replacements else "")

    def __repr__(self) -> str:
        rank = f"rank {self.rank} of {self.world_size} of " if self.sharded else ""
        return rank + self._title

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of an epoch as lists of Python ints, like torch's own batch samplers.

        Nothing is drawn before the first `next`. `batch` and `batches` give arrays.

        Raises:
            TypeError: ids are not record ids, but padding, views or uses of a record, for which
                `dataset[id]` would return another record; or torch would make batches of batches.
        """
        check_not_batched(self)
        check_record_ids(self, "sampler.batch(epoch, step)")
        return (ids.tolist() for _, _, ids in self.passes())

    def explain(
        self, *, num_steps: SupportsIndex = 4, world_size: SupportsIndex | None = None
    ) -> str:
        """Return a text table of the first batches of the current epoch, one column for each rank.

        A sample is written as its record id, such as `7`. If samples are views of records (such as
        their captions) or uses, `7.2` is view or use 2 of record 7. Padding is written as `-`.

        >>> from twinfeed.samplers import ExactOnceBatchSampler
        >>> print(ExactOnceBatchSampler(5, batch_size=4, last_batch="pad").explain(world_size=2))
        ExactOnceBatchSampler(5 records once, 2 batches of 4, last_batch='pad')
        step   rank 0   rank 1
        0      0 1      2 3
        1      4 -      - -
        """
        if world_size is None:
            world_size = self.world_size
        world = validate.integer("world_size", world_size, minimum=1)
        stop = min(validate.integer("num_steps", num_steps, minimum=1), self._steps)
        unsharded = copy.copy(self)
        unsharded.rank, unsharded.world_size = 0, 1
        ranks = [unsharded.shard(rank, world) for rank in range(world)]
        batches = [rank.batches(self.epoch, 0, stop) for rank in ranks]
        return batch_table(self._title, batches, self)

    @property
    def sampler(self) -> Self:
        """This sampler, since trainers call `batch_sampler.sampler.set_epoch`."""
        return self


def _num_assigned(num_ids: Int64s, num_ranks: int, world_size: int) -> Int64s:
    """Return how many of the first `num_ids` ids the first `num_ranks` ranks get in turn: of 5 ids,
    the first two of three ranks get 4.
    """
    per_rank, remainder = np.divmod(num_ids, world_size)
    return per_rank * num_ranks + np.minimum(remainder, num_ranks)
