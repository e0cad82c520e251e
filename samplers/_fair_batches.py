"""Fair P x K batches: fair subsets of P classes, and for each class fair subsets of K records."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.batch_shape import BatchShape, Phase
from twinfeed.samplers.drawing.fair_subsets import FairSubsets
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
from twinfeed.samplers.drawing.interleave import Interleave
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Array, Int64s, Integers

_CHUNK = 1 << 18  # classes that are computed at once at the start of a phase
_SUBSETS_AT_ONCE = 8  # subsets of records of a class that are computed to replace a record


class FairBatches:
    """The batches of a `PKBatchSampler` without coverage, for any global steps.

    Each step belongs to one super-class, in a periodic interleave; without super-labels all classes
    are one super-class. The classes of a super-class come in fair subsets of P, one subset a step.
    The records of a class come in subsets of K: fair subsets, or with `stored` the next K records
    in stored order, cyclically. Each batch that contains a class takes the next subset of the
    class. In each *phase*, a range of steps with constant P and K, the subsets of a class have the
    indices 0, 1, 2 and so on.

    `class_labels` are the labels of the classes if a record may have several labels; else None.
    With `members`, the "records" of a class are groups of records, which `members` has: each time a
    group comes, its next record in a fair order is taken.
    """

    by_class = False  # whether `ids` returns class indices in place of record ids

    def __init__(
        self,
        classes: ClassOrder,
        super_classes: ClassOrder | None,
        shape: BatchShape,
        seed: int,
        stored: bool,
        class_labels: Array | None,
        members: ClassOrder | None,
    ) -> None:
        self.classes, self.super_classes, self._shape = classes, super_classes, shape
        self.stored, self._class_labels, self.members = stored, class_labels, members
        names = ("super", "class", "record", "member")
        self.keys = {name: root_key(seed, f"pk {name}") for name in names}
        self._cache: FifoCache[_PhaseSchedule] = FifoCache(2)
        self._schedule(shape.phases[0])  # computed here, so that the first batch comes at once

    def _schedule(self, phase: Phase) -> _PhaseSchedule:
        return self._cache.get(phase, lambda: _PhaseSchedule(phase, self))

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of consecutive global steps, concatenated."""
        parts = self._shape.split_by_phase(steps)  # pairs (phase, its steps)
        return np.concatenate([self._ids_in_phase(*part, rank, world_size) for part in parts])

    def _ids_in_phase(self, phase: Phase, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these steps of one phase. Of a random K, the
        largest is drawn first. In the comments, a rank has one class in two steps, of K = 2 and 3.
        """
        start, stop = rank * phase.p // world_size, (rank + 1) * phase.p // world_size
        ids = self._ids_of_classes(phase, steps, start, stop)  # [[[10, 11, 12]], [[20, 21, 22]]]
        if self._shape.lowest_k is None:  # K is not random
            return ids.reshape(-1)
        random_k = self._shape.k_of_steps(phase, steps)  # [2, 3]
        is_taken = np.arange(phase.k) < random_k[:, None, None]  # [[[1, 1, 0]], [[1, 1, 1]]]
        return ids[np.broadcast_to(is_taken, ids.shape)]  # [10, 11, 20, 21, 22]

    def _ids_of_classes(self, phase: Phase, steps: Int64s, start: int, stop: int) -> Int64s:
        """Return the records of the classes `start` to `stop - 1` of each batch, int64[steps, stop
        - start, K].
        """
        schedule = self._schedule(phase)
        if self.by_class:  # the class index takes the place of each record id
            classes, _ = schedule.classes_at(steps, start, stop)
            return np.broadcast_to(classes[:, :, None], (*classes.shape, phase.k))
        if self._class_labels is None:  # each record is of one class
            classes, subset_index = schedule.classes_at(steps, start, stop)
            return schedule.records(classes, subset_index)
        # Two classes of a batch may draw the same record. To find such duplicates, draw all P
        # classes of each batch.
        classes, subset_index = schedule.classes_at(steps, 0, phase.p)
        ids = schedule.distinct_records(classes, subset_index, self._class_labels)
        return ids[:, start:stop]


class _PhaseSchedule:
    """The classes and records of the batches of a phase. The order of classes starts where P
    changed.
    """

    def __init__(self, phase: Phase, batches: FairBatches) -> None:
        self._phase, self._classes = phase, batches.classes
        keys, self._super_classes = batches.keys, batches.super_classes
        class_sizes = np.asarray(batches.classes.sizes)
        self._num_classes = np.array([len(class_sizes)])  # of each super-class
        if self._super_classes is not None:
            self._num_classes = self._super_classes.sizes
        # Super-classes take turns in proportion to their classes: 4 and 6 classes as 2 and 3.
        weights = self._num_classes // np.gcd.reduce(self._num_classes)
        self._super_class_order = Interleave(weights, derive(keys["super"], phase.p_start))
        class_key = derive(keys["class"], phase.p_start)
        self._class_subsets = FairSubsets(self._num_classes, phase.p, class_key)
        self._record_key = derive(keys["record"], phase.start)
        self._stored = batches.stored
        self._record_subsets = FairSubsets(class_sizes, phase.k, self._record_key)
        self._members = batches.members
        if self._members is not None:
            key = derive(keys["member"], phase.start)
            self._member_subsets = FairSubsets(np.asarray(self._members.sizes), 1, key)
        self._counts_before_phase = self._count_batches(phase.start)

    def classes_at(self, steps: Int64s, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Return the classes at these indices of each step's batch, and how many earlier batches of
        the phase have each: int64[steps, stop - start].
        """
        # The order of the classes starts where P last changed (`p_start`), which may be before the
        # phase. So count the batches since then, and subtract those before the phase.
        batch = steps - self._phase.p_start
        super_class, batch_of_super_class = self._super_class_order.elements_at(batch)
        classes, num_earlier = self._classes_of(super_class, batch_of_super_class, start, stop)
        return classes, num_earlier - self._counts_before_phase[classes]

    def _classes_of(
        self, super_class: Int64s, batch_index: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return the classes of batches of super-classes, and how many earlier batches have each
        class, int64[rows, stop - start].
        """
        # The classes are fair subsets of P classes, each class as its index in its super-class.
        classes = self._class_subsets.subsets(super_class, batch_index, start, stop)
        if self._super_classes is not None:
            # In this `ClassOrder`, super-classes take the place of classes, and classes that of
            # records. So its "record id" is the index of the class among all classes.
            classes = self._super_classes.record_ids(super_class[:, None], classes)
        # All classes of a super-class come once before any comes again. Of 3 classes, with P = 2:
        #     classes        0 2   1 0   1 2    in batch 0, 1 and 2
        #     position       0 1   2 3   4 5
        #     num_earlier    0 0   0 1   1 1    position // 3
        position = batch_index[:, None] * self._phase.p + np.arange(start, stop)
        num_earlier = position // self._num_classes[super_class][:, None]
        return classes, num_earlier

    def _count_batches(self, step: int) -> Integers:
        """Return in how many batches since P changed, and before a global step, each class is. Only
        batches of the incomplete traversal are drawn. The comments have 5 classes, P = 2, and the
        batches 3 0, 2 4, 1 2 and 0 3.
        """
        if step == self._phase.p_start:  # no batches, as for most samplers
            return np.zeros(len(self._classes), np.int8)
        p, num_classes = self._phase.p, self._num_classes
        num_batches = self._super_class_order.num_before(step - self._phase.p_start)  # [4]
        num_complete = num_batches * p // num_classes  # traversals: 4 * 2 // 5 = [1]
        # There may be millions of classes: so take the smallest type that has this number plus 1.
        small_int = np.min_scalar_type(-2 - int(num_complete.max()))
        counts = np.full(len(self._classes), num_complete[0], small_int)  # [1, 1, 1, 1, 1]
        if self._super_classes is not None:
            # In this `ClassOrder`, super-classes take the place of classes, and classes that of
            # records.
            counts[:] = num_complete[self._super_classes._class_of_records(len(counts))]
        first_batch = num_complete * num_classes // p  # of the incomplete one: 1 * 5 // 2 = [2]
        # The super-class and the index of each batch from there on: [0, 0] and [2, 3].
        super_class, offset = groups_and_indices(num_batches - first_batch)
        batch_index = first_batch[super_class] + offset
        for chunk in slices(len(batch_index), _CHUNK // p + 1):  # to bound memory
            # The classes [[1, 2], [0, 3]] and the counts [[0, 1], [1, 1]].
            classes, num_earlier = self._classes_of(super_class[chunk], batch_index[chunk], 0, p)
            # Class 1 is the end of the complete traversal, with which the first batch starts.
            is_incomplete = num_earlier == num_complete[super_class[chunk], None]
            counts[classes[is_incomplete]] += 1  # [2, 1, 2, 2, 1]
        return counts

    def records(self, classes: Int64s, subset_index: Int64s) -> Int64s:
        """Return the ids of K records of each class, int64[*classes.shape, K]: a fair subset, or in
        stored order the next K, cyclically.
        """
        order, k = self._classes, self._phase.k
        class_index, subset_index = classes.reshape(-1), subset_index.reshape(-1)
        if self._stored:
            class_size = np.asarray(order.sizes)[class_index]
            index_in_class = (subset_index[:, None] * k + np.arange(k)) % class_size[:, None]
        else:  # in random order
            index_in_class = self._record_subsets.subsets(class_index, subset_index)
        ids = order.record_ids(class_index[:, None], index_in_class)
        if self._members is not None:  # `ids` are groups of records
            # All groups of a class come once before any comes again.
            position = subset_index[:, None] * k + np.arange(k)
            num_earlier = position // np.asarray(order.sizes)[class_index][:, None]
            index = self._member_subsets.subsets(ids.reshape(-1), num_earlier.reshape(-1))
            ids = self._members.record_ids(ids.reshape(-1, 1), index)
        return ids.reshape(*classes.shape, -1)

    def distinct_records(self, classes: Int64s, subset_index: Int64s, labels: Array) -> Int64s:
        """Return the record ids of batches, int64[batches, P, K], no record twice in a batch.

        Of two classes of a batch (rows of the arrays, int64[batches, P]) that draw one record, the
        larger class takes its next record that is not in the batch. `labels` are for the error.
        """
        ids = self.records(classes, subset_index)
        # In sorted order, equal ids are neighbours.
        sorted_ids = np.sort(ids.reshape(len(ids), -1), axis=1)
        for i in np.flatnonzero((sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1)):
            # The rows of the batch, of which the smaller class keeps a record.
            rows = np.argsort(np.asarray(self._classes.sizes)[classes[i]], kind="stable")
            taken, first = np.unique(ids[i, rows], return_index=True)
            in_batch = set(taken.tolist())
            for number in np.delete(np.arange(ids[i].size), first):
                row, column = rows[number // self._phase.k], number % self._phase.k
                later = self._later_records(classes[i, row], subset_index[i, row])
                record = next((record for record in later if record not in in_batch), None)
                if record is None:
                    found = labels[classes[i]].tolist()
                    raise ValueError(
                        f"class {found[row]} has fewer than {self._phase.k} records that no other "
                        f"class of the batch takes, of the classes {found}: lower k"
                    )
                ids[i, row, column] = record
                in_batch.add(record)
        return ids

    def _later_records(self, class_index: int, subset_index: int) -> Iterator[int]:
        """Yield the records of a class in the subsets after this one: each record at least once."""
        # A class takes all of its n records, then all of them again: 2 n of them have each.
        num_subsets = -(-2 * int(self._classes.sizes[class_index]) // self._phase.k)
        for first in range(1, num_subsets + 1, _SUBSETS_AT_ONCE):
            subsets = subset_index + np.arange(first, first + _SUBSETS_AT_ONCE)
            yield from self.records(np.full_like(subsets, class_index), subsets).ravel().tolist()
