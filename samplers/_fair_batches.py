"""Fair P x K batches: fair groups of P classes, and for each class fair groups of K records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape, Phase
from twinfeed.samplers.drawing.deduplicate import replace_duplicates
from twinfeed.samplers.drawing.fair_subsets import FairSubsets
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
from twinfeed.samplers.drawing.interleave import Interleave
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Array, Int64s

_CHUNK = 1 << 18  # classes that are computed at once at the start of a phase
_LOOK_AHEAD = 8  # groups of records of a class that are searched at once for a free record


class FairBatches:
    """The batches of a `PKBatchSampler` without coverage, for any global steps.

    Each step belongs to one super-class, in a periodic interleave; without super-labels all classes
    are one super-class. The classes of a super-class come in fair groups of P, one group a step.
    The records of a class come in groups of K: fair groups, or with `stored` the next K records in
    stored order, cyclically. Each batch that contains a class takes the next group of the class. In
    each *phase*, a range of steps with constant P and K, the groups are numbered from 0.

    `class_labels` are given if a record may have several labels; else None.
    """

    by_class = False  # whether `ids` returns class numbers in place of records

    def __init__(
        self,
        classes: ClassOrder,
        super_classes: ClassOrder | None,
        shape: BatchShape,
        seed: int,
        stored: bool,
        class_labels: Array | None = None,
    ) -> None:
        self.classes, self.super_classes, self._shape = classes, super_classes, shape
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
        """Return one rank's slices of the batches of these steps, concatenated.

        All steps are in one phase, which is a range of global steps with constant P and K.
        """
        schedule, k = self._schedule(phase), phase.k
        classes_per_rank = phase.p // world_size
        rank_slice = slice(rank * classes_per_rank, (rank + 1) * classes_per_rank)
        several_labels = self._class_labels is not None and not self.by_class
        # If records have several labels, the records of a rank depend on all classes of the batch.
        columns = slice(0, phase.p) if several_labels else rank_slice
        # The super-class of each step, and the number of earlier steps of this super-class.
        super_class, index = schedule.interleave.elements_at(steps - phase.p_start)
        classes, groups = schedule.classes(super_class, index, columns.start, columns.stop)
        if self.by_class:
            ids = classes.reshape(-1, 1).repeat(k, axis=1)
        elif several_labels:
            ids = self._distinct_records(schedule, classes, groups, k)
            ids = ids[:, rank_slice].reshape(-1, k)
        else:
            ids = self._records(schedule, classes.reshape(-1), groups.reshape(-1), k)
        if self._shape.lowest_k is None:
            return ids.reshape(-1)
        # K is drawn for each batch, at most k: keep the first K records of each class.
        batch_k = np.repeat(self._shape.k_of_steps(phase, steps), classes_per_rank)
        return ids[np.arange(k) < batch_k[:, None]]

    def _records(self, schedule: _PhaseSchedule, classes: Int64s, groups: Int64s, k: int) -> Int64s:
        """Return the k records of group number `groups[i]` of class `classes[i]`, int64[n, k]."""
        if schedule.record_subsets is None:
            class_size = np.asarray(self.classes.sizes)[classes]
            member = (groups[:, None] * k + np.arange(k)) % class_size[:, None]
        else:
            member = schedule.record_subsets.subsets(classes, groups)
        return self.classes.record_ids(classes[:, None], member)

    def _distinct_records(
        self, schedule: _PhaseSchedule, classes: Int64s, groups: Int64s, k: int
    ) -> Int64s:
        """Return the records of batches, int64[batches, p, k], each record once in a batch.

        `classes` and `groups`, int64[batches, p], are the classes of each batch and the numbers of
        their groups of records.
        """
        assert self._class_labels is not None
        ids = self._records(schedule, classes.reshape(-1), groups.reshape(-1), k)
        ids = ids.reshape(*classes.shape, k)
        sorted_ids = np.sort(ids.reshape(len(ids), -1), axis=1)
        has_duplicates = (sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1)
        for batch in np.flatnonzero(has_duplicates):
            by_size = np.argsort(np.asarray(self.classes.sizes)[classes[batch]], kind="stable")
            candidates = partial(self._later_records, schedule, classes[batch], groups[batch], k)
            failed_row = replace_duplicates(ids[batch], by_size, candidates)
            if failed_row is not None:
                labels = self._class_labels[classes[batch]].tolist()
                raise ValueError(
                    f"class {labels[failed_row]} of {labels} has no {k} free records: lower k"
                )
        return ids

    def _later_records(
        self, schedule: _PhaseSchedule, classes: Int64s, groups: Int64s, k: int, row: int
    ) -> Iterator[int]:
        """Yield the records of a class from its groups of k records after the one in the batch.

        The class is `classes[row]`, and the group in the batch is `groups[row]`. Every record of
        the class comes at least once.
        """
        num_groups = 2 * int(self.classes.sizes[classes[row]]) // k + 2
        same_class = np.full(_LOOK_AHEAD, classes[row])
        for first in range(1, num_groups + 1, _LOOK_AHEAD):
            later_groups = groups[row] + np.arange(first, first + _LOOK_AHEAD)
            yield from self._records(schedule, same_class, later_groups, k).reshape(-1).tolist()


class _PhaseSchedule:
    """The classes of each step of a phase, and the numbers of their groups of records.

    A phase is a range of steps with constant P and K. `interleave` gives the super-class of each
    step, counted from the step at which P changed. `record_subsets` are the fair groups of records
    of each class (None in stored order), counted from the start of the phase.
    """

    def __init__(self, phase: Phase, batches: FairBatches) -> None:
        keys, self._super_classes, self._p = batches.keys, batches.super_classes, phase.p
        class_sizes = np.asarray(batches.classes.sizes)
        self._num_classes = np.array([len(class_sizes)])  # of each super-class
        if self._super_classes is not None:
            self._num_classes = self._super_classes.sizes
        weights = self._num_classes // np.gcd.reduce(self._num_classes)
        self.interleave = Interleave(weights, derive(keys["super"], phase.p_start))
        class_key = derive(keys["class"], phase.p_start)
        self._class_subsets = FairSubsets(self._num_classes, phase.p, class_key)
        key = derive(keys["record"], phase.start)
        self.record_subsets = None if batches.stored else FairSubsets(class_sizes, phase.k, key)
        self._count_batches_before(phase.start - phase.p_start, len(class_sizes))

    def classes(
        self, super_class: Int64s, index: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return the classes of steps, and the number of the group of records that each takes.

        A step is given by its super-class and its index among the steps of the super-class. Only
        columns `start` to `stop` of the P classes of a step: both are int64[steps, stop - start].
        """
        classes = self._class_subsets.subsets(super_class, index, start, stop)
        if self._super_classes is not None:  # whose members are the classes
            classes = self._super_classes.record_ids(super_class[:, None], classes)
        # The classes of a super-class come in cycles of one batch a class. So the number of earlier
        # batches with a class is the number of earlier cycles, less those before the phase.
        position = index[:, None] * self._p + np.arange(start, stop)
        cycle = position // self._num_classes[super_class][:, None]
        groups = cycle - self._num_cycles[super_class][:, None]
        if self._in_last_cycle is not None:
            groups -= self._in_last_cycle[classes]
        return classes, groups

    def _count_batches_before(self, steps: int, num_classes: int) -> None:
        """Count for each class the batches that contain it, of `steps` steps before the phase.

        Every class comes once in each cycle, a permutation of the classes of its super-class. So
        the count is the number of complete cycles, which is set as `_num_cycles`, and one more for
        the classes of the last, incomplete cycle, whose mask is set as `_in_last_cycle`.
        """
        num_steps = self.interleave.num_before(steps)  # of each super-class
        self._num_cycles = num_steps * self._p // self._num_classes  # complete cycles
        self._in_last_cycle: NDArray[np.bool_] | None = None  # of each class
        if not steps:
            return
        first = self._num_cycles * self._num_classes // self._p  # step where the last cycle starts
        super_class, offset = groups_and_indices(num_steps - first)
        in_last_cycle = np.zeros(num_classes, np.bool_)
        for chunk in slices(len(offset), _CHUNK // self._p + 1):
            index = first[super_class[chunk]] + offset[chunk]
            classes, groups = self.classes(super_class[chunk], index, 0, self._p)
            # Without a mask, the number of a group is the number of cycles since the last began.
            in_last_cycle[classes[groups == 0]] = True
        self._in_last_cycle = in_last_cycle
