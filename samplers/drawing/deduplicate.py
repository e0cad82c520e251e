"""Batches in which no record comes twice, though a record is of several classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twinfeed.samplers.drawing.int_arrays import Int64


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
    lacking: list[tuple[int, int]] = []
    for row in order.tolist():
        for place, record in enumerate(batch[row].tolist()):
            if owner.setdefault(record, (row, place)) != (row, place):
                lacking.append((row, place))

    for slot in lacking:
        path, seen, records = [(slot, iter(later(slot[0])))], set[int](), list[int]()
        while (found := next((r for r in later(path[-1][0][0]) if r not in owner), None)) is None:
            while found is None:
                (row, _), others = path[-1]
                found = next((r for r in others if owner[r][0] != row and r not in seen), None)
                if found is None:
                    path.pop()
                    if not path:
                        return slot[0]
                    records.pop()
            seen.add(found)
            records.append(found)
            path.append((owner[found], iter(later(owner[found][0]))))
        for (taker, _), record in zip(path, [*records, found], strict=True):
            owner[record] = taker
            batch[taker] = record
    return None
