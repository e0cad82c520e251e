"""What a batch holds beside its records' fields: rows of columns and of side tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.index import Index
from twinfeed.loaders.request import Request

Array = npt.NDArray[Any]


class Joined:
    """Join the columns of `index` by record, and the tables of `side` by sample id.

    Raises ValueError for a side table with the name of a column, or without a row for each of the
    `num_ids` samples; TypeError for one that is no array of numbers.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"label": 7}, {"label": 9}], mkdtemp())["data"]
    >>> joined = Joined(index, {"weight": np.array([0.5, 1.0])}, 2)
    >>> joined.rows(Request.plain(np.array([1])))
    {'label': array([9]), 'weight': array([1.])}
    """

    def __init__(self, index: Index, side: Mapping[str, Array], num_ids: int, /) -> None:
        self.index = index
        self.side = side
        for name, rows in self.side.items():
            if name in index.columns:
                raise ValueError(f"side table {name!r} has the name of a column of the index")
            if getattr(getattr(rows, "dtype", None), "kind", "O") not in "biufc":
                raise TypeError(
                    f"side table {name!r} must be an array of numbers (numpy's, or a SideTable), "
                    f"got {type(rows).__name__}"
                )
            if len(rows) != num_ids:
                raise ValueError(
                    f"side table {name!r} has {len(rows)} rows for {num_ids} sample ids: give it a "
                    f"row for each id of the sampler, in their order"
                )

    def rows(self, request: Request, /) -> dict[str, Array]:
        """Return a row for each sample of a request without padding."""
        columns = {name: _rows(rows, request.records) for name, rows in self.index.columns.items()}
        return columns | {name: _rows(rows, request.ids) for name, rows in self.side.items()}

    def check_by_record(self) -> None:
        """Raise ValueError for a side table that is not joined by record, but by sample id."""
        for name, rows in self.side.items():
            if len(rows) != len(self.index):
                raise ValueError(
                    f"side table {name!r} has {len(rows)} rows for {len(self.index)} records: "
                    f"its samples are known to a sampler only"
                )


def _rows(table: Array, ids: Int64s) -> Array:
    """The rows of `table` in the machine's byte order, which both frameworks take."""
    rows = np.asarray(table[ids])
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)
