"""The sources of `pack`: folders of images, loose files, an index, and iterables of dicts.

A sample is a dict of values by field name: bytes, str, numbers, arrays of one dimension. `__key__`
(str) is its key, `label` (int or str) its class, and `__ext__` maps fields to the extensions of
the files they come from.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.sniff import IMAGE_EXTENSIONS, SNIFF_BYTES, identify, image_extension
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.paths import resolve_below
from twinfeed.loaders.index.sizes import field_bytes
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers.validate import counted

Sample = Mapping[str, Any]

_BATCH_SIZE = 64  # records of an index that are read at a time


class LooseFiles:
    """Take samples from loose files below `root`, such as images with their annotations.

    Dots in the name of a key become "_", since in a tar a key ends at the first dot. If two keys
    are the same then, the extension of the file is added to each.

    Nothing is decoded. Of a file with the extension of an image, only the first bytes are checked.

    Args:
        root: the folder that the paths of the files are relative to.
        entries: an `Entry` for each sample: its key, its files by field name, and its label.

    Raises:
        ValueError: two keys are the same with their extensions too.
        FileNotFoundError: a file is not there.
        DataCorruptionError: only some samples have a label; or a file that is read has the
            extension of an image, but is empty or something else, such as a page of HTML or a Git
            LFS pointer. It is a ValueError.

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
        without = [entry.key for entry in self.entries if entry.label is None]
        if self.classes and without:
            raise DataCorruptionError(
                f"samples have no label, while others have one ({len(without)}: "
                f"{', '.join(without[:5])})",
                path=root,
                advice="put each image into the folder of its class, give its Entry a label, or "
                "remove it",
            )
        paths = [path for entry in self.entries for path in entry.paths.values()]
        self.nbytes = sum((self.root / path).stat().st_size for path in paths)
        self._keys = _distinct_keys([tar_key(entry.key) for entry in self.entries], self.entries)

    def __repr__(self) -> str:
        samples, classes = counted(len(self), "sample"), counted(len(self.classes), "class")
        return f"<{type(self).__name__} {str(self.root)!r}: {samples}, {classes}>"

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.entries)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Read the files of the sample with this number, from 0 on, and return the sample."""
        entry = self.entries[number]
        extensions = {field: _extension(path) for field, path in entry.paths.items()}
        sample: dict[str, Any] = {"__key__": self._keys[number], "__ext__": extensions}
        for field, path in entry.paths.items():
            sample[field] = read_file(resolve_below(str(self.root), path), LIMITS.record_bytes)
            if extensions[field] in IMAGE_EXTENSIONS:
                _check_image(sample[field], path, entry.key)
        if entry.label is not None:
            sample["label"] = entry.label
        return sample


RandomAccess = LooseFiles | Index | Sequence[Sample]


def read_samples(source: RandomAccess, numbers: Int64s, /) -> Iterator[Sample]:
    """Yield the samples of a source with these `numbers`, in this order; of an index in batches."""
    if not isinstance(source, Index):
        yield from map(source.__getitem__, numbers.tolist())
        return
    with Reader(source) as reader:
        for start in range(0, len(numbers), _BATCH_SIZE):
            yield from _read_batch(source, reader, numbers[start : start + _BATCH_SIZE])


def source_bytes(source: object, /) -> int | None:
    """Return the approximate size of all samples of a source in bytes; None if it is not known."""
    if isinstance(source, Index):
        return field_bytes(source)
    return source.nbytes if isinstance(source, LooseFiles) else None


def _read_batch(index: Index, reader: Reader, ids: Int64s) -> list[dict[str, Any]]:
    """Read records of an index as samples, without the fields that they lack."""
    values: dict[str, Sequence[Any]] = {"__key__": index.keys(ids)} if index.has_keys else {}
    values |= reader.read_or_none(ids, [*index.fields, *index.columns])
    if "label" in index.columns and index.classes:
        values["label"] = [index.classes[label] for label in values["label"]]
    return [
        {
            name: value_to_pack(value)
            for name, value in zip(values, row, strict=True)
            if value is not None
        }
        for row in zip(*values.values(), strict=True)
    ]


def value_to_pack(value: Any) -> Any:
    """Return a stored value for `pack`: an empty list, refused from the user, becomes an array."""
    return np.array([], bytes) if isinstance(value, list) and not value else value


def _extension(path: str) -> str:
    """Return the extension of a file in lower case, or the whole name if it has no extension."""
    return path.rpartition("/")[2].rpartition(".")[2].lower()


def _check_image(data: bytes, path: str, key: str) -> None:
    """Raise DataCorruptionError if the bytes of an image file are of another known kind."""
    other_format = identify(data[:SNIFF_BYTES]) if data else ("an empty file", "")
    is_netpbm = re.match(rb"P[1-7]\s", data)  # .pbm, .pgm, .ppm and .pam begin like a text file
    if other_format is None or image_extension(data[:SNIFF_BYTES]) or is_netpbm:
        return
    raise DataCorruptionError(
        "a file has the extension of an image, but is not an image",
        path=path,
        key=key,
        found=other_format[0],
        advice="remove the file, or copy the image again",
    )


def tar_key(key: str, /) -> str:
    """Replace the dots in the base name of a key by "_", since in a tar a key ends at a dot."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '_')}"


def _distinct_keys(keys: list[str], entries: Sequence[Entry]) -> list[str]:
    """Make keys distinct by extensions: "cat/1" of 1.jpg and 1.png get "cat/1_jpg", "cat/1_png"."""
    counts = Counter(keys)
    distinct = [
        key if counts[key] == 1 else tar_key(next(iter(entry.paths.values())))
        for key, entry in zip(keys, entries, strict=True)
    ]
    repeated = [key for key, count in Counter(distinct).items() if count > 1]
    if repeated:
        raise ValueError(f"two records have the key {repeated[0]!r}: rename one of their files")
    return distinct
