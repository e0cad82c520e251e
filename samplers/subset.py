"""Some of the records, and a stable split into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from numbers import Real
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, UInt64, root_key, words
from twinfeed.samplers.orders import InnerOrder, Order, SequentialSampler


class SubsetSampler(InnerOrder):
    """Give some records, in the order that another order gives the places of a table.

    `records` are distinct ids, int[n], and are kept as the table. By default they come as given.
    `order` is an order over `len(records)` places. `num_records` is the number of records in the
    index, which loaders compare. By default the index ends with the last record of the table.

    Records 2, 3, 5, 7 in stored order, and in a random order of their own::

        place        0 1 2 3
        stored       2 3 5 7
        random       2 5 3 7

    >>> import numpy as np
    >>> from twinfeed.samplers import RandomSampler
    >>> SubsetSampler([2, 3, 5, 7]).ids(0, np.arange(4)).tolist()
    [2, 3, 5, 7]
    >>> SubsetSampler([2, 3, 5, 7], order=RandomSampler(4, seed=1)).ids(0, np.arange(4)).tolist()
    [2, 5, 3, 7]
    """

    def __init__(
        self,
        records: ArrayLike,
        /,
        *,
        order: Order | None = None,
        num_records: SupportsIndex | None = None,
    ) -> None:
        self._table = _validate.integers("records", records, minimum=0)
        values = _validate.distinct("records", self._table)
        least = int(values[-1]) + 1 if len(values) else 0
        given = least if num_records is None else num_records
        self.num_records = _validate.integer("num_records", given, minimum=least)
        size = len(self._table)
        inner = SequentialSampler(size) if order is None else order
        self._take(inner, size, f"len(records)={size} places")
        # The records of a block of places are a range where the table ascends.
        self.in_blocks = inner.in_blocks and bool((self._table[1:] > self._table[:-1]).all())
        self.seed = inner.seed
        self._parameters = {"records": self._table, "num_records": self.num_records, "order": inner}

    def __repr__(self) -> str:
        of = f"{len(self._table):,} of {_validate.counted(self.num_records, 'record')}"
        return f"SubsetSampler({of}, {self._order!r})"

    def spans(self, records: Int64) -> tuple[Int64, Int64]:
        """Return the records from the first to the last of the inner order's range of places.

        Where less than half of these records are in the table, a range is the record alone.
        """
        alone, after = super().spans(records)
        if not self.in_blocks:
            return alone, after
        begin, end = self._order.spans(np.searchsorted(self._table, alone))
        first, stop = self._table[begin], self._table[end - 1] + 1
        dense = stop - first <= 2 * (end - begin)
        return np.where(dense, first, alone), np.where(dense, stop, after)

    def _ids(self, epoch: int, positions: Int64) -> Int64:
        return self._table[self._order._ids(epoch, positions)]


def split(
    records: SupportsIndex | Sequence[str] | NDArray[np.str_],
    /,
    *,
    fraction: float,
    seed: SupportsIndex,
) -> tuple[Int64, Int64]:
    """Divide records into training and validation by a hash of each, stable as data grows.

    `records` is their number, or one key each. With keys a record stays on its side wherever it is
    stored. Each record falls into validation with probability `fraction`, so the sizes are near the
    fraction, not equal to it. Returns two sorted int64 arrays of ids.

    Records that are added move none of the first ones:

    >>> train, validation = split(10, fraction=0.3, seed=0)
    >>> validation.tolist()
    [1, 6, 7]
    >>> split(20, fraction=0.3, seed=0)[1].tolist()
    [1, 6, 7, 10, 11, 12, 17]
    """
    if isinstance(fraction, (bool, np.bool_)) or not isinstance(fraction, Real):
        raise TypeError(f"fraction must be a number, got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction!r}")
    key = root_key(_validate.seed(seed), "split")
    hashes = words(key, _identities(records)) >> np.uint64(11)
    chosen = hashes < np.uint64(int(fraction * 2.0**53))
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def _identities(records: SupportsIndex | Sequence[str] | NDArray[np.str_]) -> Int64 | UInt64:
    """Return one number for each record: its id, or a hash of its key."""
    if isinstance(records, (np.ndarray, np.generic)):
        records = records.tolist()
    if isinstance(records, SupportsIndex):
        return np.arange(_validate.integer("records", records, minimum=0))
    if isinstance(records, (str, bytes)) or not hasattr(records, "__getitem__"):
        raise TypeError(f"records must be their number, or a sequence of keys, got {records!r}")
    keys = list(records)
    _validate.each("records", "their number, or a sequence of keys (str)", keys, str)
    encoded = (key.encode("utf-8", "surrogatepass") for key in keys)
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in encoded)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
