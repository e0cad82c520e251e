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
        num_missing = p * self.steps - int(self._num_chunks.sum())  # to fill all batches
        self._num_adjusted = abs(num_missing)
        self._adjustment = 1 if num_missing > 0 else -1  # a chunk is added, or left out
        # Of each class, the number of its records that an epoch uses.
        self._records_used = self._num_chunks * k if without_repeats else classes.sizes
        self._cache: FifoCache[_EpochTable] = FifoCache(2)

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the record ids of one rank in these training steps of one epoch, concatenated;
        with `by_class` class indices.
        """
        epoch = int(steps[0]) // self.steps  # the same for all steps
        table = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        chunks = self._chunks_of_rank(epoch, steps % self.steps, rank, world_size)
        classes, index_among_chunks = table.locate(chunks)
        if self.by_class:
            return np.repeat(classes, self._k)
        # K indices for each chunk, into those records of its class that the epoch uses.
        indices = table.record_subsets.subsets(classes, index_among_chunks)
        return self._record_ids(epoch, classes, indices).reshape(-1)

    def _record_ids(self, epoch: int, classes: Int64s, indices: Int64s) -> Int64s:
        """Return record ids, int64[n, K], from indices into the records that an epoch uses. Each
        epoch leaves out others: of a b c d e, it uses a b c d, then b c d e, then c d e a.
        """
        class_size = self._classes.sizes[classes][:, None]  # [[5]] in the example
        num_left_out = class_size - self._records_used[classes][:, None]  # [[1]]
        index_in_class = (epoch * num_left_out + indices) % class_size
        return self._classes.record_ids(classes[:, None], index_in_class)

    def _chunks_of_rank(self, epoch: int, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the chunks that one rank gets in these steps, by their numbers in the epoch's
        table. Each step gets a random column, and each rank a part of its rows, in random order.
        The comments are for rank 1 of 2 in two steps, of 3 batches of P = 4.
        """
        column = permute(self.steps, derive(self._key, epoch, _COLUMN_ORDER), steps)  # [2, 0]
        # If the rows of the two columns are in the order 0 2 3 1 and 3 1 0 2, the rank gets those
        # at the indices 2 and 3 of each order.
        num_rows = self._p // world_size
        indices = np.tile(rank * num_rows + np.arange(num_rows), (len(steps), 1))  # [[2, 3]] * 2
        order_keys = random_words(derive(self._key, epoch, _ROW_ORDER), steps)
        row = permute_rows(np.full_like(steps, self._p), order_keys, indices)  # [[3, 1], [0, 2]]
        return (row * self.steps + column[:, None]).reshape(-1)  # [11, 5, 0, 6]

    def _epoch_table(self, epoch: int) -> _EpochTable:
        """Number the chunks of an epoch class by class, with the classes in random order."""
        num_chunks = self._chunk_counts(epoch)  # of each class: [3, 1, 2]
        order_key = derive(self._key, epoch, _CLASS_ORDER)
        class_order = permute(len(num_chunks), order_key, np.arange(len(num_chunks)))  # [2, 0, 1]
        bounds = np.append(0, np.cumsum(num_chunks[class_order]))  # [0, 2, 5, 6]
        # Divide the records of each class that an epoch uses into chunks at random.
        chunk_key = derive(self._key, epoch, _CHUNK_RECORDS)
        return _EpochTable(class_order, bounds, FairSubsets(self._records_used, self._k, chunk_key))

    def _chunk_counts(self, epoch: int) -> Int64s:
        """Return how many chunks each class has in an epoch: a chunk less (or more) than usual for
        the next classes of `_adjustable`, cyclically. The comments have chunks [3, 2, 2], of which
        6 are used, in epoch 3.
        """
        first = epoch * self._num_adjusted  # 3
        index = np.arange(first, first + self._num_adjusted) % len(self._adjustable)  # [3]
        adjusted = self._adjustable[index]  # the class at index 3: [1]
        times_adjusted = np.bincount(adjusted, minlength=len(self._num_chunks))  # [0, 1, 0]
        return self._num_chunks + self._adjustment * times_adjusted  # [3, 1, 2]


class _EpochTable(NamedTuple):
    """The class of each chunk of an epoch; a chunk is K records of one class."""

    class_order: Int64s  # the classes, in random order
    bounds: Int64s  # class `class_order[i]` has the chunks `bounds[i]` to `bounds[i + 1] - 1`
    record_subsets: FairSubsets  # the records of the chunks of each class

    def locate(self, chunks: Int64s) -> tuple[Int64s, Int64s]:
        """Return the class of each chunk, and its index among the chunks of the class, int64[n]."""
        i = np.searchsorted(self.bounds, chunks, side="right") - 1
        return self.class_order[i], chunks - self.bounds[i]


def _layout_once(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the largest number of batches that use no record twice, the chunks of each class, and
    the classes of which epochs leave out a chunk in turn. The comments have classes of 6, 4 and 4
    records, P = 2 and K = 2.
    """
    num_full = sizes // k  # full chunks of each class: [3, 2, 2]
    # n batches need P * n chunks. They can use n of each class, since a class is in a batch once.
    # So 3 batches need 6 chunks, of 3 + 2 + 2.
    steps = _largest(int(num_full.sum()) // p, lambda n: np.minimum(num_full, n).sum() >= p * n)
    num_chunks = np.minimum(num_full, steps)  # [3, 2, 2]
    return steps, num_chunks, np.repeat(np.arange(len(sizes)), num_chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the smallest number of batches that use every record, the chunks of each class, and
    the classes to which epochs add a chunk in turn. The comments have classes of 10, 2 and 2
    records, P = 2 and K = 2.
    """
    needed = -(-sizes // k)  # chunks of each class, rounded up: [5, 1, 1]
    # Enough batches for all chunks, 7 / 2 rounded up, and for those of class 0, each in another.
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))  # max(4, 5) = 5
    # Raise the smallest numbers of chunks to the same number, the largest that fits: 5 + 2 + 2 fit
    # into 10, 5 + 3 + 3 do not. It is at most `steps`, since a class is in a batch once.
    lowest = _largest(steps, lambda n: np.maximum(needed, n).sum() <= p * steps)  # 2
    num_chunks = np.maximum(needed, lowest)  # [5, 2, 2], so 1 of 10 is missing
    # A chunk more for all of the smallest classes does not fit. So fewer chunks are missing than
    # there are smallest classes, and a class never gets two of them in an epoch.
    smallest_classes = np.flatnonzero(num_chunks == lowest)  # [1, 2]
    return steps, num_chunks, smallest_classes


def _largest(upper: int, is_possible: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to `upper` that is possible, as all smaller ones are."""
    return bisect_left(range(1, upper + 1), True, key=lambda n: not is_possible(n))
