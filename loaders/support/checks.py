"""Checks of arguments that are not numbers: names, dicts, ids, and numbers of bytes as text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers.validate import unmasked


def bytes_of(text: str, /) -> int:
    """Return a number of bytes from text such as "2G"; raise ValueError for other text.

    >>> bytes_of("2G"), bytes_of("500 MB"), bytes_of("1.5 GiB")
    (2000000000, 500000000, 1610612736)
    """
    match = re.fullmatch(r"([\d_]*\.?\d+)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} must be a number of bytes, such as 100M or 1.5 GiB")
    power = " kmgt".index(match[2] or " ")
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** power)


def names(name: str, values: Iterable[str], /, *, ordered: bool = False) -> tuple[str, ...]:
    """Return the user's names as a tuple of strings; `name` is the argument, for the error. A set
    or a dict (which says the order by its values) is refused where the names are `ordered`.
    """
    refused = (str, set, frozenset, Mapping) if ordered else str
    if isinstance(values, Iterable) and not isinstance(values, refused):
        strings = tuple(values)
        if all(isinstance(value, str) for value in strings):
            return strings
    raise TypeError(f"{name} must be a list of names, got {values!r}")


def mapping(name: str, values: Mapping[str, Any] | None, /) -> dict[str, Any]:
    """Return a copy of the user's dict, empty for None; raise TypeError for another type."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{name} must be a dict, got {values!r}")
    return dict(values or {})


def as_ids(ids: Int64s | Iterable[int], name: str = "ids", /) -> Int64s:
    """Return the user's ids, an array or any iterable, as int64[n]."""
    if isinstance(ids, Iterable) and not isinstance(ids, np.ndarray):
        ids = list(ids)  # a set or an iterator too
    array = unmasked(name, ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise IndexError(f"{name} must be below 2^63, got {array.max()}")
    return array.astype(np.int64, copy=False)


def check_ids(ids: Int64s | Iterable[int], records: int, name: str = "ids", /) -> Int64s:
    """Return the user's ids as int64[n]; raise IndexError for an id outside `[0, records)`."""
    array = as_ids(ids, name)
    if len(array):
        check_bounds(int(array.min()), int(array.max()), records, name)
    return array


def check_bounds(low: int, high: int, records: int, name: str = "ids", /) -> None:
    """Raise IndexError unless the lowest and the highest id lie within `[0, records)`."""
    if low < 0 or high >= records:
        raise IndexError(f"{name} must lie in [0, {records}), got {low if low < 0 else high}")
