"""Labels of records, as an array of integers or of strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.types import Array


def labels_of(data: Any) -> Any:
    """Return the labels of an index or a source of `twinfeed.loaders`; any other argument
    unchanged.
    """
    # An index and a source are recognised by their attribute `digests`. (`isinstance` would need an
    # import of `twinfeed.loaders`, on which samplers must not depend.)
    if not hasattr(data, "digests"):
        return data
    labels = data.labels if hasattr(data, "labels") else data.columns.get("label")
    if labels is None:
        kind = type(data).__name__
        raise ValueError(f"labels must be given, but this {kind} has none: create it with label=")
    return labels


def as_labels(values: ArrayLike, *, name: str = "labels") -> NDArray[np.int64] | NDArray[np.str_]:
    """Return the label of each record as an array, int64[n] or str[n].

    `values` is a list, an array or a column of a table. An int64 array is not copied.

    Raises:
        TypeError: labels are neither all integers nor all strings; the first wrong ones are named.
    """
    if isinstance(values, np.ndarray) and hasattr(values, "mask"):
        values = values.tolist()  # None where masked; np.asarray would drop the mask
    # From a dataset, np.asarray would read all items one by one, so it is not called.
    try:
        array = np.asarray(values) if validate.is_array_like(values) else None
    except ValueError as error:  # tensors of several lengths
        raise TypeError(
            f"{name} must be one label, or a list of labels, for each record: of arrays, give "
            f"lists, as in [labels.tolist() for labels in data]"
        ) from error
    if array is None or array.ndim == 0:
        kind = type(values).__name__
        raise TypeError(f"{name} must be one for each record, such as dataset.targets, got {kind}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    # The kinds of dtypes: i and u are integers, U strings, O Python objects, T strings of variable
    # length (numpy 2). Of ["a", 1], np.asarray makes the strings "a" and "1": keep the types of a
    # list, to check them.
    if array.dtype.kind == "U" and not isinstance(values, np.ndarray):
        array = np.asarray(values, dtype=object)
    if array.dtype.kind in ("O", "T"):
        array = _strings_or_integers(name, array.tolist())
    if array.dtype.kind == "U":
        return array
    if array.size and array.dtype.kind not in ("i", "u"):
        nan = np.flatnonzero(array != array)
        where = f" with NaN at {nan[0]}" if len(nan) else ""
        raise TypeError(f"{name} must be integers or strings, got dtype {array.dtype}{where}")
    return array.astype(np.int64, copy=False)


def _strings_or_integers(name: str, values: list[Any]) -> Array:
    """Return a list of labels as an array, after checking that all are str, or all are integers."""
    if not any(isinstance(value, str) for value in values):
        check_types(name, "integers or strings", values, (int, np.integer))
        return np.array(values)
    check_types(name, "integers or strings, all of one kind", values, str)
    truncated = next((value for value in values if value.endswith("\0")), None)
    if truncated is not None:
        raise ValueError(f"{name} must not end in NUL, which numpy drops, got {truncated!r}")
    return np.array(values, dtype=np.str_)


def check_types(
    name: str, expected: str, values: Sequence[Any], types: type | tuple[type, ...]
) -> None:
    """Raise TypeError, naming the first five others, unless all values of `name` are of these
    types.
    """
    wrong = [index for index, value in enumerate(values) if not isinstance(value, types)]
    if wrong:
        first = ", ".join(f"{values[index]!r} at {index}" for index in wrong[:5])
        raise TypeError(
            f"{name} must be {expected}: {len(wrong):,} of {len(values):,} are not, {first}"
        )
