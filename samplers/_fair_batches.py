"""Fair P x K batches: fair subsets of P classes, and for each class fair subsets of K records."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

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
from twinfeed.samplers.types import Array, Bools, Int64s

_CHUNK = 1 << 18  # classes that are computed at once at the start of a phase
_LOOK_AHEAD = 8  # subsets of records of a class that are computed at once, to replace a record


class ClassExclusion(NamedTuple):
    """Records of some classes that are excluded from a training step on."""

    step: int
    classes: Int64s  # the classes that have some of the excluded records
    remaining: ClassOrder  # their other records: class `classes[i]` is class i of this class order


class FairBatches:
    """The batches of a `PKBatchSampler` without coverage, for any global steps.

    Each step belongs to one super-class, in a periodic interleave; without super-labels all classes
    are one super-class. The classes of a super-class come in fair subsets of P, one subset a step.
    The records of a class come in subsets of K: fair subsets, or with `stored` the next K records
    in stored order, cyclically. Each batch that contains a class takes the next subset of the
    class. In each *phase*, a range of steps with constant P and K, the subsets of a class have the
    indices 0, 1, 2 and so on.

    `class_labels` are the labels of the classes if a record may have several labels; else None. A
    class draws an excluded record until all of its records have come equally often, and then no
    more.
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
        exclusions: list[ClassExclusion],
    ) -> None:
        self.classes, self.super_classes, self._shape = classes, super_classes, shape
        self.stored, self._class_labels = stored, class_labels
        self.keys = {name: root_key(seed, f"pk {name}") for name in ("super", "class", "record")}
        self.exclusions = exclusions
        self._cache: FifoCache[_PhaseSchedule] = FifoCache(2)
        self._schedule(shape.phases[0])  # computed here, so that the first batch comes at once

    def _schedule(self, phase: Phase) -> _PhaseSchedule:
        return self._cache.get(phase, lambda: _PhaseSchedule(phase, self))

    def ids(self, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of consecutive global steps, concatenated.

        A batch of P classes with K record ids each is divided into `world_size` equal slices. P and
        K may change at some steps: a *phase* is a range of steps with constant P and K.
        """
        parts = self._shape.split_by_phase(steps)  # pairs (phase, its steps)
        return np.concatenate([self._ids_in_phase(*part, rank, world_size) for part in parts])

    def _ids_in_phase(self, phase: Phase, steps: Int64s, rank: int, world_size: int) -> Int64s:
        """Return one rank's slices of the batches of these global steps, concatenated.

        All steps have the same P and K: a batch has P classes, and K record ids of each class. A
        rank gets the ids of `P / world_size` of the classes. If K is random in each step, the
        largest K (`phase.k`) records are drawn, and the first K of them are returned. In the
        comments, a rank has one class in two steps, the largest K is 3, and K is 2 and 3.
        """
        start, stop = rank * phase.p // world_size, (rank + 1) * phase.p // world_size
        ids = self._ids_of_classes(phase, steps, start, stop)  # [[[10, 11, 12]], [[20, 21, 22]]]
        if self._shape.lowest_k is None:  # K is not random
            return ids.reshape(-1)
        random_k = self._shape.k_of_steps(phase, steps)  # [2, 3]
        is_taken = np.arange(phase.k) < random_k[:, None, None]  # [[[1, 1, 0]], [[1, 1, 1]]]
        return ids[np.broadcast_to(is_taken, ids.shape)]  # [10, 11, 20, 21, 22]

    def _ids_of_classes(self, phase: Phase, steps: Int64s, start: int, stop: int) -> Int64s:
        """Return K record ids of some classes of each batch, int64[steps, stop - start, K].

        A batch has P classes, of which those at the indices `start` to `stop - 1` are returned. All
        batches are of a phase, in which P and K are constant.

        With `by_class`, the class index takes the place of each record id. With `_class_labels`, a
        record may be of several classes, and two classes of a batch may draw it. So whole batches
        are drawn then, and duplicates replaced.
        """
        schedule = self._schedule(phase)
        if self.by_class or self._class_labels is None:
            # How many earlier batches have a class is the number of the subset that it takes now.
            classes, subset_index = schedule.classes_at(steps, start, stop)
            if self.by_class:
                return np.broadcast_to(classes[:, :, None], (*classes.shape, phase.k))
            return schedule.records(classes, subset_index)
        classes, subset_index = schedule.classes_at(steps, 0, phase.p)
        ids = schedule.distinct_records(classes, subset_index, self._class_labels)
        return ids[:, start:stop]


class _BatchCounts(NamedTuple):
    """In how many batches each class is.

    The batches of a super-class (a group of classes) have all its classes once (a *traversal*),
    then all again, and so on. So a class is in one batch for each complete traversal of its
    super-class, and in one more if it came in the incomplete traversal already.
    """

    num_traversals: Int64s  # of each super-class
    came_once_more: Bools  # of each class, a byte: there may be millions of classes

    def of(self, classes: Int64s, super_class: Int64s) -> Int64s:
        """Return in how many batches each of `classes` is; `super_class` is that of each class."""
        return self.num_traversals[super_class] + self.came_once_more[classes]


class _Exclusion(NamedTuple):
    """Classes that draw only their remaining records, each from one of its subsets on."""

    classes: Int64s  # sorted
    first_subset: Int64s  # of each class, the index of its first subset of remaining records
    remaining: ClassOrder  # class i are the remaining records of `classes[i]`
    subsets: FairSubsets  # random subsets of these

    def find(self, classes: Int64s, subset_index: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Find which of some subsets are to have only records that are not excluded.

        Subset i is subset `subset_index[i]` of class `classes[i]`. A class draws one subset of K
        records after the other, from its subset `first_subset` on of its remaining records. If
        class 7 does so from subset 3 on, then of the subsets 2 4 5 of the classes 7 2 7, only the
        last is found.

        Returns:
            The indices i of the subsets that are found, [2]; the index of the class of each in
            `self.classes`, [0]; and its number since `first_subset`, [2].
        """
        # If a class is not in `self.classes`, this is the index of another one.
        index = np.searchsorted(self.classes, classes).clip(max=len(self.classes) - 1)
        index_since = subset_index - self.first_subset[index]
        found = np.flatnonzero((self.classes[index] == classes) & (index_since >= 0))
        return found, index[found], index_since[found]


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
        # Super-classes take turns in proportion to their classes: 4 and 6 classes as 2 and 3.
        weights = self._num_classes // np.gcd.reduce(self._num_classes)
        self._super_class_order = Interleave(weights, derive(keys["super"], phase.p_start))
        class_key = derive(keys["class"], phase.p_start)
        self._class_subsets = FairSubsets(self._num_classes, phase.p, class_key)
        self._record_key = derive(keys["record"], phase.start)
        self._stored = batches.stored
        self._record_subsets = FairSubsets(class_sizes, phase.k, self._record_key)
        # After the exclusions so far, each class draws from this number of records, from the subset
        # with this index on. If nothing is excluded, the sizes are not copied: they may be mapped
        # from a file.
        self._sizes, self._first_subset = class_sizes, np.zeros(0, np.int64)
        self._exclusions: list[_Exclusion] = []
        # In how many batches each class is, from the last change of P to the start of the phase.
        self._counts_before_phase = self._count_batches(phase.start - phase.p_start)
        for exclusion in batches.exclusions:
            self._exclude(exclusion)

    def _exclude(self, exclusion: ClassExclusion) -> None:
        """Draw only the remaining records of some classes from a training step on.

        A class draws one subset of K records for each batch that has the class. So that all of its
        records are drawn equally often, it changes only when it has drawn all of them the same
        number of times. Until then it draws excluded records, too.
        """
        if not self._exclusions:  # before the first exclusion these arrays must not be changed
            self._sizes, self._first_subset = self._sizes.copy(), np.zeros_like(self._sizes)
        classes, remaining, k = exclusion.classes, exclusion.remaining, self._phase.k
        num_batches = self._num_batches_with(classes, max(self._phase.start, exclusion.step))
        # Count from the last exclusion of each class on, or from 0.
        first_subset = self._first_subset[classes]
        num_subsets = (num_batches - first_subset).clip(min=0)
        first_subset = first_subset + _num_complete_subsets(num_subsets, self._sizes[classes], k)
        self._sizes[classes], self._first_subset[classes] = remaining.sizes, first_subset
        subsets = FairSubsets(remaining.sizes, k, derive(self._record_key, exclusion.step))
        self._exclusions.append(_Exclusion(classes, first_subset, remaining, subsets))

    def classes_at(self, steps: Int64s, start: int, stop: int) -> tuple[Int64s, Int64s]:
        """Return the classes of each step's batch, and how many earlier batches have each class.

        If the batches of the phase have the classes 0 2, 1 0 and 1 2, the counts are 0 0, 0 1 and
        1 1. A phase is a range of steps in which P and K are constant.

        A batch has P classes, all of one super-class (a group of classes). Only the classes at the
        indices `start` to `stop - 1` are returned, those of one rank. Both arrays are int64[steps,
        stop - start].
        """
        # The order of the classes starts where P last changed (`p_start`), which may be before the
        # phase. So count the batches since then, and subtract those before the phase.
        batch = steps - self._phase.p_start
        super_class, batch_of_super_class = self._super_class_order.elements_at(batch)
        classes, num_earlier = self._classes_of(super_class, batch_of_super_class, start, stop)
        num_before_phase = self._counts_before_phase.of(classes, super_class[:, None])
        return classes, num_earlier - num_before_phase

    def _classes_of(
        self, super_class: Int64s, batch_index: Int64s, start: int, stop: int
    ) -> tuple[Int64s, Int64s]:
        """Return the classes of batches, and how many earlier batches have each class.

        A super-class is a group of classes, and the P classes of a batch are of one super-class.
        Row i of both arrays, int64[rows, stop - start], is for batch `batch_index[i]` of
        super-class `super_class[i]`. It has only the classes at the indices `start` to `stop - 1`
        of the batch.
        """
        # Each class as its index within its super-class, from 0 on.
        classes = self._class_subsets.subsets(super_class, batch_index, start, stop)
        if self._super_classes is not None:
            # `_super_classes` is a `ClassOrder` of classes instead of records, in super-classes:
            # so `record_ids` returns class indices.
            classes = self._super_classes.record_ids(super_class[:, None], classes)
        # All classes of a super-class come once before any comes again. Of 3 classes, with P = 2:
        #     classes        0 2   1 0   1 2    in batch 0, 1 and 2
        #     position       0 1   2 3   4 5
        #     num_earlier    0 0   0 1   1 1    position // 3
        position = batch_index[:, None] * self._phase.p + np.arange(start, stop)
        num_earlier = position // self._num_classes[super_class][:, None]
        return classes, num_earlier

    def _num_batches_with(self, classes: Int64s, step: int) -> Int64s:
        """Return how many batches of the phase before a step have each of these classes.

        A phase is a range of steps in which P and K are constant. `_count_batches` counts from the
        last change of P on, which may be before the phase: so subtract the batches before it.
        """
        super_class = np.zeros_like(classes)  # of each class
        if self._super_classes is not None:
            # A `ClassOrder` of classes instead of records, in super-classes: so
            # `_class_of_records` returns the super-class of each class.
            super_class = self._super_classes._class_of_records(len(self._classes))[classes]
        counts_before_step = self._count_batches(step - self._phase.p_start)
        num_before_step = counts_before_step.of(classes, super_class)
        return num_before_step - self._counts_before_phase.of(classes, super_class)

    def _count_batches(self, num_batches: int) -> _BatchCounts:
        """Return in how many of the first `num_batches` batches each class is.

        Batches are counted from the last change of P on. The P classes of a batch are of one
        super-class (a group of classes). The batches of a super-class have all of its classes once
        (a *traversal*), then all of them again, and so on. So a class is in one batch for each
        complete traversal, and in one more if it is in the incomplete traversal at the end. Only
        the batches of the incomplete one are drawn.

        The comments have the values for one super-class of 5 classes, P = 2, and 4 batches: 3 0,
        2 4, 1 2 and 0 3. The incomplete traversal is 2 0 3, and starts within batch 2.
        """
        p, num_classes = self._phase.p, self._num_classes
        num_batches_of = self._super_class_order.num_before(num_batches)  # each super-class: [4]
        num_complete = num_batches_of * p // num_classes  # traversals: 4 * 2 // 5 = [1]
        first_batch = num_complete * num_classes // p  # of the incomplete one: 1 * 5 // 2 = [2]
        # The super-class and the index of each batch from there on: [0, 0] and [2, 3].
        super_class, offset = groups_and_indices(num_batches_of - first_batch)
        batch_index = first_batch[super_class] + offset
        is_in_incomplete = self._in_traversal(num_complete, super_class, batch_index)
        return _BatchCounts(num_complete, is_in_incomplete)

    def _in_traversal(self, traversal: Int64s, super_class: Int64s, batch_index: Int64s) -> Bools:
        """Return whether each class is in some batches, as a part of a certain traversal.

        A super-class is a group of classes. Its batches have all of its classes once (traversal 0),
        then all of them again (traversal 1), and so on, so a batch may have classes of two
        traversals. Batch i is batch `batch_index[i]` of super-class `super_class[i]`, and
        `traversal` has the number of the traversal for each super-class.
        """
        is_in = np.zeros(len(self._classes), np.bool_)
        for chunk in slices(len(batch_index), _CHUNK // self._phase.p + 1):  # to bound memory
            number = super_class[chunk]
            classes, num_earlier = self._classes_of(number, batch_index[chunk], 0, self._phase.p)
            # A class in traversal 2 is in two earlier batches, one of each traversal before.
            is_in[classes[num_earlier == traversal[number][:, None]]] = True
        return is_in

    def records(self, classes: Int64s, subset_index: Int64s) -> Int64s:
        """Return the ids of K records of each class, int64[*classes.shape, K].

        The records of a class are divided into subsets of K, one for each batch that has the class.
        Return subset `subset_index[i]` of class `classes[i]`, for arrays of any shape.

        A user may exclude some records from a training step on. Then the later subsets of a class
        have only its remaining records, and are counted from 0 again.
        """
        class_index, subset_index = classes.reshape(-1), subset_index.reshape(-1)
        # First draw as if nothing were excluded.
        ids = self._subset(self._classes, self._record_subsets, class_index, subset_index)
        for exclusion in self._exclusions:
            # The rows of `ids` to replace, and the class and subset of each in the remaining
            # records.
            rows, i, index = exclusion.find(class_index, subset_index)
            ids[rows] = self._subset(exclusion.remaining, exclusion.subsets, i, index)
        return ids.reshape(*classes.shape, -1)

    def _subset(
        self, order: ClassOrder, subsets: FairSubsets, class_index: Int64s, subset_index: Int64s
    ) -> Int64s:
        """Return the ids of K records of each class, int64[n, K].

        Row i is subset `subset_index[i]`, of K records, of class `class_index[i]` of `order` (the
        records sorted by class). In stored order, each subset has the next K records of the class,
        cyclically: of 5 records and K = 2, subset 2 has the records 4 and 0. Otherwise the subsets
        are random, those of `subsets`.
        """
        k = self._phase.k
        if self._stored:
            class_size = np.asarray(order.sizes)[class_index]
            index_in_class = (subset_index[:, None] * k + np.arange(k)) % class_size[:, None]
        else:  # in random order
            index_in_class = subsets.subsets(class_index, subset_index)
        return order.record_ids(class_index[:, None], index_in_class)

    def distinct_records(self, classes: Int64s, subset_index: Int64s, labels: Array) -> Int64s:
        """Return the record ids of batches, int64[batches, P, K], no record twice in a batch.

        A record may be of several classes, and two classes of a batch may draw it. Then the smaller
        class keeps it, and the larger class takes its next record that is not in the batch.

        `classes` and `subset_index` are int64[batches, P]: class `classes[i, j]` takes its subset
        number `subset_index[i, j]`, of K records. `labels` are those of the classes, for the error
        message. The comments have the values of one batch of the classes 3 and 5, which have 40 and
        20 records, and K = 2.
        """
        ids = self.records(classes, subset_index)  # [[[8, 6], [7, 6]]]: record 6 is there twice
        # In sorted order, equal ids are neighbours.
        sorted_ids = np.sort(ids.reshape(len(ids), -1), axis=1)  # [[6, 6, 7, 8]]
        has_duplicates = (sorted_ids[:, 1:] == sorted_ids[:, :-1]).any(axis=1)  # [True]
        for batch in np.flatnonzero(has_duplicates):
            # A row of the batch has the records of a class: row 1, of the smaller class, keeps 6.
            sizes = np.asarray(self._classes.sizes)[classes[batch]]  # [40, 20]
            rows_by_size = np.argsort(sizes, kind="stable")  # [1, 0]
            # `candidates(row)` yields the next records of the row's class: for row 0 say 7, 9, ...
            candidates = partial(self._later_records, classes[batch], subset_index[batch])
            # Changes `ids[batch]` to [[8, 9], [7, 6]]. A row without a replacement is returned.
            failed_row = replace_duplicates(ids[batch], rows_by_size, candidates)
            if failed_row is not None:
                batch_labels = labels[classes[batch]].tolist()
                raise ValueError(
                    f"class {batch_labels[failed_row]} has fewer than {self._phase.k} records that "
                    f"no other class of the batch takes, of the classes {batch_labels}: lower k"
                )
        return ids

    def _later_records(self, classes: Int64s, subset_index: Int64s, row: int) -> Iterator[int]:
        """Yield the next records of a class of a batch, which may replace a duplicate record.

        Each batch that has a class takes the next subset of K of its records. In this batch, class
        `classes[row]` takes subset `subset_index[row]`. Yield the records of the subsets after it,
        until each record of the class has come at least once.

        A class takes all of its n records once, then all of them again, and so on. So any 2 n
        consecutive records include all of them. The comments have the values for a class of 20
        records, K = 2, and subset 5 in this batch.
        """
        # The number of subsets with 2 n records, rounded up: 40 / 2 = 20.
        num_subsets = -(-2 * int(self._classes.sizes[classes[row]]) // self._phase.k)
        same_class = np.full(_LOOK_AHEAD, classes[row])
        # Draw `_LOOK_AHEAD` = 8 subsets at once: 6 to 13, then 14 to 21, then 22 to 29.
        for first in range(1, num_subsets + 1, _LOOK_AHEAD):
            later_subsets = subset_index[row] + np.arange(first, first + _LOOK_AHEAD)
            yield from self.records(same_class, later_subsets).reshape(-1).tolist()


def _num_complete_subsets(num_subsets: Int64s, size: Int64s, k: int) -> Int64s:
    """Return how many subsets of k records a class draws until it may change its records.

    A class of `size` records has drawn `num_subsets` subsets of k: all of its records once (a
    *traversal*), then all of them again, and so on. It completes the traversal, except that a
    subset with records of two traversals belongs to the next. The comments have the values of 5
    records, k = 2 and 7 subsets::

        subset       0    1    2    3    4    5    6    | 7
        traversal    0 0  0 0  0 1  1 1  1 1  2 2  2 2  | 2 3
    """
    num_drawn = num_subsets * k  # 14
    traversal_stop = -(-num_drawn // size) * size  # rounded up to a multiple of 5: 15
    return traversal_stop // k  # 7
