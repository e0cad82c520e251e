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

    A `ClassOrder` sorts items of one label each. So first sort the pairs (record, label) by label,
    then replace each pair by its record. If record 0 has the labels a b, and record 1 the label a::

        pair               0  1  2        pairs by label    0  2  1
        label              a  b  a        label             a  a  b
        record             0  0  1        record            0  1  0
    """
    record_of_pair, _ = groups_and_indices(counts)  # the record of each pair: [0, 0, 1]
    pair_order = ClassOrder(labels)
    # A sampler compares this text when a state is loaded: it differs if any pair differs.
    hash_text = f"{pair_order.digest} of {digest(record_of_pair)}"
    if record_ids is not None:
        pair_order = pair_order.subset(np.flatnonzero(np.isin(record_of_pair, record_ids)))
    # The pairs by label, [0, 2, 1]; where each class starts in them, [0, 2]; its size, [2, 1].
    pairs, starts, sizes = pair_order.records, pair_order.starts, pair_order.sizes
    records = record_of_pair[pairs]  # [0, 1, 0]
    order = ClassOrder.from_arrays(records=records, starts=starts, sizes=sizes, digest=hash_text)
    # The class and the record of each pair: [0, 0, 1] and [0, 1, 0]. The records of a class ascend:
    # if a record has a label twice, two neighbours are equal.
    class_index, record = order.class_record_pairs()
    if ((np.diff(record) == 0) & (np.diff(class_index) == 0)).any():
        raise ValueError("labels must not have the same label twice for a record")
    first_pairs = pairs[starts]  # a pair of each class: [0, 1], with the labels a and b
    return order, labels[first_pairs]


def check_class_pairs(order: ClassOrder, class_labels: Array, k: int, /) -> None:
    """Raise ValueError if two classes have fewer than 2 k distinct records together.

    A batch takes k records of each of its classes, and no record twice, though a record may be of
    several classes. So a batch could not have two classes of fewer than 2 k records together. Each
    class has k records or more, so only pairs of classes with records in common are checked: count
    the common records of each pair. `class_labels` are the labels of the classes.

    The comments have the values for class 0 with the records 0 1, class 1 with 0 1 2, and k = 2:
    together they have 3 records, which are fewer than 4.
    """
    sizes = np.asarray(order.sizes)  # [2, 3]
    # The class and the record id of each record of each class, class after class.
    class_index, records = order.class_record_pairs()  # [0, 0, 1, 1, 1], [0, 1, 0, 1, 2]
    # Both as one integer: 0 1 2 are the records 0 1 2 of class 0, and 3 4 5 those of class 1.
    width = int(records.max(initial=0)) + 1  # 3
    keys = class_index * width + records  # ascending: [0, 1, 3, 4, 5]
    # Pair i is class `first[i]` and class `second[i]`: [0] and [1].
    for first, second in _overlapping_pairs(class_index, records, sizes, k):
        # Take each record of the first class of each pair: the pair, and the record.
        pair_index, index_in_class = groups_and_indices(sizes[first])  # [0, 0], [0, 1]
        first_records = order.record_ids(first[pair_index], index_in_class)  # [0, 1]
        # Search it among the records of the second class.
        searched_keys = second[pair_index] * width + first_records  # [3, 4]
        key_index = np.searchsorted(keys, searched_keys).clip(max=len(keys) - 1)  # [2, 3]
        is_shared = keys[key_index] == searched_keys  # [True, True]
        num_shared = np.bincount(pair_index[is_shared], minlength=len(first))  # of each pair: [2]
        too_few = np.flatnonzero(sizes[first] + sizes[second] - num_shared < 2 * k)  # 3 < 4: [0]
        if len(too_few):
            classes = [first[too_few[0]], second[too_few[0]]]
            text = " and ".join(map(str, class_labels[classes]))
            raise ValueError(f"classes {text} together have fewer than {2 * k} records: lower k")


def _overlapping_pairs(
    class_index: Int64s, records: Int64s, sizes: Int64s, k: int
) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield pairs of classes, among them all that have fewer than 2 k distinct records together.

    To compare all pairs of classes would take too long. So each class gets keys, and only classes
    with an equal key are a pair (prefix filtering: Chaudhuri, Ganti and Kaushik, "A primitive
    operator for similarity joins in data cleaning", 2006). The keys of a class are all pairs of its
    first k + 1 records, and in a class of k records also each record with itself. With k = 2::

        class   records   keys
        0       1 2 3     1-2 1-3 2-3
        1       1 2       1-1 1-2 2-2
        2       2 4       2-2 2-4 4-4

    Classes 0 and 1 have the key 1-2, and classes 1 and 2 the key 2-2. Classes 0 and 2 have no equal
    key, and 4 records together. The comments follow this example.

    These keys miss no pair. If classes of a and b records share s records, they have `a + b - s`
    records together. For fewer than 2 k, s is at least `a + b - 2 k + 1`:

    - If a and b are k, they share a record or more, and have its key with itself.
    - Otherwise they share two records or more. Their key is the pair of the first two. In the class
      of a records, `s - 2` other shared records come after the pair. So the pair is among the first
      `a - (s - 2)` records, at most `2 k + 1 - b`. As b is at least k, these are at most k + 1.

    `class_index` and `records` are the class and the id of each record, class after class, with
    ascending ids. Each class has k records or more.
    """
    _, index_in_class = groups_and_indices(sizes)  # [0, 1, 2, 0, 1, 0, 1]
    size = sizes[class_index]  # of the class of each record: [3, 3, 3, 2, 2, 2, 2]
    # A class of 2 k records gets no keys: with any other class, it has enough records.
    num_first_records = np.where(size < 2 * k, np.minimum(size, k + 1), 0)
    # How many keys start with each record: with itself, and with each first record after it.
    num_keys = (num_first_records - index_in_class).clip(min=0)  # [3, 2, 1, 2, 1, 2, 1]
    width = int(records.max(initial=0)) + 1
    num_parts = 1 + len(class_index) * k // _CHUNK
    for part in range(num_parts):  # a part of the keys, by their first record, to bound memory
        rows = np.flatnonzero(records % num_parts == part)
        # The two records of each key, as indices in `records`. The keys 1-1 1-2 1-3 of class 0 are
        # at distance 0 1 2 from its first record, 2-2 2-3 at distance 0 1 from its second, ...
        row, distance = groups_and_indices(num_keys[rows])
        first, second = rows[row], rows[row] + distance
        # Drop the keys of a record with itself, but for classes of k records.
        is_key = (distance > 0) | (size[first] == k)
        first, second = first[is_key], second[is_key]
        keys = records[first] * width + records[second]  # two records as one integer
        yield from _pairs_with_equal_keys(keys, class_index[first])


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
