"""Arrays: their types, and how values of other libraries become arrays of numpy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from twinfeed.samplers.types import Array, Ids, Int64s

__all__ = ["Array", "Ids", "Int64s", "as_array"]

_FLOAT64 = np.dtype(np.float64)


def as_array(value: Any, /) -> Array:
    """Return a value as a numpy array; a bfloat16 tensor of torch gets the dtype of ml_dtypes.

    Raises:
        TypeError: numpy would round integers of a list, since it has a float or both an integer of
            2**63 or more and a smaller one.

    >>> as_array([1, 2])
    array([1, 2])
    """
    if str(getattr(value, "dtype", None)) != "torch.bfloat16":
        array = np.asarray(value)
        if array.ndim and array.dtype == _FLOAT64 and not hasattr(value, "dtype"):
            _check_exact(value, array)
        return array
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError("bfloat16 in numpy needs the package ml_dtypes") from None
    return np.asarray(value.view(sys.modules["torch"].int16)).view(bfloat16)


def _check_exact(values: Any, array: Array) -> None:
    """Raise TypeError if an integer of a list is another number in the array of floats."""
    sizes = np.abs(array)
    if not np.maximum.reduce(sizes, axis=None, initial=0) < 2**53:  # also if one is NaN
        is_large = sizes >= 2**53  # smaller integers are floats exactly
        large = np.asarray(values, object)[is_large].tolist()
        for item, number in zip(large, array[is_large].tolist(), strict=True):
            value = item.item() if hasattr(item, "item") else item  # of a number of numpy
            if isinstance(value, int) and value != number:
                raise TypeError(f"float64 cannot hold {value} of a list: give an array of integers")
