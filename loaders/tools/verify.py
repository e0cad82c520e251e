"""Verify every checksum of every shard, and every byte that an index describes."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from twinfeed.loaders.building.bad_records import (
    BAD_LIST,
    BadRecord,
    bad_record,
    write_bad_records,
)
from twinfeed.loaders.building.plan import BuildPlan, add_headers
from twinfeed.loaders.building.sources import Job, PathLike, Shards, find_source, local_copy
from twinfeed.loaders.errors import (
    DataCorruptionError,
    IndexFormatError,
    LoaderError,
    StaleIndexError,
)
from twinfeed.loaders.feed.decode import DecodeImage
from twinfeed.loaders.formats.example import sample_of
from twinfeed.loaders.formats.records import Record, Sample, one_by_one
from twinfeed.loaders.formats.sniff import IMAGE_EXTENSIONS, image_extension
from twinfeed.loaders.formats.tar import ADVISE_JOIN
from twinfeed.loaders.index.index import Index, load_index
from twinfeed.loaders.index.manifest import MANIFEST, file_digest
from twinfeed.loaders.index.open import set_shards_root
from twinfeed.loaders.index.options import ReadingOptions, parse_reading_options
from twinfeed.loaders.index.paths import join, output_path
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.loop.feed_loader import in_order
from twinfeed.loaders.reading.reader import Reader, verified_reader
from twinfeed.loaders.reading.together import read_together
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.atomic import check_replaceable
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.loaders.support.system import processors
from twinfeed.samplers.validate import counted
from twinfeed.samplers.verdict import Verdict

_MAX_SHOWN = 20
"""Findings that a printed report lists."""
_TASKS = 64
"""About how many tasks there are: enough for the workers of an executor, but fewer than shards."""
_BATCH = 64  # records that are read in one call

_ShardResult = tuple[int, list[BadRecord], Int64s]
"""The number of records of a shard, what is bad there, and the ids of the good records."""

_Decode = Callable[[Sample], object]


@dataclass(frozen=True)
class Report(Verdict):
    """The result of `verify`; printed, a line for each finding, and a summary.

    Attributes:
        findings: what is bad. A `record` of -1 is a whole shard, a loose file that is missing or
            has changed, or half of a tar sample whose parts lie apart. A record of an index is
            numbered among the records that the index has of its shard.
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
    - each field against its CRC-32C;
    - a checksum over the headers and checksums of each shard's records, which in a tar also covers
      the members that are not fields. If it alone differs, the whole shard is a finding.

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
            Of an index that leaves out records, no list can be made: verify its shards.
        root: the folder or URL that shard paths are relative to.
        executor: any executor of concurrent.futures' kind. The executor is sent the index, and
            groups of shards, which its workers check side by side.
        progress: whether to show a progress bar.
        **options: how the records of shards without an index are read; see `ReadingOptions`.

    Raises:
        FileExistsError: the path `bad_list` exists, and is not an older bad list.
        IndexFormatError: damaged arrays.
        FileNotFoundError: a pattern has no match.
        ValueError: `bad_list` is given, and the index leaves out records.

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
    source = _opened(source, root)
    index = source if isinstance(source, Index) else None
    shards: Sequence[Any]
    full_paths = False
    if isinstance(source, Index):
        _check_arrays(source)
        if bad_list is not None and source.options.left_out:
            raise ValueError(
                f"{source.where} leaves out records, which the list would not have: make it by "
                "verify(shards, bad_list=…)"
            )
        plan, shards = BuildPlan(source.shards_root, source.options), range(len(source.shards))
    else:
        found = find_source(source, None, container=reading.container, root=root, complete=False)
        full_paths = root is None and found.container != "files"
        plan, shards = BuildPlan.of(found, None, None, reading), found.jobs
    size = math.ceil(len(shards) / _TASKS) or 1
    tasks = [shards[start : start + size] for start in range(0, len(shards), size)]
    run = map if executor is None else executor.map
    checks = chain.from_iterable(run(partial(_check_shards, plan, index, decoder), tasks))
    results = list(progress_bar(checks, "verifying", "shard", progress, len(shards)))
    findings = [finding for _, bad, _ in results for finding in bad]
    if full_paths:
        findings = [f._replace(shard=str(join(plan.root, f.shard))) for f in findings]
    if bad_list is not None:
        write_bad_records(bad_list, [finding for finding in findings if finding.record >= 0])
    records = sum(records for records, _, _ in results)
    good_records = np.concatenate([np.zeros(0, np.int64), *(ids for _, _, ids in results)])
    return Report(len(shards), records, findings, None if index is None else good_records)


