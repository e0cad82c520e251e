"""Records sorted by class, once, for every sampler of the same labels."""

from __future__ import annotations

import mmap
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, spread
from twinfeed.samplers._state import digest

Ids = NDArray[np.integer[Any]]
_PIECE = 1 << 20
_Mapping: TypeAlias = partial[NDArray[Any]]


class ClassOrder:
    """Hold the ids of the records of each class side by side; immutable.

    `PKBatchSampler` takes a class order in place of labels. Sorting 10^8 labels takes many seconds
    and gigabytes. Sort once, save the arrays, and map them wherever a sampler is made:

    - `records`: the ids sorted by class, and within a class in stored order, int[records];
    - `starts`, `sizes`: where each class begins in `records`, and its length, int64[classes];
    - `digest`: a hash of the labels, which states of samplers are compared by.

    Classes are numbered by their first record. So a stream does not depend on how labels are
    written: 3, "3" and "cat" are the same class if the same records carry them.

    Arrays that are mapped from a file (`np.load(path, mmap_mode="r")`) are pickled as the path:
    each process maps the file itself, and the memory is shared.

    >>> order = ClassOrder(["b", "a", "b", "c", "a"])
    >>> order.records.tolist(), order.starts.tolist(), order.sizes.tolist()
    ([1, 4, 0, 2, 3], [2, 0, 4], [2, 2, 1])
    >>> arrays = {"records": order.records, "starts": order.starts, "sizes": order.sizes}
    >>> len(ClassOrder.from_arrays(**arrays, digest=order.digest))
    3
    """

    def __init__(self, labels: ArrayLike, /) -> None:
        array = _validate.labels(labels)
        records, bounds = _grouped(_compact(array))
        starts = bounds[:-1]
        by_first = np.argsort(records[starts])
        self._hold(records, starts[by_first], np.diff(bounds)[by_first], digest=digest(array))

    @classmethod
    def from_arrays(cls, *, records: Ids, starts: Int64, sizes: Int64, digest: str) -> ClassOrder:
        """Return the class order that has these arrays, which are neither copied nor read through.

        Raises TypeError and ValueError for arrays that no class order has.
        """
        for name, array in (("records", records), ("starts", starts), ("sizes", sizes)):
            if not isinstance(array, np.ndarray) or array.dtype.kind != "i" or array.ndim != 1:
                raise TypeError(f"{name} must be a one-dimensional array of ints, got {array!r}")
        if len(starts) != len(sizes) or int(sizes.sum()) != len(records):
            raise ValueError(
                f"sizes must be as many as starts and sum to the number of records, got "
                f"{len(sizes)} sizes of {int(sizes.sum())} records, {len(starts)} starts and "
                f"{len(records)} records"
            )
        return cls._of(records, starts, sizes, digest=digest)

    @classmethod
    def _of(cls, *arrays: NDArray[Any] | _Mapping, digest: str) -> ClassOrder:
        """Return the class order of arrays, or of what maps them."""
        made = object.__new__(cls)
        made._hold(*(a() if isinstance(a, partial) else a for a in arrays), digest=digest)
        return made

    def _hold(self, *arrays: NDArray[Any], digest: str) -> None:
        self._records, self._starts, self._sizes = map(_locked, arrays)
        self._digest = digest

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self._records, self._starts, self._sizes)
        return partial(self._of, digest=self._digest), tuple(map(_reference, arrays))

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        records = _validate.counted(len(self._records), "record")
        return f"ClassOrder({records}, {_validate.counted(len(self), 'class')})"

    @property
    def records(self) -> Ids:
        """Record ids sorted by class, int[records], read-only."""
        return self._records

    @property
    def starts(self) -> Int64:
        """Where each class begins in `records`, int64[classes], read-only."""
        return self._starts

    @property
    def sizes(self) -> Int64:
        """How many records each class has, int64[classes], read-only."""
        return self._sizes

    @property
    def digest(self) -> str:
        """A hash of the labels."""
        return self._digest

    def _ids(self, number: Int64, member: Int64) -> Int64:
        """Return the record ids of members (0 … size - 1) of classes, broadcast."""
        ids: Int64 = self._records[self._starts[number] + member].astype(np.int64)
        return ids

    def _by_class(self) -> tuple[Int64, Int64]:
        """Return the class of each record, and its id, class by class."""
        owner, place = spread(self._sizes)
        return owner, self._ids(owner, place)

    def _classes(self, kept: NDArray[np.bool_]) -> ClassOrder:
        """Return the class order of some classes, of the same records."""
        if kept.all():
            return self
        return self._of(self._records, self._starts[kept], self._sizes[kept], digest=self._digest)

    def _some(self, chosen: Int64) -> ClassOrder:
        """Return the class order of some records, with the digest of all labels."""
        number = np.empty(len(self._records), np.int64)
        owner, record = self._by_class()
        number[record] = owner
        some = ClassOrder(number[chosen])
        return self._of(chosen[some.records], some.starts, some.sizes, digest=self._digest)

    def _supers(self, super_labels: ArrayLike | None, num_records: int) -> Int64:
        """Return a number for the super-class of each class, all the same where none are given."""
        if super_labels is None:
            return np.zeros(len(self), np.int64)
        parents = _compact(_validate.labels(super_labels, name="super_labels"))
        if len(parents) != num_records:
            raise ValueError(
                f"super_labels must be as many as labels, {num_records}, got {len(parents)}"
            )
        owner, record = self._by_class()
        first = self._records[self._starts]
        found: Int64 = parents[first]
        strays = np.flatnonzero(parents[record] != found[owner])
        if strays.size:
            here, there = record[strays[0]], first[owner[strays[0]]]
            raise ValueError(
                f"super_labels must agree within a class: records {there} and {here} have one "
                f"label and two super-labels"
            )
        return found


