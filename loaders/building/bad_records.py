"""The list of bad records: `verify` writes it, `build_index(exclude=…)` leaves the records out."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from twinfeed.loaders.building.sources import Job, PathLike, Source
from twinfeed.loaders.errors import LoaderError, StaleIndexError
from twinfeed.loaders.index.paths import relative_to, to_write
from twinfeed.loaders.remote.location import is_url, place_of
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file


class BadRecord(NamedTuple):
    """Name one bad record: its shard, its number in the shard, its place and what is wrong.

    The number is -1 where leaving out one record does not help. With `rest`, all later records of
    the shard are lost too.

    >>> BadRecord("a.tfrecord", 7, 1024, None, "corrupted data").record
    7
    """

    shard: str
    record: int
    offset: int | None = None
    key: str | None = None
    problem: str = ""
    rest: bool = False


Exclude = PathLike | Iterable[BadRecord | tuple[str, int]]


def bad_record(shard: str, error: LoaderError | OSError, *, rest: bool = False) -> BadRecord:
    """Return the entry for an error.

    The record is -1 for a shard or file that is missing, unreadable, or changed since the indexing.
    """
    if isinstance(error, OSError):
        return BadRecord(shard, -1, problem=error.strerror or str(error))
    if isinstance(error, StaleIndexError):
        problem = f"{error.problem}: {error.found}, not {error.expected}"
        return BadRecord(shard, -1, problem=problem)
    number = -1 if error.record is None else error.record
    return BadRecord(shard, number, error.offset, error.key, error.problem, rest and number >= 0)


def write_bad_records(path: str | os.PathLike[str], records: Iterable[BadRecord], /) -> None:
    """Write a list of bad records, a line of JSON each."""
    lines = [json.dumps(record._asdict()) + "\n" for record in records]
    replace_file(to_write(path), "".join(lines).encode())


def read_bad_records(path: str | os.PathLike[str], /) -> list[BadRecord]:
    """Read a list of bad records that was written by `write_bad_records` or by hand.

    Each line needs a `shard` and a `record`. Empty lines are skipped. Any other line raises
    ValueError.
    """
    text = read_file(path, LIMITS.table_bytes).decode("utf-8", "surrogateescape")
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                records.append(_parsed(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)}, line {number}: not a bad record: {error}; a line looks like "
                f'{{"shard": "a.tar", "record": 7}}: make the list with twinfeed verify'
            ) from None
    return records


def _parsed(line: str) -> BadRecord:
    """Return the entry that a line holds."""
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError(f"a line must be a JSON object, got {line[:40]!r}")
    lacking = sorted({"shard", "record"} - set(entry))
    unknown = sorted(set(entry) - set(BadRecord._fields))
    if lacking or unknown:
        raise ValueError(f"{lacking} must be there" if lacking else f"unknown names {unknown}")
    if not isinstance(entry["shard"], str):
        raise ValueError(f"shard must be a path, got {entry['shard']!r}")
    if type(entry["record"]) is not int or entry["record"] < 0:
        raise ValueError(f"record must be a number of at least 0, got {entry['record']!r}")
    if not isinstance(entry.get("rest", False), bool):
        raise ValueError(f"rest must be true or false, got {entry['rest']!r}")
    return BadRecord(**entry)


def without(source: Source, exclude: Exclude, /) -> list[Job]:
    """Return the jobs, each with the records that it leaves out."""
    given = read_bad_records(exclude) if isinstance(exclude, (str, os.PathLike)) else exclude
    left_out = [_entry(one) for one in given]
    if left_out and source.container == "files":
        left_out = _where_now(source.jobs, left_out)
    else:
        names = _Names(source)
        left_out = [one._replace(shard=names.of(one.shard)) for one in left_out]
    bad: dict[str, list[BadRecord]] = {}
    for one in left_out:
        bad.setdefault(one.shard, []).append(one)
    unknown = sorted(set(bad) - {job.shard for job in source.jobs})
    if unknown:
        raise ValueError(
            f"exclude= names shards that are not indexed ({len(unknown)}: {unknown[:5]}): "
            f"names are relative to the root, for example {source.jobs[0].shard!r}; make the list "
            f"again: verify with root={str(source.root)!r}"
        )
    jobs = []
    for job in source.jobs:
        listed = bad.get(job.shard, [])
        rest = min((one.record for one in listed if one.rest), default=None)
        named = (one.record for one in listed if rest is None or one.record <= rest)
        jobs.append(job._replace(exclude=frozenset(named), rest=rest))
    return jobs


def _entry(one: Any) -> BadRecord:
    """Return an entry of `exclude`, which may be a pair."""
    if isinstance(one, str) or not isinstance(one, Sequence) or len(one) < 2:
        raise TypeError(
            "exclude must be the list that verify writes, or (shard, number) pairs such as "
            f"('a.tar', 7), got {one!r}"
        )
    return BadRecord(*one)


class _Names:
    """Find listed shards among those of a source, whose root may be another than the list's."""

    def __init__(self, source: Source) -> None:
        self._root = source.root
        self._named: dict[str, list[str]] = {}
        for job in source.jobs:
            self._named.setdefault(posixpath.basename(job.shard), []).append(job.shard)

    def of(self, shard: str) -> str:
        """Return a listed shard's path below the root; what is not found stays as it is.

        Of relative paths, one may end with the other, if this fits a single shard.
        """
        if os.path.isabs(shard) or is_url(shard):
            with suppress(ValueError):
                return relative_to(self._root, place_of(shard))
            return shard
        alike = self._named.get(posixpath.basename(shard), [])
        ends = [one for one in alike if _ends(one, shard) or _ends(shard, one)]
        return ends[0] if len(ends) == 1 and shard not in alike else shard


def _ends(path: str, end: str) -> bool:
    """Whether the last parts of a path are those of another."""
    return f"/{path}".endswith(f"/{end}")


def _where_now(jobs: Sequence[Job], listed: Sequence[BadRecord]) -> list[BadRecord]:
    """Return records of loose files with their present numbers, found by their keys."""
    places: dict[str | None, list[tuple[str, int]]] = {}
    for job in jobs:
        for number, entry in enumerate(job.entries):
            places.setdefault(entry.key, []).append((job.shard, number))
    gone = [one.key for one in listed if one.key is not None and one.key not in places]
    if gone:
        raise ValueError(
            f"exclude= names records that are not there ({len(gone)}: {gone[:5]}): "
            "make the list again with verify"
        )
    found = []
    for one in listed:
        there = (one.shard, one.record)
        here = places.get(one.key, [there])
        shard, number = there if there in here else here[0]
        found.append(one._replace(shard=shard, record=number))
    return found
