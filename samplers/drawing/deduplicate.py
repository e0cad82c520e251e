"""Replacement of records that come twice in a batch, because a record may have several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from twinfeed.samplers.types import Int64s

_Cell = tuple[int, int]  # the row and the column of a record in a batch


def replace_duplicates(
    batch: Int64s, order: Int64s, candidates: Callable[[int], Iterable[int]]
) -> int | None:
    """Replace records that come twice in a batch of P x K records, int64[p, k], in place.

    Each row has records of one class, and a record may be of several classes. Of two rows with the
    same record, the row that is earlier in `order` keeps it. The other row takes the first of its
    `candidates(row)` that is not in the batch. If all are, it takes the record of another row,
    which finds a replacement in turn. So this fails only if there is no assignment of distinct
    records at all.

    Returns:
        The row for which there is no record, or None.
    """
    cell_of: dict[int, _Cell] = {}  # the cell (row, column) of each record of the batch
    duplicates: list[_Cell] = []
    for row in order.tolist():
        for column, record in enumerate(batch[row].tolist()):
            if cell_of.setdefault(record, (row, column)) != (row, column):
                duplicates.append((row, column))
    for duplicate in duplicates:
        replacements = _augmenting_path(duplicate, cell_of, candidates)
        if replacements is None:
            return duplicate[0]
        for cell, record in replacements.items():
            cell_of[record] = cell
            batch[cell] = record
    return None


def _augmenting_path(
    start: _Cell, cell_of: Mapping[int, _Cell], candidates: Callable[[int], Iterable[int]]
) -> dict[_Cell, int] | None:
    """Find a record for the cell `start` of a batch, by moving records of other cells if necessary.

    A cell is the (row, column) of a record in a batch, `cell_of` has the cell of each record, and a
    row may have any of the records `candidates(row)`. If one of them is in no cell, `start` gets
    it. Otherwise it gets the record of a cell in another row, that cell gets the record of a third
    cell, and so on, until a cell gets a record that was in no cell. This is an augmenting path of a
    bipartite matching (Kuhn, "The Hungarian method for the assignment problem", 1955).

    Returns:
        The new record of each cell that changes; None if there is no record for `start`.
    """
    # A depth-first search, without recursion, as the path may have many cells.
    path = {start: -1}  # the cells of the path in order, each with its new record
    # For each cell that was visited, an iterator over the candidates that were not tried yet.
    untried: dict[_Cell, Iterator[int]] = {}
    while path:
        cell = next(reversed(path))
        row = cell[0]
        if cell not in untried:  # the first visit
            free_record = next((r for r in candidates(row) if r not in cell_of), None)
            if free_record is not None:
                return {**path, cell: free_record}
            untried[cell] = iter(candidates(row))
        # Take the next candidate whose cell was not visited. One of the same row is no help: the
        # row would have it twice.
        usable = (r for r in untried[cell] if cell_of[r][0] != row and cell_of[r] not in untried)
        path[cell] = next(usable, -1)
        if path[cell] < 0:  # a dead end: go back to the cell before it
            del path[cell]
        else:
            path[cell_of[path[cell]]] = -1
    return None
