"""P x K epochs that cover: every chunk of a class once, or every record at least once."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape
from twinfeed.samplers.drawing.fair_subsets import FairSubsets
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute, permute_rows
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.types import Int64s


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

    by_class = False  # whether `ids` returns class numbers in place of records

    def __init__(
        self, classes: ClassOrder, shape: BatchShape, without_repeats: bool, seed: int
    ) -> None:
        self._classes = classes
        p, k = self._p, self._k = shape.largest_p, shape.largest_k
        self._key = root_key(seed, f"pk coverage {'once' if without_repeats else 'all'}")
        layout = _layout_once if without_repeats else _layout_all
        self.steps, self._num_chunks, self._adjustable = layout(classes.sizes, p, k)
        self._surplus = int(self._num_chunks.sum()) - p * self.steps
        # Of each class, the number of its records that an epoch uses.
        self._records_used = self._num_chunks * k if without_repeats else classes.sizes
        self._cache: FifoCache[_EpochTable] = FifoCache(2)

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these global steps of one epoch, concatenated.

        A batch is P chunks, each of K records of one class. A rank gets `P / world_size` of them.
        The chunks of an epoch are the cells of a table, class by class. The table has a column for
        each batch, so a step is looked up by its cells.
        """
        epoch, step = int(steps[0]) // self.steps, steps % self.steps
        table = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        cells = self._cells(epoch, step, rank, world_size)
        index = np.searchsorted(table.bounds, cells, side="right") - 1
        classes, chunk = table.class_order[index], cells - table.bounds[index]
        if self.by_class:  # class numbers in place of record ids
            return np.repeat(classes, self._k)
        # `member` is the number of a record within its class.
        member = table.chunks.subsets(classes, chunk)
        # If an epoch does not use all records of a class, each epoch starts at another record of
        # the class, so that other records are unused.
        class_size = self._classes.sizes[classes]
        num_unused = class_size - self._records_used[classes]
        rotated = (member + (epoch * num_unused)[:, None]) % class_size[:, None]
        return self._classes.record_ids(classes[:, None], rotated).reshape(-1)

    def _cells(self, epoch: int, step: Int64s, rank: int, world_size: int) -> Int64s:
        """Return which cells of the epoch's table are one rank's parts of these steps, int64[n].

        Each cell of the table stands for K records of one class. The table has P rows, and a column
        for each batch, in random order. A cell has the number `row * steps + column`. A rank gets
        `P / world_size` rows of a column. The rows are permuted in each column: neighbouring cells
        of a row are often of the same class, so a rank with fixed rows would get few classes.
        """
        # Independent keys: 1 for the order of the columns, and 3 for the rows of each column.
        column = permute(self.steps, derive(self._key, epoch, 1), step)
        row_keys = random_words(derive(self._key, epoch, 3), step)
        rank_rows = np.tile(np.arange(self._p).reshape(world_size, -1)[rank], (len(step), 1))
        row = permute_rows(np.full_like(step, self._p), row_keys, rank_rows)
        return (row * self.steps + column[:, None]).reshape(-1)

    def _epoch_table(self, epoch: int) -> _EpochTable:
        """Return the table of an epoch: one cell for each chunk (K records of one class).

        The classes are in random order, and each has consecutive cells, as many as it has chunks.
        There may be more chunks in all (`_num_chunks`) than cells: then some of the classes in
        `_adjustable` lose one. Or there may be fewer: then some get one more. These classes rotate
        over the epochs.
        """
        num_changed = abs(self._surplus)
        # The next `num_changed` of the adjustable classes, cyclically over the epochs.
        index = (epoch * num_changed + np.arange(num_changed)) % max(1, len(self._adjustable))
        changes = np.bincount(self._adjustable[index], minlength=len(self._num_chunks))
        num_chunks = self._num_chunks - np.sign(self._surplus) * changes
        # Independent keys: 0 for the order of the classes, and 2 for the records of the chunks.
        order = permute(len(num_chunks), derive(self._key, epoch, 0), np.arange(len(num_chunks)))
        bounds = np.append(0, np.cumsum(num_chunks[order]))
        chunks = FairSubsets(self._records_used, self._k, derive(self._key, epoch, 2))
        return _EpochTable(order, bounds, chunks)


class _EpochTable(NamedTuple):
    """The cells of an epoch's table of chunks, numbered row by row; a chunk is K records."""

    class_order: Int64s  # the classes, in random order
    bounds: Int64s  # class `class_order[i]` has the cells `bounds[i]` to `bounds[i + 1] - 1`
    chunks: FairSubsets  # the records of the chunks of each class


def _layout_once(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the largest number of batches that use no record twice, and the chunks in them.

    `sizes` has the number of records of each class. A chunk is K records of a class, and a batch is
    P chunks of different classes. So n batches have at most n chunks of a class. With sizes 8, 4
    and 3, P = 2 and K = 2, the classes have 4, 2 and 1 full chunks, which fill 3 batches.

    Returns:
        The number of batches; the number of chunks of each class, which may be more in all than
        the batches hold; and the classes that may lose a chunk then, each as often as it has
        chunks.
    """
    full_chunks = sizes // k
    # If n batches can be filled, so can fewer. A binary search finds how many n can be filled,
    # which is the largest.
    candidates = range(1, int(full_chunks.sum()) // p + 1)
    steps = bisect_left(candidates, True, key=lambda n: np.minimum(full_chunks, n).sum() < p * n)
    num_chunks = np.minimum(full_chunks, steps)
    return steps, num_chunks, np.repeat(np.arange(len(sizes)), num_chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the smallest number of batches that use every record, and the chunks in them.

    `sizes` has the number of records of each class. A chunk is K records of a class, and a batch is
    P chunks of different classes. So n batches have at most n chunks of a class. With sizes 8, 4
    and 3, P = 2 and K = 2, the classes need 4, 2 and 2 chunks, which are 4 batches.

    Returns:
        The number of batches; the number of chunks of each class, which may be fewer in all than
        the batches hold; and the classes that may get one chunk more then.
    """
    needed = -(-sizes // k)  # chunks of each class, rounded up
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    # If the batches hold more chunks, the classes with the fewest get more, at least `minimum`
    # each: the largest number for which there is room, by binary search.
    counts = range(1, steps + 1)
    minimum = bisect_left(counts, True, key=lambda n: np.maximum(needed, n).sum() > p * steps)
    return steps, np.maximum(needed, minimum), np.flatnonzero(needed <= minimum)
