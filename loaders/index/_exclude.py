"""Which records a build leaves out: the list of bad ones, brought to the shards of now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from twinfeed.loaders.index._paths import is_url, relative_to
from twinfeed.loaders.index._sources import Job, PathLike, Source
from twinfeed.loaders.index.bad_records import BadRecord, read_bad_records

Exclude = PathLike | Iterable[BadRecord | tuple[str, int]]


def without(source: Source, exclude: Exclude, /) -> list[Job]:
    """Return the jobs, each told which of its records to leave out.

    >>> without(Source("tar", "/data", [Job("a.tar")]), [("a.tar", 7)])[0].exclude
    frozenset({7})
    """
    given = read_bad_records(exclude) if isinstance(exclude, (str, os.PathLike)) else exclude
    left_out = [_entry(one) for one in given]
    if left_out and source.container == "files":
        left_out = _where_now(source.jobs, left_out)
    else:
        left_out = [one._replace(shard=_name(source.root, one.shard)) for one in left_out]
    bad: dict[str, set[int]] = {}
    rest: dict[str, int] = {}
    for one in left_out:
        bad.setdefault(one.shard, set()).add(one.record)
        if one.rest:
            rest[one.shard] = min(one.record, rest.get(one.shard, one.record))
    unknown = sorted(set(bad) - {job.shard for job in source.jobs})
    if unknown:
        raise ValueError(
            f"exclude= names shards that are not indexed ({len(unknown)}: {unknown[:5]}): "
            f"names are relative to the root, and here such as {source.jobs[0].shard!r}; list the "
            f"bad records again: verify with root= {source.root}"
        )
    return [
        _leaving_out(job, bad.get(job.shard, set()), rest.get(job.shard)) for job in source.jobs
    ]


def _entry(one: Any) -> BadRecord:
    """Return an entry of `exclude`, which may be a pair only."""
    if isinstance(one, str) or not isinstance(one, Sequence) or len(one) < 2:
        raise TypeError(
            "exclude must be the list that verify writes, or (shard, number) pairs such as "
            f"('a.tar', 7), got {one!r}"
        )
    return BadRecord(*one)


def _name(root: str, shard: str) -> str:
    """Return the name that a listed shard has below the root; a full path may lie elsewhere."""
    if not os.path.isabs(shard) and not is_url(shard):
        return shard
    with suppress(ValueError):
        return relative_to(root, shard)
    return shard


def _where_now(jobs: Sequence[Job], listed: Sequence[BadRecord]) -> list[BadRecord]:
    """Return records of loose files with the numbers they have now: found by their keys, since
    other files may have come or gone.
    """
    places: dict[str, list[tuple[str, int]]] = {}
    for job in jobs:
        for number, entry in enumerate(job.entries):
            places.setdefault(entry.key, []).append((job.shard, number))
    gone = [one.key for one in listed if one.key is not None and one.key not in places]
    if gone:
        raise ValueError(
            f"exclude= names records that are not there ({len(gone)}: {gone[:5]}): "
            "list the bad records again with verify"
        )
    found = []
    for one in listed:
        here = places.get(one.key or "", [(one.shard, one.record)])
        shard, number = (one.shard, one.record) if (one.shard, one.record) in here else here[0]
        found.append(one._replace(shard=shard, record=number))
    return found


def _leaving_out(job: Job, bad: set[int], rest: int | None) -> Job:
    """Return a job that leaves out some records, and all from `rest` on."""
    named = frozenset(n for n in bad if rest is None or n <= rest)
    return job._replace(exclude=named, rest=rest)
