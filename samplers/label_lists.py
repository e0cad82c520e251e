"""Several labels a record: a list for each, or all labels end to end."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.bits import Int64, spread
from twinfeed.samplers.state import digest

_LISTS = (list, tuple, np.ndarray)  # no sets: the order of a set differs from process to process


class LabelLists(NamedTuple):
    """The labels of all records end to end, and the record of each label."""

    number: int
    records: Int64
    labels: NDArray[Any]

    @classmethod
    def of(cls, given: Any) -> LabelLists | None:
        """Return label lists as they may be given; None for one label a record."""
        pair = isinstance(given, tuple) and len(given) == 2
        if pair and all(isinstance(each, np.ndarray) for each in given):
            counts = np.diff(validate.integers("offsets of labels", given[0], minimum=0))
            labels = given[1]
            if len(given[0]) < 1 or given[0][0] or given[0][-1] != len(labels) or any(counts < 0):
                raise ValueError(
                    f"offsets of labels must rise from 0 to the number of labels, {len(labels)}"
                )
        elif isinstance(given, (list, tuple)) and any(isinstance(each, _LISTS) for each in given):
            validate.each("labels", "lists, if one of them is", given, _LISTS)
            counts = np.array([len(each) for each in given])
            labels = [label for each in given for label in each]
        else:
            return None
        records, _ = spread(counts)
        found = validate.labels(labels)
        classes, of_class = np.unique(found, return_inverse=True)
        pairs = np.sort(records * len(classes) + of_class)
        if (pairs[1:] == pairs[:-1]).any():
            raise ValueError("labels must not name a class twice for one record")
        return cls(len(counts), records, found)

    def order(self, chosen: Int64 | None) -> tuple[ClassOrder, NDArray[Any]]:
        """Return the class order of all or the chosen records, and the label of classes."""
        kept = slice(None) if chosen is None else np.isin(self.records, chosen)
        records, labels = self.records[kept], self.labels[kept]
        by_label = ClassOrder(labels)
        content = f"{digest(self.labels)} of {digest(self.records)}"
        order = ClassOrder._of(
            records[by_label.records], by_label.starts, by_label.sizes, digest=content
        )
        return order, labels[by_label.records[by_label.starts]]
