"""P classes by K records: batches for metric learning."""

from __future__ import annotations

from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64
from twinfeed.samplers._coverage import CoverageDraw
from twinfeed.samplers._fair_draw import FairDraw
from twinfeed.samplers._schedule import PerStep, Schedule
from twinfeed.samplers._stream import BatchStream
from twinfeed.samplers.class_order import ClassOrder


class PKBatchSampler(BatchStream):
    """Draw P distinct classes and K records of each, every class and record equally often.

    A batch holds P blocks of K records of one class. After any step the counts of the classes
    differ by at most one, and so do the counts of the records of a class. No record comes twice in
    a batch while its class has K records. Ranks take whole classes: world_size must divide P.

    - `labels`: one a record (int or str), or a `ClassOrder`.
    - `p`, `k`: numbers, or schedules by training step (`epoch * len + step`) such as
      `k={0: 2, 1000: 3}`. A change of k restarts the walks over records. A change of p restarts the
      walks over classes too. Counts are fair between two changes. `k=(2, 5)` draws K anew for each
      batch. Then the counts of records are not fair.
    - `seed`: the only source of chance.
    - `batches_per_epoch`: by default `max(1, records // (P * K))`. It must be given with schedules.
      `ceil(classes / P)` meets every class in any two epochs in a row, and in every epoch where P
      divides the number of classes (with one P throughout, and no super-classes).
    - `small`: what to do with classes of fewer than K records. `"raise"` refuses the classes,
      `"repeat"` gives all their records and then again, `"drop"` leaves the classes out.
    - `min_class_size`: classes of fewer records are left out before `small` is applied.
    - `coverage`: `"once"` makes epochs in which no record comes twice, in as many batches as chunks
      of K records can fill. The records that are left out rotate over epochs. `"all"` makes epochs
      with every record at least once, in the fewest batches. The last chunk of a class is filled up
      from the class. Both set the number of batches, and do not keep the counts of classes fair.
    - `super_labels`: one a record. The P classes of a batch are of one super-class. Super-classes
      take turns in proportion to their classes, and classes are fair within each.
    - `order_within`: `"stored"` walks the records of a class in a circle in stored order, for
      sources that are read from front to back.
    - `records`: ids of the records to draw from (int64, in any order), such as one side of `split`.
      Labels are given for all records. The other records are never drawn.

    Raises ValueError, with the numbers, for what does not fit: too few classes or records, options
    that contradict each other.

    Classes a (records 0 1), b (2 3 4) and c (5 6), P=2, K=2. Each class comes twice in three
    steps, and record 4 comes again once 2 was used::

        step      0            1            2
        classes   b    a       c    b       c    a
        global    3 4  0 1     5 6  2 4     5 6  1 0
        rank 0    3 4          5 6          5 6
        rank 1         0 1          2 4          1 0

    >>> stream = PKBatchSampler(list("aabbbcc"), p=2, k=2, seed=0, batches_per_epoch=3)
    >>> [ids.tolist() for ids in stream]
    [[3, 4, 0, 1], [5, 6, 2, 4], [5, 6, 1, 0]]
    >>> stream.shard(1, 2).batch(0, 1).tolist()
    [2, 4]
    >>> PKBatchSampler(list("aabbbcc"), p=2, k=2, seed=0, records=[0, 1, 3, 4])
    PKBatchSampler(4 of 7 records, 2 classes, 1 batch of p=2 x k=2, 4 ids)
    """

    _draws: FairDraw | CoverageDraw

    def __init__(
        self,
        labels: ArrayLike | ClassOrder,
        /,
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
    ) -> None:
        self._small = _validate.choice("small", small, ("raise", "repeat", "drop"))
        self._min_size = _validate.integer("min_class_size", min_class_size, minimum=1)
        seed = _validate.seed(seed)
        schedule = self._schedule = Schedule(p, k, seed)
        self.repeats, self._even = small == "repeat", schedule.fixed
        self._coverage = coverage
        self._within = _validate.choice("order_within", order_within, ("random", "stored"))
        order = labels if isinstance(labels, ClassOrder) else ClassOrder(labels)
        self.num_records, chosen = len(order.records), None
        if records is not None:
            chosen = _validate.records(records, self.num_records)
            order = order._some(chosen)
        self._drawn = len(order.records)
        parents = order._supers(super_labels, self.num_records)
        kept = self._kept_classes(order.sizes)
        self._classes, supers = order._classes(kept), ClassOrder(parents[kept])
        self._parameters = {
            "labels": order.digest,
            "super_labels": None if super_labels is None else supers.digest,
            "p": schedule.p_text,
            "k": schedule.k_text,
            "small": small,
            "min_class_size": self._min_size,
            "coverage": coverage,
            "order_within": order_within,
            "records": chosen,
        }
        self._check_enough(supers.sizes)
        if coverage is None:
            self._draws = FairDraw(self._classes, supers, schedule, seed, order_within == "stored")
            steps = self._batches_per_epoch(batches_per_epoch)
        else:
            self._check_coverage(batches_per_epoch)
            self._draws = CoverageDraw(self._classes, schedule, once=coverage == "once", seed=seed)
            steps = self._draws.steps
        largest = schedule.largest_batch
        super().__init__(steps=steps, size=steps * largest, batch_size=largest, seed=seed)

    def _kept_classes(self, sizes: Int64) -> NDArray[np.bool_]:
        """Apply the rules for small classes."""
        k = self._schedule.largest_k
        kept, short = sizes >= self._min_size, sizes < k
        if self._small == "drop":
            return kept & ~short
        if self._small == "raise" and (kept & short).any():
            once = self._coverage == "once"
            repeat = "" if once else "small='repeat' to use their records again, "
            raise ValueError(
                f"{int((kept & short).sum())} of {int(kept.sum())} classes have fewer than k={k} "
                f"records (the smallest has {int(sizes[kept].min())}): pass {repeat}"
                f"small='drop' or min_class_size={k} to leave them out"
            )
        return kept

    def _check_enough(self, super_sizes: Int64) -> None:
        p, fewest = self._schedule.largest_p, int(super_sizes.min(initial=len(self._classes)))
        if fewest < p:
            where = "every super-class" if self._parameters["super_labels"] else "the data"
            raise ValueError(
                f"p must be at most the number of classes in {where}, {fewest} of those kept "
                f"(min_class_size={self._min_size}, small={self._small!r}), got {p}"
            )

    def _check_coverage(self, batches_per_epoch: SupportsIndex | None) -> None:
        coverage = _validate.choice("coverage", self._coverage, ("once", "all"))
        rules = {
            "p and k must be plain integers": self._schedule.fixed,
            "batches_per_epoch must not be given": batches_per_epoch is None,
            "super_labels must not be given": self._parameters["super_labels"] is None,
            "order_within must be 'random'": self._within == "random",
        }
        if coverage == "once":
            rules["small must be 'raise' or 'drop'"] = self._small != "repeat"
        for rule, holds in rules.items():
            if not holds:
                raise ValueError(f"{rule} with coverage={coverage!r}")

    def _batches_per_epoch(self, given: SupportsIndex | None) -> int:
        """Return the number given, or as many batches as the records fill."""
        schedule = self._schedule
        if given is not None:
            return _validate.integer("batches_per_epoch", given, minimum=1)
        if not schedule.fixed:
            raise ValueError("batches_per_epoch must be given when p or k changes, got None")
        return max(1, int(self._classes.sizes.sum()) // schedule.largest_batch)

    def __repr__(self) -> str:
        schedule = self._schedule
        most = "" if schedule.fixed else "at most "
        coverage = f", coverage={self._coverage!r}" if self._coverage else ""
        some = "" if self._parameters["records"] is None else f"{self._drawn:,} of "
        told = _validate.counted
        return (
            f"PKBatchSampler({some}{told(self.num_records, 'record')}, "
            f"{told(self.num_classes, 'class')}, {told(len(self), 'batch')} of "
            f"p={schedule.p_text} x k={schedule.k_text}, "
            f"{most}{told(self._largest, 'id')}{coverage})"
        )

    @property
    def num_classes(self) -> int:
        """Number of classes that batches are drawn from."""
        return len(self._classes)

    def _check_world(self, world_size: int) -> None:
        for p in sorted({stretch.p for stretch in self._schedule.stretches}):
            if p % world_size:
                raise ValueError(
                    f"world_size must divide p, so that a rank gets whole classes: "
                    f"got world_size={world_size}, p={p}"
                )

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        return self._schedule.sizes(epoch * self._steps + np.arange(start, stop))

    def _draw(self, epoch: int, start: int, lows: Int64, highs: Int64) -> Int64:
        steps = epoch * self._steps + start + np.arange(len(lows))
        return self._draws.ids(steps, self.rank, self.world_size)
