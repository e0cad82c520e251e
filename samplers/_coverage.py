"""P x K epochs that cover: every chunk of a class once, or every record at least once."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape
from twinfeed.samplers.drawing.fair_groups import FairGroups
from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.permutation import permute, permute_rows
from twinfeed.samplers.drawing.random_words import derive, root_key, words


class CoverageDraw:
    """Fill a grid of B batches by P places with chunks of K records, classes distinct in a batch.

    Chunks are laid out class by class along the B batches of a place, then on along the next place.
    So a class with at most B chunks never comes twice in a batch (McNaughton, "Scheduling with
    deadlines and loss functions", 1959). Each batch orders its places anew. `once` takes the
    largest B that whole chunks can fill, `all` the smallest B that holds every record.
    """

    by_class = False  # as of a `FairDraw`

    def __init__(self, classes: ClassOrder, shape: BatchShape, *, once: bool, seed: int) -> None:
        self._classes = classes
        p, k = self._p, self._k = shape.largest_p, shape.largest_k
        self._key = root_key(seed, f"pk coverage {'once' if once else 'all'}")
        plan = _once if once else _all
        self.steps, self._chunks, self._adjustable = plan(classes.sizes, p, k)
        self._surplus = int(self._chunks.sum()) - p * self.steps
        self._pools = self._chunks * k if once else classes.sizes
        self._recent: Recent[tuple[FairGroups, Int64, Int64]] = Recent(2)

    def ids(self, steps: Int64, rank: int, world_size: int) -> Int64:
        """Return one rank's slices of the batches of global steps of one epoch, end to end."""
        epoch = int(steps[0]) // self.steps
        groups, order, bounds = self._recent.get(epoch, lambda: self._table(epoch))
        column = permute(self.steps, derive(self._key, epoch, 1), steps % self.steps)
        share = self._p // world_size
        # A place holds few classes, one after the other: each batch permutes its places, so that no
        # rank gets these classes alone.
        keys = words(derive(self._key, epoch, 3), steps % self.steps)
        places = np.arange(rank * share, (rank + 1) * share)
        place = permute_rows(np.full_like(steps, self._p), keys, np.tile(places, (len(steps), 1)))
        cell = (column[:, None] + place * self.steps).reshape(-1)
        turn = np.searchsorted(bounds, cell, side="right") - 1
        number = order[turn]
        if self.by_class:
            return np.repeat(number, self._k)
        member = groups.groups(number, cell - bounds[turn])
        # Other records of a class are left out in each epoch, one after the other.
        size = self._classes.sizes[number]
        left_out = size - self._pools[number]
        member = (member + (epoch * left_out)[:, None]) % size[:, None]
        return self._classes._ids(number[:, None], member).reshape(-1)

    def _table(self, epoch: int) -> tuple[FairGroups, Int64, Int64]:
        """Return the record groups of an epoch, the order of its classes, and their cells."""
        # Some classes lose a chunk, or get one chunk more: other classes in each epoch.
        count = abs(self._surplus)
        window = (epoch * count + np.arange(count)) % max(1, len(self._adjustable))
        change = np.bincount(self._adjustable[window], minlength=len(self._chunks))
        chunks = self._chunks - np.sign(self._surplus) * change
        order = permute(len(chunks), derive(self._key, epoch, 0), np.arange(len(chunks)))
        bounds = np.concatenate([[0], np.cumsum(chunks[order])])
        return FairGroups(self._pools, self._k, derive(self._key, epoch, 2)), order, bounds


def _once(sizes: Int64, p: int, k: int) -> tuple[int, Int64, Int64]:
    """Return B, the chunks of each class, and the class of each chunk that may be left out."""
    whole = sizes // k
    # Where a grid of b batches can be filled, so can a smaller grid.
    grids = range(1, int(whole.sum()) // p + 1)
    steps = bisect_left(grids, True, key=lambda b: np.minimum(whole, b).sum() < p * b)
    chunks = np.minimum(whole, steps)
    return steps, chunks, np.repeat(np.arange(len(sizes)), chunks)


def _all(sizes: Int64, p: int, k: int) -> tuple[int, Int64, Int64]:
    """Return B, the chunks of each class, and the classes that may be given another."""
    needed = -(-sizes // k)
    steps = max(-(-int(needed.sum()) // p), int(needed.max()))
    levels, room = range(1, steps + 1), p * steps
    level = bisect_left(levels, True, key=lambda h: np.maximum(needed, h).sum() > room)
    return steps, np.maximum(needed, level), np.flatnonzero(needed <= level)
