"""Subsets of the records, and a stable split into training and validation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from itertools import pairwise
from math import fsum
from numbers import Real
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder
from twinfeed.samplers.drawing.int_arrays import groups_and_indices, ranges
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.label_arrays import as_labels, check_types
from twinfeed.samplers.mapped import is_increasing
from twinfeed.samplers.orders import InnerSampler, Sampler, SequentialSampler, checked_draw
from twinfeed.samplers.types import Array, Int64s, Integers, UInt64s


class SubsetSampler(InnerSampler):
    """Some of the records (a table of ids), in the order of another sampler over the table.

    Records that are mapped from a file (`np.load(path, mmap_mode="r")`) stay there, and are pickled
    as the path. Other records are copied. `ranges` take no memory for each record, as for the
    episodes of robots.

    Args:
        records: distinct ids, int[n], which are kept as the table. By default they come as given.
        of: the number of records of the index, `len(index)`, or the index or dataset itself.
        ranges: in place of records, `(start, stop)` of runs of records, of which none is in two.
        order: a sampler over `len(records)` positions, as `RandomSampler(len(records), seed=0)`.

    Raises:
        TypeError: neither records nor ranges, or both.
        ValueError: no ids, ids that are not distinct, an empty range, or an `order` of another
            length.

    Records 2, 3, 5, 7 in stored order, and in a random order of their own::

        position     0 1 2 3
        stored       2 3 5 7
        random       2 5 3 7

    >>> import numpy as np
    >>> from twinfeed.samplers import RandomSampler
    >>> SubsetSampler([2, 3, 5, 7], of=10).ids(0, np.arange(4)).tolist()
    [2, 3, 5, 7]
    >>> order = RandomSampler(4, seed=1)
    >>> SubsetSampler([2, 3, 5, 7], of=10, order=order).ids(0, np.arange(4)).tolist()
    [2, 5, 3, 7]
    >>> SubsetSampler(ranges=[(6, 8), (0, 3)], of=10).ids(0, np.arange(5)).tolist()
    [6, 7, 0, 1, 2]
    """

    @validate.show_call("SubsetSampler(ids, of=len(index))")
    def __init__(
        self,
        records: ArrayLike | None = None,
        *,
        of: SupportsIndex | Sized,
        ranges: ArrayLike | None = None,
        order: Sampler | None = None,
    ) -> None:
        if (records is None) == (ranges is None):
            raise TypeError(
                "SubsetSampler takes records or ranges: write SubsetSampler(ids, of=len(index)) or "
                "SubsetSampler(ranges=[(0, 100)], of=len(index))"
            )
        self._set_records(records if ranges is None else _Ranges(ranges), of, order)
        if not len(self._table):
            raise ValueError(f"records must hold an id, got none of {self.num_records:,} records")

    def _set_records(self, records: Any, of: SupportsIndex | Sized, order: Sampler | None) -> None:
        """Set what the arguments say, checked; `records` are ids or `_Ranges`, or none."""
        if isinstance(records, _Ranges):
            self._table: Any = records
            minimum, increases, parameter = records.stop, records.increases, "ranges"
        else:
            self._table = validate.integers("records", records, minimum=0)
            values = validate.sorted_distinct("records", self._table)
            minimum = int(values[-1]) + 1 if len(values) else 0
            increases, parameter = is_increasing(self._table), "records"
        subset = "SubsetSampler(ids, of=len(index))"
        self.num_records = validate.record_count("of", of, subset=subset, minimum=minimum)
        size = len(self._table)
        inner = SequentialSampler(size) if order is None else order
        self._set_inner_sampler(inner, size, f"len(records)={size} positions")
        # A block of the inner sampler is a range of indices of the table. Its records are close
        # together in storage only if the table ascends.
        blocks = inner.traits.reads_blocks and increases
        self.traits = replace(
            inner.traits, record_ids=self._table, reads_blocks=blocks, num_groups=None
        )
        self.seed, self._fixed_order = inner.seed, inner._fixed_order
        table = records.bounds if isinstance(records, _Ranges) else self._table
        self.parameters = {parameter: table, "num_records": self.num_records, "order": inner}

    def __repr__(self) -> str:
        of = f"{len(self._table):,} of {validate.counted(self.num_records, 'record')}"
        return f"SubsetSampler({of}, {self._inner_sampler!r})"

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return for each record a range of records that are read around the same time: its span.

        A loader prefetches a span as a whole. The result is the first record of each span, and the
        record after its last: int64[n] each.

        The inner sampler reads the records of the subset in blocks. The span of a record is that
        from the first to the last record of its block, if at least half of the records in between
        are in the subset: the block 2 3 5 has 3 of the 4 records 2 to 5. Otherwise the span is the
        record alone: the block 40 90 has only 2 of 51 records.
        """
        if not self.traits.reads_blocks:
            return super().spans(records)  # each record by itself
        first, last, num_in_subset = self._blocks_of(records, epoch)
        is_dense = last - first + 1 <= 2 * num_in_subset
        return np.where(is_dense, first, records), np.where(is_dense, last, records) + 1

    def _blocks_of(self, records: Int64s, epoch: int | None) -> tuple[Int64s, Int64s, Int64s]:
        """Return the first and last record of the block of each record, and the block's size."""
        # The index of each record in the table. (searchsorted copies a table of another dtype.)
        if isinstance(self._table, _Ranges):
            index = self._table.index_of(records)
        else:
            index = np.searchsorted(self._table, records.astype(self._table.dtype))
        start, stop = self._inner_sampler.spans(index, epoch)
        return self._lookup(start), self._lookup(stop - 1), stop - start

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        return self._lookup(checked_draw(self._inner_sampler, epoch, positions))

    def _inner_ids(self, ids: Int64s) -> Int64s:
        table = np.asarray(self._table)
        by_id = np.argsort(table)
        index = by_id[np.searchsorted(table, ids, sorter=by_id) % len(table)]
        return np.where(table[index] == ids, index, -1)

    def _lookup(self, index: Int64s) -> Int64s:
        """Return the records at these indices of the table."""
        if isinstance(self._table, _Ranges):
            return self._table[index]
        return np.asarray(self._table)[index].astype(np.int64)


