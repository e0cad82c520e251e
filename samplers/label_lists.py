"""Several labels a record: a list for each, or all labels end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.bits import Int64, spread
from twinfeed.samplers.state import digest

_LISTS = (list, tuple, np.ndarray)
_SEVERAL = (*_LISTS, set)  # sets are refused: their order differs from process to process


def label_lists(given: Any, /) -> tuple[Int64, NDArray[Any]] | None:
    """Return how many labels each record has, and all labels; None for one label a record."""
    pair = isinstance(given, tuple) and len(given) == 2
    if pair and all(isinstance(each, np.ndarray) for each in given):
        counts = np.diff(validate.integers("offsets of labels", given[0], minimum=0))
        labels = given[1]
        if len(given[0]) < 1 or given[0][0] or given[0][-1] != len(labels) or any(counts < 0):
            raise ValueError(
                f"offsets of labels must rise from 0 to the number of labels, {len(labels)}"
            )
    elif isinstance(given, (list, tuple)) and any(isinstance(each, _SEVERAL) for each in given):
        validate.each("labels", "lists (sorted, if they were sets)", given, _LISTS)
        counts = np.array([len(each) for each in given])
        labels = [label for each in given for label in each]
    else:
        return None
    return counts, validate.labels(labels)


def by_class(
    counts: Int64, labels: NDArray[Any], chosen: Int64 | None, /
) -> tuple[ClassOrder, NDArray[Any]]:
    """Return the class order of all or the chosen records, and the label of each class."""
    records, _ = spread(counts)
    content = f"{digest(labels)} of {digest(records)}"
    if chosen is not None:
        kept = np.isin(records, chosen)
        records, labels = records[kept], labels[kept]
    one = ClassOrder(labels)  # of places in `records`, which rise within a class
    order = ClassOrder._of(records[one.records], one.starts, one.sizes, digest=content)
    owner, record = order._by_class()
    if ((np.diff(record) == 0) & (np.diff(owner) == 0)).any():
        raise ValueError("labels must not name a class twice for one record")
    return order, labels[one.records[one.starts]]
