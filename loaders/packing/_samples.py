"""What can be packed: folders of images, loose files, an index, any sequence or iterable of dicts.

A sample is a dict of values by field name: bytes, str, numbers, arrays of one dimension. `__key__`
(str) is its key, `label` (int or str) its class, and `__ext__` maps fields to the extensions of
the files they come from.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.formats.files import IMAGES, Entry, folder
from twinfeed.loaders.index import Index
from twinfeed.loaders.index._paths import below
from twinfeed.loaders.reading.reader import Reader

Sample = Mapping[str, Any]

_BATCH = 64


class LooseFiles:
    """Take samples from loose files below `root`: images with their annotations, say.

    - `root`: the folder that the paths of the files are relative to.
    - `entries`: an `Entry` for each sample: its key, its files by field name, and its label.

    Dots in the name of a key become "_", since in a tar a key ends at the first dot. Keys that are
    then the same get the extension of their file added.

    Raises ValueError for keys that stay the same, FileNotFoundError for a file that is not there.

    >>> import tempfile, pathlib
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("a.jpg", "a.xml", "b.jpg", "b.xml"):
    ...     _ = (root / name).write_bytes(name.encode())
    >>> images = sorted(path.name for path in root.glob("*.jpg"))
    >>> entries = [
    ...     Entry(image, {"image": image, "annotation": image.replace(".jpg", ".xml")})
    ...     for image in images
    ... ]
    >>> pairs = LooseFiles(root, entries)
    >>> pairs[1]  # doctest: +NORMALIZE_WHITESPACE
    {'__key__': 'b_jpg', '__ext__': {'image': 'jpg', 'annotation': 'xml'},
     'image': b'b.jpg', 'annotation': b'b.xml'}
    """

    def __init__(self, root: str | os.PathLike[str], entries: Sequence[Entry], /) -> None:
        self.root = Path(root)
        self.entries = list(entries)
        self.classes = tuple(sorted({entry.label for entry in self.entries if entry.label}))
        self.nbytes: int | None = sum(
            (self.root / path).stat().st_size
            for entry in self.entries
            for path in entry.paths.values()
        )
        self._keys = _distinct([_tar_key(entry.key) for entry in self.entries], self.entries)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.entries)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return one sample, its files read."""
        entry = self.entries[number]
        extensions = {
            field: path.rpartition("/")[2].rpartition(".")[2].lower()
            for field, path in entry.paths.items()
        }
        sample: dict[str, Any] = {"__key__": self._keys[number], "__ext__": extensions}
        for field, path in entry.paths.items():
            with open(below(str(self.root), path), "rb") as file:
                sample[field] = file.read()
        if self.classes:
            if entry.label is None:
                raise ValueError(f"{entry.key} has no label while others have one")
            sample["label"] = entry.label
        return sample


class ImageFolder(LooseFiles):
    """Take samples from a directory tree of images, with a folder for each class.

    The classes are those of torchvision's ImageFolder. Hidden files and folders (`.name`) and links
    to folders are left out. Files that are no images are left out with a ShardWarning.

    Raises FileNotFoundError for a tree without images, DataCorruptionError (a ValueError) for
    images beside the class folders.

    >>> import tempfile, pathlib
    >>> root = pathlib.Path(tempfile.mkdtemp())
    >>> (root / "cat").mkdir()
    >>> _ = (root / "cat" / "1.png").write_bytes(b"...")
    >>> source = ImageFolder(root)
    >>> source.classes, source[0]
    (('cat',), {'__key__': 'cat/1', '__ext__': {'image': 'png'}, 'image': b'...', 'label': 'cat'})
    """

    def __init__(
        self, root: str | os.PathLike[str], /, *, extensions: Iterable[str] = IMAGES
    ) -> None:
        entries = folder(root, extensions=extensions)
        if not entries:
            raise FileNotFoundError(f"no images below {os.fspath(root)}: {', '.join(extensions)}")
        outside = [entry.paths["image"] for entry in entries if entry.label is None]
        if 0 < len(outside) < len(entries):
            raise DataCorruptionError(
                f"images lie outside any class folder ({len(outside)}: {', '.join(outside[:5])})",
                advice="move them into one, or remove them",
            )
        super().__init__(root, entries)


@dataclass(frozen=True)
class Samples:
    """Hold samples that can be taken in any order.

    `at` yields the samples of some numbers below `count`. `nbytes` tells about how many bytes all
    samples hold, None if that is not known. `classes` are the names of their labels, if known.
    """

    count: int
    at: Callable[[Int64s], Iterator[Sample]]
    nbytes: int | None = None
    classes: tuple[str, ...] = ()


def samples_of(source: LooseFiles | Index | Sequence[Sample], /) -> Samples:
    """Return the samples of loose files, of a sequence, or of an index: its fields, its columns,
    and its keys if it has some.
    """
    if isinstance(source, Index):
        lengths = (source.table(field)["length"] for field in source.fields)
        nbytes = sum(int(np.maximum(length, 0).sum()) for length in lengths)
        return Samples(len(source), partial(_records, source), nbytes, source.classes)

    def at(numbers: Int64s) -> Iterator[Sample]:
        return map(source.__getitem__, numbers.tolist())

    if isinstance(source, LooseFiles):
        return Samples(len(source), at, source.nbytes, source.classes)
    return Samples(len(source), at)


def _records(index: Index, numbers: Int64s) -> Iterator[Sample]:
    """Yield records of an index, read in batches; what a record lacks is left out of its sample."""
    with Reader(index) as reader:
        for start in range(0, len(numbers), _BATCH):
            yield from _batch(index, reader, numbers[start : start + _BATCH])


def _batch(index: Index, reader: Reader, ids: Int64s) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = [{} for _ in ids]
    if index.has_keys:
        for sample, key in zip(samples, index.keys(ids), strict=True):
            sample["__key__"] = key
    for name in index.fields:
        held = np.flatnonzero(index.rows([name], ids)["length"] != -1)
        values = reader.read(ids[held], [name])[name]
        for place, value in zip(held.tolist(), values, strict=True):
            samples[place][name] = value
    for name, column in index.columns.items():
        rows: Iterable[Any] = column[ids]
        if name == "label" and index.classes:
            rows = [index.classes[label] for label in column[ids].tolist()]
        for sample, row in zip(samples, rows, strict=True):
            sample[name] = row
    return samples


def _tar_key(key: str) -> str:
    """Return a key without dots in its base name: in a tar the key ends at the first of them."""
    place, slash, name = key.rpartition("/")
    return f"{place}{slash}{name.replace('.', '_')}"


def _distinct(keys: list[str], entries: Sequence[Entry]) -> list[str]:
    """Return keys of which no two are the same."""
    times = Counter(keys)
    out = [
        key if times[key] == 1 else _tar_key(next(iter(entry.paths.values())))
        for key, entry in zip(keys, entries, strict=True)
    ]
    for key, count in Counter(out).most_common(1):
        if count > 1:
            raise ValueError(f"two records have the key {key!r}: rename one of their files")
    return out
