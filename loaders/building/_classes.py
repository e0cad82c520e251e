"""Classes: labels as numbers, and the records of an index sorted by class.

Labels are all integers or all names. While shards are scanned, names are numbered by first
occurrence, with None for a record without a label. Classes are numbered when all names are known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from twinfeed.loaders.building.writer import IndexWriter
from twinfeed.loaders.index.class_arrays import READ
from twinfeed.loaders.index.options import Label, is_label
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.samplers import ClassOrder
from twinfeed.samplers.class_order import by_size
from twinfeed.samplers.state import digest

SORTED_AT_ONCE = 1 << 23
"""The number of records sorted at a time. All labels are read for each such chunk."""


class Vocabulary:
    """Number names by first occurrence, from 0."""

    def __init__(self) -> None:
        self._numbers: defaultdict[Label | None, int] = defaultdict(count().__next__)

    def add(self, names: Sequence[Label | None], /) -> Int64s:
        """Return the number of each name; new names get the next numbers."""
        return np.fromiter(map(self._numbers.__getitem__, names), np.int64, len(names))

    @property
    def names(self) -> list[Any]:
        """Every name, by its number."""
        return list(self._numbers)


def class_numbers(
    names: Sequence[str | None],
    /,
    *,
    classes: Sequence[str] | None,
    background: Label | None,
    from_text: bool,
) -> tuple[Int64s, list[str]]:
    """Return the class number of each name (int64[n]), and the names of the classes by number.

    A name of None is that of a record without a label: its class is `background`. With `from_text`,
    names that are all integers written as text become integers, unless `classes` lists all of them.
    """
    texts = [name for name in names if name is not None and not (from_text and _is_integer(name))]
    if texts and None in names and isinstance(background, int):
        raise ValueError(
            f"background={background} is an integer, and labels are names ({min(texts)!r})"
        )
    names_or_background = [str(background) if name is None else name for name in names]
    distinct = set(names_or_background)
    if classes is None or not distinct <= set(classes):
        if from_text and all(map(_is_integer, distinct)):
            numbers = [int(name) for name in names_or_background]
            return np.array(numbers, np.int64), list(classes or ())
        if classes is not None:
            unknown = sorted(distinct - set(classes))
            raise ValueError(f"labels are not among classes= ({len(unknown)}: {unknown[:5]})")
        classes = sorted(distinct)
    number_of = {name: number for number, name in enumerate(classes)}
    return np.array([number_of[name] for name in names_or_background], np.int64), list(classes)


def integer_background(background: Label | None, /) -> int:
    """Return the background label as an integer, for integer labels."""
    if isinstance(background, str) and not _is_integer(background):
        raise ValueError(f"background={background!r} is a name, and labels are integers")
    return int(background or 0)


def check_classes(classes: Sequence[str] | None, /) -> None:
    """Raise TypeError or ValueError unless `classes` is a list of different names."""
    counts = Counter(checks.names("classes", () if classes is None else classes))
    bad = [name for name, count in counts.items() if count > 1 or not is_label(name)]
    if bad:
        raise ValueError(f"classes must be different names, and not empty, got {bad[:5]}")


def _is_integer(name: str) -> bool:
    """Return whether a text is an int64 as Python writes it."""
    try:
        return str(int(name)) == name and -(2**63) <= int(name) < 2**63
    except ValueError:
        return False


def write_class_order(store: IndexWriter, labels: Int64s, classes: Sequence[str], /) -> str:
    """Write the record ids sorted by class, and the start and size of each class, to `store`.

    `labels` is int64[records], and its digest is returned. About `SORTED_AT_ONCE` records are sorted at a
    time, so the memory does not grow with the number of labels.

    Raises:
        ValueError: a label is not the number of one of the `classes`, if there are names.
    """
    values, sizes, first = _count_classes(labels)
    outside = (values < 0) | (values >= len(classes))
    if classes and outside.any():
        raise ValueError(
            f"labels lie outside [0, {len(classes)}) of classes= ({sizes[outside].sum()}, "
            f"first: {values[outside][:5].tolist()})"
        )
    narrow = np.int32 if len(labels) < 1 << 31 else np.int64
    records = store.new("classorder-records", narrow, labels.shape)
    ends = np.cumsum(sizes)
    low = 0
    while low < len(values):  # the classes [low, high), by the order of their labels
        start = int(ends[low] - sizes[low])
        high = max(low + 1, int(np.searchsorted(ends, start + SORTED_AT_ONCE, side="right")))
        chunks = _records_between(labels, values[low], values[high - 1])
        if high > low + 1:
            ids, chunk_labels = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
            records.add(ids[ClassOrder(chunk_labels).records])
        else:  # the records of a single class are sorted already, however many they are
            for ids, _ in chunks:
                records.add(ids)
        low = high
    class_rank = by_size(sizes, first)
    starts = ends - sizes
    store.add({"classorder-starts": starts[class_rank], "classorder-sizes": sizes[class_rank]})
    return digest(labels)


def _records_between(labels: Int64s, low: int, high: int) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield chunks of (record ids, their labels), of the records with labels in [low, high]."""
    for start in range(0, len(labels), READ):
        chunk = labels[start : start + READ]
        found = np.flatnonzero((chunk >= low) & (chunk <= high))
        yield found + start, chunk[found]


def _count_classes(labels: Int64s) -> tuple[Array, Int64s, Int64s]:
    """Return the distinct labels, sorted, the count of each, and the first record of each.

    Like `np.unique(labels, return_index=True, return_counts=True)`, but chunk by chunk.
    """
    values, counts, first = labels[:0], np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in range(0, len(labels), READ):
        new_values, new_first, new_counts = np.unique(
            labels[start : start + READ], return_index=True, return_counts=True
        )
        all_values, inverse = np.unique(np.concatenate([values, new_values]), return_inverse=True)
        all_counts = np.zeros(len(all_values), np.int64)
        np.add.at(all_counts, inverse, np.concatenate([counts, new_counts]))
        all_first = np.full(len(all_values), len(labels))
        np.minimum.at(all_first, inverse, np.concatenate([first, new_first + start]))
        values, counts, first = all_values, all_counts, all_first
    return values, counts, first
