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
        # Cells of the table without a chunk; negative if there are more chunks than cells.
        self._num_empty = p * self.steps - int(self._num_chunks.sum())
        # Of each class, the number of its records that an epoch uses.
        self._records_used = self._num_chunks * k if without_repeats else classes.sizes
        self._cache: FifoCache[_EpochTable] = FifoCache(2)

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the record ids of one rank in these global steps of one epoch, concatenated.

        A batch is P chunks, each of K records of one class, and a rank gets `P / world_size` of the
        chunks. A table has the chunks of the epoch, class by class, with a column for each batch.
        With P = 2, 3 batches, and classes a, b, c of 3, 2 and 1 chunks (`a1` is chunk 1 of a)::

            row 0   a0 a1 a2
            row 1   b0 b1 c0
        """
        epoch, steps_in_epoch = int(steps[0]) // self.steps, steps % self.steps
        table = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        cells = self._cells(epoch, steps_in_epoch, rank, world_size)
        # The class of each cell, and the index of the cell's chunk among those of the class.
        index = np.searchsorted(table.bounds, cells, side="right") - 1
        classes, chunk_index = table.class_order[index], cells - table.bounds[index]
        if self.by_class:  # class indices in place of record ids
            return np.repeat(classes, self._k)
        # Where the records of each chunk are in their class, among the records that are used.
        index_in_class = table.chunks.subsets(classes, chunk_index)
        # If an epoch does not use all records of a class, the used ones start at another record in
        # each epoch, so that the unused ones are not always the same.
        class_size = self._classes.sizes[classes]
        first_used = epoch * (class_size - self._records_used[classes])
        index_in_class = (first_used[:, None] + index_in_class) % class_size[:, None]
        return self._classes.record_ids(classes[:, None], index_in_class).reshape(-1)

    def _cells(self, epoch: int, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the cells of the epoch's table that one rank gets in these steps, int64[cells].

        Each cell of the table stands for K records of one class. The table has P rows and a column
        for each batch, and its cells are numbered row by row. With P = 2 and 3 batches::

            row 0   0 1 2
            row 1   3 4 5

        Columns come in random order. If the batch of a step is column 2, its cells are 2 and 5:
        one rank gets both, and each of two ranks gets one. The rows are permuted in each column,
        since neighbouring cells of a row are often of the same class: a rank with fixed rows would
        get few classes.
        """
        column = permute(self.steps, derive(self._key, epoch, _COLUMN_ORDER), steps)
        row_keys = random_words(derive(self._key, epoch, _ROW_ORDER), steps)  # a key a column
        # The rank's rows before they are permuted: rank 1 of 2 gets 2 3 of P = 4, in each step.
        rank_rows = np.tile(np.arange(self._p).reshape(world_size, -1)[rank], (len(steps), 1))
        row = permute_rows(np.full_like(steps, self._p), row_keys, rank_rows)
        return (row * self.steps + column[:, None]).reshape(-1)

    def _epoch_table(self, epoch: int) -> _EpochTable:
        """Return the table of an epoch: one cell for each chunk (K records of one class).

        The classes are in random order, and each has consecutive cells, as many as it has chunks.
        Class sizes seldom fill the P rows and `steps` columns exactly. If there are more chunks
        than cells, some of the classes in `_adjustable` lose a chunk; if there are fewer, some get
        one more. These classes rotate: if one chunk of three classes must go, it is a chunk of
        class 0 in epoch 0, of class 1 in epoch 1, of class 2 in epoch 2, and of class 0 in epoch 3.
        """
        num_adjusted = abs(self._num_empty)
        # The next `num_adjusted` of the adjustable classes, cyclically over the epochs.
        index = (epoch * num_adjusted + np.arange(num_adjusted)) % len(self._adjustable)
        adjustments = np.bincount(self._adjustable[index], minlength=len(self._num_chunks))
        num_chunks = self._num_chunks + np.sign(self._num_empty) * adjustments
        num_classes = len(num_chunks)
        order = permute(num_classes, derive(self._key, epoch, _CLASS_ORDER), np.arange(num_classes))
        bounds = np.append(0, np.cumsum(num_chunks[order]))
        chunk_key = derive(self._key, epoch, _CHUNK_RECORDS)
        return _EpochTable(order, bounds, FairSubsets(self._records_used, self._k, chunk_key))


class _EpochTable(NamedTuple):
    """The cells of an epoch's table of chunks, numbered row by row; a chunk is K records."""

    class_order: Int64s  # the classes, in random order
    bounds: Int64s  # class `class_order[i]` has the cells `bounds[i]` to `bounds[i + 1] - 1`
    chunks: FairSubsets  # the records of the chunks of each class


def _layout_once(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the largest number of batches that use no record twice, and the chunks in them.

    `sizes` has the number of records of each class. A chunk is K records of a class, and a batch is
    P chunks of different classes. So n batches have at most n chunks of a class. With sizes 6, 4
    and 4, P = 2 and K = 2, the classes have 3, 2 and 2 full chunks, which fill 3 batches. One chunk
    is left over, so in each epoch one of the classes has a chunk less.

    Returns:
        The number of batches; the number of chunks of each class, which may be too many in all;
        and the classes that take turns at having a chunk less. A class of 3 chunks is three times
        among them, since it can spare more: 0 0 0 1 1 2 2.
    """
    chunks = sizes // k  # full chunks of each class
    steps = _largest(int(chunks.sum()) // p, lambda n: np.minimum(chunks, n).sum() >= p * n)
    num_chunks = np.minimum(chunks, steps)
    return steps, num_chunks, np.repeat(np.arange(len(sizes)), num_chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the smallest number of batches that use every record, and the chunks in them.

    `sizes` has the number of records of each class. A chunk is K records of a class, and a batch is
    P chunks of different classes. So n batches have at most n chunks of a class. With sizes 10, 2
    and 2, P = 2 and K = 2, the classes need 5, 1 and 1 chunks. The first class needs 5 batches,
    which hold 10 chunks. So the small classes are repeated: they get 2 chunks each, which makes 9,
    and in each epoch one of them gets a third.

    Returns:
        The number of batches; the number of chunks of each class, which may be too few in all; and
        the classes that take turns at having a chunk more: those with the fewest.
    """
    needed = -(-sizes // k)  # chunks of each class, rounded up
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    # The least number of chunks that each class can get: 2 in the example above.
    least = _largest(steps, lambda n: np.maximum(needed, n).sum() <= p * steps)
    return steps, np.maximum(needed, least), np.flatnonzero(needed <= least)


def _largest(upper: int, is_possible: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to `upper` that is possible, by binary search.

    0 is possible, and if n is possible, so are all smaller numbers.
    """
    return bisect_left(range(1, upper + 1), True, key=lambda n: not is_possible(n))
