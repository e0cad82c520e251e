"""The classes that a sampler draws from."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, spread
from twinfeed.samplers.class_order import ClassOrder, compact


class Classes:
    """Some classes of a class order, numbered from 0."""

    def __init__(self, order: ClassOrder, kept: NDArray[np.bool_] | None = None) -> None:
        self._order = order
        self._some: tuple[Int64, Int64] | None = None  # else the order's own, which may be mapped
        if kept is not None and not kept.all():
            self._some = order.starts[kept], order.sizes[kept]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def sizes(self) -> Int64:
        """How many records each class has."""
        return self._order.sizes if self._some is None else self._some[1]

    def ids(self, number: Int64, member: Int64) -> Int64:
        """Return the record ids of members (0 … size - 1) of classes, broadcast."""
        starts = self._order.starts if self._some is None else self._some[0]
        ids: Int64 = self._order.records[starts[number] + member].astype(np.int64)
        return ids


def chosen_records(records: ArrayLike, num_records: int) -> Int64:
    """Return distinct ids of some records, sorted."""
    ids = _validate.distinct("records", _validate.integers("records", records, minimum=0))
    if len(ids) and ids[-1] >= num_records:
        raise ValueError(f"records must be below {num_records}, their number, got {ids[-1]}")
    return ids


def order_of_some(order: ClassOrder, chosen: Int64) -> ClassOrder:
    """Return the class order of some records, with the digest of all labels."""
    number = np.empty(len(order.records), np.int64)
    owner, place = spread(order.sizes)
    number[Classes(order).ids(owner, place)] = owner
    some = ClassOrder(number[chosen])
    return ClassOrder.from_arrays(
        records=chosen[some.records], starts=some.starts, sizes=some.sizes, digest=order.digest
    )


def super_of_class(classes: Classes, super_labels: ArrayLike | None, num_records: int) -> Int64:
    """Return a number for the super-class of each class, all the same where none are given."""
    if super_labels is None:
        return np.zeros(len(classes), np.int64)
    parents = compact(_validate.labels(super_labels, name="super_labels"))
    if len(parents) != num_records:
        raise ValueError(
            f"super_labels must be as many as labels, {num_records}, got {len(parents)}"
        )
    owner, place = spread(classes.sizes)
    record = classes.ids(owner, place)
    first = record[np.cumsum(classes.sizes) - classes.sizes]
    strays = np.flatnonzero(parents[record] != parents[first][owner])
    if strays.size:
        here, there = record[strays[0]], first[owner[strays[0]]]
        raise ValueError(
            f"super_labels must agree within a class: records {there} and {here} have one label "
            f"and two super-labels"
        )
    found: Int64 = parents[first]
    return found