def _locked(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that the owner may still change the array."""
    view = array.view() if array.flags.writeable else array
    view.flags.writeable = False
    return view


def _reference(array: NDArray[Any]) -> NDArray[Any] | _Mapping:
    """Return what maps a mapped array again; any other array as it is."""
    # A slice of a mapped array is one too, but has the offset of the whole: its base tells.
    if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap) and array.filename:
        return partial(np.memmap, array.filename, array.dtype, "r", array.offset, array.shape)
    return array


def _compact(labels: NDArray[Any]) -> Int64:
    """Return labels as integers from 0 that sort fast."""
    if not labels.size:
        return np.empty(0, np.int64)
    if labels.dtype.kind == "i":
        least = labels.min()
        span = int(labels.max()) - int(least)
        if span.bit_length() + labels.size.bit_length() <= 63:
            return labels - least if least else labels
    return np.unique(labels, return_inverse=True)[1]


def _grouped(labels: Int64) -> tuple[NDArray[np.integer[Any]], Int64]:
    """Return record ids sorted by (label, id) and the bounds of the labels that occur."""
    shift = labels.size.bit_length()  # label and id in one integer: a plain sort costs half
    packed = labels << shift
    for begin in range(0, labels.size, _PIECE):  # no second array of n
        packed[begin : begin + _PIECE] |= np.arange(begin, min(begin + _PIECE, labels.size))
    packed.sort()
    narrow = np.int32 if labels.size < 1 << 31 else np.int64
    records: NDArray[np.integer[Any]] = np.empty(labels.size, narrow)
    np.bitwise_and(packed, (1 << shift) - 1, out=records, casting="same_kind")
    packed >>= shift
    changes = np.flatnonzero(packed[1:] != packed[:-1]) + 1
    ends = [labels.size] if labels.size else []
    bounds: Int64 = np.concatenate([[0], changes, ends]).astype(np.int64)
    return records, bounds
