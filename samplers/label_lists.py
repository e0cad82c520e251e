"""Records with several labels: a list of labels for each record, or all labels end to end."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
from twinfeed.samplers.label_arrays import as_labels, check_types
from twinfeed.samplers.state import digest
from twinfeed.samplers.types import Array, Int64s

_CHUNK = 1 << 18  # pairs of classes that are sorted at once
_LISTS = (list, tuple, np.ndarray)  # no sets: their order differs from process to process


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
    elif isinstance(labels, (list, tuple)) and any(isinstance(item, _LISTS) for item in labels):
        check_types("labels", "lists", labels, _LISTS)
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
    # The records of a class ascend, so two equal records of a class are next to each other.
    class_index, record = order.class_record_pairs()
    if ((np.diff(class_index) == 0) & (np.diff(record) == 0)).any():
        raise ValueError("labels must not have the same label twice for a record")
    return order, class_labels


def check_class_pairs(order: ClassOrder, class_labels: Array, k: int, /) -> None:
    """Raise ValueError if two classes have fewer than 2 k distinct records together.

    A batch takes k records of each of its classes, and no record twice, so it could not have both.
    `order` has the records sorted by class, and `class_labels` the label of each class. The
    comments are for k = 2 and the classes 0 to 2 of the records 0 1 2, 0 1 and 2 3.
    """
    sizes = np.asarray(order.sizes)  # [3, 2, 2]
    classes, records = order.class_record_pairs()
    is_small = sizes[classes] < 2 * k  # a class of 2 k records has enough by itself
    classes, records = classes[is_small], records[is_small]
    classes = classes[np.argsort(records, kind="stable")]  # of each record: 0 1, 0 1, 0 2, 2
    record, index = groups_and_indices(np.bincount(records))
    num_later = np.bincount(records)[record] - 1 - index  # of its record: [1, 0, 1, 0, 1, 0, 0]
    part = classes % (1 + int(num_later.sum()) // _CHUNK)  # some of the classes, to bound memory
    for rows in np.split(np.argsort(part, kind="stable"), np.cumsum(np.bincount(part))):
        row, offset = groups_and_indices(num_later[rows])
        row = rows[row]
        # The pairs of classes of each record, 0 1, 0 1 and 0 2, and each pair as one integer.
        keys = classes[row] * len(sizes) + classes[row + 1 + offset]
        keys, num_common = np.unique(keys, return_counts=True)
        first, second = np.divmod(keys, len(sizes))  # [0, 0], [1, 2] with [2, 1] common records
        too_few = np.flatnonzero(sizes[first] + sizes[second] - num_common < 2 * k)  # [0]
        if len(too_few):
            names = class_labels[[first[too_few[0]], second[too_few[0]]]]
            text = " and ".join(map(str, names))
            raise ValueError(f"classes {text} together have fewer than {2 * k} records: lower k")
