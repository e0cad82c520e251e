"""Labels as numbers: what becomes of names, of whole numbers in text, and of records without one.

A shard's labels are of one kind, integers or names, and so must those of all shards be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.index.labels import Label, is_label


class Labels(NamedTuple):
    """Hold the label of each record (int64[n]): the integer itself if `names` is None, else its
    place in `names`. `without` are the places of the records that have none, and a 0 here.
    """

    numbers: Int64s
    names: list[str] | None
    without: Int64s


def encode(labels: Sequence[Label | None], /) -> Labels:
    """Return labels, which are all integers or all names, as numbers.

    >>> encode(["dog", None, "cat"])
    Labels(numbers=array([1, 0, 0]), names=['cat', 'dog'], without=array([1]))
    """
    without = np.array([n for n, label in enumerate(labels) if label is None], np.int64)
    if any(label is not None and not isinstance(label, str) for label in labels):
        return Labels(np.array([label or 0 for label in labels], np.int64), None, without)
    names = sorted({str(label) for label in labels if label is not None})
    number: dict[Label | None, int] = {name: n for n, name in enumerate(names)}
    return Labels(np.array([number.get(label, 0) for label in labels], np.int64), names, without)


def join_labels(shards: Sequence[tuple[str, Labels]], /) -> Labels:
    """Return the labels of all shards, given as (path, labels); raise ValueError where some have
    names and some integers.

    >>> join_labels([("a.tar", encode(["dog"])), ("b.tar", encode(["cat", None]))])
    Labels(numbers=array([1, 0, 0]), names=['cat', 'dog'], without=array([2]))
    """
    named = [(path, names[0]) for path, (_, names, _) in shards if names]
    integers = [path for path, (_, names, _) in shards if names is None]
    if named and integers:
        path, name = named[0]
        raise ValueError(f"labels are names in {path} ({name!r}) and integers in {integers[0]}")
    all_names = sorted({name for _, (_, names, _) in shards for name in names or ()})
    place = _places(all_names)
    numbers, without, start = [], [], 0
    for _, labels in shards:
        numbers.append(_renumbered(labels, place))
        without.append(labels.without + start)
        start += len(labels.numbers)
    return Labels(np.concatenate(numbers), None if integers else all_names, np.concatenate(without))


def label_column(
    labels: Labels,
    /,
    *,
    classes: Sequence[str] | None,
    background: Label | None,
    from_text: bool,
) -> tuple[Int64s, list[str]]:
    """Return the labels as numbers, the background filled in, and the names of the classes.

    With `from_text`, text that is a whole number in every record is a number, unless `classes`
    lists it as a name.

    >>> label_column(encode(["7", "-2"]), classes=None, background=None, from_text=True)
    (array([ 7, -2]), [])
    """
    if len(labels.without):
        assert background is not None
        labels = _filled(labels, background, from_text)
    numbers, names, _ = labels
    if names is not None and classes is not None and set(names) <= set(classes):
        return _renumbered(labels, _places(classes)), list(classes)
    if names is not None and from_text and all(map(_is_integer, names)):
        numbers, names = np.array([int(name) for name in names], np.int64)[numbers], None
    if names is None:
        return check_range(numbers, classes or ()), list(classes or ())
    if classes is not None:
        unknown = sorted(set(names) - set(classes))
        raise ValueError(f"{len(unknown)} labels are not among classes= (first: {unknown[:5]})")
    return numbers, names


def check_classes(classes: Sequence[str] | None, /) -> None:
    """Raise TypeError or ValueError for `classes` that are no list of different names.

    >>> check_classes(["cat", "dog", "cat"])
    Traceback (most recent call last):
    ValueError: classes must be different names, and not empty, got ['cat']
    """
    if classes is None:
        return
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise TypeError(f"classes must be a list of names, got {classes!r}")
    bad = [name for name, count in Counter(classes).items() if count > 1 or not is_label(name)]
    if bad:
        raise ValueError(f"classes must be different names, and not empty, got {bad[:5]}")


def check_range(labels: npt.NDArray[np.generic] | None, classes: Sequence[str], /) -> Int64s:
    """Return labels that are numbers of `classes`, checked."""
    if labels is None or labels.ndim != 1 or labels.dtype.kind != "i":
        raise ValueError(
            "classes= names integer labels, and there are none: say where they are with label="
        )
    numbers = labels.astype(np.int64, copy=False)
    if classes and len(numbers):
        outside = numbers[(numbers < 0) | (numbers >= len(classes))]
        if len(outside):
            raise ValueError(
                f"{len(outside)} labels lie outside the {len(classes)} classes= "
                f"(first: {outside[:5].tolist()})"
            )
    return numbers


def _filled(labels: Labels, background: Label, from_text: bool) -> Labels:
    """Give the background to the records that have no label."""
    numbers, names, without = labels
    whole = isinstance(background, int) or _is_integer(background)
    if names is None or (not names and isinstance(background, int)):
        if not whole:
            raise ValueError(f"background={background!r} is a name, and labels are integers")
        numbers[without] = int(background)
        return Labels(numbers, None, without)
    if isinstance(background, int) and not (from_text and all(map(_is_integer, names))):
        name = next(name for name in names if not (from_text and _is_integer(name)))
        raise ValueError(f"background={background} is an integer, and labels are names ({name!r})")
    all_names = sorted({*names, str(background)})
    numbers = _renumbered(labels, _places(all_names))
    numbers[without] = all_names.index(str(background))
    return Labels(numbers, all_names, without)


def _places(names: Sequence[str]) -> dict[str, int]:
    """Return the place of each name."""
    return {name: n for n, name in enumerate(names)}


def _renumbered(labels: Labels, place: Mapping[str, int]) -> Int64s:
    """Return numbers into other names, given their places; integers stay as they are."""
    if labels.names is None:
        return labels.numbers
    return np.array([place[name] for name in labels.names] or [0], np.int64)[labels.numbers]


def _is_integer(name: str) -> bool:
    """Tell whether text is an integer as Python writes it."""
    try:
        return str(int(name)) == name and -(2**63) <= int(name) < 2**63
    except ValueError:
        return False
