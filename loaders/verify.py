"""Verify everything: every checksum of every shard, and every byte that an index promises."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from twinfeed.loaders.errors import (
    REBUILD,
    DataCorruptionError,
    IndexFormatError,
    LoaderError,
    StaleIndexError,
)
from twinfeed.loaders.formats._sniff import MANIFEST
from twinfeed.loaders.formats.tar import APART
from twinfeed.loaders.index._arrays import damaged_arrays
from twinfeed.loaders.index._paths import check_shards, check_size, is_url, join, to_write
from twinfeed.loaders.index._plan import Plan, add_header, scan_job
from twinfeed.loaders.index._sources import Job, PathLike, Shards, find_source, local
from twinfeed.loaders.index.bad_records import (
    BadRecord,
    bad_record,
    lost_file,
    write_bad_records,
)
from twinfeed.loaders.index.opened import Index, load_index
from twinfeed.loaders.index.options import DEFAULT, Reading
from twinfeed.loaders.progress import bar
from twinfeed.loaders.reading.reader import Reader

_BATCH = 256


class Report(NamedTuple):
    """Say what was verified and what is bad; `record` -1 stands for a whole shard, for a loose file
    that is not there or has changed, or for the half of a tar sample whose parts lie apart.

    >>> Report(3, 1000, []).ok
    True
    """

    shards: int
    records: int
    bad: list[BadRecord]

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return not self.bad


def verify(
    source: Index | Shards,
    /,
    *,
    bad_list: PathLike | None = None,
    reading: Reading = DEFAULT,
    root: PathLike | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> Report:
    """Check every checksum of an index (open, or its folder) and its shards, or of shards that have
    no index yet.

    Of shards: the framing, every checksum, every Example; `reading` says how they are read. Of an
    index also: its own arrays, each shard's record headers, and each field against its CRC-32C, in
    loose files and tar too; a tar member that only became a label counts with its shard's headers.
    What is bad or missing is reported, not raised, and bad records are written to `bad_list` for
    `build_index(exclude=…)`; a scan that cannot go on after a bad record says so (`rest`), and
    leaving that one out leaves out all that follow. Where an index has no more of such a shard, all
    is well with it. Shards are named relative to the root, those without an index or a `root` by
    their full paths.

    Raises IndexFormatError for damaged arrays, FileNotFoundError where every shard of an index is
    missing, or a pattern has no match.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> verify(pack([{"word": b"to"}, {"word": b"be"}], mkdtemp())["data"])
    Report(shards=1, records=2, bad=[])
    """
    if bad_list is not None:
        bad_list = to_write(bad_list)
    tasks: list[tuple[Callable[..., tuple[int, list[BadRecord]]], tuple[Any, ...]]]
    if _is_index(source):
        source = load_index(source, root)
        _check_root(source)
    if isinstance(source, Index):
        _check_arrays(source)
        tasks = [(_indexed_shard, (source, number)) for number in range(len(source.shards))]
    else:
        found = find_source(source, None, container=reading.container, root=root, complete=False)
        plan = Plan.of(found, None, None, reading)
        full = root is None and found.container != "files"
        tasks = [(_plain_shard, (plan, job, full)) for job in found.jobs]
    if executor is None:
        results = [task(*args) for task, args in bar(tasks, "verifying", "shard", progress)]
    else:
        futures = [executor.submit(task, *args) for task, args in tasks]
        for _ in bar(as_completed(futures), "verifying", "shard", progress, total=len(futures)):
            pass
        results = [future.result() for future in futures]
    bad = [one for _, found_bad in results for one in found_bad]
    if bad_list is not None:
        write_bad_records(bad_list, [one for one in bad if one.record >= 0])
    return Report(len(results), sum(records for records, _ in results), bad)


def _is_index(source: Index | Shards) -> TypeGuard[PathLike]:
    """Tell whether `source` is the folder of an index."""
    return isinstance(source, (str, os.PathLike)) and Path(source, MANIFEST).exists()


def _check_root(index: Index) -> None:
    """Raise FileNotFoundError, which tells of a better root, if no shard is there at all."""
    names = index.shard_paths.tolist()
    local_shards = index.container != "files" and not is_url(index.root)
    if local_shards and not any(os.path.exists(join(index.root, name)) for name in names):
        check_shards(index.root, names, index.shards["bytes"].tolist())


def _check_arrays(index: Index) -> None:
    """Compare the index's own files with their digests."""
    damaged = damaged_arrays(index.path, index.manifest)
    if damaged:
        raise IndexFormatError(
            f"damaged index: {', '.join(damaged)} do not match their digests",
            path=index.path,
            advice=REBUILD,
        )


