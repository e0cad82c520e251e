"""The list of bad records: `verify` writes it, `build_index(exclude=…)` leaves them out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from twinfeed.loaders._atomic import replace_file
from twinfeed.loaders.errors import LoaderError, StaleIndexError
from twinfeed.loaders.index._paths import to_write


class BadRecord(NamedTuple):
    """Name one bad record: its shard, its number there (-1 where leaving a record out does not
    help), where it lies and what is wrong; with `rest`, all records after it are lost too.

    >>> BadRecord("a.tfrecord", 7, 1024, None, "corrupted data").record
    7
    """

    shard: str
    record: int
    offset: int | None = None
    key: str | None = None
    problem: str = ""
    rest: bool = False


def bad_record(shard: str, error: LoaderError, *, rest: bool = False) -> BadRecord:
    """Return the entry for an error; a shard that is bad as a whole has record -1, and cannot be
    helped by leaving one out.
    """
    if error.record is None:
        return BadRecord(shard, -1, error.offset, error.key, error.problem)
    return BadRecord(shard, error.record, error.offset, error.key, error.problem, rest)


def lost_file(name: str, error: OSError | StaleIndexError) -> BadRecord:
    """Return the entry for a shard or a loose file that is missing, cannot be read, or is another
    than was indexed.
    """
    if isinstance(error, StaleIndexError):
        problem = f"{error.problem}: {error.found}, not {error.expected}"
    else:
        problem = error.strerror or str(error)
    return BadRecord(name, -1, None, None, problem)


def write_bad_records(path: str | os.PathLike[str], records: Iterable[BadRecord], /) -> None:
    """Write a list of bad records, a line of JSON each.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bad_records(f"{folder}/bad", [BadRecord("a.tar", 7, 0, "0007", "corrupted data")])
    ...     read_bad_records(f"{folder}/bad")
    [BadRecord(shard='a.tar', record=7, offset=0, key='0007', problem='corrupted data', rest=False)]
    """
    lines = [json.dumps(record._asdict()) + "\n" for record in records]
    replace_file(to_write(path), "".join(lines).encode())


def read_bad_records(path: str | os.PathLike[str], /) -> list[BadRecord]:
    """Read a list that `write_bad_records` wrote, or somebody by hand: a line needs a `shard` and a
    `record`, and an empty line is passed over. Raise ValueError for a line that is none.

    >>> read_bad_records("/dev/null")
    []
    """
    text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(_parsed(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)}, line {number}: not a bad record: {error}; a line must be such "
                f'as {{"shard": "a.tar", "record": 7}}: list the records with twinfeed verify'
            ) from None
    return records


def _parsed(line: str) -> BadRecord:
    """Return the entry that a line holds."""
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError(f"no JSON object, but {line[:40]!r}")
    lacking = sorted({"shard", "record"} - set(entry))
    unknown = sorted(set(entry) - set(BadRecord._fields))
    if lacking or unknown:
        raise ValueError(f"it lacks {lacking}" if lacking else f"nobody knows its {unknown}")
    if not isinstance(entry["shard"], str):
        raise ValueError(f"its shard is {entry['shard']!r}, not a path")
    if type(entry["record"]) is not int or entry["record"] < 0:
        raise ValueError(f"its record is {entry['record']!r}, not a number of at least 0")
    if not isinstance(entry.get("rest", False), bool):
        raise ValueError(f"its rest is {entry['rest']!r}, neither true nor false")
    return BadRecord(**entry)
