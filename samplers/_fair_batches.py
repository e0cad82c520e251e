"""Fair P x K batches: fair subsets of P classes, and for each class fair subsets of K records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

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

# A training step, the classes of which records are excluded from it on, and their other records:
# class `classes[i]` is class i of this class order.
ClassExclusion = tuple[int, Int64s, ClassOrder]

_CHUNK = 1 << 18  # classes that are computed at once at the start of a phase
_LOOK_AHEAD = 8  # subsets of records of a class that are computed at once, to replace a record


class FairBatches:
    """The batches of a `PKBatchSampler` without coverage, for any global steps.

    Each step belongs to one super-class, in a periodic interleave; without super-labels all classes
    are one super-class. The classes of a super-class come in fair subsets of P, one subset a step.
    The records of a class come in subsets of K: fair subsets, or with `stored` the next K records
    in stored order, cyclically. Each batch that contains a class takes the next subset of the
    class. In each *phase*, a range of steps with constant P and K, the subsets are numbered from 0.

    `class_labels` are given if a record may have several labels; else None. `exclusions` have the
    ids that are excluded, by training step. In each class they come no more from its next
    traversal on, which is a permutation of the records that are left.
    """

    by_class = False  # whether `ids` returns class numbers in place of records

    def __init__(
        self,
        classes: ClassOrder,
        super_classes: ClassOrder | None,
        shape: BatchShape,
        seed: int,
        stored: bool,
        class_labels: Array | None,
        exclusions: list[ClassExclusion],
    ) -> None:
        self.classes, self.super_classes, self._shape = classes, super_classes, shape
        self.stored, self._class_labels = stored, class_labels
        self.keys = {of: root_key(seed, f"pk {of}") for of in ("super", "class", "record")}
        self.exclusions = exclusions
        self._cache: FifoCache[_PhaseSchedule] = FifoCache(2)
        self._schedule(shape.phases[0])  # computed here, so that the first batch comes at once

    def _schedule(self, phase: Phase) -> _PhaseSchedule:
        return self._cache.get(phase, lambda: self._new_schedule(phase))

    def _new_schedule(self, phase: Phase) -> _PhaseSchedule:
        """Return the schedule of a phase (a range of steps with constant P and K), with exclusions.

        An exclusion is a training step, the classes of which records are excluded from this step
        on, and their other records.
        """
        schedule = _PhaseSchedule(phase, self)
        for step, classes, order in self.exclusions:
            # A phase that starts at the step counts how many batches before it have each class.
            at_step = _PhaseSchedule(phase._replace(start=max(phase.start, step)), self)
            numbers = at_step.num_before(classes) - schedule.num_before(classes)
            schedule.exclude(step, numbers, classes, order)
        return schedule

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of consecutive global steps, concatenated.

        A batch of P classes with K record ids each is divided into `world_size` equal slices. P and
        K may change at some steps: a *phase* is a range of steps with constant P and K.
        """
        parts = self._shape.split_by_phase(steps)  # pairs (phase, its steps)
        return np.concatenate([self._ids_in_phase(*part, rank, world_size) for part in parts])

    def _ids_in_phase(self, phase: Phase, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these global steps, concatenated.

        All steps are in one phase, a range of steps with constant P and K. A batch has P classes,
        and K record ids of each. A rank gets the ids of `P / world_size` of the classes.
        """
        schedule, p, k = self._schedule(phase), phase.p, phase.k
        # The rank gets the columns `start` to `stop - 1` of the P classes of each batch.
        start, stop = rank * p // world_size, (rank + 1) * p // world_size
        if self.by_class:  # class numbers in place of record ids
            classes, _ = schedule.classes_at(steps, start, stop)
            ids = np.broadcast_to(classes[:, :, None], (*classes.shape, k))
        elif self._class_labels is None:
            ids = schedule.records(*schedule.classes_at(steps, start, stop))
        else:  # records may have several labels: which are free depends on the whole batch
            batch_classes = schedule.classes_at(steps, 0, p)
            ids = schedule.distinct_records(*batch_classes, self._class_labels)[:, start:stop]
        if self._shape.lowest_k is None:  # K is constant
            return ids.reshape(-1)
        # K is random in each step, and at most k: take the first K records of each class.
        random_k = self._shape.k_of_steps(phase, steps)
        is_taken = np.arange(k) < random_k[:, None, None]
        return ids[np.broadcast_to(is_taken, ids.shape)]


class _PhaseSchedule:
    """The classes and records of the batches of a phase, a range of steps with constant P and K.

    The order of the classes starts at the step at which P changed, and the order of the records of
    each class at the start of the phase.
    """

    def __init__(self, phase: Phase, batches: FairBatches) -> None:
        self._phase, self._classes = phase, batches.classes
        keys, self._super_classes = batches.keys, batches.super_classes
        class_sizes = np.asarray(batches.classes.sizes)
        self._num_classes = np.array([len(class_sizes)])  # of each super-class
        if self._super_classes is not None:
            self._num_classes = self._super_classes.sizes
        weights = self._num_classes // np.gcd.reduce(self._num_classes)
        self._super_class_order = Interleave(weights, derive(keys["super"], phase.p_start))
        class_key = derive(keys["class"], phase.p_start)
        self._class_subsets = FairSubsets(self._num_classes, phase.p, class_key)
        self._record_key = derive(keys["record"], phase.start)
        self._stored = batches.stored
        self._record_subsets = FairSubsets(class_sizes, phase.k, self._record_key)
        # Of each class, the length of its last traversals of records, and their first subset. If
        # nothing is excluded, the sizes are not copied: they may be mapped from a file.
        self._sizes, self._first = class_sizes, np.zeros(0, np.int64)
        self._exclusions: list[tuple[Int64s, Int64s, ClassOrder, FairSubsets]] = []
        # How many batches before the phase have each class: the number for its super-class, and
        # one more where `_has_extra_batch`.
        self._batches_before = np.zeros_like(self._num_classes)  # of each super-class
        self._has_extra_batch = np.zeros(len(class_sizes), np.bool_)  # of each class
        self._count_batches_before(phase.start - phase.p_start)

    def exclude(self, step: int, numbers: Int64s, classes: Int64s, order: ClassOrder) -> None:
        """Exclude records of classes from a training step on: `order` has their other records.

        A class takes its records in subsets of K, and has all of them once, a *traversal*, before
        any comes again. The excluded records come no more from the first traversal on that starts
        after the step. `numbers` is how many subsets of each of the `classes` come before the step.
        With 7 subsets of K = 2, of a class of 5 records, the next traversal starts at position 15
        of its sequence of records, which is in subset 7: the first that is drawn from `order`.
        (Position 14, the end of the traversal before it, is skipped.)
        """
        if not self._exclusions:
            self._sizes, self._first = self._sizes.copy(), np.zeros_like(self._sizes)
        k, size, first = self._phase.k, self._sizes[classes], self._first[classes]
        # Traversals that start before the step: the quotient, rounded up.
        num_traversals = -((first - numbers).clip(max=0) * k // size)
        first = first + num_traversals * size // k  # the first subset drawn from `order`
        self._sizes[classes], self._first[classes] = order.sizes, first
        subsets = FairSubsets(order.sizes, k, derive(self._record_key, step))
        self._exclusions.append((classes, first, order, subsets))

    def classes_at(self, steps: Int64s, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Return the classes of each step's batch, and how many earlier batches have each class.

        Only batches of the phase, a range of steps with constant P and K, are counted. A batch has
        P classes, of which only the columns `start` to `stop - 1` are returned. Both arrays are
        int64[steps, stop - start].
        """
        # All P classes of a batch are of one super-class (a group of classes). `batch_number` is
        # the number of the batch among those of its super-class, counted since P last changed.
        positions = steps - self._phase.p_start
        super_class, batch_number = self._super_class_order.elements_at(positions)
        return self._classes_of(super_class, batch_number, start, stop)

    def _classes_of(
        self, super_class: Int64s, batch_number: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return the classes of batches, and how many earlier batches have each class.

        A super-class is a group of classes, and the P classes of a batch are of one super-class.
        Row i of both arrays, int64[rows, stop - start], is for batch number `batch_number[i]` (from
        0) of super-class `super_class[i]`. Of its P classes, only the columns `start` to `stop - 1`
        are returned. Earlier batches are counted from the start of the phase, a range of steps with
        constant P and K.
        """
        # The number of each class within its super-class.
        member = self._class_subsets.subsets(super_class, batch_number, start, stop)
        classes = member
        if self._super_classes is not None:
            classes = self._super_classes.record_ids(super_class[:, None], member)
        # A super-class of n classes has all n in its batches before any of them comes again. So
        # the class at position q of its concatenated batches is in q // n earlier batches.
        position = batch_number[:, None] * self._phase.p + np.arange(start, stop)
        num_earlier = position // self._num_classes[super_class][:, None]
        # Subtract the batches before the phase, which have each class so often, or once more.
        num_earlier -= self._batches_before[super_class][:, None]
        num_earlier -= self._has_extra_batch[classes]
        return classes, num_earlier

    def num_before(self, classes: Int64s) -> Int64s:
        """Return how many batches have each class, from the last change of P to this phase."""
        super_class, order = np.zeros_like(classes), self._super_classes
        if order is not None:
            all_super_classes, members = groups_and_indices(order.sizes)
            super_class_of = np.empty_like(all_super_classes)
            super_class_of[order.record_ids(all_super_classes, members)] = all_super_classes
            super_class = super_class_of[classes]
        return self._batches_before[super_class] + self._has_extra_batch[classes]

    def _count_batches_before(self, num_steps: int) -> None:
        """Count for each class the batches that contain it, in the `num_steps` before the phase.

        A phase is a range of steps with constant P and K. The P classes of a batch are of one
        super-class, a group of classes. The batches of a super-class have all its classes once (a
        *traversal*), then all of them again, and so on. So each class is in as many batches as
        there are complete traversals, and some classes in one more, of an incomplete traversal.
        With 5 classes, P = 2 and 4 steps, the batches have 8 classes: all 5, and 3 of them again.

        Sets `_batches_before` of each super-class (the complete traversals), and `_has_extra_batch`
        of each class, as a byte each: there may be millions of classes.
        """
        if not num_steps:
            return
        p, num_classes = self._phase.p, self._num_classes
        num_batches = self._super_class_order.num_before(num_steps)  # of each super-class
        self._batches_before = num_batches * p // num_classes
        # The batches of each super-class from the start of its incomplete traversal on.
        first_batch = self._batches_before * num_classes // p
        super_class, offset = groups_and_indices(num_batches - first_batch)  # of these batches
        has_extra_batch = np.zeros_like(self._has_extra_batch)
        for chunk in slices(len(offset), _CHUNK // p + 1):
            batch_number = first_batch[super_class[chunk]] + offset[chunk]
            classes, num_earlier = self._classes_of(super_class[chunk], batch_number, 0, p)
            # Complete traversals are subtracted: 0 is a class of the incomplete one. The first
            # batch may also have classes of the last complete traversal, which have -1.
            has_extra_batch[classes[num_earlier == 0]] = True
        self._has_extra_batch = has_extra_batch

    def records(self, classes: Int64s, numbers: Int64s) -> Int64s:
        """Return the ids of K records of each class, int64[*classes.shape, K].

        The records of a class are divided into subsets of K, and each batch that has the class
        takes its next subset. Here it is subset number `numbers[i]` (from 0) of class `classes[i]`,
        for arrays of any shape. In stored order, subset t has the records `t * K` to `t * K + K -
        1` of the class, modulo its size: of 5 records and K = 2, subset 2 has records 4 and 0.
        """
        class_number, number = classes.reshape(-1), numbers.reshape(-1)
        ids = self._subset(self._classes, self._record_subsets, class_number, number)
        # Of classes with excluded records, subset number `first` and later ones are drawn from the
        # other records of the class.
        for changed_classes, first, order, subsets in self._exclusions:
            index = np.searchsorted(changed_classes, class_number).clip(max=len(first) - 1)
            number_since = number - first[index]
            rows = np.flatnonzero((changed_classes[index] == class_number) & (number_since >= 0))
            ids[rows] = self._subset(order, subsets, index[rows], number_since[rows])
        return ids.reshape(*classes.shape, -1)

    def _subset(
        self, order: ClassOrder, subsets: FairSubsets, class_number: Int64s, number: Int64s
    ) -> Int64s:
        """Return the ids of K records of each class, int64[n, K].

        Row i is subset number `number[i]` (of K records) of class `class_number[i]` of `order`.
        `subsets` are the random subsets of these classes, which are used unless records are drawn
        in stored order.
        """
        k = self._phase.k
        # `member` is the number of a record within its class.
        if self._stored:
            class_size = np.asarray(order.sizes)[class_number]
            member = (number[:, None] * k + np.arange(k)) % class_size[:, None]
        else:  # in random order
            member = subsets.subsets(class_number, number)
        return order.record_ids(class_number[:, None], member)

    def distinct_records(self, classes: Int64s, numbers: Int64s, class_labels: Array) -> Int64s:
        """Return the record ids of batches, int64[batches, P, K], no record twice in a batch.

        Row i of `classes`, int64[batches, P], has the classes of batch i. Class `classes[i, j]`
        takes its subset of K records number `numbers[i, j]`. A record may have several labels. If
        two classes of a batch take the same record, the smaller class keeps it, and the larger
        class takes its next record that is not in the batch. `class_labels` are for the error.
        """
        ids = self.records(classes, numbers)
        sorted_ids = np.sort(ids.reshape(len(ids), -1), axis=1)
        has_duplicates = (sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1)
        for batch in np.flatnonzero(has_duplicates):
            rows_by_size = np.argsort(
                np.asarray(self._classes.sizes)[classes[batch]], kind="stable"
            )
            candidates = partial(self._later_records, classes[batch], numbers[batch])
            failed_row = replace_duplicates(ids[batch], rows_by_size, candidates)
            if failed_row is not None:
                labels = class_labels[classes[batch]].tolist()
                raise ValueError(
                    f"class {labels[failed_row]} of {labels} has no {self._phase.k} free records: "
                    f"lower k"
                )
        return ids

    def _later_records(self, classes: Int64s, numbers: Int64s, row: int) -> Iterator[int]:
        """Yield the records that follow for a class of a batch: each at least once, some twice.

        A class takes its records in subsets of K. Class `classes[row]` of the batch has subset
        number `numbers[row]`: yield the records of its next subsets, a few at a time.
        """
        # All n records are within the next 2 n, as they come in traversals: all once, then again.
        num_subsets = 2 * int(self._classes.sizes[classes[row]]) // self._phase.k + 2
        same_class = np.full(_LOOK_AHEAD, classes[row])
        for first in range(1, num_subsets + 1, _LOOK_AHEAD):
            later_numbers = numbers[row] + np.arange(first, first + _LOOK_AHEAD)
            yield from self.records(same_class, later_numbers).reshape(-1).tolist()