def _opened(source: Index | Shards, root: PathLike | None) -> Index | Shards:
    """Open the index if `source` is the path of one; its shards may be missing."""
    if not isinstance(source, (str, os.PathLike)):
        return source
    if not (Path(source, MANIFEST).exists() or is_index_path(source)):
        return source
    index = load_index(source, root)
    if root is None:
        set_shards_root(index)
    return index


def _check_arrays(index: Index) -> None:
    """Raise IndexFormatError if the file of an array of the index does not match its digest."""
    folder = index.path / index.manifest["folder"]
    for name, entry in index.manifest["arrays"].items():
        if file_digest(folder / f"{name}.npy") != entry["sha256"]:
            problem = f"damaged index: {name} does not match its digest"
            raise IndexFormatError(problem, path=index.where)


def _check_shards(
    plan: BuildPlan, index: Index | None, decode: _Decode | None, shards: Sequence[Any]
) -> list[_ShardResult]:
    """Check shards, given as jobs or as numbers in an index, and return the result of each."""
    if index is None:
        return [_check_shard(plan, decode, job) for job in shards]
    with verified_reader(index) as reader:
        return [_check_indexed_shard(plan, reader, decode, shard) for shard in shards]


def _check_shard(plan: BuildPlan, decode: _Decode | None, job: Job) -> _ShardResult:
    """Scan a shard without an index. It has no ids."""
    scan = _Scan(plan, job)

    def check(record: Record) -> BadRecord | None:
        number, key = record.number, record.key
        return decode and _undecodable(decode, job.shard, number, key, sample_of(record))

    found = in_order(check, scan.records(), threads=processors() if decode else 1)
    undecodable = [*filter(None, found)]
    return scan.num_records, undecodable + scan.bad, np.zeros(0, np.int64)


def _check_indexed_shard(
    plan: BuildPlan, reader: Reader, decode: _Decode | None, shard: int
) -> _ShardResult:
    """Read and decode the records that an index has of a shard, then scan the shard."""
    index, name = reader.index, reader.index.shard_paths[shard]
    stops = index.shard_stops
    start, stop = int(stops[shard - 1]) if shard else 0, int(stops[shard])
    batches = (range(n, min(n + _BATCH, stop)) for n in range(start, stop, _BATCH))
    check = partial(_bad_records, reader, decode, name)
    try:
        results = in_order(check, batches, threads=processors() if decode else 1)
        found = [*chain.from_iterable(results)]
    except (OSError, StaleIndexError) as error:  # of the whole shard
        return stop - start, [bad_record(name, error)], np.zeros(0, np.int64)
    findings = [*filter(None, found)]
    # Corrupted bytes, which have an offset, explain why the checksum over a shard differs.
    is_explained = any(finding.offset is not None for finding in findings)
    changes = [] if is_explained or index.container == "files" else _changes(plan, index, shard)
    good = [] if changes else [start + n for n, bad in enumerate(found) if bad is None]
    return stop - start, findings + changes, np.array(good, np.int64)


