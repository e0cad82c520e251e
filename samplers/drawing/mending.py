"""Batches in which no record comes twice, though a record is of several classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twinfeed.samplers.drawing.bits import Int64


def mend(batch: Int64, order: Int64, later: Callable[[int], Iterable[int]]) -> int | None:
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
    for row in order.tolist():
        for place, record in enumerate(batch[row].tolist()):
            if owner.setdefault(record, (row, place)) != (row, place):
                lacking.append((row, place))

    def give(row: int, place: int, seen: set[int]) -> bool:
        def moved(record: int) -> bool:
            seen.add(record)
            return give(*owner[record], seen)

        found = next((record for record in later(row) if record not in owner), None)
        if found is None:
            others = (r for r in later(row) if owner[r][0] != row and r not in seen)
            found = next((record for record in others if moved(record)), None)
        if found is not None:
            owner[found] = row, place
            batch[row, place] = found
        return found is not None

    return next((row for row, place in lacking if not give(row, place, set())), None)
