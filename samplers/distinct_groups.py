"""Batches in which no two records are of one group: the random order that `apart=` gives.

B batches can be apart if no group has more than B records, and no more groups have exactly B than
the last batch has records (Gale and Ryser, 1957). An epoch is drawn in three parts:

1. The records of the last, smaller batch are drawn first, or those that are left out: first one of
   each group that has a record too many for the other batches, then random records.
2. The other batches are cut into *windows* of 256 to 511 batches. Records of *light* groups, which
   have no more records than a window has batches, come in random order. The records of *heavy*
   groups are sorted by group, in a random order of the groups, and dealt to the batches in turn, in
   a random order of the batches. Light records fill up the last round.
3. The records of a window are sorted by group too, and dealt row by row, each row in an order of
   its own. Where a group goes on in the next row, batches that have it change indices in this row.

Groups a, b and c of 3, 2 and 1 records in a window of 3 batches; row 1 had the order 0 2 1, which
would give batch 0 a second a::

    batch          0 1 2
    sorted row 0   b b a    in the order 2 1 0    a b b
    sorted row 1   a a c    in the order 1 2 0    c a a
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.class_order import ClassOrder, small_integers, sort_by_label
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import distinct_pairs, ranges
from twinfeed.samplers.drawing.permutation import (
    inverse_permute,
    permute,
    permute_rows,
    random_permutations,
)
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.drawing.round_robin import equal_bounds
from twinfeed.samplers.label_arrays import check_types
from twinfeed.samplers.mapped import is_mapped
from twinfeed.samplers.orders import RandomSampler, Sampler
from twinfeed.samplers.subset import SubsetSampler
from twinfeed.samplers.types import Array, Bools, Int64s, Integers
from twinfeed.samplers.views import ViewSampler

# What the random keys of an epoch are for.
_REQUIRED, _LAST, _GROUPS, _MEMBERS, _LIGHT, _BATCHES, _WINDOW = range(7)
# What the random keys of a window are for.
_SORT, _ROWS, _PLACES = range(3)
_INT = (int, np.integer)


def group_numbers(values: ArrayLike, num_records: int) -> Integers:
    """Return a number for the group of each record, int[n]; -1 if it has none (None, "" or -1)."""
    if isinstance(values, np.ndarray) and hasattr(values, "mask"):
        values = values.tolist()  # None where masked
    if not validate.is_array_like(values) or isinstance(values, (str, bytes)):
        raise TypeError(f"apart must have a group for each record, got {validate.a_type(values)}")
    array = np.asarray(values, None if hasattr(values, "__array__") else object)
    if array.shape != (num_records,):
        records = f"{num_records:,} records"
        raise ValueError(f"apart must have one group for each of {records}, got {array.shape}")
    if array.dtype.kind in ("O", "U", "T"):
        array = _checked_objects(array.tolist())
    elif array.size and array.dtype.kind not in "iu":
        missing = ": give -1 in place of NaN" if array.dtype.kind == "f" else ""
        raise TypeError(f"apart must be integers or strings, got dtype {array.dtype}{missing}")
    is_text = array.dtype.kind == "O" and isinstance(next(iter(array), None), str)
    if is_text or (array.size and not -1 <= array.min() <= array.max() < validate.LIMIT):
        numbers = {"" if is_text else -1: -1}
        array = np.array([numbers.setdefault(group, len(numbers)) for group in array.tolist()])
    integers = validate.integers("apart", array.astype(np.int64, copy=False), minimum=-1)
    is_small = integers.max(initial=0) < 1 << 31
    return integers.astype(np.int32) if is_small and not is_mapped(integers) else integers


def _checked_objects(values: list[Any]) -> Array:
    """Return objects as an array of them, "" or -1 in place of None; TypeError for other types."""
    present = [value for value in values if value is not None]
    is_text = any(isinstance(value, str) for value in present)
    if is_text:
        check_types("apart", "integers or strings, all of one kind", present, str)
    else:
        booleans = [value for value in present if isinstance(value, bool)]  # which are ints
        check_types("apart", "integers or strings", booleans or present, _INT[bool(booleans) :])
    none: Any = "" if is_text else -1
    return np.array([none if value is None else value for value in values], object)


def with_distinct_groups(order: Sampler, groups: Integers, batch_size: int, drop: bool) -> Sampler:
    """Return a random order in whose batches no two records are of one group, for this order.

    `groups` has the number of each record's group. A subset and views keep what they are, over
    another order of their positions.

    Raises:
        ValueError: an order that is not random over all positions, or groups that no batches can
            keep apart.
    """
    if isinstance(order, RandomSampler):
        return DistinctGroupsSampler(groups, seed=order.seed, batch_size=batch_size, drop=drop)
    if not isinstance(order, (SubsetSampler, ViewSampler)):
        raise ValueError(
            f"apart= needs a RandomSampler, or a SubsetSampler or ViewSampler over one, got "
            f"{order!r}, which has an order of its own"
        )
    repeats = False
    if isinstance(order, SubsetSampler):
        groups = np.asarray(groups)[order._table]
    elif order._per_epoch == "all":
        records = order.records(np.arange(order.num_ids))
        repeats = bool((order._counts[np.asarray(groups) == -1] > 1).any())
        groups = np.asarray(groups)[records]
    inner = with_distinct_groups(order._inner_sampler, groups, batch_size, drop)
    order = copy.copy(order)
    vars(order).update(_inner_sampler=inner, _own_cursor=None, _fingerprint={})
    order.traits = replace(order.traits, repeats=repeats)
    order.parameters = {**order.parameters, "order": inner}
    return order


class _Epoch(NamedTuple):
    """The records that an epoch's full batches are drawn from: all but its last ones."""

    key: int
    last: Int64s  # the records of the last batch, or those left out
    light_gaps: Int64s  # for `_skip`: the light records that are taken out
    member_gaps: Int64s  # for `_skip`: the same of the members of heavy groups
    order: Int64s  # the heavy groups in random order
    sizes: Int64s  # the members of each heavy group, in the order of the groups
    num_members: int
    num_light: int
    num_rounds: int  # entries of each batch that are of heavy groups, or fill up the last round