def _bad_records(
    reader: Reader, decode: _Decode | None, shard: str, ids: range
) -> list[BadRecord | None]:
    """Return the finding of each record that is bad, or None; raise errors of a whole shard."""
    index, fields = reader.index, tuple(reader.index.fields)

    def read(ids: range) -> list[BadRecord | None]:
        values = reader.read_values(np.array(ids), fields)
        if decode is None:
            return [None] * len(ids)
        keys: Sequence[str | None] = index.keys(ids) if index.has_keys else [None] * len(ids)
        columns = [(name, values[name]) for name in fields]
        samples = ({n: v[i] for n, v in columns if v[i] is not None} for i in range(len(ids)))
        numbers = (index.location(record)[1] for record in ids)
        return [*map(partial(_undecodable, decode, shard), numbers, keys, samples)]

    def failed(record: int, error: Any) -> BadRecord:
        if not isinstance(error, OSError | StaleIndexError):
            return bad_record(shard, error)._replace(record=index.location(record)[1])
        if index.container != "files":
            raise error
        file = error.filename if isinstance(error, OSError) else error.path
        return bad_record(file or shard, error)

    return [*read_together(read, ids, failed)]


def _changes(plan: BuildPlan, index: Index, shard: int) -> list[BadRecord]:
    """Scan a shard whose fields are as they were indexed; return the finding if others differ."""
    scan = _Scan(plan, Job(index.shard_paths[shard]))
    deque(scan.records(), maxlen=0)
    digests = index.shard_sums  # the SHA-256 of each shard; empty if the index has none
    if scan.headers_checksum != index.shards["headers"][shard]:
        what = "the checksum over its records"
    elif len(digests) and scan.sha256 != digests[shard].tobytes().hex():
        what = "its SHA-256"
    else:
        return []
    problem = f"the shard has changed: {what} is not that of the index"
    return [BadRecord(scan.job.shard, -1, problem=problem)]


def _undecodable(
    decode: _Decode, shard: str, number: int, key: str | None, sample: Sample
) -> BadRecord | None:
    """Decode a record; return the finding if it fails. ImportError is no fault of a record."""
    try:
        decode(sample)
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
            DecodeImage(name)(sample)


class _Scan:
    """Scan one shard to its end, or to where it breaks off, and collect its bad records."""

    def __init__(self, plan: BuildPlan, job: Job) -> None:
        self.plan, self.job = plan, job
        self.bad: list[BadRecord] = []
        self.num_records = self.headers_checksum = 0
        self.sha256 = ""

    def records(self) -> Iterator[Record]:
        """Scan the shard, and yield its good records. A shard without records is bad too."""
        plan, job = self.plan, self.job
        try:
            with local_copy(join(plan.root, job.shard)) as (path, _):
                if plan.options.digest:
                    self.sha256 = file_digest(Path(path))
                for record in one_by_one(plan.scan(job, path, self._add_bad)):
                    self.headers_checksum = add_headers(self.headers_checksum, [record.header])
                    self.num_records += 1
                    yield record
        except OSError as error:
            name = error.filename if job.entries else None
            self.bad.append(bad_record(name or job.shard, error))
        except LoaderError as error:
            self.bad.append(bad_record(job.shard, error, rest=True))
        if not self.bad and not self.num_records:
            self.bad.append(BadRecord(job.shard, -1, problem="it has no records"))

    def _add_bad(self, error: DataCorruptionError) -> None:
        """Store the error of a bad record. The scan calls this, and continues after the record."""
        finding = bad_record(self.job.shard, error)
        # A bad record is usually excluded by its number, but not if it is a part of a tar sample. A
        # sample is the files of one key, such as a.jpg and a.txt. If b.jpg lies between them, the
        # scan finds a.txt as a record of its own. If only that were excluded, a.jpg alone would
        # stay, as a wrong sample. Its error is known by its advice, `ADVISE_JOIN`: index the tar
        # with `join`, which joins the parts. The report shows this advice.
        if error.advice == ADVISE_JOIN:
            finding = finding._replace(record=-1, problem=f"{error.problem}; {ADVISE_JOIN}")
        self.bad.append(finding)
        self.num_records += 1
