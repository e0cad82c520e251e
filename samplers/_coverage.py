"""P x K epochs that cover: every chunk of a class once, or every record at least once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape
from twinfeed.samplers.drawing.fair_subsets import FairSubsets
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute, permute_rows
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.types import Int64s


class CoverageBatches:
    """The batches of a `PKBatchSampler` with coverage: B batches an epoch, of P chunks each.

    A *chunk* is K records of one class. Chunks are laid out in a table of B columns (batches) and P
    rows, class by class along the first row, then on along the next: McNaughton's wrap-around rule
    ("Scheduling with deadlines and loss functions", 1959). So a class with at most B chunks is
    never twice in a batch. `without_repeats` takes the largest B that whole chunks can fill,
    otherwise B is the smallest that covers every record.
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
        self._cache: FifoCache[tuple[FairSubsets, Int64s, Int64s]] = FifoCache(2)

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these global steps of one epoch, concatenated.

        The chunks of an epoch, of K records of a class each, are in a table: a column is a batch,
        and has P rows. The order of the columns is another in each epoch.
        """
        epoch, step = int(steps[0]) // self.steps, steps % self.steps
        groups, class_order, bounds = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        column = permute(self.steps, derive(self._key, epoch, 1), step)
        # A row holds few classes, one after the other. Each batch permutes its rows, so that no
        # rank gets these classes alone.
        keys = random_words(derive(self._key, epoch, 3), step)
        rank_rows = np.tile(np.arange(self._p).reshape(world_size, -1)[rank], (len(steps), 1))
        row = permute_rows(np.full_like(steps, self._p), keys, rank_rows)
        cell = (column[:, None] + row * self.steps).reshape(-1)  # numbered row by row
        index = np.searchsorted(bounds, cell, side="right") - 1
        classes = class_order[index]
        if self.by_class:
            return np.repeat(classes, self._k)
        chunk = cell - bounds[index]  # its number among the chunks of its class
        member = groups.subsets(classes, chunk)
        # The records of a class that an epoch leaves out rotate over the epochs.
        size = self._classes.sizes[classes]
        num_unused = size - self._records_used[classes]
        member = (member + (epoch * num_unused)[:, None]) % size[:, None]
        return self._classes.record_ids(classes[:, None], member).reshape(-1)

    def _epoch_table(self, epoch: int) -> tuple[FairSubsets, Int64s, Int64s]:
        """Return an epoch's groups of records, its order of classes, and the bounds of the classes.

        A chunk, K records of a class, takes a cell of a table of P rows and a column for each
        batch. Class `order[i]` has the cells from `bounds[i]` to `bounds[i + 1]`, row by row.
        """
        # `_num_chunks` are more chunks than the table has cells, or fewer. So some classes lose a
        # chunk, or get one chunk more: other classes in each epoch, in turn.
        count = abs(self._surplus)
        window = (epoch * count + np.arange(count)) % max(1, len(self._adjustable))
        changes = np.bincount(self._adjustable[window], minlength=len(self._num_chunks))
        num_chunks = self._num_chunks - np.sign(self._surplus) * changes
        order = permute(len(num_chunks), derive(self._key, epoch, 0), np.arange(len(num_chunks)))
        bounds = np.append(0, np.cumsum(num_chunks[order]))
        return FairSubsets(self._records_used, self._k, derive(self._key, epoch, 2)), order, bounds


def _layout_once(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the largest number of batches that use no record twice, and the chunks in them.

    A chunk is K records of a class. The result is (number n of batches, number of chunks of each
    class, class of each chunk that may be left out). A batch has P chunks of different classes, so
    a class has at most n.
    """
    full_chunks = sizes // k
    # If n batches can be filled, so can fewer: a binary search finds the largest n.
    candidates = range(1, int(full_chunks.sum()) // p + 1)
    steps = bisect_left(candidates, True, key=lambda n: np.minimum(full_chunks, n).sum() < p * n)
    num_chunks = np.minimum(full_chunks, steps)
    return steps, num_chunks, np.repeat(np.arange(len(sizes)), num_chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return the smallest number of batches that use every record, and the chunks in them.

    A chunk is K records of a class. The result is (number n of batches, number of chunks of each
    class, classes that may get one chunk more). A batch has P chunks of different classes, so a
    class has at most n.
    """
    needed = -(-sizes // k)
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    # There may be room for more chunks. So each class gets at least `minimum` chunks, the largest
    # number for which there is room.
    counts = range(1, steps + 1)
    minimum = bisect_left(counts, True, key=lambda n: np.maximum(needed, n).sum() > p * steps)
    return steps, np.maximum(needed, minimum), np.flatnonzero(needed <= minimum)
