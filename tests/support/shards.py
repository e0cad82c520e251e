"""Small sets of shards for the tests of index, reader and packer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

from support.inside import (
    BuildPlan,
    IndexStats,
    Reading,
    ReadingOptions,
    TarWriter,
    TFRecordWriter,
    build,
    encode,
    find_source,
    load_part,
    temporary_folder,
    write_index,
)
from twinfeed.loaders import Index, Reader, open_index

Sample = Mapping[str, Any]


def write_tfrecord(path: Path, samples: Iterable[Sample]) -> Path:
    with TFRecordWriter(path) as writer:
        for sample in samples:
            writer.write(encode(sample))
    return path


def write_tar(path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> Path:
    with TarWriter(path) as writer:
        for key, parts in samples:
            writer.write(key, parts)
    return path


def write_files(root: Path, *names: str) -> Path:
    """Write files that hold their own names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def shard_of_text(folder: Path, text: str) -> bytes:
    """The bytes of a shard whose only record says `text`."""
    return write_tfrecord(folder / "one", [{"x": text.encode()}]).read_bytes()


def numbered(start: int, stop: int, *, size: int = 20) -> list[dict[str, Any]]:
    """Samples of 7 classes; the image has the number of the sample."""
    return [
        {"image": f"{n:06d}".encode() * (size // 6 + n % 3), "label": n % 7, "key": f"k{n}"}
        for n in range(start, stop)
    ]


def tfrecords(folder: Path, *, shards: int = 3, each: int = 10, size: int = 20) -> list[Path]:
    """Shards d-00000-of-..., each of `each` records."""
    return [
        write_tfrecord(
            folder / f"d-{s:05d}-of-{shards:05d}.tfrecord",
            numbered(s * each, (s + 1) * each, size=size),
        )
        for s in range(shards)
    ]


def tars(folder: Path, *, shards: int = 3, each: int = 10) -> list[Path]:
    """Shards d-000000.tar, each of `each` samples of png, cls and json."""
    made = []
    for s in range(shards):
        samples = []
        for n in range(s * each, (s + 1) * each):
            parts = {
                "png": f"{n:06d}".encode() * (3 + n % 3),
                "cls": str(n % 7).encode(),
                "json": f'{{"object": {{"name": "name{n % 3}", "id": {n}}}}}'.encode(),
            }
            samples.append((f"k{n}", parts))
        made.append(write_tar(folder / f"d-{s:06d}.tar", samples))
    return made


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` and its bytes."""
    return {
        os.path.relpath(Path(place, name), folder): Path(place, name).read_bytes()
        for place, _, names in os.walk(folder)
        for name in names
    }


def read_images(index: Index) -> list[bytes]:
    """The images of all records, as bytes of their own."""
    with Reader(index) as reader:
        return [bytes(image) for image in reader.read(range(len(index)))["image"]]


def total_bytes(reader: Reader) -> int:
    """The bytes of all images; here since a spawned process must be able to import it."""
    return sum(map(len, reader.read(range(len(reader.index)), ["image"])["image"]))


def made_parts(
    shards: list[Path], folder: Path, *, label: Any = None, **options: Unpack[ReadingOptions]
) -> list[Path]:
    """The files of the parts of shards, in a folder beside the shards."""
    folder.mkdir(exist_ok=True)
    source = find_source(shards, folder, container=None, root=None)
    plan = BuildPlan.of(source, label, None, Reading(**options))
    return [Path(part.file) for part in build._build_parts(source.jobs, folder, None, False, plan)]


def merged(files: Iterable[Path], path: Path) -> Index:
    """The index of parts."""
    with temporary_folder(path) as work:
        write_index(path, work, IndexStats(map(load_part, files)), None)
    return open_index(path)
