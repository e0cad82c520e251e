"""Classes: label names as class indices, and the records of an index sorted by class.

Labels are all integers or all names. While shards are scanned, each different text gets the next
index of a `Vocabulary`. When all texts are known, `assign_classes` decides whether they are
integers or names, which it numbers in sorted order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Literal

import numpy as np

from twinfeed.loaders.building.writer import IndexWriter
from twinfeed.loaders.index.options import Label, as_label
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.samplers import ClassOrder
from twinfeed.samplers.class_order import by_size
from twinfeed.samplers.state import digest

Classes = Sequence[str] | Literal["names"] | None
"""The user's `classes=`: the names by number; "names" takes every text as a name."""

_NAMES_ADVICE = (
    "correct it, or take all labels as names: build_index(…, classes='names') (--label-names), an "
    "index that pack takes too"
)

SORTED_AT_ONCE = 1 << 23
"""About how many records are sorted at a time, to bound memory. All labels are read each time."""

READ_ITEMS = 1 << 20
"""The number of labels that are read at a time, to bound memory."""


class Vocabulary:
    """The different labels in the order of their first occurrence, each with its index."""

    def __init__(self) -> None:
        # A defaultdict stores the next integer for a name that is looked up for the first time.
        self._indices: defaultdict[Label | None, int] = defaultdict(count().__next__)

    def add(self, names: Sequence[Label | None], /) -> Int64s:
        """Add the names that are new, and return the index of each: [0, 1, 0] for cat, dog, cat."""
        # `_indices` is a defaultdict, so looking up a new name adds it with the next index.
        return np.fromiter(map(self._indices.__getitem__, names), np.int64, len(names))

    @property
    def names(self) -> list[Any]:
        """The names, each at its index."""
        return list(self._indices)


def assign_classes(
    texts: Sequence[str | None],
    /,
    *,
    classes: Classes,
    background: Label | None,
    where: Callable[[str], str],
) -> tuple[Int64s, list[str]]:
    """Return the class index of each text that is a label (int64[n]), and the names of the classes.

    A text of None gets the default label `background`. The first of these cases that applies
    decides:

    1. `classes` is "names": the class index of a text is its index in the sorted texts.
    2. `classes` lists all texts: the class index is the index in `classes`.
    3. All texts are integers, and `classes` lists none of them: they are the class indices.
    4. `classes` is None, and no text is an integer: as 1.

    Anything else is an error; `where` says for a text which record has it.
    """
    filled = [str(background) if text is None else text for text in texts]
    integers = {text: _as_integer(text) for text in filled}
    names = [text for text, integer in integers.items() if integer is None]
    listed = {*classes} if isinstance(classes, tuple) else set[str]()
    unlisted = [text for text in integers if text not in listed]

    def first_record(text: str) -> str:
        return f"{where(text)}: {text!r}" if text in texts else f"background={text!r}"

    if classes == "names" or (classes is None and len(names) == len(integers)):
        ordered = sorted(integers)
    elif classes is not None and not unlisted:
        ordered = list(classes)
    elif not names and len(unlisted) == len(integers):
        _check_spellings(integers, first_record)
        return np.array([integers[text] for text in filled], np.int64), list(classes or ())
    elif classes is None:
        integer = next(text for text, number in integers.items() if number is not None)
        raise ValueError(
            f"{len(integers) - len(names)} of {len(integers)} labels are integers, and this is not:"
            f" {first_record(names[0])}; an integer: {first_record(integer)}\n{_NAMES_ADVICE}"
        )
    else:
        bad = [text for text in names if text not in listed] or unlisted
        listing, advice = "integers", "it; classes=() allows integers alone"
        if classes:
            listing, advice = f"among the {len(classes)} names of classes=", "it, or list the name"
        first = f"{len(bad)}, first: {first_record(bad[0])}"
        raise ValueError(f"labels are not {listing} ({first}): correct {advice}")
    index_of = {name: class_index for class_index, name in enumerate(ordered)}
    return np.array([index_of[text] for text in filled], np.int64), ordered


def integer_background(background: Label | None, /) -> int:
    """Convert the label of records without a label, `background`, to an integer: "7" becomes 7.

    Raises:
        ValueError: `background` is a name. An index has only integers or only names as labels.
    """
    assert background is not None  # without a `background`, records without a label are refused
    integer = _as_integer(str(background))
    if integer is None:
        raise ValueError(f"background={background!r} is a name, and labels are integers")
    return integer


def check_classes(classes: Classes, /) -> Classes:
    """Return `classes`; raise an error unless it is a list of different names, "names" or None."""
    if classes is None or (isinstance(classes, str) and classes == "names"):
        return classes
    counts = Counter(checks.names("classes", classes))
    bad = [name for name, count in counts.items() if count > 1 or as_label(name) is None]
    if bad:
        raise ValueError(f"classes must be different names that are not empty, got {bad[:5]}")
    return tuple(counts)


def _as_integer(text: str) -> int | None:
    """Return the int64 that a text is, such as "17", "-1", "007" or "7.0"; None for a name."""
    match = re.fullmatch(r"(-?)0*([0-9]{1,19})(\.0*)?", text)
    if match is None:
        return None
    value = int(match[1] + match[2])
    bound = 1 << (53 if match[3] else 63)
    return value if -bound <= value < bound else None


def _check_spellings(texts: Iterable[str], first_record: Callable[[str], str]) -> None:
    """Raise ValueError if two texts, such as "7" and "007", are one integer; "7.0" is "7"."""
    first_texts = dict[int | None, str]()
    for text in texts:
        first = first_texts.setdefault(_as_integer(text), text)
        if first.partition(".")[0] != text.partition(".")[0]:
            raise ValueError(
                f"two labels are one integer: {first_record(first)}; {first_record(text)}\n"
                + _NAMES_ADVICE
            )


def write_class_order(store: IndexWriter, labels: Int64s, classes: Sequence[str], /) -> str:
    """Write the record ids sorted by class, and each class's start and size; see `ClassOrder`.

    About `SORTED_AT_ONCE` records are sorted at a time, to bound memory. The digest of `labels`
    (int64[records]) is returned.
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
    """Yield ids and labels of the records with a label from `low` to `high`, in chunks."""
    for start in range(0, len(labels), READ_ITEMS):
        chunk = labels[start : start + READ_ITEMS]
        positions = np.flatnonzero((chunk >= low) & (chunk <= high))
        yield positions + start, chunk[positions]


def _count_classes(labels: Int64s) -> tuple[Array, Int64s, Int64s]:
    """Return the distinct labels, sorted, their counts and first records, in chunks."""
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
