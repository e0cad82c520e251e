"""Records grouped by class, in numpy arrays alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, spread
from twinfeed.samplers._state import digest

_PIECE = 1 << 20


class Classes:
    """Record ids sorted by class, and where each class begins.

    Classes are numbered by their first record, so a stream does not depend on how labels are
    written: 3, "3" and "cat" are the same class if the same records carry them.
    """

    def __init__(self, labels: ArrayLike, records: ArrayLike | None = None) -> None:
        """Group labels, int or str [n], by one sort; those of some records only, if ids are given.

        ``digest`` is of all labels, ``records_digest`` of those ids, or None.
        """
        array = _validate.labels(labels)
        self.num_records = len(array)
        self.digest = digest(array)
        chosen = None if records is None else _among(records, len(array))
        self.records_digest = None if chosen is None else digest(chosen)
        self.records, bounds = _grouped(_compact(array if chosen is None else array[chosen]))
        if chosen is not None:
            self.records = chosen[self.records]
        starts = bounds[:-1]
        by_first = np.argsort(self.records[starts])
        self.starts, self.sizes = starts[by_first], np.diff(bounds)[by_first]

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.sizes)

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Leave the other classes out."""
        self.starts, self.sizes = self.starts[kept], self.sizes[kept]

    def ids(self, number: Int64, member: Int64) -> Int64:
        """Return the record ids of members (0 … size - 1) of classes, broadcast."""
        ids: Int64 = self.records[self.starts[number] + member].astype(np.int64)
        return ids


def _among(records: ArrayLike, num_records: int) -> Int64:
    """Return the ids of records, sorted, which must be some of those that have labels."""
    ids = _validate.distinct("records", _validate.integers("records", records, minimum=0))
    if len(ids) and ids[-1] >= num_records:
        raise ValueError(f"records must be below the {num_records} that have labels, got {ids[-1]}")
    return ids


def super_of_class(classes: Classes, super_labels: ArrayLike | None) -> Int64:
    """Return a number for the super-class of each class, all the same where none are given."""
    if super_labels is None:
        return np.zeros(len(classes), np.int64)
    parents = _compact(_validate.labels(super_labels, name="super_labels"))
    if len(parents) != classes.num_records:
        raise ValueError(
            f"super_labels must be as many as labels, {classes.num_records}, got {len(parents)}"
        )
    owner, place = spread(classes.sizes)
    record = classes.ids(owner, place)
    first = record[np.cumsum(classes.sizes) - classes.sizes]
    strays = np.flatnonzero(parents[record] != parents[first][owner])
    if strays.size:
        here, there = record[strays[0]], first[owner[strays[0]]]
        raise ValueError(
            f"super_labels must agree within a class: records {there} and {here} have one label "
            f"and two super-labels"
        )
    found: Int64 = parents[first]
    return found


def _compact(labels: NDArray[Any]) -> Int64:
    """Return labels as integers from 0 that sort fast."""
    if labels.dtype.kind == "U":
        return np.unique(labels, return_inverse=True)[1]
    if labels.size and _bits(int(labels.max()) - int(labels.min())) + _bits(labels.size) > 63:
        return np.unique(labels, return_inverse=True)[1]
    return labels - labels.min() if labels.size and labels.min() else labels


def _grouped(labels: Int64) -> tuple[NDArray[np.integer[Any]], Int64]:
    """Return record ids sorted by (label, id) and the bounds of the labels that occur.

    Label and id are packed into one integer: a plain sort then costs half a stable argsort.
    """
    shift = _bits(labels.size)
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


def _bits(value: int) -> int:
    """Return how many bits hold ``0 … value``."""
    return value.bit_length()
