"""Read the samples of compressed shards: decompress each to a temporary file, and scan it.

The file is in the packer's own folder, and deleted before the next shard. So one record is in
memory, and every check of a scan is made.
"""

from __future__ import annotations

import lzma
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from twinfeed.loaders.building.sources import local_copy, read_head
from twinfeed.loaders.errors import (
    DataCorruptionError,
    ShardWarning,
    TruncatedShardError,
)
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.example import sample_of
from twinfeed.loaders.formats.records import Record
from twinfeed.loaders.formats.sniff import COMPRESSED, compression, is_tar
from twinfeed.loaders.packing._inputs import value_to_pack
from twinfeed.loaders.storage.url import parse_location
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_shard

_CHUNK_BYTES = 1 << 16  # of the compressed file that are read at a time


def decompressed_samples(shards: Sequence[str], temporary: Path, /) -> Iterator[dict[str, Any]]:
    """Decompress each shard to a temporary file, and yield its records as samples."""
    folder = temporary / "decompressed"
    folder.mkdir()
    for path in shards:
        out = folder / os.path.basename(path)  # warnings show this name
        is_empty = True
        with local_copy(parse_location(path)) as (local_path, _):
            decompressed = _decompress(local_path, path, out)
            is_in_tar = is_tar(read_head(decompressed))
            try:
                for record in (tar if is_in_tar else tfrecord).scan(decompressed):
                    yield _as_sample(record)
                    is_empty = False
            except DataCorruptionError as error:
                # Name the user's shard. Offsets may count in the decompressed file.
                error.path = f"{path}, decompressed" if decompressed == str(out) else path
                raise
            finally:
                out.unlink(missing_ok=True)
        if is_empty:
            warnings.warn(f"{path} has no records", ShardWarning, stacklevel=2)


def _decompress(path: str, name: str, out: Path) -> str:
    """Decompress a shard to `out`, and return its path; `path` itself if it is plain."""
    kind = compression(read_head(path))
    if kind is None:
        return path
    # A damaged or malicious shard of a few bytes could fill the disk.
    max_bytes = max(LIMITS.record_bytes, LIMITS.inflation * os.path.getsize(path))
    with open_shard(path) as file, out.open("wb") as out_file:
        for chunk in _decompressed_chunks(file, COMPRESSED[kind][1], name):
            out_file.write(chunk)
            if out_file.tell() > max_bytes:
                raise DataCorruptionError(
                    "a compressed shard becomes too large",
                    path=name,
                    expected=f"at most {max_bytes} bytes",
                    found=f"{out_file.tell()} bytes so far",
                    advice="decompress the shard if it is meant to be this large, and index it",
                )
    return str(out)


def _decompressed_chunks(
    file: BinaryIO, decompressor: Callable[[], Any], name: str
) -> Iterator[bytes]:
    """Yield the decompressed bytes of all streams of a file, as `cat a.gz b.gz` makes them."""
    data = file.read(_CHUNK_BYTES)
    while data:
        start = file.tell() - len(data)
        stream = decompressor()
        while not stream.eof:
            # zlib returns input that it has not read as `unconsumed_tail`. Other decompressors keep
            # it, and say with `needs_input` when they have used it up.
            if not data and getattr(stream, "needs_input", True):
                data = file.read(_CHUNK_BYTES)
                if not data:
                    raise _stream_error(TruncatedShardError, "the file ends too early", name, start)
            try:
                chunk = stream.decompress(data, BUFFER)
            except (OSError, lzma.LZMAError, zlib.error) as error:  # bz2 raises OSError
                raise _stream_error(DataCorruptionError, error, name, start) from error
            yield chunk
            data = getattr(stream, "unconsumed_tail", b"")
        data = stream.unused_data
        while not (data := data.lstrip(b"\0")):  # zeros fill up the last block of a tape
            if not (data := file.read(_CHUNK_BYTES)):
                return


def _stream_error(
    error: type[DataCorruptionError], reason: object, name: str, start: int
) -> DataCorruptionError:
    """Return the error for a compressed stream, at offset `start`, that is truncated or damaged."""
    return error(
        f"the stream at offset {start} cannot be decompressed: {reason}", path=name, offset=start
    )


def _as_sample(record: Record) -> dict[str, Any]:
    """Return a record of a compressed shard as a sample to pack."""
    sample: dict[str, Any] = {} if record.key is None else {"__key__": record.key}
    for name, value in sample_of(record).items():
        is_single_integer = record.fields[name].kind == "int64_list" and len(value) == 1
        sample[name] = int(value[0]) if is_single_integer else value_to_pack(value)
    return sample
