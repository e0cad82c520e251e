"""P x K epochs that cover: every chunk of a class once, or every record at least once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape
from twinfeed.samplers.drawing.fair_groups import FairGroups
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
        self.steps, self._chunks, self._adjustable = layout(classes.sizes, p, k)
        self._surplus = int(self._chunks.sum()) - p * self.steps
        self._records_used = (
            self._chunks * k if without_repeats else classes.sizes
        )  # of each class, an epoch
        self._cache: FifoCache[tuple[FairGroups, Int64s, Int64s]] = FifoCache(2)

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these global steps of one epoch, concatenated.

        In each epoch the columns are in another random order.
        """
        epoch = int(steps[0]) // self.steps
        groups, class_order, bounds = self._cache.get(epoch, lambda: self._epoch_table(epoch))
        column = permute(self.steps, derive(self._key, epoch, 1), steps % self.steps)
        # A row holds few classes, one after the other. Each batch permutes its rows, so that no
        # rank gets these classes alone.
        keys = random_words(derive(self._key, epoch, 3), steps % self.steps)
        rank_p = self._p // world_size
        rank_rows = np.tile(np.arange(rank * rank_p, (rank + 1) * rank_p), (len(steps), 1))
        row = permute_rows(np.full_like(steps, self._p), keys, rank_rows)
        cell = (column[:, None] + row * self.steps).reshape(-1)
        index = np.searchsorted(bounds, cell, side="right") - 1
        classes = class_order[index]
        if self.by_class:
            return np.repeat(classes, self._k)
        member = groups.groups(classes, cell - bounds[index])
        # The records of a class that an epoch leaves out rotate over the epochs.
        size = self._classes.sizes[classes]
        num_unused = size - self._records_used[classes]
        member = (member + (epoch * num_unused)[:, None]) % size[:, None]
        return self._classes.record_ids(classes[:, None], member).reshape(-1)

    def _epoch_table(self, epoch: int) -> tuple[FairGroups, Int64s, Int64s]:
        """Return an epoch's groups of records, its order of classes, and the bounds of the classes.

        Class number i of the order has the cells from `bounds[i]` to `bounds[i + 1]` of the table,
        numbered row by row.
        """
        # Some classes lose a chunk, or get one chunk more: other classes in each epoch.
        count = abs(self._surplus)
        window = (epoch * count + np.arange(count)) % max(1, len(self._adjustable))
        changes = np.bincount(self._adjustable[window], minlength=len(self._chunks))
        chunks = self._chunks - np.sign(self._surplus) * changes
        order = permute(len(chunks), derive(self._key, epoch, 0), np.arange(len(chunks)))
        bounds = np.append(0, np.cumsum(chunks[order]))
        return FairGroups(self._records_used, self._k, derive(self._key, epoch, 2)), order, bounds


def _layout_once(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return B, the chunks of each class, and the class of each chunk that may be left out.

    In B batches a class has B chunks at most.
    """
    full_chunks = sizes // k
    # If B batches can be filled, so can fewer: a binary search finds the largest B.
    candidates = range(1, int(full_chunks.sum()) // p + 1)
    steps = bisect_left(candidates, True, key=lambda b: np.minimum(full_chunks, b).sum() < p * b)
    chunks = np.minimum(full_chunks, steps)
    return steps, chunks, np.repeat(np.arange(len(sizes)), chunks)


def _layout_all(sizes: Int64s, p: int, k: int) -> tuple[int, Int64s, Int64s]:
    """Return B, the chunks of each class, and the classes that may get one chunk more."""
    needed = -(-sizes // k)
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    # Small classes get more chunks, all the same number, as far as the table has room.
    counts = range(1, steps + 1)
    least = bisect_left(counts, True, key=lambda n: np.maximum(needed, n).sum() > p * steps)
    return steps, np.maximum(needed, least), np.flatnonzero(needed <= least)
