"""Check the `split` argument, and compute the number of records of each split."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping
from itertools import accumulate, pairwise

Split = Mapping[str, int | float]


def check_split(split: Split, seed: int | None, /) -> None:
    """Check the `split` argument of `pack`."""
    if not isinstance(split, Mapping) or not split:
        raise TypeError(
            "split must map names to numbers of records or fractions, such as "
            f"{{'train': 0.8, 'eval': 0.2}}, got {reprlib.repr(split)}"
        )
    for name, size in split.items():
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise ValueError(f"split= names must be valid file names, got {name!r}")
        if isinstance(size, bool) or not isinstance(size, numbers.Real):
            raise TypeError(f"split= sizes must be numbers, got {reprlib.repr(size)} for {name!r}")
        if not size >= 0:
            raise ValueError(f"split= sizes must be at least 0, got {size!r} for {name!r}")
    if seed is None:
        raise ValueError("split= needs a seed=, since records are assigned to splits at random")


def counts_of(split: Split, n: int, /) -> dict[str, int]:
    """Return the size of each split: {"a": 0.8, "b": 0.2} of 11 is {"a": 9, "b": 2}."""
    if n == 0:
        raise ValueError("there is nothing to pack: the source is empty")
    total = sum(split.values())
    if all(isinstance(size, numbers.Integral) for size in split.values()):
        if total != n:
            raise ValueError(
                f"split= must add up to the {n} records of the source, got {total}: "
                f"give counts, or fractions that add up to 1, such as 0.8 and 0.2"
            )
        return {name: int(size) for name, size in split.items()}
    if not math.isclose(total, 1):
        raise ValueError(f"split= must be counts, or fractions that add up to 1, got {total:g}")
    ends = [round(fraction * n) for fraction in accumulate(split.values(), initial=0.0)]
    return {name: end - start for name, (start, end) in zip(split, pairwise(ends), strict=True)}
