"""Replacement of records that come twice in a batch, because a record may have several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from twinfeed.samplers.types import Int64s

_Cell = tuple[int, int]  # the row and the column of a record in a batch


def replace_duplicates(
    batch: Int64s, order: Int64s, candidates: Callable[[int], Iterable[int]]
) -> int | None:
    """Replace records that come twice in a batch of P x K records, int64[p, k], in place.

    Of two classes (rows) with the same record, the class that is earlier in `order` keeps it. The
    other class takes the first of its `candidates(row)` that is not in the batch. If all are, it
    takes the record of another class, which finds a replacement in turn. So this fails only if
    there is no assignment of distinct records at all.

    Returns:
        The row for which there is no record, or None.
    """
    cell_of: dict[int, _Cell] = {}  # the cell of each record of the batch
    duplicates: list[_Cell] = []
    for row in order.tolist():
        for column, record in enumerate(batch[row].tolist()):
            if cell_of.setdefault(record, (row, column)) != (row, column):
                duplicates.append((row, column))
    for cell in duplicates:
        replacements = _augmenting_path(cell, cell_of, candidates)
        if replacements is None:
            return cell[0]
        for receiver, record in replacements.items():
            cell_of[record] = receiver
            batch[receiver] = record
    return None


def _augmenting_path(
    start: _Cell, cell_of: Mapping[int, _Cell], candidates: Callable[[int], Iterable[int]]
) -> dict[_Cell, int] | None:
    """Return which cells take which records, so that the cell `start` gets one; None if impossible.

    `cell_of` has the cell of each record of the batch, and `candidates(row)` are the records that a
    row may take. A row takes a free record, which is in no cell, or the record of another cell,
    which takes the next record in turn: an augmenting path of a bipartite matching (Kuhn, "The
    Hungarian method for the assignment problem", 1955), found by depth-first search.
    """

    def free_record(row: int) -> int | None:
        return next((record for record in candidates(row) if record not in cell_of), None)

    free = free_record(start[0])
    path = [start]
    untried = [iter(candidates(start[0]))]  # the candidates of each cell of the path
    records: list[int] = []  # what each cell of the path but the last takes
    seen: set[int] = set()
    while free is None:
        row = path[-1][0]
        record = next((r for r in untried[-1] if cell_of[r][0] != row and r not in seen), None)
        if record is not None:
            seen.add(record)
            records.append(record)
            path.append(cell_of[record])
            untried.append(iter(candidates(cell_of[record][0])))
            free = free_record(cell_of[record][0])
        elif records:  # no way on from the last cell: go back to the cell before it
            path.pop()
            untried.pop()
            records.pop()
        else:
            return None
    return dict(zip(path, [*records, free], strict=True))
