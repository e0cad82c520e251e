"""Fair P x K batches: fair groups of P classes, and for each class fair groups of K records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape, Phase
from twinfeed.samplers.drawing.deduplicate import replace_duplicates
from twinfeed.samplers.drawing.fair_groups import FairGroups
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.interleave import Interleave
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Array, Int64s

_CHUNK = 1 << 18  # classes that are computed at once at the start of a phase
_LOOK_AHEAD = 8  # later visits of a class that are searched at once for a free record


class FairBatches:
    """The batches of a `PKBatchSampler` without coverage, for any global steps.

    Each step belongs to one super-class, in a periodic interleave; without super-labels all classes
    are one super-class. The classes of a super-class come in fair groups of P, one group a step.
    A *visit* of a class is a batch that contains it; visits are numbered from 0 in each phase. The
    number of the visit is the number of the class's group of K records: fair groups, or with
    `stored` the next K records in stored order, cyclically.

    `names` are the labels of the classes if a record may have several; else None.
    """

    by_class = False  # whether `ids` returns class numbers in place of records

    def __init__(
        self,
        classes: ClassOrder,
        supers: ClassOrder | None,
        shape: BatchShape,
        seed: int,
        stored: bool,
        names: Array | None = None,
    ) -> None:
        self.classes, self.supers, self._shape = classes, supers, shape
        self.stored, self._names = stored, names
        self.keys = {of: root_key(seed, f"pk {of}") for of in ("super", "class", "record")}
        self._cache: FifoCache[_PhaseSchedule] = FifoCache(2)
        self._schedule(shape.phases[0])  # computed here, so that the first batch comes at once

    def _schedule(self, phase: Phase) -> _PhaseSchedule:
        return self._cache.get(phase, lambda: _PhaseSchedule(phase, self))

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of consecutive global steps, end to end."""
        parts = self._shape.split_by_phase(steps)
        return np.concatenate([self._ids_in_phase(*part, rank, world_size) for part in parts])

    def _ids_in_phase(self, phase: Phase, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return what `ids` returns, for steps of one phase."""
        schedule, k = self._schedule(phase), phase.k
        share = phase.p // world_size
        own = slice(rank * share, (rank + 1) * share)
        supers_of_steps = schedule.supers.streams_at(steps - phase.p_start)
        if self.by_class:
            number, _ = schedule.classes(*supers_of_steps, own.start, own.stop)
            ids = number.reshape(-1, 1).repeat(k, axis=1)
        elif self._names is None:
            number, visit = schedule.classes(*supers_of_steps, own.start, own.stop)
            ids = self._records(schedule, number.reshape(-1), visit.reshape(-1), k)
        else:  # which records a rank gets depends on all classes of the batch
            number, visit = schedule.classes(*supers_of_steps, 0, phase.p)
            ids = self._distinct_records(schedule, number, visit, k)[:, own].reshape(-1, k)
        if not self._shape.lowest_k:
            return ids.reshape(-1)
        ks = np.repeat(self._shape.ks(phase, steps), share)
        return ids[np.arange(k) < ks[:, None]]

    def _records(self, schedule: _PhaseSchedule, number: Int64s, visit: Int64s, k: int) -> Int64s:
        """Return the k records of each class at each visit, int64[rows, k]."""
        if schedule.records is None:
            size = np.asarray(self.classes.sizes)[number]
            member = (visit[:, None] * k + np.arange(k)) % size[:, None]
        else:
            member = schedule.records.groups(number, visit)
        return self.classes.record_ids(number[:, None], member)

    def _distinct_records(
        self, schedule: _PhaseSchedule, number: Int64s, visit: Int64s, k: int
    ) -> Int64s:
        """Return the records of whole batches, int64[batches, p, k], distinct in each batch."""
        assert self._names is not None
        ids = self._records(schedule, number.reshape(-1), visit.reshape(-1), k)
        ids = ids.reshape(*number.shape, k)
        ascending = np.sort(ids.reshape(len(ids), -1), axis=1)
        for batch in np.flatnonzero((ascending[:, 1:] == ascending[:, :-1]).any(axis=1)):
            order = np.argsort(np.asarray(self.classes.sizes)[number[batch]], kind="stable")
            later = partial(self._later_records, schedule, number[batch], visit[batch], k)
            row = replace_duplicates(ids[batch], order, later)
            if row is not None:
                names = self._names[number[batch]].tolist()
                raise ValueError(f"class {names[row]} of {names} has no {k} free records: lower k")
        return ids

    def _later_records(
        self, schedule: _PhaseSchedule, number: Int64s, visit: Int64s, k: int, row: int
    ) -> Iterator[int]:
        """Yield the records of a class's next visits, until every record of the class has come."""
        last = 2 * int(self.classes.sizes[number[row]]) // k + 3
        for first in range(1, last, _LOOK_AHEAD):
            visits = visit[row] + np.arange(first, first + _LOOK_AHEAD)
            ids = self._records(schedule, np.full(_LOOK_AHEAD, number[row]), visits, k)
            yield from ids.reshape(-1).tolist()


class _PhaseSchedule:
    """The schedule of one phase: which classes each step has, and which visit of them it is.

    `supers` is the interleave of super-classes, `records` the fair groups of records of each class
    (None in stored order). Groups of classes start where P changed; visits are counted from the
    start of the phase, where K or P changed.
    """

    def __init__(self, phase: Phase, batches: FairBatches) -> None:
        keys, self._class_order, self._p = batches.keys, batches.supers, phase.p
        class_sizes = np.asarray(batches.classes.sizes)
        self._sizes = np.array([len(class_sizes)])  # classes of each super-class
        if self._class_order is not None:
            self._sizes = self._class_order.sizes
        weights = self._sizes // np.gcd.reduce(self._sizes)
        self.supers = Interleave(weights, derive(keys["super"], phase.p_start))
        self._groups = FairGroups(self._sizes, phase.p, derive(keys["class"], phase.p_start))
        key = derive(keys["record"], phase.start)
        self.records = None if batches.stored else FairGroups(class_sizes, phase.k, key)
        self._count_earlier_visits(phase.start - phase.p_start, len(class_sizes))

    def classes(
        self, group: Int64s, number: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return classes `start` to `stop` of steps, and their visits: int64[steps, stop - start].

        A step is given by its super-class (`group`) and its number among the steps of the
        super-class.
        """
        position = number[:, None] * self._p + np.arange(start, stop)
        classes = self._groups.groups(group, number, start, stop)
        if self._class_order is not None:
            classes = self._class_order.record_ids(group[:, None], classes)
        visit = position // self._sizes[group][:, None] - self._laps[group][:, None]
        if self._visited is not None:
            visit -= self._visited[classes >> 3] >> (classes & 7) & 1
        return classes, visit

    def _count_earlier_visits(self, steps: int, num_classes: int) -> None:
        """Count the visits of each class in these steps, which come before the phase.

        In each lap (see `FairGroups`) every class is visited once. So the count is the number of
        whole laps, and one more for the classes that were visited in the lap that is not over.
        """
        sizes, counts = self._sizes, self.supers.counts_before(steps)
        self._laps = counts * self._p // sizes  # whole laps of each super-class
        self._visited: NDArray[np.uint8] | None = None  # a bit a class: visited in the last lap
        if not steps:
            return
        first = self._laps * sizes // self._p  # the super-class's step in which its last lap starts
        stops = np.cumsum(counts - first)
        visited = np.zeros(num_classes, np.bool_)
        for chunk in slices(int(stops[-1]), _CHUNK // self._p + 1):
            step = np.arange(chunk.start, chunk.stop)
            group = np.searchsorted(stops, step, side="right")
            classes, visit = self.classes(group, counts[group] - stops[group] + step, 0, self._p)
            visited[classes[visit == 0]] = True
        self._visited = np.packbits(visited, bitorder="little")
