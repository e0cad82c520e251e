"""Replacement of records that come twice in a batch, because a record may have several labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    for cell in duplicates:
        if not _replace(cell, batch, cell_of, candidates, set()):
            return cell[0]
    return None


def _replace(
    cell: _Cell,
    batch: Int64s,
    cell_of: dict[int, _Cell],
    candidates: Callable[[int], Iterable[int]],
    visited: set[_Cell],
) -> bool:
    """Give a cell a record that is in no cell, or that of a cell which finds another in turn.

    This is an augmenting path of a bipartite matching (Kuhn, "The Hungarian method for the
    assignment problem", 1955). Return False if there is none.
    """
    row = cell[0]
    visited.add(cell)
    new = next((r for r in candidates(row) if r not in cell_of), None)
    if new is None:  # one of the same row is no help: the row would have it twice
        for record in candidates(row):
            holder = cell_of[record]
            is_usable = holder[0] != row and holder not in visited
            if is_usable and _replace(holder, batch, cell_of, candidates, visited):
                new = record
                break
    if new is not None:
        cell_of[new], batch[cell] = cell, new
    return new is not None
