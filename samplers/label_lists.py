"""Records with several labels: a list of labels for each record, or all labels end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import groups_and_indices, ranges
from twinfeed.samplers.label_arrays import as_labels, check_types
from twinfeed.samplers.state import digest
from twinfeed.samplers.types import Array, Int64s

_CHUNK = 1 << 22  # pairs of records that are sorted at once
_LISTS = (list, tuple, np.ndarray)
_COLLECTIONS = (*_LISTS, set)  # sets are refused: their order differs from process to process


def label_lists(labels: Any, /) -> tuple[Int64s, Array] | None:
    """Return the number of labels of each record, and all labels, record after record.

    `labels` is the argument of `PKBatchSampler`: a list of labels for each record, or a tuple
    (offsets, all labels). `[["a"], ["a", "b"]]` gives the counts [1, 2] and the labels a, a, b. The
    result is None if there is one label for each record instead of a list.
    """
    if isinstance(labels, tuple) and [*map(type, labels)] == [np.ndarray] * 2:
        offsets, values = labels  # record i has `values[offsets[i]:offsets[i + 1]]`
        counts = np.diff(validate.integers("offsets of labels", offsets, minimum=0))
        if [*offsets[:1], *offsets[-1:]] != [0, len(values)] or any(counts < 0):
            raise ValueError(f"offsets of labels must rise from 0 to their number, {len(values)}")
    elif isinstance(labels, (list, tuple)) and any(
        isinstance(item, _COLLECTIONS) for item in labels
    ):
        check_types("labels", "lists (sorted, if they were sets)", labels, _LISTS)
        counts = np.array([len(item) for item in labels])
        values = [label for item in labels for label in item]
    else:
        return None
    return counts, as_labels(values)


def class_order_of_lists(
    counts: Int64s, labels: Array, record_ids: Int64s | None, /
) -> tuple[ClassOrder, Array]:
    """Return records that may have several labels, sorted by class, and the label of each class.

    A record is in the class of each of its labels. `counts` is the number of labels of each record,
    and `labels` are all labels, record after record. With `record_ids`, only these records are in
    the class order.
    """
    # Each pair (record, label) has a number: its index in `records` and `labels`.
    records, _ = groups_and_indices(counts)
    pairs = ClassOrder(labels)  # the numbers of the pairs, sorted by label
    content = f"{pairs.digest} of {digest(records)}"
    if record_ids is not None:
        pairs = pairs.subset(np.flatnonzero(np.isin(records, record_ids)))
    order = ClassOrder.from_arrays(
        records=records[pairs.records], starts=pairs.starts, sizes=pairs.sizes, digest=content
    )
    class_index, record = order.class_record_pairs()
    if ((np.diff(record) == 0) & (np.diff(class_index) == 0)).any():
        raise ValueError("labels must not name a class twice for one record")
    return order, labels[pairs.records[pairs.starts]]


def check_class_pairs(order: ClassOrder, class_labels: Array, k: int, /) -> None:
    """Raise ValueError if two classes have fewer than 2 k distinct records together.

    A record may be of several classes, and comes once in a batch: so a batch could not have k
    records of each of two such classes. `class_labels` are the labels of the classes.
    """
    sizes = np.asarray(order.sizes)
    class_index, records = order.class_record_pairs()
    width = int(records.max(initial=0)) + 1
    members = class_index * width + records  # each (class, record) as one integer, sorted
    starts = np.cumsum(sizes) - sizes
    # Pairs of classes: class `first[i]` and class `second[i]` have records in common.
    for first, second in _overlapping_pairs(class_index, records, sizes, k):
        # How many? For each record of the first class, search (second class, record) in `members`.
        pair, _ = groups_and_indices(sizes[first])
        wanted = members[ranges(starts[first], starts[first] + sizes[first])]
        wanted += ((second - first) * width)[pair]
        index = np.searchsorted(members, wanted).clip(max=len(members) - 1)
        num_shared = np.bincount(pair[members[index] == wanted], minlength=len(first))
        too_few = np.flatnonzero(sizes[first] + sizes[second] - num_shared < 2 * k)
        if len(too_few):
            classes = [first[too_few[0]], second[too_few[0]]]
            text = " and ".join(map(str, class_labels[classes]))
            raise ValueError(f"classes {text} together have fewer than {2 * k} records: lower k")


def _overlapping_pairs(
    class_index: Int64s, records: Int64s, sizes: Int64s, k: int
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield pairs of classes, among them all that have fewer than 2 k distinct records together.

    `class_index` and `records` are the class and the id of each record, class after class, and
    each class has k records or more. To compare all pairs of classes would take too long. Two
    classes of a and b records that have fewer than 2 k together share at least `a + b - 2 k + 1`:
    one record if both classes have k, else two records, and these are among the first k + 1 of
    either class. So only classes are compared that share one record, or two of the first k + 1
    (prefix filtering: Chaudhuri, Ganti and Kaushik, "A primitive operator for similarity joins in
    data cleaning", 2006).
    """
    _, index_in_class = groups_and_indices(sizes)  # the index of each record in its class
    size = sizes[class_index]
    # How many of the first k + 1 records of a class there are from each record on. (Two classes
    # have enough records together if one has 2 k.)
    remaining = np.where(size < 2 * k, np.minimum(size, k + 1) - index_in_class, 0).clip(min=0)
    width = int(records.max(initial=0)) + 1
    num_parts = 1 + len(class_index) * k // _CHUNK  # to bound memory
    for part in range(num_parts):  # of the pairs of records, by their first record
        rows = np.flatnonzero(records % num_parts == part)
        # All pairs of these records of a class: each record with itself and with those after it.
        row, distance = groups_and_indices(remaining[rows])
        first = rows[row]
        # A pair of a record with itself stands for one common record, in classes of k records.
        is_pair = (distance > 0) | (size[first] == k)
        first, second = first[is_pair], (first + distance)[is_pair]
        pairs = records[first] * width + records[second]  # two records in one integer
        yield from _pairs_with_equal_keys(pairs, class_index[first])


def _pairs_with_equal_keys(keys: Int64s, classes: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield arrays of all pairs (first, second) of classes that have an equal key.

    The keys 7, 4, 7, 7 of classes 0, 1, 2, 3 give the pairs (0, 2), (2, 3) and (0, 3).
    """
    order = np.argsort(keys, kind="stable")
    keys, classes = keys[order], classes[order]
    # Equal keys are next to each other: compare each key with the next, then the one after it, ...
    for distance in range(1, len(keys)):
        equal = np.flatnonzero(keys[distance:] == keys[:-distance])
        if not len(equal):
            break
        yield classes[equal], classes[equal + distance]
