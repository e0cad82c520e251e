"""Arrays: their types, and how values of other libraries become arrays of numpy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from twinfeed.samplers.types import Array, Ids, Int64s

__all__ = ["Array", "Ids", "Int64s", "as_array"]


def as_array(value: Any, /) -> Array:
    """Return a value as a numpy array; a bfloat16 tensor of torch gets the dtype of ml_dtypes.

    >>> as_array([1, 2])
    array([1, 2])
    """
    if str(getattr(value, "dtype", None)) != "torch.bfloat16":
        return np.asarray(value)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError("bfloat16 in numpy needs the package ml_dtypes") from None
    return np.asarray(value.view(sys.modules["torch"].int16)).view(bfloat16)
