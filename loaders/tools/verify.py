"""Verify every checksum of every shard, and every byte that an index describes."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pickle
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
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
from twinfeed.loaders.errors import DataCorruptionError, DecodeError, LoaderError, StaleIndexError
from twinfeed.loaders.feed.decode import DecodeImage
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Record, Sample, one_by_one
from twinfeed.loaders.formats.sniff import IMAGE_EXTENSIONS, image_extension
from twinfeed.loaders.formats.tar import ADVISE_JOIN
from twinfeed.loaders.index.index import Index, load_index
from twinfeed.loaders.index.manifest import MANIFEST, file_digest
from twinfeed.loaders.index.open import file_exists, set_shards_root
from twinfeed.loaders.index.options import ReadingOptions, parse_reading_options
from twinfeed.loaders.index.paths import check_shards, join, output_path, stale_file_error
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.atomic import check_replaceable
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.loaders.support.system import processors
from twinfeed.samplers.validate import counted

_BATCH = 256  # records that are read in one call
_MAX_SHOWN = 20
"""Findings that a printed report lists."""
_TASKS = 64
"""About how many tasks an executor gets: enough for its workers, but far fewer than shards."""

_ShardResult = tuple[int, list[BadRecord], Int64s | None]
"""The number of records of a shard, what is bad there, and the ids of the good records."""

_Error = LoaderError | OSError
_Decode = Callable[[Sample], object] | None

_Check = Callable[[Sequence[Any]], Iterator[_ShardResult]]

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
    check: _Check
    shards: Sequence[Any]
    if isinstance(source, Index):
        _check_arrays(source)
        check, shards = partial(_check_indexed_shards, source, decoder), range(len(source.shards))
    else:
        found = find_source(source, None, container=reading.container, root=root, complete=False)
        full_paths = root is None and found.container != "files"
        plan = BuildPlan.of(found, None, None, reading)
        check, shards = partial(_check_plain_shards, plan, full_paths, decoder), found.jobs
    checks = _check_all(check, shards, executor)
    results = list(progress_bar(checks, "verifying", "shard", progress, len(shards)))
    findings = [finding for _, bad, _ in results for finding in bad]
    good = [ids for _, _, ids in results if ids is not None]
    good_records = np.concatenate([np.zeros(0, np.int64), *good])
    if bad_list is not None:
        write_bad_records(bad_list, [finding for finding in findings if finding.record >= 0])
    records = sum(records for records, _, _ in results)
    is_index = isinstance(source, Index)
    return Report(len(shards), records, findings, good_records if is_index else None)


def _check_all(
    check: _Check, shards: Sequence[Any], executor: Executor | None
) -> Iterator[_ShardResult]:
    """Call `check` for shards, and yield the result of each, in order.

    An executor gets tasks of several shards.
    """
    if executor is None:
        yield from check(shards)
        return
    size = math.ceil(len(shards) / _TASKS) or 1
    tasks = [shards[start : start + size] for start in range(0, len(shards), size)]
    for results in executor.map(partial(_check_in_worker, pickle.dumps(check)), tasks):
        yield from results


def _check_in_worker(pickled_check: bytes, shards: Sequence[Any]) -> list[_ShardResult]:
    """Call a pickled check for some shards, in a worker process, and return their results.

    The check, with its index, is unpickled once in a process, and cached.
    """
    check: _Check = _unpickle_cached(pickled_check)
    return list(check(shards))


def _check_root(index: Index) -> None:
    """Raise FileNotFoundError if no shard of an index exists: its root may be a wrong folder."""
    if index.container == "files":  # its records are loose files: there are no shards
        return
    names = index.shard_paths.tolist()
    try:
        if any(file_exists(index.shards_root, name) for name in names):
            return
    except LoaderError:  # such as a refused request: the check of each shard will report it
        return
    if index.remote:
        problem = f"none of the {counted(len(names), 'shard')} is at this URL: is root= right?"
        raise FileNotFoundError(errno.ENOENT, problem, index.root)
    # In a local folder, this raises the error, with the files that the folder has instead.
    check_shards(index.root, names, index.shards["bytes"].tolist())


def _check_arrays(index: Index) -> None:
    """Raise IndexFormatError if the file of an array of the index does not match its digest."""
    folder = index.path / index.manifest["folder"]
    entries = index.manifest["arrays"].items()
    damaged = [n for n, entry in entries if file_digest(folder / f"{n}.npy") != entry["sha256"]]
    if damaged:
        raise errors.IndexFormatError(
            f"damaged index: {', '.join(damaged)} do not match their digests", path=index.where
        )


def _decode_images(sample: Sample) -> None:
    """Decode each field that has the name of an image, or bytes that begin like an image."""
    for name, value in sample.items():
        is_image = name.rpartition(".")[2] in ("image", "image/encoded", *IMAGE_EXTENSIONS)
        if isinstance(value, bytes) and (is_image or image_extension(value)):
            _image_decoder(name)(sample)


class _DecodeErrors:
    """Decode samples on threads, and collect the errors by the number of the record."""

    def __init__(self, decode: Callable[[Sample], object]) -> None:
        self._decode, self._threads = decode, processors()
        self._pool = ThreadPoolExecutor(self._threads, "twinfeed-decode")
        self._pending = deque[tuple[int, Future[object]]]()
        self._errors: dict[int, _Error] = {}

    def add(self, number: int, sample: Sample) -> None:
        """Begin to decode a sample."""
        self._pending.append((number, self._pool.submit(self._decode, sample)))
        if len(self._pending) >= 2 * self._threads:  # bounds the memory of the samples
            self._collect()

    def finish(self) -> dict[int, _Error]:
        """Wait for the threads, and return the errors."""
        while self._pending:
            self._collect()
        self._pool.shutdown()
        return self._errors

    def _collect(self) -> None:
        """Wait for the sample that was added first, and keep its error."""
        number, future = self._pending.popleft()
        error = future.exception()
        if isinstance(error, ImportError):  # no fault of the record
            raise error
        if error is not None:
            self._errors[number] = DecodeError(f"it does not decode: {error!r:.300}")


class _ShardScan:
    """Scan one shard to its end, or to where it breaks off, and collect bad records.

    Attributes:
        unreadable: whether the shard cannot be read, or does not have the expected size.
        sha256: of the shard, if the plan asks for it.
        headers_checksum: over the headers of all good records.
        records: the number of records, good and bad.
        bad: the bad records.
        half_samples: the numbers of bad records that are a part of a tar sample. Its members (the
            files of one sample) should follow one another, but other members lie between them.
        offsets, record_numbers: two arrays of the same length. Record `record_numbers[i]` of the
            shard, or a part of it, starts at byte `offsets[i]`. -1 marks bytes of no record.
        previous_end: the end of the last record; None after a bad record, whose end is not known.
    """

    def __init__(
        self, plan: BuildPlan, job: Job, *, size: int | None = None, decode: _Decode = None
    ) -> None:
        """Scan the shard `job` as `plan` says; `size` is its size in bytes, if known."""
        decoding = None if decode is None else _DecodeErrors(decode)
        self.job = job
        self.sha256 = ""
        self.unreadable = False
        self.previous_end: int | None = 0
        self.headers_checksum = self.records = 0
        self.offsets, self.record_numbers = array("q"), array("q")
        self.bad: list[BadRecord] = []
        self.half_samples: set[int] = set()
        try:
            with local_copy(join(plan.root, job.shard)) as (path, _):
                if size is not None and os.stat(path).st_size != size:
                    raise stale_file_error(path, size, os.stat(path).st_size)
                if plan.options.digest:
                    self.sha256 = file_digest(Path(path))
                for record in one_by_one(plan.scan(job, path, self._on_bad)):
                    self.headers_checksum = add_headers(self.headers_checksum, [record.header])
                    self.records += 1
                    self._add(record.offset, record.number)
                    self.previous_end = record.offset + record.length
                    if decoding is not None:
                        decoding.add(record.number, _sample_of(record))
                    if plan.options.join:  # other records may lie between the parts of this record
                        for part in record.fields.values():
                            self._add(part.offset, record.number)
        except (OSError, StaleIndexError) as error:
            self.unreadable = True
            name = getattr(error, "filename", None) if job.entries else None
            self.bad.append(bad_record(name or job.shard, error))
        except LoaderError as error:
            self.bad.append(bad_record(job.shard, error, rest=True))
            if error.record is not None:  # all records after the break belong to this error
                start = error.offset if self.previous_end is None else self.previous_end
                self._add(start or 0, error.record)
        for number, problem in decoding.finish().items() if decoding is not None else ():
            # The key of loose files: a list made with other files is then refused.
            key = job.entries[number].key if job.entries else None
            self.bad.append(bad_record(job.shard, problem)._replace(record=number, key=key))

    def _on_bad(self, error: DataCorruptionError) -> None:
        """Store the error of a bad record. The scan calls this, and continues after the record."""
        finding = bad_record(self.job.shard, error)
        # A bad record is usually excluded by its number, but not if it is a part of a tar sample. A
        # sample is the files of one key, such as a.jpg and a.txt. If b.jpg lies between them, the
        # scan finds a.txt as a record of its own. If only that were excluded, a.jpg alone would
        # stay, as a wrong sample. Its error is known by its advice, `ADVISE_JOIN`: index the tar
        # with `join`, which joins the parts. The report shows this advice.
        if error.advice == ADVISE_JOIN:
            finding = finding._replace(problem=f"{error.problem}; {ADVISE_JOIN}")
            self.half_samples.add(finding.record)
        self.bad.append(finding)
        self.records += 1
        self._add(error.offset or 0, finding.record)
        self.previous_end = None  # a bad record may have a wrong length

    def _add(self, offset: int, number: int) -> None:
        """Store the offset at which a record, or a part of it, starts, and its number."""
        self.offsets.append(offset)
        self.record_numbers.append(number)

    def numbers_at(self, offsets: Int64s) -> Int64s:
        """Return for each offset the number of the record that contains it; -1 if none does.

        That is the last record that starts at the offset or before it. If record 0 starts at 10 and
        record 1 at 50, offsets 5, 10 and 60 give -1, 0 and 1.
        """
        starts, numbers = np.array(self.offsets, np.int64), np.array(self.record_numbers, np.int64)
        by_start = np.lexsort((numbers, starts))
        num_started = np.searchsorted(starts[by_start], offsets, side="right")
        return np.append(-1, numbers[by_start])[num_started]


def _sample_of(record: Record) -> Sample:
    """Return the fields of a record as `decode` takes them."""
    return {
        name: field.data if field.kind == "bytes" else decode_list(field.kind, field.data)
        for name, field in record.fields.items()
    }


def _check_plain_shards(
    plan: BuildPlan, full_paths: bool, decode: _Decode, jobs: Sequence[Job]
) -> Iterator[_ShardResult]:
    """Scan shards that have no index, and yield (number of records, bad records) of each.

    A bad record has a number, by which the user can exclude it when an index is built. Half samples
    get the number -1, which excludes nothing. Such a sample of a tar file is in two parts: a.jpg,
    then b.jpg, and then a.txt. If a.jpg were excluded, a.txt would be taken for a whole sample.

    With `full_paths`, the bad records name their shards by full paths.
    """
    for job in jobs:
        scan = _ShardScan(plan, job, decode=decode)  # reads the whole shard
        bad = [b._replace(record=-1) if b.record in scan.half_samples else b for b in scan.bad]
        if scan.records == 0 and not bad:
            bad = [BadRecord(job.shard, -1, problem="it has no records")]
        if full_paths:
            bad = [b._replace(shard=str(join(plan.root, job.shard))) for b in bad]
        yield scan.records, bad, None


def _check_indexed_shards(
    index: Index, decode: _Decode, shards: Sequence[int]
) -> Iterator[_ShardResult]:
    """Check shards of an index, and yield the result of each."""
    with Reader(index) as reader:
        for shard in shards:
            stop = int(index.shard_stops[shard])
            start = int(index.shard_stops[shard - 1]) if shard else 0
            errors = _read_errors(reader, start, stop, decode)
            bad, numbers = _check_indexed_shard(reader, shard, start, stop, errors)
            is_bad = np.isin(numbers, [finding.record for finding in bad])
            is_bad[list(errors)] = True
            for finding in bad:  # the whole shard, or the rest of it
                if finding.rest or (finding.record < 0 and index.container != "files"):
                    is_bad |= numbers >= finding.record
            yield stop - start, bad, np.flatnonzero(~is_bad) + start


def _check_indexed_shard(
    reader: Reader, shard: int, start: int, stop: int, errors: Mapping[int, _Error]
) -> tuple[list[BadRecord], Int64s]:
    """Return the bad records of a shard, which has the records [start, stop) of the index.

    Also return the number in the shard of each of these records, int64[records].

    1. The shard is scanned without the index, which may find bad records.
    2. Each record was read as the index describes it, with these `errors`.
    3. Checksums over the whole shard are compared. If one differs, but no bad record was found that
       explains it, the result has a `BadRecord` with the number -1, for the whole shard.
    """
    index, name = reader.index, reader.index.shard_paths[shard]
    if index.container == "files":  # the records are loose files: there is no shard to scan
        keys = index.keys(range(start, stop))
        bad_files = [
            _bad_record_of(name, number, error)._replace(key=keys[number])
            for number, error in errors.items()
        ]
        return bad_files, np.arange(stop - start)
    plan = BuildPlan(index.shards_root, index.options)
    scan = _ShardScan(plan, Job(name), size=int(index.shards["bytes"][shard]))
    if scan.unreadable:
        return scan.bad, np.full(stop - start, -1)
    headers_changed = scan.headers_checksum != index.shards["headers"][shard]
    offsets = _record_offsets(index, start, stop)  # of the indexed records in the shard
    # Step 1: by number in the shard, the bad records that the scan has found. A bad record that the
    # index excludes was bad at the build too, so it is not reported.
    numbers = scan.numbers_at(offsets)
    indexed = set(numbers[offsets >= 0].tolist())
    bad = {
        finding.record: finding
        for finding in scan.bad
        # All after a bad record with `rest` is unreadable. It was so at the build if nothing has
        # changed since. The number -1 means the whole shard.
        if finding.record in indexed or finding.record < 0 or (finding.rest and headers_changed)
    }
    scan_found_bad = bool(bad)
    # Step 2: the number of a record in the shard is found by its offset, since it is not its number
    # in the index if the index excludes earlier records of the shard.
    undecodable = dict[int, BadRecord]()
    for row, error in errors.items():
        finding = _bad_record_of(name, int(numbers[row]), error)
        (undecodable if isinstance(error, DecodeError) else bad).setdefault(finding.record, finding)
    # Step 3: only the scan reads the headers of records, so only its findings explain why their
    # checksum differs. In a tar, this checksum also covers fields, which step 2 has read.
    explained = bool(bad) if index.container == "tar" else scan_found_bad
    digests = index.shard_sums  # the SHA-256 of each shard; empty if the index has none
    if headers_changed and not explained:
        what = "the checksum over its records"
    elif not bad and len(digests) and scan.sha256 != digests[shard].tobytes().hex():
        what = "its SHA-256"
    else:
        return list((undecodable | bad).values()), numbers
    problem = f"the shard has changed: {what} is not that of the index"
    bad[-1] = BadRecord(name, -1, problem=problem)
    return list((undecodable | bad).values()), numbers


def _record_offsets(index: Index, start: int, stop: int) -> Int64s:
    """Return for each record in [start, stop) the largest offset of its fields, int64[records].

    It lies within the record, so a scan of the shard can tell by it which record this is. It is -1
    for a record that lacks all fields.
    """
    offsets = np.full(stop - start, -1)
    for field in index.fields:
        rows = index.table(field)[start:stop]
        field_offsets = np.where(rows["length"] >= 0, rows["offset"].astype(np.int64), -1)
        np.maximum(offsets, field_offsets, out=offsets)
    return offsets


def _bad_record_of(shard: str, number: int, error: _Error) -> BadRecord:
    """Return the `BadRecord` for the error of reading record `number` of a shard."""
    # A file that is missing, or has changed since the indexing, has no good record: its
    # `BadRecord` has the number -1, and names the file.
    if isinstance(error, OSError | StaleIndexError):
        file = error.filename if isinstance(error, OSError) else error.path
        return bad_record(file or shard, error)
    return bad_record(shard, error)._replace(record=number)


def _read_errors(reader: Reader, start: int, stop: int, decode: _Decode) -> dict[int, _Error]:
    """Read and decode the records [start, stop), and return errors by the number in this range."""
    errors: dict[int, _Error] = {}
    decoding = None if decode is None else _DecodeErrors(decode)
    for first in range(start, stop, _BATCH):
        for row, sample in _read(reader, np.arange(first, min(first + _BATCH, stop))):
            if isinstance(sample, (LoaderError, OSError)):
                errors[row - start] = sample
            elif decoding is not None:
                decoding.add(row - start, sample)
    return errors if decoding is None else errors | decoding.finish()


def _read(reader: Reader, ids: Int64s) -> list[tuple[int, Sample | _Error]]:
    """Return (id, fields) of each record, or (id, error); one by one only if there is an error."""
    samples: list[Sample] = [{} for _ in ids]
    try:
        for field in reader.index.fields:
            present = np.flatnonzero(reader.index.table(field)["length"][ids] >= 0)
            values = reader.read(ids[present], [field])[field]
            for row, value in zip(present.tolist(), values, strict=True):
                samples[row][field] = value
    except (LoaderError, OSError) as error:
        if len(ids) == 1:
            return [(int(ids[0]), error)]
        return [read for row in range(len(ids)) for read in _read(reader, ids[row : row + 1])]
    return list(zip(ids.tolist(), samples, strict=True))
