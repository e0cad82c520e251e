"""Records with several labels: a list of labels for each record, or all labels end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
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
    if isinstance(labels, tuple) and [type(array) for array in labels] == [np.ndarray, np.ndarray]:
        offsets, values = labels  # record i has `values[offsets[i]:offsets[i + 1]]`
        counts = np.diff(validate.integers("offsets of labels", offsets, minimum=0))
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(values) or (counts < 0).any():
            raise ValueError(f"offsets must rise from 0 to the number of labels, {len(values)}")
    elif isinstance(labels, (list, tuple)) and any(
        isinstance(item, _COLLECTIONS) for item in labels
    ):
        check_types("labels", "lists (sort a set into a list)", labels, _LISTS)
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
    the class order. If record 0 has the labels a and b, and record 1 the label a, then class a has
    the records 0 1, and class b the record 0.
    """
    # Sort the pairs (record, label) by label. In the example these are (0, a), (0, b), (1, a), so
    # that class a has the pairs 0 2, and class b the pair 1.
    records, _ = groups_and_indices(counts)  # of each pair: 0 0 1
    pair_order = ClassOrder(labels)  # a class order with indices of pairs in place of records
    content = f"{pair_order.digest} of {digest(records)}"
    if record_ids is not None:
        pair_order = pair_order.subset(np.flatnonzero(np.isin(records, record_ids)))
    starts, pairs = pair_order.starts, pair_order.records
    order = ClassOrder.from_arrays(
        records=records[pairs], starts=starts, sizes=pair_order.sizes, digest=content
    )
    # The records of a class ascend: if one has the label twice, it is next to itself.
    class_index, record = order.class_record_pairs()
    if ((np.diff(record) == 0) & (np.diff(class_index) == 0)).any():
        raise ValueError("labels must not have the same label twice for a record")
    first_pairs = pairs[starts]  # the first pair of each class has the label of the class
    return order, labels[first_pairs]


def check_class_pairs(order: ClassOrder, class_labels: Array, k: int, /) -> None:
    """Raise ValueError if two classes have fewer than 2 k distinct records together.

    A record may be of several classes, and comes once in a batch: so a batch could not have k
    records of each of two such classes. `class_labels` are the labels of the classes.
    """
    sizes = np.asarray(order.sizes)
    class_index, records = order.class_record_pairs()
    # Each pair (class, record) as one integer. They are sorted, as the class order is.
    width = int(records.max(initial=0)) + 1
    keys = class_index * width + records
    # Pairs of classes: class `first[i]` and class `second[i]` have records in common.
    for first, second in _overlapping_pairs(class_index, records, sizes, k):
        # How many? For each record of the first class, search the key (second class, record).
        pair, index_in_class = groups_and_indices(sizes[first])
        shared_keys = second[pair] * width + order.record_ids(first[pair], index_in_class)
        index = np.searchsorted(keys, shared_keys).clip(max=len(keys) - 1)
        is_shared = keys[index] == shared_keys
        num_shared = np.bincount(pair[is_shared], minlength=len(first))
        too_few = np.flatnonzero(sizes[first] + sizes[second] - num_shared < 2 * k)
        if len(too_few):
            classes = [first[too_few[0]], second[too_few[0]]]
            text = " and ".join(map(str, class_labels[classes]))
            raise ValueError(f"classes {text} together have fewer than {2 * k} records: lower k")


def _overlapping_pairs(
    class_index: Int64s, records: Int64s, sizes: Int64s, k: int
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield pairs of classes, among them all that have fewer than 2 k distinct records together.

    `class_index` and `records` are the class and the id of each record, class after class, with
    ascending ids. Each class has k records or more. To compare all pairs of classes would take too
    long. So only classes are compared that share one record, if both have k records, or that share
    two of their first k + 1 records (prefix filtering: Chaudhuri, Ganti and Kaushik, "A primitive
    operator for similarity joins in data cleaning", 2006). No pair is missed:

    - Classes of a and b records that share s have `a + b - s` distinct records together. These are
      fewer than 2 k if `s >= a + b - 2 k + 1`, which is 1 if both have k records, and otherwise at
      least 2.
    - The second of the s shared records is followed by `s - 2` of them. So it is among the first
      `a - (s - 2)` records of its class, which is at most `2 k + 1 - b`, and so at most k + 1.
    """
    _, index_in_class = groups_and_indices(sizes)
    size = sizes[class_index]  # of the class of each record
    # For each record, how many of the first k + 1 of its class come from this record on: with k = 2
    # and 3 records, 3 2 1. A class of 2 k records is left out: with any other it has enough.
    prefix_size = np.where(size < 2 * k, np.minimum(size, k + 1), 0)
    num_from_here = (prefix_size - index_in_class).clip(min=0)
    width = int(records.max(initial=0)) + 1
    num_parts = 1 + len(class_index) * k // _CHUNK  # to bound memory
    for part in range(num_parts):  # of the pairs of records, by their first record
        rows = np.flatnonzero(records % num_parts == part)
        # All pairs of records of a class: each of these records with itself and with those after.
        row, distance = groups_and_indices(num_from_here[rows])
        first = rows[row]
        # A pair of a record with itself stands for one shared record, in classes of k records.
        is_pair = (distance > 0) | (size[first] == k)
        first, second = first[is_pair], (first + distance)[is_pair]
        pair_keys = records[first] * width + records[second]  # two records in one integer
        yield from _pairs_with_equal_keys(pair_keys, class_index[first])


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