class _Scan:
    """Scan one shard to its end, or to where it breaks off, and keep what is bad.

    A shard that cannot be read, or has not the `size` that is given, is `lost`.
    """

    def __init__(self, plan: Plan, job: Job, *, size: int | None = None) -> None:
        self.job = job
        self.lost = False
        self.end: int | None = 0
        self.headers = self.records = 0
        self.places: list[tuple[int, int]] = []
        self.bad: list[BadRecord] = []
        self.halves: set[int] = set()
        try:
            with local(join(plan.root, job.shard)) as path:
                if size is not None:
                    check_size(path, size)
                for record in scan_job(plan, job, path, self.on_bad):
                    self.headers = add_header(self.headers, record)
                    self.note(record.offset, record.number)
                    self.end = record.offset + record.length
                    if plan.reading.join:  # other records may lie between the parts of this one
                        self.places += [(p.offset, record.number) for p in record.parts.values()]
        except (OSError, StaleIndexError) as error:
            self.lost = True
            name = getattr(error, "filename", None) if job.entries else None
            self.bad.append(lost_file(name or job.shard, error))
        except LoaderError as error:
            self.bad.append(bad_record(job.shard, error, rest=True))
            if error.record is not None:  # what the index has behind the break counts with it
                start = error.offset if self.end is None else self.end
                self.places.append((start or 0, error.record))
        self.places.sort()

    def on_bad(self, error: DataCorruptionError) -> None:
        """Keep the error of one record."""
        entry = bad_record(self.job.shard, error)
        if error.advice == APART:
            entry = entry._replace(problem=f"{error.problem}; {APART}")
            self.halves.add(entry.record)
        self.bad.append(entry)
        self.note(error.offset or 0, -1 if error.record is None else error.record)
        self.end = None

    def note(self, offset: int, number: int) -> None:
        """Keep where a record starts."""
        self.records += 1
        self.places.append((offset, number))

    def number_at(self, offset: int) -> int:
        """Return the number of the record that holds the byte at `offset`."""
        place = bisect_right(self.places, (offset, sys.maxsize)) - 1
        return self.places[place][1] if place >= 0 else -1


def _plain_shard(plan: Plan, job: Job, full: bool) -> tuple[int, list[BadRecord]]:
    """Verify a shard by itself, named by its full path if so wanted."""
    scan = _Scan(plan, job)
    name = join(plan.root, job.shard) if full else job.shard
    bad = [one._replace(shard=name) for one in scan.bad] if full else scan.bad
    # Half a sample is not to be left out, since that would keep the other half.
    bad = [one._replace(record=-1) if one.record in scan.halves else one for one in bad]
    if not bad and job.samples not in (None, scan.records):
        problem = f"the wids index says {job.samples} samples, the shard has {scan.records}"
        bad = [BadRecord(name, -1, None, None, problem)]
    return scan.records, bad


def _indexed_shard(index: Index, shard: int) -> tuple[int, list[BadRecord]]:
    """Verify a shard against its index."""
    stop = int(index.shards["stop"][shard])
    start = int(index.shards["stop"][shard - 1]) if shard else 0
    name = index.shard_paths[shard]
    if index.container == "files":
        return stop - start, [_entry(name, n, e) for n, e in _unreadable(index, start, stop)]
    plan = Plan(index.root, index.options)
    scan = _Scan(plan, Job(name), size=int(index.shards["bytes"][shard]))
    if scan.lost:
        return stop - start, scan.bad
    held = {scan.number_at(offset) for offset in _offsets(index, start, stop)}
    changed = scan.headers != index.shards["headers"][shard]
    bad = {
        one.record: one
        for one in scan.bad
        if one.record in held or one.record < 0 or (one.rest and changed)
    }
    for number, error in _unreadable(index, start, stop):
        offset = next(iter(_offsets(index, start + number, start + number + 1)), 0)
        found = scan.number_at(offset)
        entry = _entry(name, found, error)
        bad.setdefault(entry.record, entry)
    explained = scan.bad or (bad and index.container == "tar")  # there fields count as well
    if not explained and changed:
        what = "headers, or members that are no fields," if index.container == "tar" else "headers"
        problem = f"the shard has changed: its record {what} are not those that were indexed"
        bad[-1] = BadRecord(name, -1, None, None, problem)
    return stop - start, list(bad.values())


def _offsets(index: Index, start: int, stop: int) -> list[int]:
    """Return where some held field of each record lies, records without any left out."""
    offsets = {}
    for field in index.fields:
        rows = index.table(field)[start:stop]
        for place in (rows["length"] >= 0).nonzero()[0].tolist():
            offsets[place] = int(rows["offset"][place])
    return [offsets[place] for place in sorted(offsets)]


def _entry(shard: str, number: int, error: LoaderError | OSError) -> BadRecord:
    """Return the entry for the error of reading one record."""
    if isinstance(error, StaleIndexError):
        return lost_file(error.path or shard, error)
    if isinstance(error, OSError):
        return lost_file(error.filename or shard, error)
    return bad_record(shard, error)._replace(record=number)


def _unreadable(index: Index, start: int, stop: int) -> Iterator[tuple[int, LoaderError | OSError]]:
    """Yield (number within the shard, error) of each record that does not read as indexed."""
    with Reader(index) as reader:
        for first in range(start, stop, _BATCH):
            ids = range(first, min(first + _BATCH, stop))
            if _read(reader, ids) is not None:
                for record in ids:
                    error = _read(reader, range(record, record + 1))
                    if error is not None:
                        yield record - start, error


def _read(reader: Reader, ids: range) -> LoaderError | OSError | None:
    """Read records with what fields they hold, and return the error if there is one."""
    try:
        for field in reader.index.fields:
            lengths = reader.index.table(field)["length"][ids.start : ids.stop]
            held = [
                record for record, length in zip(ids, lengths.tolist(), strict=True) if length >= 0
            ]
            reader.read(held, [field])
    except (LoaderError, OSError) as error:
        return error
    return None
