"""A text table of the first steps of a stream."""

from __future__ import annotations

from itertools import islice

from twinfeed.samplers.traits import Samples
from twinfeed.samplers.types import Int64s


def batch_table(title: str, ranks: list[list[Int64s]], samples: Samples) -> str:
    """Return a table with a row for each step and a column for each rank, below a title.

    `ranks` are the batches of each rank, and `samples` gives the record and view of each id.
    """
    steps = len(ranks[0])
    batches = [ids for batches in ranks for ids in batches]
    without_views = not any(samples.views(ids).any() for ids in batches)  # every view is 0
    cells = (
        " ".join(
            "-" if record < 0 else str(record) if without_views else f"{record}.{view}"
            for record, view in zip(
                samples.records(ids).tolist(), samples.views(ids).tolist(), strict=True
            )
        )
        for ids in batches
    )
    columns = [["step", *map(str, range(steps))]]
    columns += [[f"rank {rank}", *islice(cells, steps)] for rank in range(len(ranks))]
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([title, *rows])
