"""Arrays: their types, and how values of other libraries become arrays of numpy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from twinfeed.samplers.types import Array, Ids, Int64s

__all__ = ["Array", "Ids", "Int64s", "as_array", "as_list", "keeps_numbers"]

_FLOATS = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
_COLUMN = "to_pylist", "to_list", "isna"  # methods of columns of pyarrow, polars and pandas


def as_array(value: Any, /) -> Array:
    """Return a value as a numpy array; a bfloat16 tensor of torch gets the dtype of ml_dtypes.

    Raises:
        TypeError: numpy would round integers of a list, since it has a float or both an integer of
            2**63 or more and a smaller one; or would make NaN of a null of pyarrow, pandas or
            polars.

    >>> as_array([1, 2])
    array([1, 2])
    """
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):  # no value is rounded, and none is null
        return np.asarray(value)
    if str(dtype) != "torch.bfloat16":
        array = np.asarray(value)
        if array.ndim and array.dtype in _FLOATS:
            of_list = dtype is None and array.dtype == np.float64
            if of_list or any(hasattr(value, name) for name in _COLUMN):
                _check_exact(value, array)
        return array
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError("bfloat16 in numpy needs the package ml_dtypes") from None
    return np.asarray(value.view(sys.modules["torch"].int16)).view(bfloat16)


def as_list(column: Any, /) -> Any:
    """Return a column of Arrow, polars, pandas or numpy as a list; a list or a tuple unchanged.

    >>> as_list(np.arange(2))
    [0, 1]
    """
    methods = (getattr(column, name, None) for name in ("to_pylist", "to_list", "tolist"))
    return next((method() for method in methods if method is not None), column)


def keeps_numbers(numbers: Array, dtype: np.dtype[Any], /) -> bool:
    """Return whether each integer keeps its value, and each finite float stays finite, if it is
    cast to a dtype of numbers.

    >>> keeps_numbers(np.array(257), np.dtype(np.uint8))
    False
    """
    is_float = numbers.dtype.kind == "f"
    if is_float:
        scalar = numbers.ndim == 0  # np.vdot is slow
        square = (x := numbers.item()) * x if scalar else float(np.vdot(numbers, numbers))
        if square <= 65504**2:  # none is larger than the largest float16
            return True
    with np.errstate(all="ignore"):  # a number may be too large for the dtype
        cast = np.real(numbers.astype(dtype))
        if is_float:
            return bool((np.isfinite(cast) | ~np.isfinite(numbers)).all())
        is_kept = bool(np.array_equal(cast.astype(numbers.dtype), numbers))
    # 2**63 becomes negative as int64, and -2**63 infinite as float16; cast back, both are the same.
    if is_kept and dtype.kind in "iu":
        is_kept = np.array_equal(cast < 0, numbers < 0)
    return is_kept and (dtype.char != "e" or bool(np.isfinite(cast).all()))


def _check_exact(values: Any, array: Array) -> None:
    """Raise TypeError if an integer or a null is another number, or NaN, in the array of floats."""
    sizes = np.abs(array, dtype=np.float64)
    if np.maximum.reduce(sizes, axis=None, initial=0) < 2**53:  # smaller integers are exact
        return
    listed = as_list(values)
    # Of a list of columns, each becomes a list, which has None for a null.
    if any(hasattr(kind, name) for kind in {*map(type, listed)} for name in _COLUMN):
        listed = [as_list(item) for item in listed]
    objects = np.asarray(listed, object)
    if objects.shape != array.shape:  # some rows are null, or it is a table
        has_null = any(item is None for item in listed)
        objects = np.full(array.shape, None) if has_null else np.asarray(values, object)
    is_changed = ~(sizes < 2**53)  # if at all; NaN may be a null
    for item, number in zip(objects[is_changed].tolist(), array[is_changed].tolist(), strict=True):
        value = item.item() if hasattr(item, "item") else item  # of a number of numpy
        is_int = isinstance(value, int)
        if value != number if is_int else value is None or type(value).__name__ == "NAType":
            advice = "give an array of integers, without nulls" if is_int else "fill it first"
            raise TypeError(f"{array.dtype} cannot hold {value} of a list: {advice}")
