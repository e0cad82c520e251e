"""Subsets of the records, and a stable split into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import owners_of, ranges
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.label_arrays import as_labels, check_types
from twinfeed.samplers.mapped import is_increasing
from twinfeed.samplers.orders import InnerSampler, Sampler, SequentialSampler, checked_draw
from twinfeed.samplers.types import Int64s, UInt64s


class SubsetSampler(InnerSampler):
    """Some of the records (a table of ids), in the order of another sampler over the table.

    Records that are mapped from a file (`np.load(path, mmap_mode="r")`) stay there, and are pickled
    as the path. Other records are copied.

    Args:
        records: distinct ids, int[n], which are kept as the table. By default they come as given.
        of: the number of records of the index, `len(index)`.
        order: a sampler over `len(records)` places, such as `RandomSampler(len(records), seed=0)`.

    Records 2, 3, 5, 7 in stored order, and in a random order of their own::

        place        0 1 2 3
        stored       2 3 5 7
        random       2 5 3 7

    >>> import numpy as np
    >>> from twinfeed.samplers import RandomSampler
    >>> SubsetSampler([2, 3, 5, 7], of=10).ids(0, np.arange(4)).tolist()
    [2, 3, 5, 7]
    >>> order = RandomSampler(4, seed=1)
    >>> SubsetSampler([2, 3, 5, 7], of=10, order=order).ids(0, np.arange(4)).tolist()
    [2, 5, 3, 7]
    """

    def __init__(
        self,
        records: ArrayLike,
        /,
        *,
        of: SupportsIndex,
        order: Sampler | None = None,
    ) -> None:
        self._table = validate.integers("records", records, minimum=0)
        values = validate.sorted_distinct("records", self._table)
        least = int(values[-1]) + 1 if len(values) else 0
        self.num_records = validate.integer("of", of, minimum=least)
        size = len(self._table)
        inner = SequentialSampler(size) if order is None else order
        self._set_order(inner, size, f"len(records)={size} places")
        # The records of a block of places are a range where the table ascends.
        blocks = inner.traits.reads_blocks and is_increasing(self._table)
        self.traits = replace(
            inner.traits, record_ids=self._table, reads_blocks=blocks, num_groups=None
        )
        self.seed = inner.seed
        self.parameters = {"records": self._table, "num_records": self.num_records, "order": inner}

    def __repr__(self) -> str:
        of = f"{len(self._table):,} of {validate.counted(self.num_records, 'record')}"
        return f"SubsetSampler({of}, {self._order!r})"

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return the range of records around each record.

        The inner sampler has a range of the table. Its records are the range, from the first to the
        last. Where less than half of these are in the table, a range is the record alone.
        """
        single, single_stop = super().spans(records)
        if not self.traits.reads_blocks:
            return single, single_stop
        # With keys of another dtype, searchsorted would copy the table.
        index = np.searchsorted(self._table, single.astype(self._table.dtype))
        low, high = self._order.spans(index, epoch)
        first, stop = self._lookup(low), self._lookup(high - 1) + 1
        dense = stop - first <= 2 * (high - low)
        return np.where(dense, first, single), np.where(dense, stop, single_stop)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        return self._lookup(checked_draw(self._order, epoch, positions))

    def _lookup(self, index: Int64s) -> Int64s:
        """Return the records at these indices of the table."""
        return np.asarray(self._table)[index].astype(np.int64)


