"""Labels as numbers: what becomes of names, of whole numbers in text, and of records without one.

Labels are all integers or all names. A name is numbered as it comes, and a record without a label
has the number of None. The numbers of the classes are known when all names are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from twinfeed.loaders._checks import Array, Int64s
from twinfeed.loaders._checks import names as checked_names
from twinfeed.loaders.index.labels import Label, is_label

PIECE = 1 << 20


class Numbering:
    """Number names as they come, the same name always the same."""

    def __init__(self) -> None:
        self._numbers: defaultdict[Label | None, int] = defaultdict(count().__next__)

    def of(self, names: Sequence[Label | None], /) -> Int64s:
        """Return the number of each name."""
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
    """Return the number that each name stands for, None being the background, and the names of the
    classes.

    With `from_text`, text that is a whole number in every record is a number, unless `classes`
    lists it as a name.
    """
    texts = [name for name in names if name is not None and not (from_text and _is_integer(name))]
    if texts and None in names and isinstance(background, int):
        raise ValueError(
            f"background={background} is an integer, and labels are names ({min(texts)!r})"
        )
    filled = [str(background) if name is None else name for name in names]
    known = set(filled)
    if classes is None or not known <= set(classes):
        if from_text and all(map(_is_integer, known)):
            return np.array([int(name) for name in filled], np.int64), list(classes or ())
        if classes is not None:
            unknown = sorted(known - set(classes))
            raise ValueError(f"labels are not among classes= ({len(unknown)}: {unknown[:5]})")
        classes = sorted(known)
    place = {name: n for n, name in enumerate(classes)}
    return np.array([place[name] for name in filled], np.int64), list(classes)


def whole_background(background: Label | None, /) -> int:
    """Return the background of labels that are integers."""
    if isinstance(background, str) and not _is_integer(background):
        raise ValueError(f"background={background!r} is a name, and labels are integers")
    return int(background or 0)


def check_classes(classes: Sequence[str] | None, /) -> None:
    """Raise TypeError or ValueError for `classes` that are no list of different names."""
    counts = Counter(checked_names("classes", () if classes is None else classes))
    bad = [name for name, count in counts.items() if count > 1 or not is_label(name)]
    if bad:
        raise ValueError(f"classes must be different names, and not empty, got {bad[:5]}")


def check_range(labels: Array, classes: Sequence[str], /) -> None:
    """Raise ValueError for labels that are no numbers of `classes`."""
    pieces = (labels[start : start + PIECE] for start in range(0, len(labels), PIECE))
    outside = [piece[(piece < 0) | (piece >= len(classes))] for piece in pieces]
    bad = sum(map(len, outside))
    if bad:
        first = np.concatenate(outside)[:5].tolist()
        raise ValueError(
            f"labels lie outside [0, {len(classes)}) of classes= ({bad}, first: {first})"
        )


def _is_integer(name: str) -> bool:
    """Tell whether text is an integer as Python writes it."""
    try:
        return str(int(name)) == name and -(2**63) <= int(name) < 2**63
    except ValueError:
        return False
