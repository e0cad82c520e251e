"""Several labels a record: a list for each, or all labels end to end."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, combinations
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
    if isinstance(given, tuple) and [*map(type, given)] == [np.ndarray] * 2:
        offsets, labels = given
        counts = np.diff(validate.integers("offsets of labels", offsets, minimum=0))
        if [*offsets[:1], *offsets[-1:]] != [0, len(labels)] or any(counts < 0):
            raise ValueError(f"offsets of labels must rise from 0 to their number, {len(labels)}")
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
    records, _ = spread(counts)  # of the pairs of a record and a label
    pairs = ClassOrder(labels)
    content = f"{pairs.digest} of {digest(records)}"
    if chosen is not None:
        pairs = pairs._some(np.flatnonzero(np.isin(records, chosen)))
    order = ClassOrder._of(records[pairs.records], pairs.starts, pairs.sizes, digest=content)
    owner, record = order._by_class()
    if ((np.diff(record) == 0) & (np.diff(owner) == 0)).any():
        raise ValueError("labels must not name a class twice for one record")
    return order, labels[pairs.records[pairs.starts]]


def check_pairs(order: ClassOrder, names: NDArray[Any], k: int, /) -> None:
    """Refuse two classes that have fewer than 2 k records together; `names` are their labels."""
    owner, records = order._by_class()
    sizes = np.asarray(order.sizes)
    small = sizes[owner] < 2 * k
    classes_of = defaultdict(list)
    for record, number in zip(records[small].tolist(), owner[small].tolist(), strict=True):
        classes_of[record].append(number)
    shared = Counter(chain.from_iterable(combinations(each, 2) for each in classes_of.values()))
    for pair, both in shared.items():
        if sizes[[*pair]].sum() - both < 2 * k:
            named = " and ".join(map(str, names[[*pair]]))
            raise ValueError(f"classes {named} together have fewer than {2 * k} records: lower k")
