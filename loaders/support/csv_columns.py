"""Read the columns of a CSV or TSV file."""

from __future__ import annotations

import csv
import io

from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file


def csv_columns(path: str, /) -> dict[str, tuple[str, ...]]:
    """Return the columns of a CSV file with a line of names, or of a TSV file by its name, but for
    those without a name.
    """
    try:
        text = read_file(path, LIMITS.table_bytes).decode("utf-8-sig")
        delimiter = "\t" if path.endswith(".tsv") else ","
        # `strict`: a quote that is not closed would take the rest of the file as one cell.
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names, *rows = [row for row in lines if row] or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a table: {error}") from None
    if len({*names} - {""}) < len(names) - names.count(""):  # a spreadsheet ends with empty ones
        raise ValueError(f"{path}: two columns have one name, of {names[:8]}")
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            raise ValueError(f"{path}: row {number} has {len(row)} cells, not {len(names)}")
    return {name: tuple(row[n] for row in rows) for n, name in enumerate(names) if name}
