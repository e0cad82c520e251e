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

        A chunk is K records of one class. The chunks of an epoch are numbered along the rows of a
        table, which has P rows, and a column for each batch. With P = 2 and 3 batches::

            row 0   0 1 2
            row 1   3 4 5

        Columns come in random order. If the batch of a step is column 2, it has the chunks 2 and 5:
        one rank gets both, and each of two ranks gets one. The rows are permuted in each column,
        since neighbouring chunks of a row are often of the same class: a rank with fixed rows would
        get few classes.
        """
        column = permute(self.steps, derive(self._key, epoch, _COLUMN_ORDER), steps)
        row_keys = random_words(derive(self._key, epoch, _ROW_ORDER), steps)  # a key a column
        # The rank's rows before they are permuted: rank 1 of 2 gets 2 3 of P = 4, in each step.
        rank_rows = np.tile(np.arange(self._p).reshape(world_size, -1)[rank], (len(steps), 1))
        row = permute_rows(np.full_like(steps, self._p), row_keys, rank_rows)
        return (row * self.steps + column[:, None]).reshape(-1)

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
    is P chunks of different classes. So n batches have at most n chunks of a class.

    Returns:
        Three values. As an example, classes 0, 1 and 2 have 6, 4 and 4 records, P = 2 and K = 2:

        - The number of batches: 3, since the classes have 3, 2 and 2 full chunks.
        - The number of chunks of each class: 3 2 2. These may be more than P chunks a batch.
        - The classes that take turns at having a chunk less, so that all batches are full. A class
          of 3 chunks is three times among them, since it can spare more: 0 0 0 1 1 2 2.
    """
    full = sizes // k  # full chunks of each class
    steps = _largest(int(full.sum()) // p, lambda n: np.minimum(full, n).sum() >= p * n)
    num_chunks = np.minimum(full, steps)
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
