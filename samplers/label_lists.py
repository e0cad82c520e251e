"""Several labels a record: a list for each, or all labels end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import Int64, ranges, spread
from twinfeed.samplers.state import digest

_AT_ONCE = 1 << 22  # pairs of records that are sorted at once
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
    sizes = np.asarray(order.sizes)
    owner, records = order._by_class()
    width = int(records.max(initial=0)) + 1
    codes = owner * width + records  # sorted
    starts = np.cumsum(sizes) - sizes
    for first, second in _alike(owner, records, sizes, k):
        stops = starts[first] + sizes[first]
        wanted = codes[ranges(starts[first], stops)]
        wanted += np.repeat((second - first) * width, sizes[first])
        place = np.searchsorted(codes, wanted).clip(max=len(codes) - 1)
        number = np.repeat(np.arange(len(first)), sizes[first])
        both = np.bincount(number[codes[place] == wanted], minlength=len(first))
        few = np.flatnonzero(sizes[first] + sizes[second] - both < 2 * k)
        if len(few):
            pair = [first[few[0]], second[few[0]]]
            named = " and ".join(map(str, names[pair]))
            raise ValueError(f"classes {named} together have fewer than {2 * k} records: lower k")


def _alike(owner: Int64, records: Int64, sizes: Int64, k: int) -> Iterator[tuple[Int64, Int64]]:
    """Yield pairs of classes, among them all that have fewer than 2 k records together.

    Such classes share `a + b - 2 k + 1` records at least, if they have a and b. This is one record
    of two classes of k. Else it is two records, and two are among the first k + 1 of either class
    (prefix filtering: Chaudhuri, Ganti and Kaushik, "A primitive operator for similarity joins in
    data cleaning", 2006). So the work grows with the labels, not with the pairs of them.
    """
    _, member = spread(sizes)
    size = sizes[owner]
    more = np.where(size < 2 * k, np.minimum(size, k + 1) - member, 0)  # of the first k + 1
    parts = 1 + len(owner) * k // _AT_ONCE
    for part in range(parts):
        some = np.flatnonzero((records % parts == part) & (more > 0))
        rows = [some[size[some] == k], *(some[more[some] > after] for after in range(1, k + 1))]
        first = np.concatenate(rows)
        second = first + np.repeat(np.arange(k + 1), [*map(len, rows)])
        key = records[first] * (int(records.max(initial=0)) + 1) + records[second]
        by_key = np.argsort(key, kind="stable")
        key, number = key[by_key], owner[first[by_key]]
        for after in range(1, len(key)):
            same = np.flatnonzero(key[after:] == key[:-after])
            if not len(same):
                break
            yield number[same], number[same + after]
