"""Batches in which no record comes twice, though a record is of several classes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations

import numpy as np

from twinfeed.samplers.drawing.bits import Int64


def clashing(batches: Int64) -> list[int]:
    """Return which rows of int64[rows, ids] hold an id twice."""
    rising = np.sort(batches, axis=1)
    rows: list[int] = np.flatnonzero((rising[:, 1:] == rising[:, :-1]).any(axis=1)).tolist()
    return rows


def mend(
    batch: Int64, order: Iterable[int], later: Sequence[Callable[[], Iterable[int]]]
) -> int | None:
    """Give other records to classes of a batch until none comes twice; change int64[p, k] in place.

    Classes keep their records in this order. A class that lost records takes the next free records
    that `later` gives for it. If no such record is free, it takes a record from a class that finds
    another record itself (augmenting paths: Kuhn, "The Hungarian method for the assignment
    problem", 1955). So this fails only if no assignment exists.

    Returns:
        The class that cannot be served, or None.
    """
    owner: dict[int, tuple[int, int]] = {}
    lacking = []
    for row in order:
        for place, record in enumerate(batch[row].tolist()):
            if owner.setdefault(record, (row, place)) != (row, place):
                lacking.append((row, place))

    def give(row: int, place: int, seen: set[int]) -> bool:
        taken = []
        for record in later[row]():
            if record not in owner:
                owner[record] = row, place
                batch[row, place] = record
                return True
            if owner[record][0] != row:
                taken.append(record)
        for record in taken:
            if record not in seen:
                seen.add(record)
                if give(*owner[record], seen):
                    owner[record] = row, place
                    batch[row, place] = record
                    return True
        return False

    return next((row for row, place in lacking if not give(row, place, set())), None)


def poor_pair(owner: Int64, records: Int64, sizes: Int64, k: int, /) -> tuple[int, int] | None:
    """Return two classes that have fewer than 2 k records together, if there are any.

    `owner` and `records` are the class and the record of each label, by class.
    """
    small = sizes[owner] < 2 * k
    classes_of = defaultdict(list)
    for record, number in zip(records[small].tolist(), owner[small].tolist(), strict=True):
        classes_of[record].append(number)
    shared = Counter(chain.from_iterable(combinations(each, 2) for each in classes_of.values()))
    poor = (pair for pair, both in shared.items() if sizes[list(pair)].sum() - both < 2 * k)
    return next(poor, None)
