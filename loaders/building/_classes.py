"""Classes: label names as class indices, and the records of an index sorted by class.

Labels are all integers or all names. While shards are scanned, each different name gets the next
index of a `Vocabulary`. The classes are numbered in sorted order when all names are known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from twinfeed.loaders.building.writer import IndexWriter
from twinfeed.loaders.index.class_arrays import READ_ITEMS
from twinfeed.loaders.index.options import Label, is_label
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.samplers import ClassOrder
from twinfeed.samplers.class_order import by_size
from twinfeed.samplers.state import digest

SORTED_AT_ONCE = 1 << 23
"""About how many records are sorted at a time, to bound memory. All labels are read each time."""


class Vocabulary:
    """The different label names in the order of their first occurrence, each with its index.

    None means a record without a label.
    """

    def __init__(self) -> None:
        # A defaultdict stores the next integer for a name that is looked up for the first time.
        self._indices: defaultdict[Label | None, int] = defaultdict(count().__next__)

    def add(self, names: Sequence[Label | None], /) -> Int64s:
        """Add the names that are new, and return the index of each name.

        The first call with ["cat", "dog", "cat"] returns [0, 1, 0].
        """
        # `_indices` is a defaultdict, so looking up a new name adds it with the next index.
        return np.fromiter(map(self._indices.__getitem__, names), np.int64, len(names))

    @property
    def names(self) -> list[Any]:
        """The names, each at its index."""
        return list(self._indices)


def assign_classes(
    names: Sequence[str | None],
    /,
    *,
    classes: Sequence[str] | None,
    background: Label | None,
    from_text: bool,
) -> tuple[Int64s, list[str]]:
    """Return the class index of each label name (int64[n]), and the names of the classes.

    A name of None means a record without a label, which gets the default label `background`. Then
    the first of these cases that applies decides:

    1. `classes` lists all names: the class index of a name is its index in `classes`.
    2. `from_text` is set, since the labels were read from text, and all names are integers such as
       "17": they are the class indices, and `classes` are returned as the names of the classes.
    3. `classes` is None: the class index of a name is its index in the sorted names.

    For example, ["dog", "cat", None] with the background "none" is the third case, and gives
    [1, 0, 2] and ["cat", "dog", "none"].

    Raises:
        ValueError: a name is not in `classes`, or `background` is an integer and labels are names.
    """
    not_integers = [name for name in names if name and not (from_text and _is_integer(name))]
    if not_integers and None in names and isinstance(background, int):
        raise ValueError(
            f"background={background} is an integer, and labels are names ({min(not_integers)!r})"
        )
    filled_names = [str(background) if name is None else name for name in names]
    distinct = set(filled_names)
    unlisted = sorted(distinct.difference(classes or ()))
    if unlisted and from_text and all(map(_is_integer, distinct)):
        class_indices = [int(name) for name in filled_names]
        return np.array(class_indices, np.int64), list(classes or ())
    if unlisted and classes is not None:
        raise ValueError(f"labels are not among classes= ({len(unlisted)}: {unlisted[:5]})")
    if classes is None:
        classes = unlisted
    index_of = {name: class_index for class_index, name in enumerate(classes)}
    return np.array([index_of[name] for name in filled_names], np.int64), list(classes)


def integer_background(background: Label | None, /) -> int:
    """Convert the label of records without a label, `background`, to an integer: "7" becomes 7.

    Raises:
        ValueError: `background` is a name. An index has only integers or only names as labels.
    """
    assert background is not None  # without a `background`, records without a label are refused
    if isinstance(background, str) and not _is_integer(background):
        raise ValueError(f"background={background!r} is a name, and labels are integers")
    return int(background)


def check_classes(classes: Sequence[str] | None, /) -> None:
    """Raise TypeError or ValueError unless `classes` is a list of different names."""
    counts = Counter(checks.names("classes", () if classes is None else classes))
    bad = [name for name, count in counts.items() if count > 1 or not is_label(name)]
    if bad:
        raise ValueError(f"classes must be different names that are not empty, got {bad[:5]}")


def _is_integer(name: str) -> bool:
    """Return whether a string is an int64 as Python writes it: "17" and "-1", but not "017"."""
    try:
        return str(int(name)) == name and -(2**63) <= int(name) < 2**63
    except ValueError:
        return False


def write_class_order(store: IndexWriter, labels: Int64s, classes: Sequence[str], /) -> str:
    """Write the record ids sorted by class, and the start and size of each class; see `ClassOrder`.

    `labels` has the label of each record, int64[records]. Its digest is returned. For [7, 5, 7],
    the array classorder-records is [1, 0, 2], sorted by label. The classes are listed by size, the
    largest first: classorder-starts is [1, 0], and classorder-sizes [2, 1].

    About `SORTED_AT_ONCE` records are sorted at a time: those of a few classes with consecutive
    labels. So the memory does not grow with the number of records.

    Raises:
        ValueError: there are names of `classes`, and a label is not an index of them.
    """
    # the distinct labels, sorted; how many records have each; and the first record that has it
    values, sizes, first_records = _count_classes(labels)
    outside = (values < 0) | (values >= len(classes))
    if classes and outside.any():
        raise ValueError(
            f"labels lie outside [0, {len(classes)}) of classes= ({sizes[outside].sum()}, "
            f"first: {values[outside][:5].tolist()})"
        )
    id_type = np.int32 if len(labels) < 1 << 31 else np.int64
    sorted_ids = store.new("classorder-records", id_type, labels.shape)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    low = 0
    while low < len(values):
        # Take the labels values[low:high], of at most SORTED_AT_ONCE records, but at least one.
        max_end = starts[low] + SORTED_AT_ONCE
        high = max(low + 1, int(np.searchsorted(ends, max_end, side="right")))
        chunks = _records_between(labels, values[low], values[high - 1])
        if high > low + 1:
            ids, chunk_labels = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
            sorted_ids.add(ids[ClassOrder(chunk_labels).records])
        else:  # a single class may have many more records; they are sorted already
            for ids, _ in chunks:
                sorted_ids.add(ids)
        low = high
    largest_first = by_size(sizes, first_records)
    starts, sizes = starts[largest_first], sizes[largest_first]
    store.add({"classorder-starts": starts, "classorder-sizes": sizes})
    return digest(labels)


def _records_between(labels: Int64s, low: int, high: int) -> Iterator[tuple[Int64s, Int64s]]:
    """Yield the ids and labels of the records with a label from `low` to `high`, chunk by chunk.

    A chunk is `READ_ITEMS` consecutive records.
    """
    for start in range(0, len(labels), READ_ITEMS):
        chunk = labels[start : start + READ_ITEMS]
        positions = np.flatnonzero((chunk >= low) & (chunk <= high))
        yield positions + start, chunk[positions]


def _count_classes(labels: Int64s) -> tuple[Array, Int64s, Int64s]:
    """Return the distinct labels, sorted, the count of each, and the first record of each.

    Like `np.unique(labels, return_index=True, return_counts=True)`, but `READ_ITEMS` labels at a
    time, to bound memory. For [7, 5, 7]: [5, 7], [1, 2] and [1, 0].
    """
    values, counts, first = labels[:0], np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in range(0, len(labels), READ_ITEMS):
        chunk = labels[start : start + READ_ITEMS]
        new_values, new_first, new_counts = np.unique(chunk, return_index=True, return_counts=True)
        all_values, inverse = np.unique(np.concatenate([values, new_values]), return_inverse=True)
        all_counts = np.zeros(len(all_values), np.int64)
        np.add.at(all_counts, inverse, np.concatenate([counts, new_counts]))
        all_first = np.full(len(all_values), len(labels))  # larger than any record id
        np.minimum.at(all_first, inverse, np.concatenate([first, new_first + start]))
        values, counts, first = all_values, all_counts, all_first
    return values, counts, first
