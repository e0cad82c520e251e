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

_CHUNK = 1 << 18  # classes that are computed at once at the start of a phase
_LOOK_AHEAD = 8  # subsets of records of a class that are searched at once for a free record


class FairBatches:
    """The batches of a `PKBatchSampler` without coverage, for any global steps.

    Each step belongs to one super-class, in a periodic interleave; without super-labels all classes
    are one super-class. The classes of a super-class come in fair subsets of P, one subset a step.
    The records of a class come in subsets of K: fair subsets, or with `stored` the next K records
    in stored order, cyclically. Each batch that contains a class takes the next subset of the
    class. In each *phase*, a range of steps with constant P and K, the subsets are numbered from 0.

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
        """Return one rank's slices of the batches of consecutive global steps, concatenated.

        A batch of P classes with K record ids each is divided into `world_size` equal slices.
        """
        parts = self._shape.split_by_phase(steps)
        return np.concatenate([self._ids_in_phase(*part, rank, world_size) for part in parts])

    def _ids_in_phase(self, phase: Phase, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these global steps, concatenated.

        All steps are in one phase, a range of steps with constant P and K. A rank gets the record
        ids of `P / world_size` classes of each batch, K ids a class.
        """
        schedule, p, k = self._schedule(phase), phase.p, phase.k
        start, stop = rank * p // world_size, (rank + 1) * p // world_size  # of the rank's classes
        if self.by_class:
            classes, _ = schedule.classes_at(steps, start, stop)
            ids = np.broadcast_to(classes[:, :, None], (*classes.shape, k))
        elif self._class_labels is None:
            ids = schedule.records(*schedule.classes_at(steps, start, stop))
        else:  # records may have several labels: which are free depends on the whole batch
            batch_classes = schedule.classes_at(steps, 0, p)
            ids = schedule.distinct_records(*batch_classes, self._class_labels)[:, start:stop]
        if self._shape.lowest_k is None:
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
        record_key = derive(keys["record"], phase.start)
        self._record_subsets = FairSubsets(class_sizes, phase.k, record_key)
        self._stored = batches.stored
        # Nothing precedes the phase until it is counted.
        self._num_traversals = np.zeros_like(self._num_classes)
        self._in_last_traversal = np.zeros(len(class_sizes), np.bool_)
        self._count_batches_before(phase.start - phase.p_start)

    def classes_at(self, steps: Int64s, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Return the classes of each step, and how many earlier batches of the phase have each.

        Only columns `start` to `stop` of the P classes of a step: int64[steps, stop - start] both.
        """
        super_class, index = self._super_class_order.elements_at(steps - self._phase.p_start)
        return self._classes_of(super_class, index, start, stop)

    def _classes_of(
        self, super_class: Int64s, index: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return the classes of steps, and how many earlier batches of the phase have each class.

        Row i of both, int64[steps, stop - start], is for step number `index[i]` of those that have
        a batch of super-class `super_class[i]`. A batch has P classes of one super-class. Only
        columns `start` to `stop` of the P classes are returned.
        """
        members = self._class_subsets.subsets(super_class, index, start, stop)
        # `members` are the numbers of the classes within their super-class.
        classes = members
        if self._super_classes is not None:
            classes = self._super_classes.record_ids(super_class[:, None], members)
        # The batches have all classes of the super-class once before any comes again. So a class
        # at position q of the sequence of all classes was in q // num_classes batches before.
        position = index[:, None] * self._phase.p + np.arange(start, stop)
        num_earlier = position // self._num_classes[super_class][:, None]
        num_earlier -= self._num_traversals[super_class][:, None]  # those before the phase
        num_earlier -= self._in_last_traversal[classes]
        return classes, num_earlier

    def _count_batches_before(self, num_steps: int) -> None:
        """Count for each class the batches that contain it, of the last steps before the phase.

        A traversal has each class of a super-class once. So the count is the number of complete
        traversals, and one more for the classes that come in the last, incomplete traversal. With
        5 classes, P = 2 and 4 steps before the phase, there are 8 classes: one complete traversal,
        and 3 classes of the next. Sets `_num_traversals` (of each super-class) and
        `_in_last_traversal` (of each class).
        """
        if not num_steps:
            return
        steps_of_super = self._super_class_order.num_before(num_steps)  # of each super-class
        self._num_traversals = steps_of_super * self._phase.p // self._num_classes
        # The step of each super-class at which its last traversal starts.
        first_step = self._num_traversals * self._num_classes // self._phase.p
        super_class, offset = groups_and_indices(steps_of_super - first_step)
        in_last_traversal = np.zeros_like(self._in_last_traversal)
        for chunk in slices(len(offset), _CHUNK // self._phase.p + 1):
            index = first_step[super_class[chunk]] + offset[chunk]
            classes, num_earlier = self._classes_of(super_class[chunk], index, 0, self._phase.p)
            # The first of these steps may also have classes of the traversal before the last.
            in_last_traversal[classes[num_earlier == 0]] = True
        self._in_last_traversal = in_last_traversal

    def records(self, classes: Int64s, numbers: Int64s) -> Int64s:
        """Return K records of each class, int64[*classes.shape, K].

        They are subset number `numbers[...]` of the records of class `classes[...]`, int64 arrays
        of one shape. Subset t of a class of n records, in stored order, are its records `t * K` to
        `t * K + K - 1`, modulo n: of 5 records and K = 2, subset 2 has records 4 and 0.
        """
        class_number, subset = classes.reshape(-1), numbers.reshape(-1)
        k = self._phase.k
        if self._stored:
            class_size = np.asarray(self._classes.sizes)[class_number]
            member = (subset[:, None] * k + np.arange(k)) % class_size[:, None]
        else:
            member = self._record_subsets.subsets(class_number, subset)
        return self._classes.record_ids(class_number[:, None], member).reshape(*classes.shape, k)

    def distinct_records(self, classes: Int64s, numbers: Int64s, class_labels: Array) -> Int64s:
        """Return the records of batches, int64[batches, P, K], no record twice in a batch.

        Row i of `classes`, int64[batches, P], has the classes of batch i. Each takes subset number
        `numbers[i, j]` of its records. A record may have several labels. If two classes of a batch
        have the same record, the smaller class keeps it, and the larger takes its next free record.
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
        """Yield records of class `classes[row]`, from its subsets after number `numbers[row]`.

        Every record of the class comes at least once.
        """
        num_subsets = 2 * int(self._classes.sizes[classes[row]]) // self._phase.k + 2
        same_class = np.full(_LOOK_AHEAD, classes[row])
        for first in range(1, num_subsets + 1, _LOOK_AHEAD):
            later_numbers = numbers[row] + np.arange(first, first + _LOOK_AHEAD)
            yield from self.records(same_class, later_numbers).reshape(-1).tolist()