class DistinctGroupsSampler(Sampler):
    """A random order of all records, in whose batches no two records are of one group.

    `groups` has the number of each record's group, -1 for none. With `drop`, the records after the
    last full batch are not used, so that they may be of any groups.
    """

    _min_window = 256  # batches: a window has fewer than twice as many

    def __init__(self, groups: Integers, *, seed: int, batch_size: int, drop: bool) -> None:
        self.num_records = n = len(groups)
        self.seed, self._groups, self._size, self._drop = seed, groups, batch_size, drop
        self._key = root_key(seed, "apart")
        self.parameters = {"n": n, "apart": groups}
        self._num_full, self._num_last = divmod(n, batch_size)
        # The first batch of each window, and where the last window stops; the shortest comes first.
        self._bounds = equal_bounds(self._num_full, max(1, self._num_full // self._min_window))
        records, bounds = sort_by_label(small_integers(np.asarray(groups).astype(np.int64)))
        group = np.asarray(groups)[records[bounds[:-1]]]
        is_heavy = (np.diff(bounds) > self._bounds[1]) & (group >= 0)
        # Of the heavy groups; the last number is above all, so that each has a place.
        self._heavy = np.append(group[is_heavy], validate.LIMIT)
        self._counts = np.diff(bounds)[is_heavy]
        self._members = records[ranges(bounds[:-1][is_heavy], bounds[1:][is_heavy])]
        self._starts = np.cumsum(self._counts) - self._counts
        # The heavy groups with more records than there are full batches, their sizes, and how many.
        large = np.flatnonzero(self._counts > self._num_full)
        self._too_large = large, self._counts[large], self._counts[large] - self._num_full
        self._check_possible()
        self._light: Integers | None = None  # all records, without a table
        if len(self._members):
            is_light = np.ones(n, bool)
            is_light[self._members] = False
            self._light = np.flatnonzero(is_light).astype(records.dtype)
        self._epochs: FifoCache[_Epoch] = FifoCache(2)
        self._windows: FifoCache[Int64s] = FifoCache(2)

    def __repr__(self) -> str:
        records = validate.counted(self.num_records, "record")
        return f"RandomSampler({records}, seed={self.seed}), groups apart"

    def _check_possible(self) -> None:
        """Raise ValueError if no batches can keep the groups apart."""
        num_excess = int(self._too_large[2].sum())
        # Of a group, the last batch takes one record.
        is_whole = self._drop or self._counts.max(initial=0) <= self._num_full + 1
        if num_excess > self._num_last or not is_whole:
            last = "last_batch='drop' leaves out" if self._drop else "the last has, a group once,"
            raise ValueError(
                f"{validate.counted(num_excess, 'record')} of {len(self._too_large[0]):,} groups "
                f"do not fit the {self._num_full:,} full batches of {self._size:,}, which have one "
                f"of a group (the largest has {self._counts.max():,}), and {last} "
                f"{self._num_last:,}: lower batch_size, or leave some out (SubsetSampler)"
            )

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        window = np.searchsorted(self._bounds, positions // self._size, side="right") - 1
        ids = np.empty(len(positions), np.int64)
        for number in np.flatnonzero(np.bincount(window)).tolist():
            i = np.flatnonzero(window == number)
            table = self._windows.get((epoch, number), lambda: self._window(epoch, number))  # noqa: B023
            ids[i] = table[positions[i] - self._bounds[number] * self._size]
        return ids

    def _window(self, epoch: int, number: int) -> Int64s:
        """Return all ids of a window's batches, concatenated; after the last, those left over."""
        plan = self._epochs.get(epoch, lambda: self._plan(derive(self._key, epoch)))
        if number == len(self._bounds) - 1:
            return plan.last
        start, stop = self._bounds[number : number + 2].tolist()
        num_light = self._size - plan.num_rounds  # of each batch
        # The first light records fill up the last round of the heavy groups.
        first = plan.num_rounds * self._num_full - plan.num_members
        light = self._light_records(plan, first + np.arange(start * num_light, stop * num_light))
        ids = np.concatenate([light, self._heavy_records(plan, start, stop)])
        return self._deal(ids, stop - start, derive(plan.key, _WINDOW, number))

    def _plan(self, key: int) -> _Epoch:
        """Draw the last records of an epoch, and say what is left."""
        last = self._last_records(key)
        group, is_light = self._heavy_groups(last)
        indices = [
            self._starts[g] + np.searchsorted(self._members_of(g), record)
            for g, record in zip(group[~is_light].tolist(), last[~is_light].tolist(), strict=True)
        ]
        light = np.sort(last[is_light])
        if self._light is not None:
            light = np.searchsorted(self._light, light)
        sizes = self._counts - np.bincount(group[~is_light], minlength=len(self._counts))
        num_members = int(sizes.sum())
        return _Epoch(
            key,
            last,
            light - np.arange(len(light)),
            np.sort(np.array(indices, np.int64)) - np.arange(len(indices)),
            permute(len(sizes), derive(key, _GROUPS), np.arange(len(sizes))),
            sizes,
            num_members,
            self._num_full * self._size - num_members,
            -(-num_members // max(1, self._num_full)),
        )

    def _members_of(self, group: int) -> Integers:
        """Return the records of a heavy group, ascending."""
        start = self._starts[group]
        return self._members[start : start + self._counts[group]]

    def _heavy_groups(self, records: Int64s) -> tuple[Int64s, Bools]:
        """Return the number of each record's heavy group, and whether its group is light."""
        groups = np.asarray(self._groups)[records]
        number = np.searchsorted(self._heavy, groups)
        return number, self._heavy[number] != groups

    def _last_records(self, key: int) -> Int64s:
        """Return the records that are not in a full batch: required ones, then random ones."""
        required = [
            self._members_of(g)[permute(size, derive(key, _REQUIRED, g), np.arange(excess))]
            for g, size, excess in zip(*map(np.ndarray.tolist, self._too_large), strict=True)
        ]
        count = self._num_last
        while True:  # until enough records are of different groups
            positions = np.arange(min(count, self.num_records))
            random = permute(self.num_records, derive(key, _LAST), positions)
            records = np.concatenate([*required, random])
            kinds = records if self._drop else self._own_groups(records)
            first = np.sort(np.unique(kinds, return_index=True)[1])[: self._num_last]
            if len(first) == self._num_last:
                return records[first]
            count *= 2

    def _own_groups(self, records: Int64s) -> Int64s:
        """Return the group of each record; one without a group is a group by itself, below -1."""
        groups = np.asarray(self._groups)[records].astype(np.int64)
        return np.where(groups < 0, -2 - records, groups)

    def _light_records(self, plan: _Epoch, positions: Int64s) -> Int64s:
        """Return the records at these positions of the random order of light records."""
        number = permute(plan.num_light, derive(plan.key, _LIGHT), positions)
        number = _skip(plan.light_gaps, number)
        return number if self._light is None else self._light[number].astype(np.int64)

    def _heavy_records(self, plan: _Epoch, start: int, stop: int) -> Int64s:
        """Return the records of heavy groups in these batches, and those that fill up a turn."""
        batches = np.arange(start, stop)
        column = inverse_permute(self._num_full, derive(plan.key, _BATCHES), batches)
        position = (column + self._num_full * np.arange(plan.num_rounds)[:, None]).reshape(-1)
        stops = np.cumsum(plan.sizes[plan.order])
        is_member = position < plan.num_members
        light = self._light_records(plan, position[~is_member] - plan.num_members)
        position = position[is_member]
        i = np.searchsorted(stops, position, side="right")
        group = plan.order[i]
        sizes = plan.sizes[group]
        index = position - (stops[i] - sizes)
        keys = random_words(derive(plan.key, _MEMBERS), group)
        index = permute_rows(sizes, keys, index[:, None])[:, 0]
        first = np.cumsum(plan.sizes) - plan.sizes
        members = self._members[_skip(plan.member_gaps, first[group] + index)]
        return np.concatenate([members.astype(np.int64), light])

    def _deal(self, ids: Int64s, m: int, key: int) -> Int64s:
        """Return the ids of a window in m batches, concatenated, no two of a group in a batch."""
        groups = self._own_groups(ids)
        order = np.argsort(random_words(derive(key, _SORT), groups), kind="stable")
        ids, groups = ids[order].reshape(-1, m), groups[order].reshape(-1, m)
        keys = random_words(derive(key, _ROWS), np.arange(self._size))
        batch = random_permutations(keys, m).astype(np.int64)  # of each entry: [size, m]
        for row in np.flatnonzero(groups[1:, 0] == groups[:-1, -1]) + 1:
            _repair(batch[row - 1], batch[row], *groups[row - 1 : row + 1])
        dealt = np.empty_like(ids)
        np.put_along_axis(dealt, batch, ids, axis=1)
        words = random_words(
            random_words(derive(key, _PLACES), np.arange(m))[:, None], np.arange(self._size)
        )
        return np.take_along_axis(dealt.T, np.argsort(words, axis=1), axis=1).reshape(-1)


def _repair(batch_before: Int64s, batch: Int64s, groups_before: Int64s, groups: Int64s) -> None:
    """Change a row's batches so that a group that goes on from the row before meets none again:
    they change indices with batches that have not the group.
    """
    is_used = np.isin(batch, batch_before[groups_before == groups[0]])
    is_group = groups == groups[0]
    used = np.flatnonzero(is_used & is_group)
    free = np.flatnonzero(~is_used & ~is_group)[: len(used)]
    batch[used], batch[free] = batch[free], batch[used]


def _skip(gaps: Int64s, numbers: Int64s) -> Int64s:
    """Return numbers of what is left as numbers of all; `gaps[i]` are left before the one that is
    out as number i.
    """
    return numbers + np.searchsorted(gaps, numbers, side="right")


def may_replace(groups: Integers, bad: Int64s, good: Int64s) -> Bools:
    """Return whether each good record may replace the bad one: it is of its group, or of none."""
    group, good_group = np.asarray(groups)[bad], np.asarray(groups)[good]
    return np.equal(good_group, group) | np.less(good_group, 0)


def by_group(order: ClassOrder, groups: Integers) -> tuple[ClassOrder, ClassOrder]:
    """Return the groups of each class, in the place of its records, and the records of each of
    them. A record without a group is a group by itself.
    """
    class_index, record = order.class_record_pairs()
    group = np.asarray(groups)[record].astype(np.int64)
    _, number = distinct_pairs(class_index, np.where(group < 0, -2 - record, group))
    members = ClassOrder(number)
    class_of = class_index[members.records[members.starts]]
    return ClassOrder(class_of)._with_ids(np.arange(len(class_of)), order.digest), (
        members._with_ids(record, order.digest)
    )
