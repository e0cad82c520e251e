"""The list of bad records: `verify` writes it, and `build_index(exclude=…)` skips the records."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from twinfeed.loaders.building.sources import Job, PathLike, ShardSource
from twinfeed.loaders.errors import LoaderError, StaleIndexError, printable
from twinfeed.loaders.index.paths import output_path, relative_to
from twinfeed.loaders.storage.url import Root, is_url, parse_location
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers.validate import a_type, as_int


class BadRecord(NamedTuple):
    """One bad record: its shard, its number in the shard, its byte offset and what is wrong.

    The number is -1 if the whole shard is bad. If `rest` is True, the shard cannot be read after
    this record, so all later records of the shard are lost too.

    >>> print(BadRecord("a.tfrecord", 7, 1024, None, "corrupted data"))
    a.tfrecord, record 7: corrupted data
    """

    shard: str
    record: int
    offset: int | None = None
    key: str | None = None
    problem: str = ""
    rest: bool = False

    def __str__(self) -> str:
        record = f", record {self.record}" if self.record >= 0 else ""
        later = " and all after it" if self.rest else ""
        return printable(f"{self.shard}{record}{later}: {'; '.join(self.problem.splitlines())}")


_EXCLUDE = (
    "exclude must be the list that verify writes, the findings of its report, or (shard, number) "
    "pairs such as ('a.tar', 7)"
)
Exclude = PathLike | Iterable[BadRecord | tuple[str, int]]


def bad_record(shard: str, error: LoaderError | OSError, *, rest: bool = False) -> BadRecord:
    """Return the `BadRecord` for an error of reading; its number is -1 for a whole shard or file.

    If `rest` is True, all later records of the shard cannot be read either.
    """
    if isinstance(error, OSError):
        return BadRecord(shard, -1, problem=error.strerror or str(error))
    if isinstance(error, StaleIndexError):
        problem = f"{error.problem}: {error.found}, not {error.expected}"
        return BadRecord(shard, -1, problem=problem)
    number = -1 if error.record is None else error.record
    rest = rest and number >= 0
    return BadRecord(shard, number, error.offset, error.key, error.problem, rest)


def _is_written(file: BinaryIO) -> bool:
    """Return whether `write_bad_records` has written each line of a file."""
    names = BadRecord("", 0)._asdict().keys()
    return all(json.loads(line).keys() == names for line in file)


BAD_LIST = "a bad list", _is_written
"""The kind of file that a new bad list may replace, for `check_replaceable`."""


def write_bad_records(path: str | os.PathLike[str], records: Iterable[BadRecord], /) -> None:
    """Write a list of bad records, a line of JSON each."""
    lines = [json.dumps(record._asdict()) + "\n" for record in records]
    replace_file(output_path(path), "".join(lines).encode(), *BAD_LIST)


def read_bad_records(path: str | os.PathLike[str], /) -> list[BadRecord]:
    """Read a list of bad records, which may be written by hand; ValueError for a bad line."""
    lines = read_file(path, LIMITS.table_bytes).decode("utf-8", "surrogateescape").splitlines()
    where = f"{os.fspath(path)}, line"
    return [_parse_line(line, f"{where} {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _parse_line(line: str, where: str) -> BadRecord:
    """Return the `BadRecord` of a line of JSON; raise ValueError for another."""
    problem: object = f"got {line[:80]!r}"
    try:
        bad = BadRecord(**json.loads(line))
        has_number = type(bad.record) is int and bad.record >= 0  # a bool is not a number
        if has_number and isinstance(bad.shard, str) and isinstance(bad.rest, bool):
            return bad
    except (TypeError, ValueError, RecursionError) as error:
        problem = error
    raise ValueError(
        f"{where}: not a bad record: {problem}; a line looks like "
        f'{{"shard": "a.tar", "record": 7}}: make the list with twinfeed verify'
    )


def exclude_records(source: ShardSource, exclude: Exclude, /) -> list[Job]:
    """Return the jobs of `source`, each with the numbers of the records that it must skip.

    A bad record with `rest` covers all later records of its shard. ValueError for an unknown shard.
    """
    items = read_bad_records(exclude) if isinstance(exclude, (str, os.PathLike)) else exclude
    if not isinstance(items, Iterable):
        raise TypeError(f"{_EXCLUDE}, got {a_type(items)}")
    by_shard = defaultdict[str, list[BadRecord]](list)
    for item in items:
        record = _parse_item(item, source.root)
        by_shard[record.shard].append(record)
    unknown = sorted(set(by_shard) - {job.shard for job in source.jobs})
    if unknown:
        raise ValueError(
            f"exclude= names shards that are not indexed ({len(unknown)}: {unknown[:5]}): "
            f"names are relative to the root, for example {source.jobs[0].shard!r}; make the list "
            f"again: verify with root={str(source.root)!r}"
        )
    jobs = []
    for job in source.jobs:
        records = by_shard[job.shard]
        # All records from the number `stop` on are excluded, whether they are listed or not.
        stop = min((record.record for record in records if record.rest), default=None)
        listed = [record for record in records if stop is None or record.record <= stop]
        # In a tar, bytes that are not those of an older index have an offset too, and can be read.
        is_checked = source.container == "tfrecord"
        unreadable = (r.record for r in listed if r.rest or (is_checked and r.offset is not None))
        keys = {record.record: record.key for record in listed}
        jobs.append(job._replace(exclude=keys, stop=stop, unreadable=frozenset(unreadable)))
    return jobs


def _parse_item(item: Any, root: Root) -> BadRecord:
    """Return an item of `exclude`, a `BadRecord` or a pair, with its path relative to the root."""
    is_pair = isinstance(item, tuple | list) and 2 <= len(item) <= 6
    if not is_pair or not isinstance(item[0], str | os.PathLike):
        raise TypeError(f"{_EXCLUDE}, got {item!r}")
    number = as_int("the number of a record of exclude", item[1])
    record = BadRecord(os.fspath(item[0]), number, *item[2:])
    if os.path.isabs(record.shard) or is_url(record.shard):
        with suppress(ValueError):
            return record._replace(shard=relative_to(root, parse_location(record.shard)))
    return record
