"""The records sorted by class, computed once for every sampler of the same labels."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.int_arrays import groups_and_indices
from twinfeed.samplers.label_arrays import as_labels
from twinfeed.samplers.mapped import as_mapped, is_increasing, slices
from twinfeed.samplers.state import digest
from twinfeed.samplers.types import Array, Int64s, Integers


class ClassOrder:
    """The ids of the records of each class, class after class; immutable.

    `PKBatchSampler` takes a class order in place of labels. Sorting 10^8 labels takes many seconds
    and gigabytes. Sort once, save the arrays `records`, `starts` and `sizes`, and map them wherever
    a sampler is created.

    Classes are numbered by size, the largest first, and classes of one size by their first record.
    So the classes of at least some size come first, and a stream does not depend on how labels are
    written: 3, "3" and "cat" are the same class if the same records have them.

    Arrays that are mapped from a file (`np.load(path, mmap_mode="r")`) are pickled as the path:
    each process maps the file itself, and the memory is shared. So the file must stay as it is.
    Other arrays are copied into each pickle.

    Args:
        labels: one for each record, int or str.

    Attributes:
        records: record ids sorted by class, int[records], read-only.
        starts: where each class begins in `records`, int64[classes], read-only.
        sizes: how many records each class has, int64[classes], read-only.
        digest: a hash of the labels.

    >>> order = ClassOrder(["b", "a", "a", "c", "a"])
    >>> order.records.tolist(), order.starts.tolist(), order.sizes.tolist()
    ([1, 2, 4, 0, 3], [0, 3, 4], [3, 1, 1])
    >>> arrays = {"records": order.records, "starts": order.starts, "sizes": order.sizes}
    >>> len(ClassOrder.from_arrays(**arrays, digest=order.digest))
    3
    """

    records: Integers
    starts: Int64s
    sizes: Int64s
    digest: str

    def __init__(self, labels: ArrayLike, /) -> None:
        array = as_labels(labels)
        records, bounds = sort_by_label(small_integers(array))
        starts, sizes = bounds[:-1], np.diff(bounds)
        rank = by_size(sizes, records[starts])
        self.records, self.starts, self.sizes = map(as_mapped, (records, starts[rank], sizes[rank]))
        self.digest = digest(array)

    @classmethod
    def from_arrays(
        cls, *, records: Integers, starts: Int64s, sizes: Int64s, digest: str
    ) -> ClassOrder:
        """Return a class order, the records sorted by class, with these arrays.

        The arrays are not copied. Only `sizes` are read, so the record ids in a large file are not.

        Args:
            records: the ids sorted by class, and within a class in stored order, int[records].
            starts: where each class begins in `records`, int64[classes].
            sizes: the length of each class, int64[classes].
            digest: a hash of the labels. A sampler compares it when a state is loaded.

        Raises:
            TypeError: an array is not one-dimensional, or not of ints.
            ValueError: the lengths do not agree, or the largest class is not the first.
        """
        for name, array in (("records", records), ("starts", starts), ("sizes", sizes)):
            if not isinstance(array, np.ndarray) or array.dtype.kind != "i" or array.ndim != 1:
                raise TypeError(f"{name} must be a one-dimensional array of ints, got {array!r}")
        largest_first = is_increasing(sizes[::-1], strictly=False)
        if len(starts) != len(sizes) or int(sizes.sum()) != len(records) or not largest_first:
            raise ValueError(
                "records, starts and sizes must be those of a ClassOrder, the largest class first, "
                f"got {len(records)} records, {len(starts)} starts and {len(sizes)} sizes"
            )
        return cls._unchecked(digest, records, starts, sizes)

    @classmethod
    def _unchecked(cls, digest: str, *arrays: Array) -> ClassOrder:
        """Return the class order of the arrays `records`, `starts` and `sizes`, unchecked."""
        order = object.__new__(cls)
        order.digest, (order.records, order.starts, order.sizes) = digest, map(as_mapped, arrays)
        return order

    def __reduce__(self) -> tuple[Any, ...]:
        return self._unchecked, (self.digest, self.records, self.starts, self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        records = validate.counted(len(self.records), "record")
        return f"ClassOrder({records}, {validate.counted(len(self), 'class')})"

    def record_ids(self, class_number: Int64s, member: Int64s) -> Int64s:
        """Return the ids of records `member[i]` of class `class_number[i]`, broadcast against each
        other.
        """
        starts, records = np.asarray(self.starts), np.asarray(self.records)
        ids: Int64s = records[starts[class_number] + member].astype(np.int64)
        return ids

    def class_record_pairs(self) -> tuple[Int64s, Int64s]:
        """Return the class index and the id of each record, class after class: int64[records]."""
        class_index, index_in_class = groups_and_indices(self.sizes)
        return class_index, self.record_ids(class_index, index_in_class)

    def num_at_least(self, size: int) -> int:
        """Return the number of classes with at least `size` records."""
        return bisect_right(range(len(self)), -size, key=lambda i: -int(self.sizes[i]))

    def _largest(self, count: int) -> ClassOrder:
        """Return the class order of the `count` largest classes."""
        if count == len(self):
            return self
        return self._unchecked(self.digest, self.records, self.starts[:count], self.sizes[:count])

    def _class_of_records(self, num_records: int) -> Int64s:
        """Return the class index of each record id, int64[num_records]; -1 if it is in no class."""
        class_of = np.full(num_records, -1)
        class_index, record = self.class_record_pairs()
        class_of[record] = class_index
        return class_of

    def _subset(self, records: Int64s) -> ClassOrder:
        """Return the class order of these records only, with the digest of all labels."""
        class_of = self._class_of_records(len(self.records))
        # Sort the indices 0, 1, 2, ... of `records` by class, and replace them by the records.
        return ClassOrder(class_of[records])._with_ids(records, self.digest)

    def _with_ids(self, ids: Int64s, digest: str) -> ClassOrder:
        """Return this class order with `ids[i]` in place of each record i, and with this digest."""
        return self._unchecked(digest, ids[self.records], self.starts, self.sizes)


def super_class_order(
    order: ClassOrder, super_labels: ArrayLike | None, num_records: int, num_classes: int
) -> ClassOrder | None:
    """Return the first `num_classes` classes sorted by super-class; None without super-labels. The
    classes take the place of records: if 0 and 2 are animals and 1 a plant, `records` is 0 2 1.
    """
    if super_labels is None:
        return None
    return ClassOrder(_labels_of_classes(order, super_labels, num_records)[:num_classes])


def _labels_of_classes(order: ClassOrder, super_labels: ArrayLike, num_records: int) -> Int64s:
    """Return the super-label of each class; ValueError if those of its records differ."""
    by_record = small_integers(as_labels(super_labels, name="super_labels"))
    if len(by_record) != num_records:
        raise ValueError(f"super_labels must have {num_records} entries, got {len(by_record)}")
    # The super-label of a class is that of its first record. Compare those of all its records.
    first_record = order.records[order.starts]
    by_class: Int64s = by_record[first_record]
    class_index, record = order.class_record_pairs()
    differing = np.flatnonzero(by_record[record] != by_class[class_index])
    if differing.size:
        record_1, record_2 = first_record[class_index[differing[0]]], record[differing[0]]
        raise ValueError(
            f"super_labels must be equal for all records of a class, but records {record_1} and "
            f"{record_2} have the same label and different super-labels"
        )
    return by_class


def by_size(sizes: Int64s, first: Integers) -> Int64s:
    """Return the classes by size, the largest first; of equal size by their first record."""
    return np.lexsort((first, -sizes))


def small_integers(labels: Array) -> Int64s:
    """Return each label as an integer from 0 on, in the order of the labels, small enough for
    `sort_by_label`: integers are only shifted, unless they are too large.
    """
    if labels.dtype.kind == "i" and labels.size:
        smallest, largest = int(labels.min()), int(labels.max())
        if (largest - smallest).bit_length() + labels.size.bit_length() <= 63:
            return labels - smallest if smallest else labels
    return np.unique(labels, return_inverse=True)[1]


def sort_by_label(labels: Int64s) -> tuple[Integers, Int64s]:
    """Return the record ids sorted by (label, id), and the bounds of each label's records. Both are
    packed into one integer, as a sort takes half the time of an argsort. The comments have labels 1
    0 1.
    """
    id_bits = labels.size.bit_length()  # 2
    packed = labels << id_bits  # in binary: [100, 000, 100]
    for chunk in slices(labels.size):  # to bound memory
        packed[chunk] |= np.arange(chunk.start, chunk.stop)
    packed.sort()  # [100, 001, 110] becomes [001, 100, 110]
    # The lower bits of the packed integers are the ids, [01, 00, 10].
    records: Integers = np.empty(labels.size, np.int32 if labels.size < 1 << 31 else np.int64)
    np.bitwise_and(packed, (1 << id_bits) - 1, out=records, casting="same_kind")
    packed >>= id_bits  # the upper bits are the labels: [0, 1, 1].
    changes = np.flatnonzero(packed[1:] != packed[:-1]) + 1  # [1]
    ends = [labels.size] if labels.size else []
    bounds: Int64s = np.concatenate([[0], changes, ends]).astype(np.int64)
    return records, bounds
