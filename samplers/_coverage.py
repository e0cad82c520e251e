"""P x K epochs that cover: every chunk of a class once, or every record at least once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape
from twinfeed.samplers.drawing.fair_subsets import FairSubsets
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute, permute_rows
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.types import Int64s

# What the random keys of an epoch are for: the order of the classes in its table, the order of the
# columns, the records of each chunk, and the order of the rows in each column.
_CLASS_ORDER, _COLUMN_ORDER, _CHUNK_RECORDS, _ROW_ORDER = range(4)


class CoverageBatches:
    """The batches of a `PKBatchSampler` with coverage: as many an epoch as its records fill.

    A *chunk* is K records of one class, and a batch is P chunks of different classes. The chunks of
    an epoch are laid out in a table with a column for each batch and P rows, class by class along
    the first row, then along the next: McNaughton's wrap-around rule ("Scheduling with deadlines
    and loss functions", 1959). So a class with at most as many chunks as there are batches is never
    twice in a batch. Classes a, b and c of 3, 2 and 1 chunks, in 3 batches of P = 2::

        row 0   a a a
        row 1   b b c

    `without_repeats` takes the largest number of batches that use no record twice. Otherwise it is
    the smallest number of batches that use every record.
    """

    by_class = False  # whether `ids` returns class indices in place of record ids

    def __init__(
        self, classes: ClassOrder, shape: BatchShape, without_repeats: bool, seed: int
    ) -> None:
        self._classes = classes
        p, k = self._p, self._k = shape.largest_p, shape.largest_k
        self._key = root_key(seed, f"pk coverage {'once' if without_repeats else 'all'}")
        layout = _layout_once if without_repeats else _layout_all
        self.steps, self._num_chunks, self._adjustable = layout(classes.sizes, p, k)
        # Chunks that are missing to fill all batches of an epoch; negative if there are too many.
        self._num_missing = p * self.steps - int(self._num_chunks.sum())
        # Of each class, the number of its records that an epoch uses.
        self._records_used = self._num_chunks * k if without_repeats else classes.sizes
        self._cache: FifoCache[_EpochTable] = FifoCache(2)

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the record ids of one rank in these training steps of one epoch, concatenated.

        A batch is P chunks, and a chunk is K records of one class. A rank gets `P / world_size` of
        the chunks. The chunks of an epoch are numbered class by class: if the classes a, b and c
        have 3, 2 and 1 chunks, chunks 0 1 2 are of a, chunks 3 4 of b, and chunk 5 of c.
        """
        epoch = int(steps[0]) // self.steps  # the same for all steps
        table = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        chunks = self._chunks_of_rank(epoch, steps % self.steps, rank, world_size)
        # The classes are in random order: class `class_order[i]` has the chunks `bounds[i]` to
        # `bounds[i + 1] - 1`.
        i = np.searchsorted(table.bounds, chunks, side="right") - 1
        classes = table.class_order[i]
        if self.by_class:  # class indices in place of record ids
            return np.repeat(classes, self._k)
        # The K records of each chunk: random indices among the records of the class that are used.
        index_among_used = table.record_subsets.subsets(classes, chunks - table.bounds[i])
        # If 4 of the 5 records of a class are used, epoch 0 uses the records 0 1 2 3 of the class,
        # epoch 1 the records 1 2 3 4, and epoch 2 the records 2 3 4 0.
        class_size = self._classes.sizes[classes]
        num_unused = class_size - self._records_used[classes]
        first_used = epoch * num_unused
        index_in_class = (first_used[:, None] + index_among_used) % class_size[:, None]
        return self._classes.record_ids(classes[:, None], index_in_class).reshape(-1)

    def _chunks_of_rank(self, epoch: int, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the numbers of the chunks that one rank gets in these steps, int64[chunks].

        A chunk is K records of one class, and a batch is P chunks. The chunks of an epoch are
        numbered class by class. So that the chunks of a batch are of different classes, a batch is
        a column of the table of all numbers. With P = 4 and 3 batches::

            0  1  2
            3  4  5
            6  7  8
            9 10 11

        Each step gets a random column, and the ranks divide the chunks of the column, in a random
        order. (With a constant order, a rank would always get the same rows, which have few
        classes.) In the comments, rank 1 of 2 gets its chunks of two steps.
        """
        column = permute(self.steps, derive(self._key, epoch, _COLUMN_ORDER), steps)  # say [2, 0]
        keys = random_words(derive(self._key, epoch, _ROW_ORDER), steps)  # a random order for each
        # The rank's indices in this order, the same in each step: [[2, 3], [2, 3]].
        indices = np.tile(np.arange(self._p).reshape(world_size, -1)[rank], (len(steps), 1))
        row = permute_rows(np.full_like(steps, self._p), keys, indices)  # say [[3, 1], [0, 2]]
        return (row * self.steps + column[:, None]).reshape(-1)  # [11, 5, 0, 6]

    def _epoch_table(self, epoch: int) -> _EpochTable:
        """Return which class each chunk of an epoch is of; a chunk is K records of one class.

        Each class has `_num_chunks` chunks, and one more or less in some epochs, so that all
        batches of the epoch are full. `_num_missing` is how many chunks are missing to fill them,
        negative if there are too many. Each missing chunk is added to a class of the list
        `_adjustable`, and each that is too many is taken from one, in turn over the epochs: with
        the list 0 0 1 and one chunk too many, class 0 has a chunk less in epochs 0 and 1, class 1
        in epoch 2, and class 0 again in epoch 3.
        """
        num_adjusted = abs(self._num_missing)
        # The next `num_adjusted` entries of the list, cyclically over the epochs.
        index = (epoch * num_adjusted + np.arange(num_adjusted)) % len(self._adjustable)
        adjustments = np.bincount(self._adjustable[index], minlength=len(self._num_chunks))
        num_chunks = self._num_chunks + np.sign(self._num_missing) * adjustments
        num_classes = len(num_chunks)
        order = permute(num_classes, derive(self._key, epoch, _CLASS_ORDER), np.arange(num_classes))
        bounds = np.append(0, np.cumsum(num_chunks[order]))
        chunk_key = derive(self._key, epoch, _CHUNK_RECORDS)
        return _EpochTable(order, bounds, FairSubsets(self._records_used, self._k, chunk_key))


class _EpochTable(NamedTuple):
    """Which class each chunk of an epoch is of; a chunk is K records of one class."""

    class_order: Int64s  # the classes, in random order
    bounds: Int64s  # class `class_order[i]` has the chunks `bounds[i]` to `bounds[i + 1] - 1`
    record_subsets: FairSubsets  # the records of the chunks of each class


def _layout_once(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the largest number of batches that use no record twice, and the chunks in them.

    `sizes` has the number of records of each class. A chunk is K records of one class, and a batch
    is P chunks of different classes. All batches must be full, so each epoch leaves out the chunks
    that do not fill a batch.

    For example, classes 0, 1 and 2 have 6, 4 and 4 records, P = 2 and K = 2. Their 3, 2 and 2
    chunks fill 3 batches, and one chunk is left out: of class 0 in three epochs, of class 1 in the
    next two, of class 2 in two more, and then of class 0 again.

    Returns:
        Three values, in the example 3, [3, 2, 2] and [0, 0, 0, 1, 1, 2, 2]:

        - The number of batches.
        - The number of chunks of each class, with the chunks to leave out.
        - The classes that leave out a chunk, in turn from epoch to epoch. Each class is listed once
          for each of its chunks, so that a class with more chunks leaves out more.
    """
    full = sizes // k  # full chunks of each class: [3, 2, 2]
    # n batches need P * n chunks, at most n of one class: 3 batches need 6, and can use all 7.
    steps = _largest(int(full.sum()) // p, lambda n: np.minimum(full, n).sum() >= p * n)
    num_chunks = np.minimum(full, steps)  # [3, 2, 2]
    return steps, num_chunks, np.repeat(np.arange(len(sizes)), num_chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the smallest number of batches that use every record, and the chunks in them.

    `sizes` has the number of records of each class. A chunk is K records of one class, and a batch
    is P chunks of different classes. So n batches have at most n chunks of a class.

    Returns:
        Three values. As an example, classes 0, 1 and 2 have 10, 2 and 2 records, P = 2 and K = 2:

        - The number of batches: 5, since class 0 has 5 chunks, each in another batch.
        - The number of chunks of each class: 5 2 2. Classes 1 and 2 need only 1 chunk each, but 5
          batches have 10 chunks. So the records of the smallest classes are repeated, in as many
          chunks each as there is room for.
        - The classes that take turns at having one chunk more, so that all batches are full: 1 2.
    """
    needed = -(-sizes // k)  # chunks of each class, rounded up
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    # As many chunks as all classes can have at least: 2 in the example.
    at_least = _largest(steps, lambda n: np.maximum(needed, n).sum() <= p * steps)
    return steps, np.maximum(needed, at_least), np.flatnonzero(needed <= at_least)


def _largest(upper: int, is_possible: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to `upper` that is possible, by binary search.

    0 is possible, and if n is possible, so are all smaller numbers.
    """
    return bisect_left(range(1, upper + 1), True, key=lambda n: not is_possible(n))
