"""P x K batches, P classes of K records each, for metric learning."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers._coverage import CoverageBatches
from twinfeed.samplers._fair_batches import FairBatches
from twinfeed.samplers.batch_stream import BatchStream
from twinfeed.samplers.class_order import ClassOrder, super_class_order
from twinfeed.samplers.distinct_groups import by_group, group_numbers, may_replace
from twinfeed.samplers.drawing.batch_shape import BatchShape, PerStep
from twinfeed.samplers.label_arrays import labels_of
from twinfeed.samplers.label_lists import class_order_of_lists, label_lists
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Array, Bools, Int64s, Integers

# The name of the parameter that states compare with small="drop": the largest k of all steps
# decides which classes are kept.
_KEPT = "classes that small='drop' keeps (min_class_size fixes them for any k)"


class PKBatchSampler(BatchStream):
    """Batches of P distinct classes and K records of each, every class and record equally often.

    A batch holds P blocks of K records of one class. After any step the counts of the classes
    differ by at most 1, and so do the counts of the records of a class. No record comes twice in a
    batch while its class has K records. Ranks take whole classes: world_size must divide P.

    Args:
        labels: the label of each record (int or str), an index or a source that has them, or a
            `ClassOrder`. Or a list of labels for each record: a record comes once in a batch, for
            one of its classes. If two classes of a batch draw the same record, the larger class
            takes its next free record. The counts of records may then differ by more than 1. Other
            batches do not change. A batch in which a class has no free record is an error when it
            is drawn.
        p: classes of a batch: a number, or a schedule by training step (`epoch * len + step`). A
            change of p restarts the rotation of classes and of records.
        k: records of each class: a number, or a schedule such as `k={0: 2, 1000: 3}`. A change of k
            restarts the rotation of records. Counts are fair between two changes. Over many
            changes, the counts of records drift apart. `k=(2, 5)` draws a random K for each batch:
            then the counts of records are not fair.
        seed: the only source of chance.
        batches_per_epoch: by default `max(1, records // (P * K))`. It must be given with schedules.
            `ceil(classes / P)` visits every class in any two epochs in a row, and in every epoch if
            P divides the number of classes (with one P throughout, and no super-classes).
        small: what to do with classes of fewer than K records. `"raise"` refuses the classes,
            `"repeat"` gives all their records and then again, `"drop"` leaves the classes out.
        min_class_size: classes of fewer records are left out before `small` is applied.
        coverage: `"once"` makes epochs in which no record comes twice, in as many batches as chunks
            of K records can fill. The records that are left out rotate over epochs. `"all"` makes
            epochs with every record at least once, in the fewest batches. The last chunk of a class
            is filled up from the class. Both set the number of batches, and do not keep the counts
            of classes fair.
        super_labels: the super-class of each record. The P classes of a batch are of one
            super-class. Super-classes take turns in proportion to their classes, and classes are
            fair within each.
        order_within: `"stored"` takes the records of a class in stored order, cyclically, for
            sources that are read from front to back.
        records: ids of the records to draw from (int64, in any order), such as one part of `split`,
            or a mask (bool[N]), such as `labels >= 0`. Labels are given for all records. The other
            records are never drawn.
        apart: a group for each record (integers or strings; -1, None or "" is no group), such as
            its session or camera: the K records of a class are of K groups. The groups of a class
            are then used equally often, and the records of a group are. Groups are counted in place
            of records by `small`, where `"repeat"` repeats groups, and by `min_class_size`.

    Raises:
        ValueError: too few classes or records, with the numbers, or options that contradict each
            other.

    Classes a (records 0 1), b (2 3 4) and c (5 6), P=2, K=2. Each class comes twice in three
    steps, and record 4 comes again once 3 was used::

        step      0            1            2
        classes   a    b       c    a       c    b
        global    1 0  2 4     5 6  0 1     5 6  3 4
        rank 0    1 0          5 6          5 6
        rank 1         2 4          0 1          3 4

    >>> stream = PKBatchSampler(list("aabbbcc"), p=2, k=2, seed=0, batches_per_epoch=3)
    >>> list(stream)
    [[1, 0, 2, 4], [5, 6, 0, 1], [5, 6, 3, 4]]
    >>> stream.shard(1, 2).batch(0, 1).tolist()
    [0, 1]
    >>> PKBatchSampler(list("aabbbcc"), p=2, k=2, seed=0, records=[0, 1, 3, 4])
    PKBatchSampler(4 of 7 records, 2 classes, 1 batch of p=2 x k=2, 4 ids)

    Two sessions of each class, and never two records of one:

    >>> list(PKBatchSampler(list("aaabbb"), p=2, k=2, seed=0, apart=[0, 0, 1, 0, 1, 1]))
    [[3, 5, 0, 2]]
    """

    _source: FairBatches | CoverageBatches
    _members: ClassOrder | None = None  # the records of each group of a class; None without groups

    @validate.show_call("PKBatchSampler(labels, p=8, k=4, seed=0)")
    def __init__(
        self,
        labels: ArrayLike | ClassOrder | Sequence[Sequence[Any]] | Sized,
        *,
        p: PerStep,
        k: PerStep | tuple[SupportsIndex, SupportsIndex],
        seed: SupportsIndex,
        batches_per_epoch: SupportsIndex | None = None,
        small: Literal["raise", "repeat", "drop"] = "raise",
        min_class_size: SupportsIndex = 1,
        coverage: Literal["once", "all"] | None = None,
        super_labels: ArrayLike | None = None,
        order_within: Literal["random", "stored"] = "random",
        records: ArrayLike | None = None,
        apart: ArrayLike | None = None,
    ) -> None:
        self._small = validate.choice("small", small, ("raise", "repeat", "drop"))
        self._min_size = validate.integer("min_class_size", min_class_size, minimum=1)
        seed = validate.seed(seed)
        shape = self._shape = BatchShape(p, k, seed)
        self._coverage = coverage
        self._within = validate.choice("order_within", order_within, ("random", "stored"))
        order, class_labels = self._sort_records(labels_of(labels), records)
        order, groups = self._group_records(order, apart, super_labels)
        self._classes = classes = order._largest(self._num_kept(order))
        super_classes = super_class_order(order, super_labels, self.num_records, len(classes))
        self.parameters = {
            "labels": order.digest,
            "super_labels": None if super_classes is None else super_classes.digest,
            **shape.parameters,
            "small": small,
            **({_KEPT: len(classes)} if small == "drop" else {"min_class_size": self._min_size}),
            "coverage": coverage,
            "order_within": order_within,
            "records": self._record_ids,
            **groups,
        }
        self._check_p(int(super_classes.sizes[-1]) if super_classes else len(classes))
        if coverage is None:
            options = order_within == "stored", class_labels, self._members
            self._source = FairBatches(classes, super_classes, shape, seed, *options)
            steps = self._num_batches(batches_per_epoch)
        else:
            self._check_coverage(batches_per_epoch)
            self._source = CoverageBatches(classes, shape, coverage == "once", seed)
            steps = self._source.steps
        self.size_divisor, largest = shape.size_divisor, shape.largest_batch
        super().__init__(num_steps=steps, size=steps * largest, batch_size=largest, seed=seed)

    @classmethod
    def of_classes(
        cls,
        classes: SupportsIndex,
        /,
        *,
        p: PerStep,
        k: PerStep | tuple[SupportsIndex, SupportsIndex],
        seed: SupportsIndex,
        batches_per_epoch: SupportsIndex | None = None,
        super_labels: ArrayLike | None = None,
    ) -> PKBatchSampler:
        """Draw only classes, for data sets of which only the next record can be read.

        The ids are class indices, in `[0, classes)`, each K times in a row. This is what
        `twinfeed.loaders.Selector` and `twinfeed.loaders.tensorflow.choose` need. There is no
        option about records.

        Args:
            classes: the number of classes.
            p: as in the class.
            k: as in the class.
            seed: as in the class.
            batches_per_epoch: by default `ceil(classes / P)`, which visits every class in any two
                epochs in a row. It must be given if P changes.
            super_labels: the super-class of each class.

        >>> stream = PKBatchSampler.of_classes(5, p=2, k={0: 2, 2: 3}, seed=0)
        >>> list(stream)
        [[1, 1, 0, 0], [4, 4, 3, 3], [2, 2, 2, 1, 1, 1]]
        """
        classes = validate.integer("classes", classes, minimum=1)
        if batches_per_epoch is None and not isinstance(p, Mapping):
            batches_per_epoch = -(-classes // validate.integer("p", p, minimum=1))
        return cls(
            np.arange(classes),
            p=p,
            k=k,
            seed=seed,
            batches_per_epoch=batches_per_epoch,
            small="repeat",
            super_labels=super_labels,
        )

    def _sort_records(
        self, labels: Any, records: ArrayLike | None
    ) -> tuple[ClassOrder, Array | None]:
        """Return the records to draw from, sorted by class; and the labels of classes for lists of
        labels.
        """
        counts_and_labels = label_lists(labels)  # None if each record has one label
        self._several_labels = counts_and_labels is not None
        if counts_and_labels is None:
            order = labels if isinstance(labels, ClassOrder) else ClassOrder(labels)
            self._set_records(len(order.records), records)
            return (order if self._record_ids is None else order._subset(self._record_ids)), None
        # If record 0 has the labels a and b, and record 1 has the label a: [2, 1] and [a, b, a].
        num_labels, all_labels = counts_and_labels
        self._set_records(len(num_labels), records)
        return class_order_of_lists(num_labels, all_labels, self._record_ids)

    def _set_records(self, num_records: int, records: ArrayLike | None) -> None:
        """Set the number of records, and the sorted ids of those to draw from (None for all)."""
        self.num_records, self._record_ids = num_records, None
        if records is not None:
            self._record_ids = validate.sorted_record_ids(records, num_records)

    def _group_records(
        self, order: ClassOrder, apart: ArrayLike | None, super_labels: ArrayLike | None
    ) -> tuple[ClassOrder, dict[str, Integers]]:
        """Return the groups of each class in place of its records, and the parameter of groups."""
        if apart is None:
            return order, {}
        rules = {
            "coverage must not be given": self._coverage is None,
            "super_labels must not be given": super_labels is None,
            "order_within must be 'random'": self._within == "random",
            "labels must be one for each record": not self._several_labels,
        }
        _check_rules(rules, "apart")
        groups = group_numbers(apart, self.num_records)
        order, self._members = by_group(order, groups)
        return order, {"apart": groups}

    def _num_kept(self, order: ClassOrder) -> int:
        """Return the number of classes to draw from, the largest ones, as `small` decides."""
        # Two classes of a batch may have the same record, but a batch has no record twice. So a
        # class of fewer than K records cannot repeat its records.
        if self._several_labels and self._small == "repeat":
            raise ValueError("small must be 'raise' or 'drop' with lists of labels, got 'repeat'")
        k = self._shape.largest_k
        num_kept = order.num_at_least(self._min_size)  # classes of at least this size
        num_large = order.num_at_least(k)  # classes that have K records
        if num_kept <= num_large or self._small == "repeat":
            return num_kept
        if self._small == "drop":
            return num_large
        units = "records" if self._members is None else "groups of records"
        raise ValueError(
            f"{num_kept - num_large} of {num_kept} classes have fewer than k={k} {units} (the "
            f"smallest has {order.sizes[num_kept - 1]}): pass small='repeat' to use their records "
            f"again, small='drop' or min_class_size={k} to leave them out"
        )

    def _check_p(self, num_classes: int) -> None:
        """Raise ValueError if a batch needs more classes (P) than the smallest super-class has."""
        p = self._shape.largest_p  # P may change from step to step
        if num_classes < p:
            where = "every super-class" if self.parameters["super_labels"] else "the data"
            raise ValueError(
                f"p must be at most the number of classes in {where}, {num_classes} of those kept "
                f"(min_class_size={self._min_size}, small={self._small!r}), got {p}"
            )

    def _check_coverage(self, batches_per_epoch: SupportsIndex | None) -> None:
        """Raise ValueError for an option that cannot be used together with `coverage`."""
        coverage = validate.choice("coverage", self._coverage, ("once", "all"))
        rules = {
            "p and k must be plain integers": self._shape.fixed,
            "batches_per_epoch must not be given": batches_per_epoch is None,
            "super_labels must not be given": self.parameters["super_labels"] is None,
            "order_within must be 'random'": self._within == "random",
            "labels must be one for each record": not self._several_labels,
        }
        if coverage == "once":
            rules["small must be 'raise' or 'drop'"] = self._small != "repeat"
        _check_rules(rules, f"coverage={coverage!r}")

    def _num_batches(self, batches_per_epoch: SupportsIndex | None) -> int:
        """Return `batches_per_epoch`, or by default the number of batches that the records fill."""
        if batches_per_epoch is not None:
            return validate.integer("batches_per_epoch", batches_per_epoch, minimum=1)
        if not self._shape.fixed:
            raise ValueError("batches_per_epoch must be given when p or k changes, got None")
        sizes = self._classes.sizes
        if self._members is not None:  # those of the groups of these classes
            sizes = self._members.sizes[self._classes.class_record_pairs()[1]]
        return max(1, int(sizes.sum()) // self._shape.largest_batch)

    def _describe(self) -> str:
        shape = self._shape
        most = "" if shape.fixed else "at most "
        option = f", coverage={self._coverage!r}" if self._coverage else ""
        option = option if self._members is None else ", groups apart"
        subset = "" if self._record_ids is None else f"{len(self._record_ids):,} of "
        counted = validate.counted
        return (
            f"PKBatchSampler({subset}{counted(self.num_records, 'record')}, "
            f"{counted(self.num_classes, 'class')}, {counted(len(self), 'batch')} of "
            f"p={shape.p_text} x k={shape.k_text}, "
            f"{most}{counted(self._largest_batch, 'id')}{option})"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes that batches are drawn from."""
        return len(self._classes)

    @property
    def traits(self) -> SamplerTraits:  # type: ignore[override]
        """Properties of the samples, on which loaders rely."""
        draws_subset = self._record_ids is not None or self._min_size > 1 or self._small == "drop"
        # Loaders may take the sample ids of a sampler with `num_groups` as numbers of groups, such
        # as classes. This is right if each class has one record: class i then has record i.
        ids_are_classes = self.num_classes == self.num_records and not self._several_labels
        return SamplerTraits(
            repeats=self._small == "repeat" or self._replacements is not None,
            record_ids=self._record_ids,
            num_groups=self.num_classes if ids_are_classes else None,
            needs_records=draws_subset
            or self._coverage is not None
            or self._members is not None
            or self._replacements is not None
            or self._several_labels
            or self.world_size > 1,  # each rank draws other records of a class
        )

    def _classes_of(self, ids: Int64s) -> list[set[int]]:
        """Return the classes, of those that batches are drawn from, of each record."""
        class_index, members = self._classes.class_record_pairs()
        if self._members is not None:  # the members of a class are groups of records
            group, members = self._members.class_record_pairs()
            class_index = self._classes._class_of_records(len(self._members))[group]
        classes: dict[int, set[int]] = {record: set() for record in ids.tolist()}
        for at in np.flatnonzero(np.isin(members, ids) & (class_index >= 0)):
            classes[int(members[at])].add(int(class_index[at]))
        return [classes[record] for record in ids.tolist()]

    def _are_drawn(self, ids: Int64s) -> Bools:
        return np.array([*map(bool, self._classes_of(ids))], bool)

    def _are_alike(self, bad: Int64s, good: Int64s) -> Bools:
        """Return whether each good record has all classes of the bad one, and its group or none."""
        classes = self._classes_of(np.concatenate([bad, good]))
        pairs = zip(classes[: len(bad)], classes[len(bad) :], strict=True)
        is_alike = np.array([first <= second for first, second in pairs], bool)
        groups = self.parameters.get("apart")
        return is_alike if groups is None else is_alike & may_replace(groups, bad, good)

    @property
    def group_sampler(self) -> PKBatchSampler:
        sampler = copy.copy(self)
        sampler.num_records, sampler._replacements = self.num_classes, None
        sampler._source = copy.copy(self._source)  # so that this sampler itself is not changed
        sampler._source.by_class = True  # return class indices in place of record ids
        return sampler

    def _check_world(self, world_size: int) -> None:
        """Raise ValueError unless world_size divides every P, as a rank gets whole classes."""
        for p in sorted({phase.p for phase in self._shape.phases}):
            if p % world_size:
                raise ValueError(f"world_size must divide p, got world_size={world_size}, p={p}")

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64s:
        return self._shape.sizes(epoch * self._steps + np.arange(start, stop))

    def _draw(self, epoch: int, start: int, lows: Int64s, highs: Int64s) -> Int64s:
        steps = epoch * self._steps + start + np.arange(len(lows))
        return self._source.ids(steps, self.rank, self.world_size)


def _check_rules(rules: Mapping[str, bool], option: str) -> None:
    """Raise ValueError for the first rule of an option that is not met: {rule: whether it is}."""
    for rule, is_met in rules.items():
        if not is_met:
            raise ValueError(f"{rule} with {option}")
