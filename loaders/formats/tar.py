"""webdataset's tar shards: `scan` reads the samples of a shard, and `TarWriter` writes a shard.

_tarkeys.py has the naming rule. Consecutive members of one key make a sample. A key that occurs
again after other keys is an error.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from twinfeed.loaders.errors import DataCorruptionError, TruncatedShardError
from twinfeed.loaders.formats._chunk_samples import chunk_samples
from twinfeed.loaders.formats._tarheader import BLOCK, LINKS, HeaderReader, Member
from twinfeed.loaders.formats._tarkeys import (
    FORBIDDEN,
    MACOS_NAME,
    METADATA_NAME,
    count_runs,
    field_members,
    split_name,
)
from twinfeed.loaders.formats.records import (
    CHUNK_BYTES,
    TOO_LONG,
    OnBad,
    Range,
    Record,
    RecordChunk,
    one_by_one,
    raise_error,
)
from twinfeed.loaders.support.atomic import check_replaceable
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.closing import Closing
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_shard, read_at

_FOLLOW_LINK = "write the archive again with the file itself (tar --dereference --hard-dereference)"
_ADVISE_LOWER_CASE = "write the archive again; extensions are compared in lower case"
ADVISE_JOIN = (
    "write the archive again, sorted by name, or put the members together with --join (in Python "
    "join=True)"
)
"""Advice for a key whose members are not consecutive. Without `join` they are several samples of
which each has only some fields, so excluding one of them does not help."""
_ADVISE_RENAME = "rename the file and write the archive again"
_NAME_RULE = (
    "a key must not have a dot after its last slash, and a field name no capitals and no slash; "
    "neither may contain a newline or lead outside the folder"
)


def scan(
    path: str | os.PathLike[str],
    /,
    *,
    max_record_bytes: int = LIMITS.record_bytes,
    join: bool = False,
    on_bad: OnBad = raise_error,
) -> Iterator[Record]:
    """Yield every sample of a tar shard in one sequential pass, with one sample and all keys in
    memory.

    A sample is a run of consecutive members with one key; with `join`, all members with one key.
    `on_bad` is called with the error of a bad sample, and the scan continues. A broken header
    always raises an error.
    """
    chunks = scan_chunks(path, max_record_bytes=max_record_bytes, join=join, on_bad=on_bad)
    return one_by_one(chunks)


def scan_chunks(
    path: str | os.PathLike[str], /, *, max_record_bytes: int, join: bool, on_bad: OnBad
) -> Iterator[Record | RecordChunk]:
    """Yield what `scan` yields, with a chunk in place of samples that have the same fields."""
    path = os.fspath(path)
    number = 0  # the index of the next sample
    next_chunk = 0  # the offset from which on a whole chunk is tried again
    sample: _Sample | None = None
    incomplete: dict[str, _Sample] = {}  # the samples of which more runs will come
    first_offsets: dict[str, int] = {}  # the offset of the first member of each key
    with open_shard(path) as file:
        try:
            runs = count_runs(HeaderReader(file, path)) if join else {}
            headers = HeaderReader(file, path)
            for member, key, extension in field_members(headers):
                if sample is None or key != sample.key:
                    if sample is not None and not sample.runs:
                        yield from sample.finish(on_bad)
                    is_plain = len(member.header) == BLOCK
                    if is_plain and member.start >= next_chunk and not join:
                        next_chunk = member.start + CHUNK_BYTES
                        data = read_at(file.fileno(), CHUNK_BYTES, member.start)
                        chunk = chunk_samples(data, member.start, number, max_record_bytes)
                        if chunk is not None and first_offsets.keys().isdisjoint(chunk.keys):
                            yield chunk
                            starts = (chunk.starts + chunk.offset).tolist()
                            first_offsets.update(zip(map(str, chunk.keys), starts, strict=True))
                            number += len(starts)
                            next_chunk = headers.position = chunk.offset + int(chunk.stops[-1])
                            sample = None
                            continue
                    first = first_offsets.setdefault(key, member.start)
                    sample = incomplete.pop(key, None)
                    if sample is None:
                        sample = _Sample(path, key, member.start, number, max_record_bytes)
                        sample.runs = runs.get(key, 1)
                        number += 1
                    if first != member.start and not join:
                        problem = f"key {key!r} occurs again, first at offset {first}"
                        sample.fail(member, problem, ADVISE_JOIN)
                    sample.runs -= 1
                    if sample.runs:
                        incomplete[key] = sample
                sample.add(member, extension, file)
        except DataCorruptionError as error:
            if error.record is None:  # the archive is broken within this sample, or after it
                error.record = number if sample is None else sample.number
            raise
        if sample is not None:
            yield from sample.finish(on_bad)


class _Sample:
    """A sample with its members so far, and its first error.

    `runs` is the number of runs of consecutive members that are still to come.
    """

    def __init__(self, path: str, key: str, start: int, number: int, max_bytes: int) -> None:
        self.path, self.key, self.number, self.max_bytes = path, key, number, max_bytes
        self.start = self.end = start
        self.bytes = self.runs = 0
        self.fields: dict[str, Range] = {}
        self.headers: list[bytes] = []
        self.error: DataCorruptionError | None = None

    def add(self, member: Member, extension: str, file: BinaryIO) -> None:
        """Add a member of the sample, and read its data from the file. If the member is bad, store
        the error, which `finish` reports.

        `headers` collects what the shard's checksum is computed from: the header of each member and
        the CRC of its data, since tar itself has no checksum of the data.
        """
        self.headers.append(member.header)
        self.end = member.end
        offset, size = member.offset, member.size
        self.bytes += size
        if FORBIDDEN.search(self.key) or FORBIDDEN.search(extension):
            problem = f"name {member.name!r} not allowed: contains NUL, a newline or invalid UTF-8"
            self.fail(member, problem, _ADVISE_RENAME)
        elif member.kind in LINKS:
            target = member.link.decode("utf-8", "replace")
            problem = f"field {extension!r} is a link to {target!r}, not a file"
            self.fail(member, problem, _FOLLOW_LINK)
        elif extension in self.fields:
            offsets = f"offsets {self.fields[extension].offset} and {offset}"
            problem = f"field {extension!r} twice in one sample: {offsets}"
            self.fail(member, problem, _ADVISE_LOWER_CASE)
        elif self.bytes > self.max_bytes:
            sample = member._replace(start=self.start)  # the error has the start of the sample
            self.fail(sample, f"sample longer than max_record_bytes={self.max_bytes}", TOO_LONG)
        elif self.error is None:
            file.seek(offset)
            data = file.read(size)
            if len(data) < size:  # the file has become shorter since the scan began
                raise TruncatedShardError(
                    f"truncated record at offset {member.start}",
                    path=self.path,
                    offset=member.start,
                    expected=f"{size} bytes",
                    found=f"{len(data)} bytes",
                )
            self.headers.append(crc32c(data).to_bytes(4, "little"))
            self.fields[extension] = Range("bytes", offset, size, data)

    def fail(self, member: Member, problem: str, advice: str) -> None:
        """Store the error of a member, unless the sample has an error already."""
        if self.error is None:
            where: dict[str, Any] = {"path": self.path, "offset": member.start, "key": self.key}
            self.error = DataCorruptionError(problem, **where, record=self.number, advice=advice)

    def finish(self, on_bad: OnBad) -> Iterator[Record]:
        """Yield the record of the sample, or call `on_bad` with its error."""
        if self.error is None:
            length, header = self.end - self.start, b"".join(self.headers)
            yield Record(self.start, length, self.key, self.fields, header, self.number)
        else:
            on_bad(self.error)


class TarWriter(Closing):
    """Write a webdataset tar shard; a context manager.

    The same samples give the same bytes: times and owners are zero, the mode is 0644. Names that
    are long, or not ASCII, are written as PAX records. The file is complete only after `close`.
    An older tar is overwritten; FileExistsError for any other file, and for a link.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, TarWriter(f"{folder}/a.tar") as writer:
    ...     writer.write("0001", {"txt": b"abc"})
    ...     writer.offset
    1024
    """

    def __init__(self, path: str | os.PathLike[str], /) -> None:
        check_replaceable(path, "a tar", lambda file: tarfile.TarFile(fileobj=file))
        self._file = open(path, "wb", buffering=BUFFER)  # noqa: SIM115, closed by close()
        self.offset = 0

    def write(self, key: str, fields: Mapping[str, bytes], /) -> None:
        """Append a sample; `fields` has the bytes of each field by its extension, in order.

        Raises:
            ValueError: a key or an extension would be read back differently, or a file would be
                extracted outside the folder of the archive.
        """
        names = {extension: f"{key}.{extension}" for extension in fields}
        for extension, name in names.items():
            is_unsafe = name.startswith("/") or ".." in name.split("/")
            is_left_out = METADATA_NAME.match(name) or MACOS_NAME.match(name)
            is_invalid = is_unsafe or FORBIDDEN.search(name) or is_left_out
            if is_invalid or split_name(name) != (key, extension):
                raise ValueError(
                    f"key {key!r} with field {extension!r} is not a valid name: {_NAME_RULE}"
                )
        for extension, data in fields.items():
            info = tarfile.TarInfo(names[extension])
            info.size = len(data)
            header = info.tobuf(tarfile.PAX_FORMAT)
            padding = bytes(-len(data) % BLOCK)
            self._file.writelines((header, data, padding))
            self.offset += len(header) + len(data) + len(padding)

    def close(self) -> None:
        """Write the end of the archive and close the file."""
        if not self._file.closed:
            self._file.write(bytes(2 * BLOCK))
        self._file.close()

    def __exit__(self, *error: Any) -> None:
        """Close the file. After an exception, leave out the archive's end: it is not complete."""
        if any(error):
            self._file.close()
        self.close()
