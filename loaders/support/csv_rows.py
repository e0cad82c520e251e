"""Read the rows of a CSV or TSV file."""

from __future__ import annotations

import csv
import io

from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file


def csv_rows(path: str, /) -> list[list[str]]:
    """Return the rows of a CSV file, or of a TSV file by its name, without empty lines."""
    try:
        text = read_file(path, LIMITS.table_bytes).decode("utf-8-sig")
        lines = csv.reader(
            io.StringIO(text, newline=""), delimiter="\t" if path.endswith(".tsv") else ","
        )
        return [row for row in lines if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a table: {error}") from None