def split(
    records: SupportsIndex | Sequence[str] | NDArray[np.str_],
    /,
    *,
    fraction: float,
    seed: SupportsIndex,
    by: ArrayLike | ClassOrder | None = None,
    groups: ArrayLike | None = None,
) -> tuple[Int64s, Int64s]:
    """Divide records into training and validation by a hash of each, stable as data grows.

    A record given by number stays on its side if others are added after the last. A record given by
    key stays wherever others are added. Each record falls into validation with probability
    `fraction`, so the sizes are near the fraction, not equal to it.

    Args:
        records: their number, or one key each, such as `index.keys()`.
        fraction: of the records for validation, in [0, 1].
        seed: the only source of chance.
        by: the label of each record, or a `ClassOrder`. Validation then has the fraction of each
            class, and of all records, to within one record: the records with the lowest hashes. So
            a record may change its side when its class grows.
        groups: the group of each record, int or str, such as its video or its patient. The hash is
            of the group, so a group is on one side, and stays there. Each group is drawn by itself,
            whatever its size: with few groups, the sides are far from the fraction.

    Returns:
        (training, validation), two sorted int64 arrays of ids.

    Raises:
        ValueError: `by` and `groups` are given together, or all groups fall on one side.

    Records that are added at the end move no earlier record:

    >>> train, validation = split(10, fraction=0.3, seed=0)
    >>> validation.tolist()
    [1, 6, 7]
    >>> split(20, fraction=0.3, seed=0)[1].tolist()
    [1, 6, 7, 10, 11, 12, 17]

    Half of each class, and one video of three:

    >>> split(6, fraction=0.5, seed=0, by=["cat", "cat", "cat", "cat", "dog", "dog"])[1].tolist()
    [1, 2, 5]
    >>> split(6, fraction=0.5, seed=0, groups=["a", "a", "b", "b", "c", "c"])[1].tolist()
    [2, 3]
    """
    if isinstance(fraction, (bool, np.bool_)) or not isinstance(fraction, Real):
        raise TypeError(f"fraction must be a number, got {fraction!r}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction!r}")
    seed, threshold = validate.seed(seed), int(fraction * 2.0**53)
    identities = _identities(records)
    if groups is not None:
        if by is not None:
            raise ValueError("by= and groups= exclude each other: a group may have several labels")
        identities = _identities_of_groups(groups, len(identities))
    hashes = random_words(root_key(seed, "split"), identities) >> np.uint64(11)
    if by is None:
        in_validation = hashes < np.uint64(threshold)
    else:
        order = by if isinstance(by, ClassOrder) else ClassOrder(by)
        in_validation = _stratified(order, hashes, threshold, root_key(seed, "split by"))
    one_side = len(in_validation) and in_validation.all() == in_validation.any()
    if groups is not None and 0 < fraction < 1 and one_side:
        number = validate.counted(len(np.unique(identities)), "group")
        raise ValueError(f"all of {number} fell on one side: take another seed= or fraction=")
    return np.flatnonzero(~in_validation), np.flatnonzero(in_validation)


def _stratified(order: ClassOrder, hashes: UInt64s, threshold: int, key: int) -> NDArray[np.bool_]:
    """Return a mask of the records with the lowest hashes, `threshold / 2^53` of each class."""
    _check_count("by", len(order.records), len(hashes))
    if not len(hashes):
        return np.zeros(0, np.bool_)
    classes = permute(len(order), derive(key, 0), np.arange(len(order)))
    # Rounding the sums, not the sizes, keeps the number of all records within 1 too.
    offset = derive(key, 1) >> 11
    ends = np.cumsum(order.sizes[classes]).tolist()
    sums = [(end * threshold + offset) >> 53 for end in ends]
    counts = np.empty(len(order), np.int64)
    counts[classes] = np.diff(np.array(sums, np.int64), prepend=0)
    records = order.records[ranges(order.starts, order.starts + order.sizes)]
    number, rank = owners_of(order.sizes)
    # Within each class, the records in the order of their hashes.
    records = records[np.lexsort((hashes[records], number))]
    in_validation = np.zeros(len(hashes), np.bool_)
    in_validation[records[rank < counts[number]]] = True
    return in_validation


def _check_count(name: str, count: int, records: int) -> None:
    """Raise ValueError unless there are as many entries as records."""
    if count != records:
        number = validate.counted(records, "record")
        raise ValueError(f"{name} must have one entry a record, got {count:,} for {number}")


def _identities_of_groups(groups: ArrayLike, count: int) -> Int64s | UInt64s:
    """Return one number for each record, the same for all records of a group."""
    array = as_labels(groups, name="groups")
    _check_count("groups", len(array), count)
    if array.dtype.kind != "U":
        return array.astype(np.int64, copy=False)
    names, index = np.unique(array, return_inverse=True)
    return _hashed(names.tolist())[index]


def _identities(records: SupportsIndex | Sequence[str] | NDArray[np.str_]) -> Int64s | UInt64s:
    """Return one number for each record: its id, or a hash of its key."""
    if isinstance(records, (np.ndarray, np.generic)):
        records = records.tolist()
    if isinstance(records, SupportsIndex):
        return np.arange(validate.integer("records", records, minimum=0))
    if isinstance(records, (str, bytes)) or not hasattr(records, "__getitem__"):
        raise TypeError(f"records must be their number, or a sequence of keys, got {records!r}")
    keys = list(records)
    check_types("records", "their number, or a sequence of keys (str)", keys, str)
    return _hashed(keys)


def _hashed(keys: Sequence[str]) -> UInt64s:
    """Return one number for each key."""
    encoded = (key.encode("utf-8", "surrogatepass") for key in keys)
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in encoded)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
