"""Replacement of records that come twice in a batch, because a record may have several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twinfeed.samplers.types import Int64s


def replace_duplicates(
    batch: Int64s, order: Int64s, candidates: Callable[[int], Iterable[int]]
) -> int | None:
    """Replace records that come twice in a batch of P x K records, int64[p, k], in place.

    Of two classes (rows) with the same record, the class that is earlier in `order` keeps it. The
    other class takes the first of its `candidates(row)` that is not in the batch. If all are, it
    takes the record of another class, which finds a replacement in turn: an augmenting path of a
    bipartite matching (Kuhn, "The Hungarian method for the assignment problem", 1955). So this
    fails only if there is no assignment at all.

    Returns:
        The row for which there is no record, or None.
    """
    cell_of: dict[int, tuple[int, int]] = {}  # the cell (row, column) of each record of the batch
    duplicates: list[tuple[int, int]] = []
    for row in order.tolist():
        for column, record in enumerate(batch[row].tolist()):
            if cell_of.setdefault(record, (row, column)) != (row, column):
                duplicates.append((row, column))

    for cell in duplicates:
        # A depth-first search over cells. Each cell of the path takes the record of the next cell,
        # and the last cell takes a record that is not in the batch. `path` has the cells, each with
        # the candidates that are still untried, and `records` what each cell but the last takes.
        path, seen, records = [(cell, iter(candidates(cell[0])))], set[int](), list[int]()
        while (
            choice := next((r for r in candidates(path[-1][0][0]) if r not in cell_of), None)
        ) is None:
            while choice is None:
                (row, _), untried = path[-1]
                choice = next((r for r in untried if cell_of[r][0] != row and r not in seen), None)
                if choice is None:
                    path.pop()
                    if not path:
                        return cell[0]
                    records.pop()
            seen.add(choice)
            records.append(choice)
            path.append((cell_of[choice], iter(candidates(cell_of[choice][0]))))
        for (receiver, _), record in zip(path, [*records, choice], strict=True):
            cell_of[record] = receiver
            batch[receiver] = record
    return None
