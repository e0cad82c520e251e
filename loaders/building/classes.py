"""Classes: label names as class indices, and the records of an index sorted by class.

Labels are all integers or all names. While a shard is scanned, each different label gets the next
number. When the labels of all shards are known, `assign_classes` decides whether texts are integers
or names, which it numbers in sorted order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from twinfeed.loaders.building.writer import IndexWriter
from twinfeed.loaders.index.options import Label, as_label
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.samplers.class_order import by_size, small_integers, sort_by_label
from twinfeed.samplers.drawing.int_arrays import ranges
from twinfeed.samplers.state import digest

Classes = Sequence[str] | Literal["names"] | None
"""The user's `classes=`: the names by number; "names" takes every text as a name."""

_NAMES_ADVICE = (
    "correct it, or take all labels as names: build_index(…, classes='names') (--label-names), an "
    "index that pack takes too"
)

READ_ITEMS = 1 << 20
"""The number of labels that are sorted at a time, to bound memory."""


def assign_classes(
    first_records: dict[Any, str], /, *, classes: Classes, background: Label | None
) -> tuple[dict[Any, int], list[str]]:
    """Return the class index of each label, and the names of the classes.

    `first_records` says for each label which record is the first that has it. A label of None, of
    records without a label, becomes `background`. The first of these cases that applies decides:

    1. `classes` is "names": the class index of a text is its index in the sorted texts.
    2. `classes` lists all texts: the class index is the index in `classes`.
    3. All texts are integers, and `classes` lists none of them: they are the class indices.
    4. `classes` is None, and no text is an integer: as 1.

    Anything else is an error. Labels that are integers, and not texts, are always class indices.
    """
    first_of_kind = {type(label): label for label in reversed(first_records) if label is not None}
    class_names = list(classes) if isinstance(classes, tuple) else []

    def describe(label: Label | None) -> str:
        record = first_records[label]
        return f"background={background!r}" if label is None else f"{record}: {label!r}"

    if len(first_of_kind) > 1:
        integer, name = (describe(first_of_kind[kind]) for kind in (int, str))
        both = f"an integer ({integer}) and a name ({name})"
        raise ValueError(f"labels must be all integers or all names, got {both}")
    default: Any = _as_integer(str(background))
    if int in first_of_kind:
        if None in first_records and default is None:
            raise ValueError(f"background={background!r} is a name, and labels are integers")
        # Without a text of each, as there may be as many as records.
        return {label: default if label is None else label for label in first_records}, class_names
    texts = {label: str(background if label is None else label) for label in first_records}
    integers: dict[Any, Any] = {label: _as_integer(text) for label, text in texts.items()}
    names = [label for label, integer in integers.items() if integer is None]
    listed = {*class_names}
    unlisted = [label for label, text in texts.items() if text not in listed]
    if classes == "names" or (classes is None and len(names) == len(texts)):
        class_names = sorted({*texts.values()})
    elif not names and len(unlisted) == len(texts):
        _check_spellings(texts, describe)
        return integers, class_names
    elif classes is None:
        integer = next(label for label, number in integers.items() if number is not None)
        raise ValueError(
            f"{len(texts) - len(names)} of {len(texts)} labels are integers, and this is not:"
            f" {describe(names[0])}; an integer: {describe(integer)}\n{_NAMES_ADVICE}"
        )
    elif unlisted:
        bad = [label for label in names if texts[label] not in listed] or unlisted
        what, advice = "integers", "it; classes=() allows integers alone"
        if class_names:
            what = f"among the {len(class_names)} names of classes="
            advice = "it, or list the name"
        first = f"{len(bad)}, first: {describe(bad[0])}"
        raise ValueError(f"labels are not {what} ({first}): correct {advice}")
    index_of = {name: class_index for class_index, name in enumerate(class_names)}
    return {label: index_of[text] for label, text in texts.items()}, class_names


def check_classes(classes: Classes, /) -> Classes:
    """Return `classes`; raise an error unless it is a list of different names, "names" or None."""
    if classes is None or (isinstance(classes, str) and classes == "names"):
        return classes
    counts = Counter(checks.names("classes", classes, ordered=True))
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


def _check_spellings(texts: dict[Any, str], describe: Callable[[Any], str]) -> None:
    """Raise ValueError if two texts, such as "7" and "007", are one integer; "7.0" is "7"."""
    first_labels = dict[int | None, Any]()
    for label, text in texts.items():
        first = first_labels.setdefault(_as_integer(text), label)
        if texts[first].partition(".")[0] != text.partition(".")[0]:
            raise ValueError(
                f"two labels are one integer: {describe(first)}; {describe(label)}\n"
                + _NAMES_ADVICE
            )


def write_class_order(store: IndexWriter, labels: Int64s, classes: Sequence[str], /) -> str:
    """Write the record ids sorted by class, and each class's start and size; see `ClassOrder`.

    Each chunk of `READ_ITEMS` records is sorted, and its ids are written after those that earlier
    chunks have of each class. The digest of `labels` (int64[records]) is returned.
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
    file = store.new("classorder-records", id_type, labels.shape)
    for start in range(0, len(labels), READ_ITEMS):
        # Zeros take the place on the disk: a full disk is an error here, and a crash in a map.
        file.add(np.zeros(min(READ_ITEMS, len(labels) - start), id_type))
    sorted_ids, starts = file.mapped(), np.cumsum(sizes) - sizes
    ends = starts.copy()  # of the ids of each class that are written
    for ids, chunk_values, counts in _sorted_chunks(labels):
        present = np.searchsorted(values, chunk_values)
        sorted_ids[ranges(ends[present], ends[present] + counts)] = ids
        ends[present] += counts
    sorted_ids.flush()
    largest_first = by_size(sizes, first_records)
    starts, sizes = starts[largest_first], sizes[largest_first]
    store.add({"classorder-starts": starts, "classorder-sizes": sizes})
    return digest(labels)


def _sorted_chunks(labels: Int64s) -> Iterator[tuple[Int64s, Int64s, Int64s]]:
    """Yield the ids of each chunk, sorted by label, its distinct labels, and their counts."""
    for start in range(0, len(labels), READ_ITEMS):
        chunk = labels[start : start + READ_ITEMS]
        order, bounds = sort_by_label(small_integers(chunk))
        yield order.astype(np.int64) + start, chunk[order[bounds[:-1]]], np.diff(bounds)


def _count_classes(labels: Int64s) -> tuple[Array, Int64s, Int64s]:
    """Return the distinct labels, sorted, their counts and first records, in chunks."""
    values, counts, first = labels[:0], np.zeros(0, np.int64), np.zeros(0, np.int64)
    for ids, new_values, new_counts in _sorted_chunks(labels):
        new_first = ids[np.cumsum(new_counts) - new_counts]
        all_values, inverse = np.unique(np.concatenate([values, new_values]), return_inverse=True)
        all_counts = np.zeros(len(all_values), np.int64)
        np.add.at(all_counts, inverse, np.concatenate([counts, new_counts]))
        all_first = np.full(len(all_values), len(labels))  # larger than any record id
        np.minimum.at(all_first, inverse, np.concatenate([first, new_first]))
        values, counts, first = all_values, all_counts, all_first
    return values, counts, first
