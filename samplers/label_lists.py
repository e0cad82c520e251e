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
    the class order.

    A `ClassOrder` sorts items of one label each. So sort the pairs (record, label) by label, then
    replace each pair by its record. If record 0 has the labels a b, and record 1 the label a::

        pair               0  1  2        pairs by label    0  2  1
        label              a  b  a        label             a  a  b
        record             0  0  1        record            0  1  0
    """
    record_of_pair, _ = groups_and_indices(counts)  # [0, 0, 1]
    pairs = ClassOrder(labels)  # the pairs 0 2 1: class a has 0 2, and class b has 1
    # The digest is of all labels and their records, also of those that are left out below.
    data_digest = f"{pairs.digest} of {digest(record_of_pair)}"
    if record_ids is not None:
        pairs = pairs.subset(np.flatnonzero(np.isin(record_of_pair, record_ids)))
    class_labels = labels[pairs.records[pairs.starts]]  # that of the first pair of each class
    order = pairs._with_ids(record_of_pair, data_digest)  # class a has 0 1, and class b has 0
    _check_distinct(order)
    return order, class_labels


def _check_distinct(order: ClassOrder) -> None:
    """Raise ValueError if a record is twice in a class, since it has the label twice.

    The records of a class ascend, so two equal records of a class are next to each other.
    """
    class_index, record = order.class_record_pairs()
    if ((np.diff(class_index) == 0) & (np.diff(record) == 0)).any():
        raise ValueError("labels must not have the same label twice for a record")


def check_class_pairs(order: ClassOrder, class_labels: Array, k: int, /) -> None:
    """Raise ValueError if two classes have fewer than 2 k distinct records together.

    A batch takes k records of each of its classes, and no record twice, though a record may be of
    several classes. So a batch could not have two such classes. Each class has k records or more,
    so only pairs of classes with common records are checked.

    `order` has the records sorted by class, and `class_labels` the label of each class.
    """
    sizes = np.asarray(order.sizes)
    class_index, records = order.class_record_pairs()
    width = int(records.max(initial=0)) + 1
    keys = class_index * width + records  # a class and a record as one integer, ascending
    # The pairs of classes come in arrays: `first[i]` and `second[i]` are a pair.
    for first, second in _overlapping_pairs(class_index, records, sizes, k):
        num_common = _num_common_records(order, keys, width, first, second)
        too_few = np.flatnonzero(sizes[first] + sizes[second] - num_common < 2 * k)
        if len(too_few):
            classes = [first[too_few[0]], second[too_few[0]]]
            text = " and ".join(map(str, class_labels[classes]))
            raise ValueError(f"classes {text} together have fewer than {2 * k} records: lower k")


def _num_common_records(
    order: ClassOrder, keys: Int64s, width: int, first: Int64s, second: Int64s
) -> Int64s:
    """Return how many records class `first[i]` and class `second[i]` have in common, int64[pairs].

    `order` has the records of each class, and `keys` has `class * width + record` for each of them,
    ascending. The comments are for one pair, classes 0 and 1, of the records 0 1 and 0 1 2: `width`
    is 3, and `keys` are [0, 1, 3, 4, 5].
    """
    # Take each record of the first class of each pair.
    pair, index_in_class = groups_and_indices(order.sizes[first])  # [0, 0], [0, 1]
    records = order.record_ids(first[pair], index_in_class)  # [0, 1]
    # Search the record among those of the second class.
    searched = second[pair] * width + records  # [3, 4]
    found_at = np.searchsorted(keys, searched).clip(max=len(keys) - 1)  # [2, 3]
    is_common = keys[found_at] == searched  # [True, True]
    return np.bincount(pair[is_common], minlength=len(first))  # [2]


def _overlapping_pairs(
    class_index: Int64s, records: Int64s, sizes: Int64s, k: int
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield pairs of classes, among them all that have fewer than 2 k distinct records together.

    To compare all pairs of classes would take too long. If classes of a and b records, k or more
    each, have fewer than 2 k together, they share s records, with s >= a + b - 2 k + 1. So only
    these classes can be a pair:

    - Two classes of k records each that share a record.
    - Other classes that share two of their first k + 1 records. They share at least two records, as
      a + b is more than 2 k. In the class of a records, s - 2 more shared records follow the second
      one, and s - 2 >= a + b - 2 k - 1 >= a - k - 1, as b >= k. So at most k records come before
      the second shared record, and both classes have it among their first k + 1.

    This is prefix filtering (Chaudhuri, Ganti and Kaushik, "A primitive operator for similarity
    joins in data cleaning", 2006).

    `class_index` and `records` are the class and the id of each record, class after class, with
    ascending ids. `sizes` are those of the classes, k or more.
    """
    is_of_k = sizes[class_index] == k  # whether the class has k records
    yield from _classes_with_equal_keys(records[is_of_k], class_index[is_of_k])
    num_later = _num_later_records(sizes, k)
    width = int(records.max(initial=0)) + 1
    num_parts = 1 + len(class_index) * k // _CHUNK
    for part in range(num_parts):  # a part of the pairs, by their first record, to bound memory
        rows = np.flatnonzero(records % num_parts == part)
        # Pair the first record with the next one, at offset 0, the one after that, at offset 1, ...
        row, offset = groups_and_indices(num_later[rows])
        first, second = rows[row], rows[row] + 1 + offset  # indices in `records`
        keys = records[first] * width + records[second]  # two records as one integer
        yield from _classes_with_equal_keys(keys, class_index[first])


def _num_later_records(sizes: Int64s, k: int) -> Int64s:
    """Return how many of the first k + 1 records of its class come after each record.

    The result has an entry for each record, class after class; `sizes` are those of the classes. A
    class of 2 k records or more has enough records by itself, so its entries are 0. With k = 2 and
    classes of 3 and 4 records, the result is 2 1 0, 0 0 0 0.
    """
    class_index, index_in_class = groups_and_indices(sizes)
    num_first_records = np.where(sizes < 2 * k, np.minimum(sizes, k + 1), 0)  # of each class
    return (num_first_records[class_index] - 1 - index_in_class).clip(min=0)


def _classes_with_equal_keys(keys: Int64s, classes: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
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
