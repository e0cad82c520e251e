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

    `class_labels` are given if a record may have several labels; else None.
    """

    by_class = False  # whether `ids` returns class numbers in place of records

    def __init__(
        self,
        classes: ClassOrder,
        supers: ClassOrder | None,
        shape: BatchShape,
        seed: int,
        stored: bool,
        class_labels: Array | None = None,
    ) -> None:
        self.classes, self.supers, self._shape = classes, supers, shape
        self.stored, self._class_labels = stored, class_labels
        self.keys = {of: root_key(seed, f"pk {of}") for of in ("super", "class", "record")}
        self._cache: FifoCache[_PhaseSchedule] = FifoCache(2)
        self._schedule(shape.phases[0])  # computed here, so that the first batch comes at once

    def _schedule(self, phase: Phase) -> _PhaseSchedule:
        return self._cache.get(phase, lambda: _PhaseSchedule(phase, self))

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of consecutive global steps, concatenated."""
        parts = self._shape.split_by_phase(steps)
        return np.concatenate([self._ids_in_phase(*part, rank, world_size) for part in parts])

    def _ids_in_phase(self, phase: Phase, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return what `ids` returns, for steps of one phase."""
        schedule, k = self._schedule(phase), phase.k
        rank_p = phase.p // world_size
        start, stop = rank * rank_p, (rank + 1) * rank_p
        several_labels = self._class_labels is not None and not self.by_class
        if several_labels:  # the records of a rank depend on all classes of the batch
            start, stop = 0, phase.p
        supers_of_steps = schedule.supers.streams_at(steps - phase.p_start)
        classes, visits = schedule.classes(*supers_of_steps, start, stop)
        if self.by_class:
            ids = classes.reshape(-1, 1).repeat(k, axis=1)
        elif several_labels:
            ids = self._distinct_records(schedule, classes, visits, k)
            ids = ids[:, rank * rank_p : (rank + 1) * rank_p].reshape(-1, k)
        else:
            ids = self._records(schedule, classes.reshape(-1), visits.reshape(-1), k)
        if not self._shape.lowest_k:
            return ids.reshape(-1)
        ks = np.repeat(self._shape.ks(phase, steps), rank_p)
        return ids[np.arange(k) < ks[:, None]]

    def _records(self, schedule: _PhaseSchedule, classes: Int64s, visits: Int64s, k: int) -> Int64s:
        """Return the k records of each class at a visit, int64[classes, k]."""
        if schedule.records is None:
            size = np.asarray(self.classes.sizes)[classes]
            member = (visits[:, None] * k + np.arange(k)) % size[:, None]
        else:
            member = schedule.records.groups(classes, visits)
        return self.classes.record_ids(classes[:, None], member)

    def _distinct_records(
        self, schedule: _PhaseSchedule, classes: Int64s, visits: Int64s, k: int
    ) -> Int64s:
        """Return the records of whole batches, int64[batches, p, k], distinct in each batch."""
        assert self._class_labels is not None
        ids = self._records(schedule, classes.reshape(-1), visits.reshape(-1), k)
        ids = ids.reshape(*classes.shape, k)
        sorted_ids = np.sort(ids.reshape(len(ids), -1), axis=1)
        for batch in np.flatnonzero((sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1)):
            by_size = np.argsort(np.asarray(self.classes.sizes)[classes[batch]], kind="stable")
            candidates = partial(self._later_records, schedule, classes[batch], visits[batch], k)
            row = replace_duplicates(ids[batch], by_size, candidates)
            if row is not None:
                labels = self._class_labels[classes[batch]].tolist()
                raise ValueError(
                    f"class {labels[row]} of {labels} has no {k} free records: lower k"
                )
        return ids

    def _later_records(
        self, schedule: _PhaseSchedule, classes: Int64s, visits: Int64s, k: int, row: int
    ) -> Iterator[int]:
        """Yield the records of the next visits of class number `row` of a batch.

        Every record of the class comes at least once.
        """
        num_visits = 2 * int(self.classes.sizes[classes[row]]) // k + 2
        for first in range(1, num_visits + 1, _LOOK_AHEAD):
            later_visits = visits[row] + np.arange(first, first + _LOOK_AHEAD)
            same_class = np.full(_LOOK_AHEAD, classes[row])
            yield from self._records(schedule, same_class, later_visits, k).reshape(-1).tolist()


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
        self, super_class: Int64s, number: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return classes `start` to `stop` of steps, and their visits: int64[steps, stop - start].

        A step is given by its super-class and its number among the steps of the super-class.
        """
        position = number[:, None] * self._p + np.arange(start, stop)
        classes = self._groups.groups(super_class, number, start, stop)
        if self._class_order is not None:
            classes = self._class_order.record_ids(super_class[:, None], classes)
        visits = position // self._sizes[super_class][:, None] - self._cycles[super_class][:, None]
        if self._visited is not None:
            visits -= self._visited[classes]
        return classes, visits

    def _count_earlier_visits(self, steps: int, num_classes: int) -> None:
        """Count the visits of each class in these steps, which come before the phase.

        In each cycle (see `FairGroups`) every class is visited once. So the count is the number of
        complete cycles, and one more for the classes that the last, incomplete cycle has visited.
        """
        sizes, counts = self._sizes, self.supers.counts_before(steps)
        self._cycles = counts * self._p // sizes  # complete cycles of each super-class
        self._visited: NDArray[np.bool_] | None = None  # of each class, in the incomplete cycle
        if not steps:
            return
        first = self._cycles * sizes // self._p  # the step at which the incomplete cycle starts
        stops = np.cumsum(counts - first)
        visited = np.zeros(num_classes, np.bool_)
        for chunk in slices(int(stops[-1]), _CHUNK // self._p + 1):
            index = np.arange(chunk.start, chunk.stop)
            super_class = np.searchsorted(stops, index, side="right")
            number = counts[super_class] - stops[super_class] + index
            classes, visits = self.classes(super_class, number, 0, self._p)
            visited[classes[visits == 0]] = True
        self._visited = visited
