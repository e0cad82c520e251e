"""Types of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.integer[Any]]
Unsigned = NDArray[np.unsignedinteger[Any]]
Ids = Int64s | Iterable[int]
