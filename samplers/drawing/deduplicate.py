"""Replacement of records that come twice in a batch, because a record may have several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twinfeed.samplers.types import Int64s


def replace_duplicates(
    batch: Int64s, order: Int64s, candidates: Callable[[int], Iterable[int]]
) -> int | None:
    """Replace records that come twice in a batch of P x K records, int64[p, k], in place.

    Of two classes (rows) with the same record, the class that is earlier in `order` keeps it. The
    other class takes the first of its `candidates(row)` that is free. If none is free, it takes the
    record of another class, which finds a replacement in turn: an augmenting path of a bipartite
    matching (Kuhn, "The Hungarian method for the assignment problem", 1955). So this fails only if
    there is no assignment at all.

    Returns:
        The row for which there is no record, or None.
    """
    owner: dict[int, tuple[int, int]] = {}  # the cell (row, column) of each record
    duplicates: list[tuple[int, int]] = []
    for row in order.tolist():
        for column, record in enumerate(batch[row].tolist()):
            if owner.setdefault(record, (row, column)) != (row, column):
                duplicates.append((row, column))

    for cell in duplicates:
        # A depth-first search: cells of the path, each with the candidates that are still untried,
        # and `records`, which each cell but the last takes.
        path, seen, records = [(cell, iter(candidates(cell[0])))], set[int](), list[int]()
        while (
            found := next((r for r in candidates(path[-1][0][0]) if r not in owner), None)
        ) is None:
            while found is None:
                (row, _), untried = path[-1]
                found = next((r for r in untried if owner[r][0] != row and r not in seen), None)
                if found is None:
                    path.pop()
                    if not path:
                        return cell[0]
                    records.pop()
            seen.add(found)
            records.append(found)
            path.append((owner[found], iter(candidates(owner[found][0]))))
        for (receiver, _), record in zip(path, [*records, found], strict=True):
            owner[record] = receiver
            batch[receiver] = record
    return None
