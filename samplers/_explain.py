"""A drawing of the first steps of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinfeed.samplers._bits import Int64

if TYPE_CHECKING:
    from twinfeed.samplers._stream import BatchStream


def drawing(title: str, ranks: list[list[Int64]], namer: BatchStream) -> str:
    """Write steps as rows and ranks as columns below a title."""
    plain = not any(namer.views(ids).any() for batches in ranks for ids in batches)
    columns = [["step", *map(str, range(len(ranks[0])))]]
    for rank, batches in enumerate(ranks):
        columns.append([f"rank {rank}", *(_samples(ids, namer, plain) for ids in batches)])
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([title, *rows])


def _samples(ids: Int64, namer: BatchStream, plain: bool) -> str:
    """Write the samples of a batch."""
    pairs = zip(namer.records(ids).tolist(), namer.views(ids).tolist(), strict=True)
    return " ".join(
        "-" if record < 0 else str(record) if plain else f"{record}.{view}"
        for record, view in pairs
    )
