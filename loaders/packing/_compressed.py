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
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from twinfeed.loaders.building.labels import (
    FromJson,
    RecordLabel,
    key_of,
    label_field_error,
    label_of,
    label_source_text,
    missing_error,
)
from twinfeed.loaders.building.shards import expand
from twinfeed.loaders.building.sources import PathLike, local_copy, read_head
from twinfeed.loaders.errors import (
    DataCorruptionError,
    ShardWarning,
    TruncatedShardError,
)
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.example import sample_of
from twinfeed.loaders.formats.records import Record
from twinfeed.loaders.formats.sniff import COMPRESSED, compression, compression_advice, is_tar
from twinfeed.loaders.index.options import Reading
from twinfeed.loaders.packing._inputs import value_to_pack
from twinfeed.loaders.storage.url import is_url, parse_location
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import BUFFER, open_shard
from twinfeed.samplers.validate import counted

Shards = PathLike | Sequence[PathLike]

_MISSING_LABEL_ADVICE = "name a label that every record has, or remove such records first"
_CHUNK_BYTES = 1 << 16  # of the compressed file that are read at a time


class CompressedShards:
    """Take samples from shards that are compressed, and choose their label and key.

    The kinds are gzip, bzip2, xz and zlib. Shards may be plain too. The shards are decompressed one
    at a time, in the folder that `pack` writes to.

    Args:
        shards: TFRecord or tar shards, named by a path, a pattern or a list.
        label: the label of a record, as for `build_index`: the name of a field, `FromJson`,
            `FromFolder`, `FromFile`, `FromExample` or a function. It is packed as "label".
        key: the feature that holds the key of a TFRecord. It is packed as the key.
        example: False packs the records of a TFRecord as raw bytes, in one field "data".

    Raises:
        TypeError: `key` or `example` has another type.
        DataCorruptionError: from `pack`, a shard that is damaged or has data after its end, and a
            record without its label or key.
        ValueError: from `pack`, `key` or `example=False` for a tar.

    >>> import gzip, pathlib, tempfile
    >>> from twinfeed.loaders import pack
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> _ = pack([{"word": "to"}, {"word": "be"}], root)
    >>> data = (root / "data-00000-of-00001.tfrecord").read_bytes()
    >>> _ = (root / "a.gz").write_bytes(gzip.compress(data))
    >>> pack(CompressedShards(root / "a.gz", label="word"), root / "new")["data"].classes
    ('be', 'to')
    """

    def __init__(
        self,
        shards: Shards,
        /,
        *,
        label: RecordLabel | None = None,
        key: str | None = None,
        example: bool = True,
    ) -> None:
        self.reading = Reading(key=key, example=example)
        self.paths = expand(shards, compressed=True)
        self.label = label

    def __repr__(self) -> str:
        return f"<CompressedShards: {counted(len(self.paths), 'shard')}>"


def decompressed_samples(shards: CompressedShards, temporary: Path, /) -> Iterator[dict[str, Any]]:
    """Decompress each shard to a temporary file, and yield its records as samples."""
    folder = temporary / "decompressed"
    folder.mkdir()
    for path, below in zip(shards.paths, _below_root(shards.paths), strict=True):
        out = folder / os.path.basename(path)  # warnings show this name
        is_empty = True
        with local_copy(parse_location(path)) as (local_path, _):
            decompressed = _decompress(local_path, path, out)
            try:
                for record in _scan(decompressed, shards.reading):
                    yield _as_sample(record, shards, path, below)
                    is_empty = False
            except DataCorruptionError as error:
                # Name the user's shard. Offsets may count in the decompressed file.
                error.path = f"{path}, decompressed" if decompressed == str(out) else path
                raise
            finally:
                out.unlink(missing_ok=True)
        if is_empty:
            warnings.warn(f"{path} has no records", ShardWarning, stacklevel=2)


def _below_root(paths: Sequence[str]) -> list[str]:
    """Return the path of each shard below the folder that holds the folders of all shards."""
    full = [f"/{path}" if is_url(path) else os.path.abspath(path) for path in paths]
    folders = {os.path.dirname(path) for path in full}
    root = os.path.commonpath(folders) if len(folders) > 1 else os.path.dirname(*folders)
    return [os.path.relpath(path, root) for path in full]


def _decompress(path: str, name: str, out: Path) -> str:
    """Decompress a shard to `out`, and return its path; `path` itself if it is plain."""
    kind = compression(read_head(path))
    if kind is None:
        return path
    decompressor = COMPRESSED[kind].decompressor
    if decompressor is None:
        problem = f"compressed with {kind}: pack decompresses only gzip, bzip2, xz and zlib"
        raise DataCorruptionError(problem, path=name, advice=compression_advice(kind))
    # A damaged or malicious shard of a few bytes could fill the disk.
    max_bytes = max(LIMITS.record_bytes, LIMITS.inflation * os.path.getsize(path))
    with open_shard(path) as file, out.open("wb") as out_file:
        for chunk in _decompressed_chunks(file, decompressor, name):
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


def _scan(path: str, reading: Reading) -> Iterator[Record]:
    """Yield the records of a decompressed shard, a tar or a TFRecord file."""
    if is_tar(read_head(path)):
        # Called only for its error: `Reading` refuses the options `key` and `example` for a tar.
        replace(reading, container="tar")
        return tar.scan(path)
    return tfrecord.scan(path, example=reading.example)


def _as_sample(record: Record, shards: CompressedShards, path: str, below: str) -> dict[str, Any]:
    """Return a record of a compressed shard as a sample to pack: its fields, key and label.

    The fields image=b"…", id=b"7" and cls=[3], with the key `id` and the label `cls`, become
    {"image": b"…", "__key__": "7", "label": 3}.
    """
    label, key_field = shards.label, shards.reading.key
    sample: dict[str, Any] = {}
    for name, value in sample_of(record).items():
        is_single_integer = record.fields[name].kind == "int64_list" and len(value) == 1
        sample[name] = int(value[0]) if is_single_integer else value_to_pack(value)
    if key_field is not None:  # the user has named the field of the key
        record = record._replace(key=key_of(key_field, record, path))
        sample.pop(key_field)
    if record.key is not None:  # of that field, or the common name of the members in a tar
        sample["__key__"] = record.key
    if label is not None:
        if isinstance(label, str):  # the field of the label
            sample.pop(label, None)
        elif isinstance(label, FromJson) and not label.key:  # the whole JSON value is the label
            sample.pop(label.field, None)
        if "label" in sample:  # another field would get the same name
            raise label_field_error(path)
        sample["label"] = label_of(label, record, path, below)
        if sample["label"] is None:
            problem = f"a label: {label_source_text(label)} gives none"
            raise missing_error(problem, record, path, _MISSING_LABEL_ADVICE)
    return sample
