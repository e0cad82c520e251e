"""Compressed shards as samples, one after the other: decompressed to a file, and scanned there.

The file is in the packer's own folder, and there is one at a time. So memory holds one record, the
disk holds one shard more, and every check of a scan is made.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from twinfeed.loaders.building.shards import is_compressed
from twinfeed.loaders.building.sources import local
from twinfeed.loaders.errors import DataCorruptionError, TruncatedShardError
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.example import decode_list
from twinfeed.loaders.formats.records import Record
from twinfeed.loaders.formats.sniff import HEAD, disguise, is_tar
from twinfeed.loaders.remote.location import Location, is_url, place_of
from twinfeed.loaders.remote.opening import split
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_shard


def _inflated(file: BinaryIO) -> Iterator[bytes]:
    """Yield what a zlib stream holds; TensorFlow writes one where it is asked for ZLIB."""
    inflate = zlib.decompressobj()
    while data := file.read(BUFFER):
        while data:
            yield inflate.decompress(data, BUFFER)
            data = inflate.unconsumed_tail
    if not inflate.eof:
        raise EOFError("the stream ends too early")


def _read(opener: Callable[[BinaryIO], Any]) -> Callable[[BinaryIO], Iterator[bytes]]:
    """Return what yields the pieces of a file that `opener` decompresses."""

    def pieces(file: BinaryIO) -> Iterator[bytes]:
        with opener(file) as plain:
            yield from iter(lambda: plain.read(BUFFER), b"")

    return pieces


_KINDS = {
    rb"\x1f\x8b": _read(gzip.open),
    rb"BZh": _read(bz2.open),
    rb"\xfd7zXZ\x00": _read(lzma.open),
    rb"\x78[\x01\x5e\x9c\xda]": _inflated,
}
"""How the files of each kind begin, and what decompresses them."""

_BROKEN = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


class CompressedShards:
    """Give the samples of shards of which some are compressed. `work` is a folder of the packer."""

    def __init__(self, paths: Sequence[str], /) -> None:
        self.paths = paths

    def samples(self, work: Path, /) -> Iterator[dict[str, Any]]:
        """Yield a dict of fields for each record, in stored order."""
        for path in self.paths:
            with local(place_of(path)) as here:
                plain = _decompressed(here.path, path, work / "decompressed")
                try:
                    for record in _scan(plain):
                        yield _sample(record)
                except DataCorruptionError as error:  # offsets are those of the decompressed shard
                    error.path = f"{path}, decompressed"
                    raise
                finally:
                    (work / "decompressed").unlink(missing_ok=True)


def some_compressed(paths: Sequence[str], /) -> bool:
    """Whether one of the shards is compressed, by its name or its first bytes.

    Of shards at URLs, the bytes of the first alone are looked at.
    """
    seen = [path for n, path in enumerate(paths) if n == 0 or not is_url(path)]
    return any(map(is_compressed, paths)) or any(_kind(head_of(path)) for path in seen)


def head_of(path: str, /) -> bytes:
    """Return the first bytes of a shard."""
    place = place_of(path)
    if isinstance(place, Location):
        store, name = split(place)
        return store.head(name, HEAD)
    with open_shard(path) as file:
        return file.read(HEAD)


def _kind(head: bytes) -> Callable[[BinaryIO], Iterator[bytes]] | None:
    """Return what decompresses a file that begins so, None for a file that is not compressed."""
    # A TFRecord may begin with any length, and so with the two bytes of zlib.
    if is_tar(head) or (found := disguise(head)) is None or "compressed" not in found[0]:
        return None
    return next((pieces for magic, pieces in _KINDS.items() if re.match(magic, head)), None)


def _decompressed(path: str, name: str, out: Path) -> str:
    """Return the path of the plain shard: `out`, or the shard itself if it is not compressed."""
    head = head_of(path)
    pieces = _kind(head)
    if pieces is None:
        found = disguise(head)
        if found is not None and "compressed" in found[0]:
            raise DataCorruptionError(
                "pack decompresses gzip, bzip2, xz and zlib alone",
                path=name,
                found=found[0],
                advice="decompress the shard, and index the result",
            )
        return path
    most = max(LIMITS.record_bytes, LIMITS.inflation * os.path.getsize(path))
    with open_shard(path) as file, out.open("wb") as plain:
        try:
            for piece in pieces(file):
                plain.write(piece)
                if plain.tell() > most:
                    raise DataCorruptionError(
                        "a compressed shard that becomes too large",
                        path=name,
                        expected=f"at most {most} bytes",
                        found=f"{plain.tell()} bytes so far",
                        advice="decompress the shard if it is meant to be this large, and index it",
                    )
        except _BROKEN as error:
            kind = TruncatedShardError if isinstance(error, EOFError) else DataCorruptionError
            raise kind(
                f"cannot be decompressed: {error}",
                path=name,
                offset=file.tell(),
                advice="copy the shard again, or write it again",
            ) from error
    return str(out)


def _scan(path: str) -> Iterator[Record]:
    return tar.scan(path) if is_tar(head_of(path)) else tfrecord.scan(path)


def _sample(record: Record) -> dict[str, Any]:
    """Return a record as a sample to pack, a single integer as an int."""
    sample: dict[str, Any] = {} if record.key is None else {"__key__": record.key}
    for name, part in record.fields.items():
        value = part.data if part.kind == "bytes" else decode_list(part.kind, part.data)
        single = part.kind == "int64_list" and len(value) == 1
        sample[name] = int(value[0]) if single else value
    return sample
