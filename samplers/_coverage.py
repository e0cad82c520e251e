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

        A batch is P chunks of K records of a class each. A rank gets `P / world_size` of them.
        """
        epoch, step = int(steps[0]) // self.steps, steps % self.steps
        table = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        cells = self._cells(epoch, step, rank, world_size)
        index = np.searchsorted(table.bounds, cells, side="right") - 1
        classes, chunk = table.class_order[index], cells - table.bounds[index]
        if self.by_class:
            return np.repeat(classes, self._k)
        member = table.chunks.subsets(classes, chunk)
        # An epoch uses the first records of a class. The records that it leaves out are others in
        # each epoch, as the class is rotated.
        size = self._classes.sizes[classes]
        num_unused = size - self._records_used[classes]
        rotated = (member + (epoch * num_unused)[:, None]) % size[:, None]
        return self._classes.record_ids(classes[:, None], rotated).reshape(-1)

    def _cells(self, epoch: int, step: Int64s, rank: int, world_size: int) -> Int64s:
        """Return the cells of the epoch's table that a rank gets in these steps, int64[n].

        The table of chunks has a column for each batch, and P rows. Its cells are numbered row by
        row. The columns are in random order. So are the rows of each column, since a row has few
        classes, and otherwise a rank would get these classes alone.
        """
        column = permute(self.steps, derive(self._key, epoch, 1), step)
        keys = random_words(derive(self._key, epoch, 3), step)
        rank_rows = np.tile(np.arange(self._p).reshape(world_size, -1)[rank], (len(step), 1))
        row = permute_rows(np.full_like(step, self._p), keys, rank_rows)
        return (row * self.steps + column[:, None]).reshape(-1)

    def _epoch_table(self, epoch: int) -> _EpochTable:
        """Return the table of an epoch: which class has which cells, one for each chunk.

        `_num_chunks` may be more chunks than the table has cells, or fewer. Then some classes lose
        a chunk, or get one chunk more. These are other classes in each epoch, in turn.
        """
        num_changed = abs(self._surplus)
        index = (epoch * num_changed + np.arange(num_changed)) % max(1, len(self._adjustable))
        changes = np.bincount(self._adjustable[index], minlength=len(self._num_chunks))
        num_chunks = self._num_chunks - np.sign(self._surplus) * changes
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

    `sizes` are the records of each class. A chunk is K records of a class, and a batch is P chunks
    of different classes. So n batches have at most n chunks of a class. With sizes 8, 4 and 3,
    P = 2 and K = 2, classes have 4, 2 and 1 whole chunks, which fill 3 batches.

    Returns:
        The number of batches, the number of chunks of each class, and for each chunk that may be
        left out its class.
    """
    full_chunks = sizes // k
    # If n batches can be filled, so can fewer: a binary search finds the largest n.
    candidates = range(1, int(full_chunks.sum()) // p + 1)
    steps = bisect_left(candidates, True, key=lambda n: np.minimum(full_chunks, n).sum() < p * n)
    num_chunks = np.minimum(full_chunks, steps)
    return steps, num_chunks, np.repeat(np.arange(len(sizes)), num_chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the smallest number of batches that use every record, and the chunks in them.

    `sizes` are the records of each class. A chunk is K records of a class, and a batch is P chunks
    of different classes. So n batches have at most n chunks of a class. With sizes 8, 4 and 3,
    P = 2 and K = 2, classes need 4, 2 and 2 chunks, which are 4 batches.

    Returns:
        The number of batches, the number of chunks of each class, and the classes that may get one
        chunk more.
    """
    needed = -(-sizes // k)
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    # There may be room for more chunks. So each class gets at least `minimum` chunks, the largest
    # number for which there is room.
    counts = range(1, steps + 1)
    minimum = bisect_left(counts, True, key=lambda n: np.maximum(needed, n).sum() > p * steps)
    return steps, np.maximum(needed, minimum), np.flatnonzero(needed <= minimum)
