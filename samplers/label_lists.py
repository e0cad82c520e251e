"""Records with several labels: a list of labels for each record."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
from twinfeed.samplers.label_arrays import as_labels, check_types
from twinfeed.samplers.state import digest
from twinfeed.samplers.types import Array, Int64s

_LISTS = (list, tuple, np.ndarray)  # no sets: their order differs from process to process


def label_lists(labels: Any, /) -> tuple[Int64s, Array] | None:
    """Return the number of labels of each record, and all labels, record after record; None if
    there is one label for each record instead of a list.
    """
    if not isinstance(labels, (list, tuple)):
        return None
    # A number of numpy may be an array without an axis.
    labels = [item.item() if getattr(item, "ndim", 1) == 0 else item for item in labels]
    if not any(isinstance(item, _LISTS) for item in labels):
        return None
    check_types("labels", "lists", labels, _LISTS)
    counts = np.array([len(item) for item in labels])
    return counts, as_labels([label for item in labels for label in item])


def class_order_of_lists(
    counts: Int64s, labels: Array, record_ids: Int64s | None, /
) -> tuple[ClassOrder, Array]:
    """Return records that may have several labels, sorted by class, and the label of each class.

    The pairs (record, label) are sorted by label, then each is replaced by its record. In the
    comments, record 0 has the labels a b, and record 1 the label a.
    """
    record_of_pair, _ = groups_and_indices(counts)  # [0, 0, 1]
    pairs = ClassOrder(labels)  # the pairs 0 2 1: class a has 0 2, and class b has 1
    # The digest is of all labels and their records, also of those that are left out below.
    data_digest = f"{pairs.digest} of {digest(record_of_pair)}"
    if record_ids is not None:
        pairs = pairs._subset(np.flatnonzero(np.isin(record_of_pair, record_ids)))
    class_labels = labels[pairs.records[pairs.starts]]  # that of the first pair of each class
    order = pairs._with_ids(record_of_pair, data_digest)  # class a has 0 1, and class b has 0
    # The records of a class ascend, so two equal records of a class are next to each other.
    class_index, record = order.class_record_pairs()
    if ((np.diff(class_index) == 0) & (np.diff(record) == 0)).any():
        raise ValueError("labels must not have the same label twice for a record")
    return order, class_labels
