"""Verify every checksum of every shard, and every byte that an index describes.

Each shard is scanned as a build scans it. Then its records are read by the index, if there is one.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pickle
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from twinfeed.loaders import errors
from twinfeed.loaders.building.bad_records import (
    BAD_LIST,
    BadRecord,
    bad_record,
    write_bad_records,
)
from twinfeed.loaders.building.plan import BuildPlan, add_headers
from twinfeed.loaders.building.sources import Job, PathLike, Shards, find_source, local_copy
from twinfeed.loaders.errors import DataCorruptionError, LoaderError, StaleIndexError
from twinfeed.loaders.feed.decode import DecodeImage
from twinfeed.loaders.formats.example import sample_of
from twinfeed.loaders.formats.records import Record, Sample, one_by_one
from twinfeed.loaders.formats.sniff import IMAGE_EXTENSIONS, image_extension
from twinfeed.loaders.formats.tar import ADVISE_JOIN
from twinfeed.loaders.index.index import Index, load_index
from twinfeed.loaders.index.manifest import MANIFEST, file_digest
from twinfeed.loaders.index.open import file_exists, set_shards_root
from twinfeed.loaders.index.options import ReadingOptions, parse_reading_options
from twinfeed.loaders.index.paths import check_shards, join, output_path, stale_file_error
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.loop.feed_loader import in_order
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.atomic import check_replaceable
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.loaders.support.system import processors
from twinfeed.samplers.validate import counted

_MAX_SHOWN = 20
"""Findings that a printed report lists."""
_TASKS = 64
"""About how many tasks an executor gets: enough for its workers, but far fewer than shards."""
_BATCH = 256  # records that are read in one call

_ShardResult = tuple[int, list[BadRecord], Int64s]
"""The number of records of a shard, what is bad there, and the ids of the good records."""

_Decode = Callable[[Sample], object]
_Check = Callable[[Sequence[Any]], Iterator[_ShardResult]]
_Good = tuple[int, str | None, Record | Sample]
"""A good record: its number in the shard, its key and its fields."""

_image_decoder = lru_cache(DecodeImage)
_unpickle_cached = lru_cache(maxsize=1)(pickle.loads)  # a worker gets the same check many times


@dataclass(frozen=True)
class Report:
    """The result of `verify`; printed, a line for each finding, and a summary.

    Attributes:
        findings: what is bad. A `record` of -1 is a whole shard, a loose file that is missing or
            has changed, or half of a tar sample whose parts lie apart.
        good_records: the ids of the good records of an index, in order, for `records=` of a
            sampler, int64[n]; None for shards without an index.

    >>> report = Report(3, 1000, [BadRecord("a.tar", 7, problem="corrupted data")])
    >>> print(report)
    a.tar, record 7: corrupted data
    1,000 records in 3 shards: 1 bad
    >>> report.ok
    False
    """

    shards: int
    records: int
    findings: list[BadRecord]
    good_records: Int64s | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return not self.findings

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings[:_MAX_SHOWN]]
        if len(self.findings) > _MAX_SHOWN:
            lines.append(f"... and {len(self.findings) - _MAX_SHOWN} more")
        result = "all is well" if self.ok else f"{len(self.findings)} bad"
        checked = f"{counted(self.records, 'record')} in {counted(self.shards, 'shard')}"
        return "\n".join([*lines, f"{checked}: {result}"])


def verify(
    source: Index | Shards,
    /,
    *,
    decode: bool | Callable[[Sample], object] = False,
    bad_list: PathLike | None = None,
    root: PathLike | None = None,
    executor: Executor | None = None,
    progress: bool = False,
    **options: Unpack[ReadingOptions],
) -> Report:
    """Check every checksum of an index and its shards, or of shards that have no index yet.

    Of shards: the framing, every checksum, every Example. Of an index also:

    - its own arrays;
    - the SHA-256 of each shard, where the index holds it (an index of `pack` does);
    - a checksum over the headers and checksums of each shard's records, which in a tar also covers
      the members that are not fields;
    - each field against its CRC-32C.

    With `decode`, each record is also decoded, on threads. Bad and missing records are reported,
    not raised.

    Args:
        source: an index (open, or its folder), or shards as `build_index` takes them. The report
            names shards relative to the root, or by full paths if there is neither an index nor a
            `root`.
        decode: whether to decode images, as `DecodeImage` does: the values of fields with the name
            of an image, such as `image` or `jpg`, and others that begin like an image. Or the
            `decode` of a feed, which may be lenient: `DecodeImage(strict=False)`.
        bad_list: the file to write the bad records to, for `build_index(exclude=…)`. If a scan
            cannot go on after a bad record, the entry says so (`rest`). Leaving out such a record
            leaves out all records after it. An index without these records has nothing bad there.
        root: the folder or URL that shard paths are relative to.
        executor: any executor of concurrent.futures' kind. The executor is sent the index, and
            groups of shards, which its workers check side by side.
        progress: whether to show a progress bar.
        **options: how the records of shards without an index are read; see `ReadingOptions`.

    Raises:
        FileExistsError: the path `bad_list` exists, and is not an older bad list.
        IndexFormatError: damaged arrays.
        FileNotFoundError: every shard of an index is missing, or a pattern has no match.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> index = pack([{"word": b"to"}, {"word": b"be"}], mkdtemp())["data"]
    >>> print(report := verify(index))
    2 records in 1 shard: all is well
    >>> report.good_records
    array([0, 1])
    """
    reading = parse_reading_options(verify, options)
    decoder = _decode_images if decode is True else decode or None
    if decoder is not None and not callable(decoder):
        raise TypeError(f"decode must be True or a function of a sample, got {decode!r:.80}")
    if bad_list is not None:
        bad_list = output_path(bad_list)
        check_replaceable(bad_list, *BAD_LIST)
    if isinstance(source, (str, os.PathLike)) and (
        Path(source, MANIFEST).exists() or is_index_path(source)
    ):
        source = load_index(source, root)
        if root is None:
            set_shards_root(source)
        _check_root(source)
    index = source if isinstance(source, Index) else None
    shards: Sequence[Any]
    full_paths = False
    if isinstance(source, Index):
        _check_arrays(source)
        plan, shards = BuildPlan(source.shards_root, source.options), range(len(source.shards))
    else:
        found = find_source(source, None, container=reading.container, root=root, complete=False)
        full_paths = root is None and found.container != "files"
        plan, shards = BuildPlan.of(found, None, None, reading), found.jobs
    checks = _check_all(partial(_check_shards, plan, index, decoder), shards, executor)
    results = list(progress_bar(checks, "verifying", "shard", progress, len(shards)))
    findings = [finding for _, bad, _ in results for finding in bad]
    if full_paths:
        findings = [f._replace(shard=str(join(plan.root, f.shard))) for f in findings]
    if bad_list is not None:
        write_bad_records(bad_list, [finding for finding in findings if finding.record >= 0])
    records = sum(records for records, _, _ in results)
    good_records = np.concatenate([np.zeros(0, np.int64), *(ids for _, _, ids in results)])
    return Report(len(shards), records, findings, None if index is None else good_records)


def _check_all(
    check: _Check, shards: Sequence[Any], executor: Executor | None
) -> Iterator[_ShardResult]:
    """Yield the result of `check` for each shard, in order; an executor gets several at a time."""
    if executor is None:
        yield from check(shards)
        return
    size = math.ceil(len(shards) / _TASKS) or 1
    tasks = [shards[start : start + size] for start in range(0, len(shards), size)]
    for results in executor.map(partial(_check_in_worker, pickle.dumps(check)), tasks):
        yield from results


def _check_in_worker(pickled_check: bytes, shards: Sequence[Any]) -> list[_ShardResult]:
    """Call a pickled check, which is unpickled once in a process, with its index."""
    check: _Check = _unpickle_cached(pickled_check)
    return list(check(shards))


def _check_root(index: Index) -> None:
    """Raise FileNotFoundError if no shard of an index exists: its root may be a wrong folder."""
    names = index.shard_paths.tolist()
    with suppress(LoaderError):  # such as a refused request: the check of each shard reports it
        if index.container == "files" or any(file_exists(index.shards_root, n) for n in names):
            return
        if not index.remote:  # raises the error, with the files that the folder has instead
            check_shards(index.root, names, index.shards["bytes"].tolist())
        problem = f"none of the {counted(len(names), 'shard')} is at this URL: is root= right?"
        raise FileNotFoundError(errno.ENOENT, problem, index.root)


def _check_arrays(index: Index) -> None:
    """Raise IndexFormatError if the file of an array of the index does not match its digest."""
    folder = index.path / index.manifest["folder"]
    entries = index.manifest["arrays"].items()
    damaged = [n for n, entry in entries if file_digest(folder / f"{n}.npy") != entry["sha256"]]
    if damaged:
        raise errors.IndexFormatError(
            f"damaged index: {', '.join(damaged)} do not match their digests", path=index.where
        )


def _check_shards(
    plan: BuildPlan, index: Index | None, decode: _Decode | None, shards: Sequence[Any]
) -> Iterator[_ShardResult]:
    """Check shards, given as jobs or as numbers in an index, and yield the result of each."""
    with nullcontext() if index is None else Reader(index) as reader:
        for shard in shards:
            check: _PlainShard | _IndexedShard = (
                _PlainShard(plan, shard)
                if reader is None
                else _IndexedShard(plan, reader, shard, wants_samples=decode is not None)
            )
            if decode is None:
                deque(check.records(), maxlen=0)
                failed = []
            else:
                try_decode = partial(_undecodable, decode, check.name)
                found = in_order(try_decode, check.records(), threads=processors())
                failed = [finding for finding in found if finding is not None]
            findings = failed + check.findings()
            yield check.num_records, findings, check.good_records(findings)


def _undecodable(decode: _Decode, shard: str, good: _Good) -> BadRecord | None:
    """Decode a record; return the finding if it fails. ImportError is no fault of a record."""
    number, key, sample = good
    try:
        decode(sample_of(sample) if isinstance(sample, Record) else sample)
    except ImportError:
        raise
    except Exception as error:
        return BadRecord(shard, number, key=key, problem=f"it does not decode: {error!r:.300}")
    return None


def _decode_images(sample: Sample) -> None:
    """Decode each field that has the name of an image, or bytes that begin like an image."""
    for name, value in sample.items():
        is_image = name.rpartition(".")[2] in ("image", "image/encoded", *IMAGE_EXTENSIONS)
        if isinstance(value, bytes) and (is_image or image_extension(value)):
            _image_decoder(name)(sample)


class _PlainShard:
    """Scan one shard to its end, or to where it breaks off, and collect bad records.

    - `bad`: the bad records.
    - `size`: the size in bytes that the shard has if it is indexed.
    - `offsets`, `numbers`: record `numbers[i]` of the shard, or a part of it, starts at byte
      `offsets[i]`.
    - `previous_end`: the end of the last record; None after a bad record, whose end is not known.
    """

    def __init__(self, plan: BuildPlan, job: Job, size: int | None = None) -> None:
        self.plan, self.job, self.name, self.size = plan, job, job.shard, size
        self.bad: list[BadRecord] = []
        self.offsets, self.numbers = array("q"), array("q")
        self.num_records = self.headers_checksum = 0
        self.sha256, self.is_readable = "", True
        self.previous_end: int | None = 0

    def records(self) -> Iterator[_Good]:
        """Scan the shard, and yield its good records."""
        plan, job = self.plan, self.job
        try:
            with local_copy(join(plan.root, job.shard)) as (path, _):
                if self.size is not None and os.stat(path).st_size != self.size:
                    raise stale_file_error(path, self.size, os.stat(path).st_size)
                if plan.options.digest:
                    self.sha256 = file_digest(Path(path))
                for record in one_by_one(plan.scan(job, path, self._add_bad)):
                    self.headers_checksum = add_headers(self.headers_checksum, [record.header])
                    self.num_records += 1
                    self._add(record.offset, record.number)
                    self.previous_end = record.offset + record.length
                    if plan.options.join:  # other records may lie between the parts of this record
                        for part in record.fields.values():
                            self._add(part.offset, record.number)
                    yield record.number, record.key, record
        except (OSError, StaleIndexError) as error:
            self.is_readable = False
            name = getattr(error, "filename", None) if job.entries else None
            self.bad.append(bad_record(name or job.shard, error))
        except LoaderError as error:
            self.bad.append(bad_record(job.shard, error, rest=True))
            if error.record is not None:  # all records after the break belong to this error
                start = error.offset if self.previous_end is None else self.previous_end
                self._add(start or 0, error.record)

    def _add_bad(self, error: DataCorruptionError) -> None:
        """Store the error of a bad record. The scan calls this, and continues after the record."""
        finding = bad_record(self.job.shard, error)
        # A bad record is usually excluded by its number, but not if it is a part of a tar sample. A
        # sample is the files of one key, such as a.jpg and a.txt. If b.jpg lies between them, the
        # scan finds a.txt as a record of its own. If only that were excluded, a.jpg alone would
        # stay, as a wrong sample. Its error is known by its advice, `ADVISE_JOIN`: index the tar
        # with `join`, which joins the parts. The report shows this advice.
        if error.advice == ADVISE_JOIN:
            number = -1 if self.size is None else finding.record
            finding = finding._replace(record=number, problem=f"{error.problem}; {ADVISE_JOIN}")
        self.bad.append(finding)
        self.num_records += 1
        self._add(error.offset or 0, finding.record)
        self.previous_end = None  # a bad record may have a wrong length

    def _add(self, offset: int, number: int) -> None:
        """Store the offset at which a record, or a part of it, starts, and its number."""
        self.offsets.append(offset)
        self.numbers.append(number)

    def findings(self) -> list[BadRecord]:
        """Return the bad records. A shard without records is bad too."""
        is_empty = not self.bad and not self.num_records
        return [BadRecord(self.job.shard, -1, problem="it has no records")] * is_empty or self.bad

    def good_records(self, _: Sequence[BadRecord]) -> Int64s:
        """Return no ids: a shard without an index has none."""
        return np.zeros(0, np.int64)

    def numbers_at(self, offsets: Int64s) -> Int64s:
        """Return the number of the last record that starts at or before each offset, or -1."""
        starts, numbers = np.array(self.offsets, np.int64), np.array(self.numbers, np.int64)
        by_start = np.lexsort((numbers, starts))
        num_started = np.searchsorted(starts[by_start], offsets, side="right")
        return np.append(-1, numbers[by_start])[num_started]


class _IndexedShard:
    """Scan one shard without the index, then read its records by the index; compare checksums.

    - `scan`: what the scan has found; None of loose files, which are their records.
    - `numbers`: the number in the shard of each record of the index, int64[records].
    - `unreadable`: what reading the records has found, by the index of the record.
    """

    def __init__(self, plan: BuildPlan, reader: Reader, shard: int, *, wants_samples: bool) -> None:
        index, self.wants_samples = reader.index, wants_samples
        self.reader, self.index, self.shard = reader, index, shard
        self.name = index.shard_paths[shard]
        stops = index.shard_stops
        self.start, self.stop = int(stops[shard - 1]) if shard else 0, int(stops[shard])
        self.num_records = self.stop - self.start
        self.numbers = np.arange(self.num_records)
        self.unreadable: dict[int, BadRecord] = {}
        size = int(index.shards["bytes"][shard])
        is_loose = index.container == "files"
        self.scan = None if is_loose else _PlainShard(plan, Job(self.name), size)

    def records(self) -> Iterator[_Good]:
        """Check the shard, and yield the fields of its good records if samples are wanted."""
        if self.scan is not None:
            deque(self.scan.records(), maxlen=0)
            if not self.scan.is_readable:
                return
            self.numbers = self.scan.numbers_at(self._offsets())
        for first in range(self.start, self.stop, _BATCH):
            yield from self._read(np.arange(first, min(first + _BATCH, self.stop)))

    def _offsets(self) -> Int64s:
        """Return an offset within each record, the largest of its fields; -1 without fields."""
        offsets = np.full(self.num_records, -1)
        for field in self.index.fields:
            rows = self.index.table(field)[self.start : self.stop]
            found = np.where(rows["length"] >= 0, rows["offset"].astype(np.int64), -1)
            np.maximum(offsets, found, out=offsets)
        return offsets

    def _read(self, ids: Int64s) -> Iterator[_Good]:
        """Read some records together, or one by one if there is an error."""
        fields, index = self.index.fields, self.index
        try:
            values = self.reader.read_or_none(ids, tuple(fields))
        except (LoaderError, OSError) as error:
            for n in range(len(ids)) if len(ids) > 1 else ():
                yield from self._read(ids[n : n + 1])
            if len(ids) == 1:
                row = int(ids[0]) - self.start
                self.unreadable[row] = _unreadable(self.name, int(self.numbers[row]), error)
            return
        if not self.wants_samples:
            return
        keys: Sequence[str | None] = index.keys(ids) if index.has_keys else [None] * len(ids)
        for n, number in enumerate(self.numbers[ids - self.start].tolist()):
            sample = {name: values[name][n] for name in fields if values[name][n] is not None}
            yield number, keys[n], sample

    def findings(self) -> list[BadRecord]:
        """Return what is bad, but not a bad record that the index excludes, as it was bad at the
        build.
        """
        scan, unreadable = self.scan, [*self.unreadable.values()]
        if scan is None:
            return unreadable
        if not scan.is_readable:
            return scan.bad
        headers_changed = scan.headers_checksum != self.index.shards["headers"][self.shard]
        indexed = set(self.numbers.tolist())
        # All after a bad record with `rest` is unreadable. It was so at the build if nothing has
        # changed since. The number -1 means the whole shard.
        bad = [
            finding
            for finding in scan.bad
            if finding.record in indexed or finding.record < 0 or (finding.rest and headers_changed)
        ]
        # Only the scan reads the headers of records, so only its findings explain why their
        # checksum differs. In a tar, this checksum also covers the fields.
        explained = bad or (self.index.container == "tar" and unreadable)
        bad = [*{finding.record: finding for finding in unreadable + bad}.values()]
        digests = self.index.shard_sums  # the SHA-256 of each shard; empty if the index has none
        if headers_changed and not explained:
            what = "the checksum over its records"
        elif not bad and len(digests) and scan.sha256 != digests[self.shard].tobytes().hex():
            what = "its SHA-256"
        else:
            return bad
        problem = f"the shard has changed: {what} is not that of the index"
        return [*bad, BadRecord(self.name, -1, problem=problem)]

    def good_records(self, findings: Sequence[BadRecord]) -> Int64s:
        """Return the ids of the records without a finding, of all `findings`."""
        is_bad = np.isin(self.numbers, [finding.record for finding in findings])
        is_bad[list(self.unreadable)] = True
        for finding in findings:  # the whole shard, or the rest of it
            if finding.rest or (finding.record < 0 and self.scan is not None):
                is_bad |= self.numbers >= finding.record
        return np.flatnonzero(~is_bad) + self.start


def _unreadable(shard: str, number: int, error: LoaderError | OSError) -> BadRecord:
    """Return the finding for an error of reading record `number` of a shard."""
    # A file that is missing, or has changed since the indexing, has no good record: its
    # `BadRecord` has the number -1, and names the file.
    if isinstance(error, OSError | StaleIndexError):
        file = error.filename if isinstance(error, OSError) else error.path
        return bad_record(file or shard, error)
    return bad_record(shard, error)._replace(record=number)
