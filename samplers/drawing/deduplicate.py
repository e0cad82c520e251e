"""Replacement of records that come twice in a batch, because a record may have several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

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
    path = [start]  # each cell takes the record of the next cell
    records: list[int] = []  # of the cells of the path but the first
    untried: dict[_Cell, Iterator[int]] = {}  # the candidates of each cell that was visited
    while path:
        cell = path[-1]
        row = cell[0]
        if cell not in untried:
            untried[cell] = iter(candidates(row))
            free_record = next((r for r in candidates(row) if r not in cell_of), None)
            if free_record is not None:
                return dict(zip(path, [*records, free_record], strict=True))
        taken = (r for r in untried[cell] if cell_of[r][0] != row and cell_of[r] not in untried)
        record = next(taken, None)
        if record is None:  # no way on from this cell: go back to the cell before it
            path.pop()
            del records[-1:]
        else:
            records.append(record)
            path.append(cell_of[record])
    return None