class _Ranges:
    """A table of the record ids of several ranges, of which only the bounds are stored."""

    def __init__(self, bounds: ArrayLike) -> None:
        array = validate.unmasked("ranges", bounds)
        if array.ndim != 2 or array.shape[1] != 2:
            raise ValueError(f"ranges must be (start, stop) of each, got shape {array.shape}")
        values = validate.integers("ranges", array.reshape(-1), minimum=0)
        self.bounds = np.array(values, np.int64).reshape(-1, 2)
        self._starts, stops = self.bounds.T
        empty = np.flatnonzero(self._starts >= stops)
        if len(empty):
            raise ValueError(f"a range must have a record, got {self.bounds[empty[0]].tolist()}")
        by_start = np.argsort(self._starts)
        repeated = np.flatnonzero(stops[by_start][:-1] > self._starts[by_start][1:])
        if len(repeated):
            first, second = self.bounds[by_start[repeated[0] : repeated[0] + 2]].tolist()
            raise ValueError(f"ranges must not overlap, got {first} and {second}")
        ends = np.cumsum(stops - self._starts)
        self._offsets = ends - (stops - self._starts)  # of the ranges, in the table
        self._size, self.stop = int(ends[-1]), int(stops.max())
        self.increases = is_increasing(self._starts)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Int64s) -> Int64s:
        """Return the records at these indices of the table."""
        number = np.searchsorted(self._offsets, index, side="right") - 1  # of the range
        records: Int64s = self._starts[number] + (index - self._offsets[number])
        return records

    def index_of(self, records: Int64s) -> Int64s:
        """Return the index in the table of each of these records, if the ranges increase."""
        number = np.searchsorted(self._starts, records, side="right") - 1
        index: Int64s = self._offsets[number] + (records - self._starts[number])
        return index

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Return all ids, for what needs a mask of the records."""
        return ranges(self.bounds[:, 0], self.bounds[:, 1]).astype(dtype or np.int64, copy=False)


@validate.show_call(
    "split(len(index), fraction=0.1, seed=0)", stratify="by=labels divides each class so"
)
def split(
    records: SupportsIndex | Sequence[str] | NDArray[np.str_] | Sized,
    /,
    *,
    fraction: float | Sequence[float],
    seed: SupportsIndex,
    by: ArrayLike | ClassOrder | None = None,
    groups: ArrayLike | None = None,
) -> tuple[Int64s, ...]:
    """Divide records into training and validation by a hash of each, stable as data grows.

    If records are given by their number, a record stays in its part when records are added after
    the last. If they are given by key, it stays wherever records are added. Each record falls into
    validation with probability `fraction`, so the sizes are near the fraction, not equal to it.

    Args:
        records: their number, or a dataset, an index or a source, of which only the length counts.
            Or one key each, such as `index.keys()`.
        fraction: of the records for validation, in [0, 1]. Or the fractions of several parts, which
            sum to 1, such as `[0.8, 0.1, 0.1]`: `[0.8, 0.2]` is `0.2`. If later fractions change
            and their sum stays, the parts before them keep their records. Without `by`, so do the
            parts after fractions that change.
        seed: the only source of chance.
        by: the label of each record, or a `ClassOrder`. Validation then has the fraction of each
            class, and of all records, to within one record: the records with the lowest hashes. So
            a record may change its part when its class grows. Of three parts, each is near its
            fraction to within two records.
        groups: the group of each record, int or str, such as its video or its patient. The hash is
            of the group, so a group is in one part, and stays there. The size of a group does not
            matter: with few groups, the parts are far from the fraction. With `by`, the groups are
            dealt, the largest first, to the part that is filled least with their classes, so the
            parts are near the fraction of each class. A group may change its part when data grow.
            The seed orders groups of one size: if no two have one size, it changes nothing.

    Returns:
        (training, validation), or the parts in the order of their fractions: sorted int64 arrays of
        ids.

    Raises:
        ValueError: no record falls into a part.

    Records that are added at the end move no earlier record:

    >>> train, validation = split(10, fraction=0.3, seed=0)
    >>> validation.tolist()
    [1, 6, 7]
    >>> split(20, fraction=0.3, seed=0)[1].tolist()
    [1, 6, 7, 10, 11, 12, 17]

    Training, validation and test:

    >>> [part.tolist() for part in split(10, fraction=[0.7, 0.2, 0.1], seed=0)]
    [[0, 2, 3, 4, 5, 8, 9], [1, 7], [6]]

    Half of each class, and one video of three:

    >>> split(6, fraction=0.5, seed=0, by=["cat", "cat", "cat", "cat", "dog", "dog"])[1].tolist()
    [1, 2, 5]
    >>> split(6, fraction=0.5, seed=0, groups=["a", "a", "b", "b", "c", "c"])[1].tolist()
    [2, 3]
    >>> patients, labels = [1, 1, 2, 3, 3, 4, 5, 5], ["ill"] * 4 + ["well"] * 4
    >>> split(8, fraction=0.5, seed=0, by=labels, groups=patients)[1].tolist()
    [2, 5, 6, 7]
    """
    seed, fractions_after = validate.seed(seed), _fractions_after(fraction)
    inputs = _ids_or_key_hashes(records)
    if groups is not None:
        inputs = _hash_inputs_of_groups(groups, len(inputs))
    hashes = random_words(root_key(seed, "split"), inputs) >> np.uint64(11)  # below 2^53
    part_of = np.zeros(len(hashes), np.min_scalar_type(len(fractions_after)))  # of each record
    if by is None:
        for fraction_after in fractions_after:
            part_of += hashes < np.uint64(int(fraction_after * 2.0**53))
    else:
        order = by if isinstance(by, ClassOrder) else ClassOrder(by)
        _check_count("by", len(order.records), len(hashes))
        if groups is None:
            _stratify(part_of, order, hashes, fractions_after, root_key(seed, "split by"))
        else:
            _deal_groups(part_of, order, inputs, hashes, fractions_after)
    parts = tuple(np.flatnonzero(part_of == number) for number in range(len(fractions_after) + 1))
    fractions = -np.diff([1.0, *fractions_after, 0.0])
    for number, part in enumerate(parts):
        if len(hashes) and fractions[number] > 0 and not len(part):
            unit = "record" if groups is None else "group"
            count = validate.counted(len(np.unique(inputs)), unit)
            raise ValueError(
                f"none of {count} fell into part {number}: pass another seed= or fraction="
            )
    return parts


def _fractions_after(fraction: float | Sequence[float]) -> list[float]:
    """Return the fraction in all parts after part 0, after part 1, and so on: [0.3, 0.1] of 0.7 0.2
    0.1.
    """
    if not isinstance(fraction, (str, bytes)) and hasattr(fraction, "__len__"):
        decimals = validate.decimals("fraction", fraction)
        if round(sum(decimals), 9) != 1 or min(decimals) < 0:
            raise ValueError(f"fraction must be numbers from 0 on that sum to 1, got {fraction!r}")
        # At most 1: the decimals of a user may sum to slightly more.
        return [min(float(sum(decimals[part:])), 1.0) for part in range(1, len(decimals))]
    if isinstance(fraction, (bool, np.bool_)) or not isinstance(fraction, Real):
        raise TypeError(f"fraction must be a number or a sequence of numbers, got {fraction!r}")
    number = float(fraction)
    if not 0 <= number <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction!r}")
    return [number]


def _stratify(
    part_of: Integers, order: ClassOrder, hashes: UInt64s, fractions_after: list[float], key: int
) -> None:
    """Write to `part_of` the part of each record, so that each class is split in proportion.

    Each part gets the records of the part before it that have the lowest hashes. In the comments, a
    class of 4 records is listed by hash, and `fractions_after` is [1/2, 1/4].
    """
    records, class_index, index_in_class = _sorted_by_class_and_hash(order, hashes)
    # Counts are rounded so that the sums over neighbouring classes are right, too. In this random
    # order of the classes, no class has always the same neighbours.
    random_order = permute(len(order), derive(key, 0), np.arange(len(order)))
    counts = order.sizes  # of the records of each class in the current part: [4] in part 0
    for part, (fraction_before, fraction) in enumerate(pairwise([1.0, *fractions_after]), 1):
        # The share of the records of the part before that move to this part: 1/2, then 1/2.
        share = fraction / fraction_before if fraction_before else 0.0
        counts = _scaled_counts(counts, share, random_order, derive(key, part))  # [2], then [1]
        is_moved = index_in_class < counts[class_index]  # [1, 1, 0, 0], then [1, 0, 0, 0]
        part_of[records[is_moved]] = part  # by hash: [1, 1, 0, 0], then [2, 1, 0, 0]


def _deal_groups(
    part_of: Integers,
    order: ClassOrder,
    group_of: Integers,
    hashes: UInt64s,
    fractions_after: list[float],
) -> None:
    """Write to `part_of` the part of each record, with no group in two parts, greedily as in
    scikit-learn's `StratifiedGroupKFold`: the largest group first, to the part that is filled least
    with half of the group, weighted by its records of each class, and threefold for all records.
    """
    class_of = order._class_of_records(len(hashes))
    _, first, group_index, group_sizes = np.unique(
        group_of, return_index=True, return_inverse=True, return_counts=True
    )
    in_class = class_of >= 0  # not so of the records that `ClassOrder.largest` leaves out
    pairs = (group_index * len(order) + class_of)[in_class]
    pairs, counts = np.unique(pairs, return_counts=True)
    bounds = np.searchsorted(pairs, np.arange(len(first) + 1) * len(order)).tolist()
    classes, counts_of_pairs = (pairs % len(order)).tolist(), counts.tolist()
    # All records count as one more class.
    totals = [*order.sizes.tolist(), len(hashes) / 3]
    fractions = enumerate((-np.diff([1.0, *fractions_after, 0.0])).tolist())
    filled = {part: (fraction, [0] * len(totals)) for part, fraction in fractions if fraction > 0}
    part_of_group = np.zeros(len(first), part_of.dtype)
    sizes = group_sizes.tolist()
    for group in np.lexsort((hashes[first], -group_sizes)).tolist():
        members = slice(*bounds[group : group + 2])
        contents = [
            *zip(classes[members], counts_of_pairs[members], strict=True),
            (len(order), sizes[group]),
        ]
        fill = {
            # Python 3.12 adds floats by another method than 3.11: `fsum` is exact on both.
            part: fsum(n * (found[k] + n / 2) / totals[k] for k, n in contents) / fraction
            for part, (fraction, found) in filled.items()
        }
        part_of_group[group] = part = min(fill, key=fill.__getitem__)  # of equal ones the first
        for k, n in contents:
            filled[part][1][k] += n
    part_of[:] = part_of_group[group_index]


def _sorted_by_class_and_hash(
    order: ClassOrder, hashes: UInt64s
) -> tuple[Integers, Int64s, Int64s]:
    """Return the records by class and hash, the class of each, and its index within the class."""
    records = order.records[ranges(order.starts, order.starts + order.sizes)]
    class_index, index_in_class = groups_and_indices(order.sizes)
    by_hash = np.lexsort((hashes[records], class_index))  # the class comes first
    return records[by_hash], class_index, index_in_class


def _scaled_counts(counts: Int64s, fraction: float, order: Int64s, random_word: int) -> Int64s:
    """Return counts multiplied by a fraction, rounded at random. Each count, and each sum of the
    counts in `order` (int64, their indices), is within 1 of its exact value.
    """
    # In fixed point with 53 bits after the point: (x + offset) >> 53 rounds x up or down at random.
    # Python's integers, as products exceed 64 bits.
    numerator, random_offset = int(fraction * 2.0**53), random_word >> 11
    prefix_sums = np.cumsum(counts[order]).tolist()
    scaled_sums = [(total * numerator + random_offset) >> 53 for total in prefix_sums]
    scaled_counts = np.empty_like(counts)
    scaled_counts[order] = np.diff(scaled_sums, prepend=0)
    return scaled_counts


def _check_count(name: str, count: int, records: int) -> None:
    """Raise ValueError unless argument `name` has one entry for each record."""
    if count != records:
        number = validate.counted(records, "record")
        raise ValueError(f"{name} must have one entry a record, got {count:,} for {number}")


def _hash_inputs_of_groups(groups: ArrayLike, count: int) -> Int64s | UInt64s:
    """Return an integer for each record, the same for all records of a group."""
    array = as_labels(groups, name="groups")
    _check_count("groups", len(array), count)
    if array.dtype.kind != "U":  # integers
        return array.astype(np.int64, copy=False)
    names, index = np.unique(array, return_inverse=True)
    return _hashed(names.tolist())[index]


def _ids_or_key_hashes(records: SupportsIndex | Sized) -> Int64s | UInt64s:
    """Return an integer for each record: a hash of its key, or its id if records have no keys."""
    if not isinstance(records, (SupportsIndex, Sized)):
        raise TypeError(f"records must be their number, or a sequence of keys, got {records!r}")
    if _is_list_of_keys(records):
        items: Any = records
        keys = items.tolist() if isinstance(items, np.ndarray) else list(items)
        check_types("records", "their number, or a sequence of keys (str)", keys, str)
        return _hashed(keys)
    # The number, or the length of the dataset. `subset` is advice for the error message.
    return np.arange(validate.record_count("records", records, subset="SubsetSampler(ids, …)"))


def _is_list_of_keys(records: Any) -> bool:
    """Return whether the records are given by a list of keys, not by a number or a dataset."""
    if isinstance(records, str) or not validate.is_list(records):
        return False
    return not isinstance(next(iter(records), None), (Mapping, tuple, list, np.ndarray))


def _hashed(keys: Sequence[str]) -> UInt64s:
    """Return a hash of each string, uint64[keys], the same in every process."""
    encoded = (key.encode("utf-8", "surrogatepass") for key in keys)
    digests = b"".join(hashlib.blake2b(key, digest_size=8).digest() for key in encoded)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
