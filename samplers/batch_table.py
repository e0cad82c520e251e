"""A text table of the first steps of a stream."""

from __future__ import annotations

from twinfeed.samplers.traits import SampleSpace
from twinfeed.samplers.types import Int64s


def batch_table(title: str, ranks: list[list[Int64s]], samples: SampleSpace) -> str:
    """Return a table of record ids, with their views if there are any: a row for each step and a
    column for each rank.
    """
    without_views = not any(samples.views(ids).any() for batches in ranks for ids in batches)

    def cell(ids: Int64s) -> str:
        """Return the samples of a batch as text: records, with their views if there are any."""
        pairs = zip(samples.records(ids).tolist(), samples.views(ids).tolist(), strict=True)
        return " ".join(
            "-" if record < 0 else f"{record}" if without_views else f"{record}.{view}"
            for record, view in pairs
        )

    columns = [["step", *map(str, range(len(ranks[0])))]]
    columns += [[f"rank {rank}", *map(cell, batches)] for rank, batches in enumerate(ranks)]
    widths = [max(map(len, column)) for column in columns]
    rows = [
        "   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]
    return "\n".join([title, *rows])
