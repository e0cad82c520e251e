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

        A batch is P chunks, and a chunk is K records of one class. The chunks of an epoch are
        numbered class by class, with the classes in random order. A rank gets `P / world_size` of
        the chunks of each batch.

        In the comments, K is 2, and the classes come in the order 2 0 1: class 2 has the chunks
        0 1, class 0 the chunks 2 3 4, and class 1 the chunk 5. A rank gets the chunks 4 and 0, of
        the classes 0 and 2. These have 7 and 5 records, of which an epoch uses 6 and 4.
        """
        epoch = int(steps[0]) // self.steps  # the same for all steps: 2
        # The `class_order` of the table is [2, 0, 1], and its `bounds` are [0, 2, 5, 6].
        table = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        chunks = self._chunks_of_rank(epoch, steps % self.steps, rank, world_size)  # [4, 0]
        # Find the class of each chunk, and the index of the chunk among those of its class.
        i = np.searchsorted(table.bounds, chunks, side="right") - 1  # [1, 0]
        classes = table.class_order[i]  # [0, 2]
        if self.by_class:  # class indices in place of record ids
            return np.repeat(classes, self._k)
        chunk_in_class = chunks - table.bounds[i]  # [2, 0]
        # Draw K of the used records of each class, numbered from 0 on, such as [[5, 0], [3, 1]].
        numbers = table.record_subsets.subsets(classes, chunk_in_class)
        # So that each epoch leaves out other records, number 0 is another record in each epoch: of
        # class 2, the records 0 1 2 3 are used in epoch 0, 1 2 3 4 in epoch 1, 2 3 4 0 in epoch 2.
        class_size = self._classes.sizes[classes]  # [7, 5]
        num_left_out = class_size - self._records_used[classes]  # [1, 1]
        first_used = epoch * num_left_out  # [2, 2]
        # The index of each record in its class: [[0, 2], [0, 3]].
        index_in_class = (first_used[:, None] + numbers) % class_size[:, None]
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
        """Decide how many chunks each class has in an epoch, and number the chunks.

        A chunk is K records of one class, and a batch is P chunks. All batches must be full, so in
        each epoch some classes have a chunk less (or a chunk more). They take turns: each epoch
        takes the next entries of the list `_adjustable`, cyclically.

        In the comments, 3 batches of P = 2 have 6 chunks, but classes 0, 1 and 2 have 3, 2 and 2:
        in each epoch, one class has a chunk less. This is epoch 3::

            epoch          0  1  2  3  4  5  6
            _adjustable    0  0  0  1  1  2  2    the class with a chunk less
        """
        # `_num_missing` is 6 - 7 = -1: one chunk too many.
        num_adjusted = abs(self._num_missing)  # 1
        # The entries of the list for this epoch, and how often each class is among them.
        index = (epoch * num_adjusted + np.arange(num_adjusted)) % len(self._adjustable)  # [3]
        turns = np.bincount(self._adjustable[index], minlength=len(self._num_chunks))  # [0, 1, 0]
        num_chunks = self._num_chunks + np.sign(self._num_missing) * turns  # [3, 1, 2]
        # Number the chunks class by class, with the classes in random order.
        num_classes = len(num_chunks)
        order = permute(num_classes, derive(self._key, epoch, _CLASS_ORDER), np.arange(num_classes))
        # If `order` is [2, 0, 1], class 2 has the chunks 0 1, class 0 has 2 3 4, and class 1 has 5.
        bounds = np.append(0, np.cumsum(num_chunks[order]))  # [0, 2, 5, 6]
        # An epoch uses `_records_used` records of each class: divide them into chunks at random.
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

    A chunk is K records of one class, and a batch is P chunks of different classes. `sizes` has the
    number of records of each class. So that all batches are full, the smallest classes repeat their
    records in more chunks than they need. With 10, 2 and 2 records, P = 2 and K = 2::

        class                       0    1    2    all
        chunks needed               5    1    1    7
        chunks of 5 full batches                   10
        chunks, filled up           5    2    2    9, and one more of class 1 or 2

    Returns:
        Three values, in the example 5, [5, 2, 2] and [1, 2]:

        - The number of batches.
        - The number of chunks of each class, without the chunks that then are missing.
        - The classes that get the missing chunks, in turn from epoch to epoch.
    """
    needed = -(-sizes // k)  # chunks of each class, rounded up: [5, 1, 1]
    # Enough batches for all chunks, 7 / 2 rounded up, and for those of class 0, each in another.
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))  # max(4, 5) = 5
    # Fill up all classes to the largest number of chunks that fits into the batches. `_largest`
    # searches it up to `steps`: 5 + 2 + 2 chunks fit into 10, but 5 + 3 + 3 do not.
    lowest = _largest(steps, lambda n: np.maximum(needed, n).sum() <= p * steps)  # 2
    return steps, np.maximum(needed, lowest), np.flatnonzero(needed <= lowest)


def _largest(upper: int, is_possible: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to `upper` that is possible, by binary search.

    0 is possible, and if n is possible, so are all smaller numbers.
    """
    return bisect_left(range(1, upper + 1), True, key=lambda n: not is_possible(n))
