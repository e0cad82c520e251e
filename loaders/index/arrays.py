"""The arrays of an index: rows with the byte range of a field, strings, and memory-mapped arrays.

Small arrays are read and checked when the index is opened, as each mapping keeps a file descriptor.
Large arrays are mapped, and checked when they are first used.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import IndexFormatError
from twinfeed.loaders.index.manifest import CHUNK
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.regular import open_file
from twinfeed.samplers.validate import counted

MAX_READ_BYTES = 1 << 18
"""Files of up to this many bytes are read, and longer files are mapped."""

ROW = np.dtype([("offset", "<i8"), ("length", "<i8"), ("file", "<u4"), ("crc", "<u4")])
"""The location of a field of a record; a `length` of -1 marks a missing field."""

MISSING_ROW = (0, -1, 0)

_CHUNK_STRINGS, _MAX_SHOWN = 1 << 14, 100  # strings decoded in one call, and shown in a repr


def row_type(location: int, length: int, /, *, whole_files: bool) -> np.dtype[np.void]:
    """Return the narrowest dtype of rows (location, length, CRC-32C) up to these values. The
    location is an offset in a shard, or with `whole_files` the number of a file.
    """
    name = "file" if whole_files else "offset"
    lengths = "<i4" if length < 1 << 31 else "<i8"
    return np.dtype([(name, integer_type(location)), ("length", lengths), ("crc", "<u4")])


def row_types(*, whole_files: bool) -> set[np.dtype[np.void]]:
    """Return the four dtypes of rows: location and length have four bytes, or eight."""
    return {
        row_type(location, length, whole_files=whole_files)
        for location in (0, 1 << 32)  # a value that fits in four bytes, and one that does not
        for length in (0, 1 << 31)
    }


def integer_type(largest: int, /) -> str:
    """Return the dtype for numbers from 0 to `largest`: of four bytes if possible, else eight."""
    return "<u4" if largest < 1 << 32 else "<i8"


class StringColumn(Sequence[str]):
    """Strings in two arrays, which can be memory-mapped: a sequence like a tuple.

    Args:
        text: the bytes of all strings, uint8.
        ends: the end of each string in `text`, uint32[n], or int64[n] for a long text.
        convert: a function that is applied to each string when it is read.

    >>> column = StringColumn.of(["cat", "", "dog"])
    >>> column[0], column[-1], column[1:], len(column)
    ('cat', 'dog', ('', 'dog'), 3)
    >>> column, column == ("cat", "", "dog")
    (('cat', '', 'dog'), True)
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        text: npt.NDArray[np.uint8],
        ends: npt.NDArray[Any],
        convert: Callable[[str], str] | None = None,
        /,
    ) -> None:
        self.text = text
        self.ends = ends
        self._convert = convert

    @classmethod
    def of(cls, strings: Iterable[str], /) -> StringColumn:
        """Pack `strings`. A string that is not UTF-8 is kept byte for byte (surrogateescape)."""
        data = [string.encode("utf-8", "surrogateescape") for string in strings]
        ends = np.cumsum([len(item) for item in data], dtype=np.int64)
        text = np.frombuffer(b"".join(data), np.uint8)
        return cls(text, ends.astype(integer_type(len(text))))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[str, ...]: ...
    def __getitem__(self, number: int | slice) -> str | tuple[str, ...]:
        """Return the string at the index `number`, or a tuple of the strings of a slice."""
        if isinstance(number, slice):
            return tuple(map(self.__getitem__, range(*number.indices(len(self)))))
        index = range(len(self))[number]  # not negative; raises IndexError
        return self._decode(index, index + 1)[0]

    def __iter__(self) -> Iterator[str]:
        """Yield all strings, decoded in chunks."""
        for start in range(0, len(self), _CHUNK_STRINGS):  # ten times as fast as one by one
            yield from self._decode(start, start + _CHUNK_STRINGS)

    def _decode(self, start: int, stop: int) -> list[str]:
        """Return the strings at the indices `start` to `stop` - 1, of which at least one exists."""
        ends = self.ends[start:stop].tolist()
        base = int(self.ends[start - 1]) if start else 0
        text = self.text[base : ends[-1]].tobytes()
        strings = [
            text[low - base : high - base].decode("utf-8", "surrogateescape")
            for low, high in pairwise([base, *ends])
        ]
        return strings if self._convert is None else list(map(self._convert, strings))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        if len(self) <= _MAX_SHOWN:
            return repr(tuple(self))
        return f"({', '.join(map(repr, self[:_MAX_SHOWN]))}, … {counted(len(self), 'string')})"

    def tolist(self) -> list[str]:
        """Return all strings as a list."""
        return list(self)

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Return the two arrays by the names under which an index stores the column `name`."""
        return {f"{name}-text": self.text, f"{name}-ends": self.ends}


class Arrays:
    """The arrays that a manifest names, after checks of the size, type and shape of each file.

    `verified` names the mapped arrays that were compared with their SHA-256.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = path / manifest["folder"]
        self.verified: set[str] = set()
        self._error = partial(IndexFormatError, path=self.folder)
        self._entries: Mapping[str, Mapping[str, Any]] = manifest["arrays"]
        self._arrays = dict[str, Array]()
        for name in self._entries:
            with open_file(self.folder / f"{name}.npy") as file:
                self._arrays[name] = self._open(name, file)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        """Return an array without comparing its bytes with their SHA-256."""
        return np.asarray(self._arrays[name])

    def verified_array(self, name: str) -> Array:
        """Return an array whose bytes were compared with their SHA-256 in the manifest."""
        return np.asarray(self.verified_memmap(name))

    def verified_memmap(self, name: str) -> Array:
        """Return `verified_array`; a large array as `np.memmap`, with the name of its file."""
        array = self._arrays[name]
        if isinstance(array, np.memmap) and name not in self.verified:
            memory_map = array.base  # an mmap.mmap
            self._check_digest(name, _mapped_digest(memory_map))
            self.verified.add(name)
        return array

    def _open(self, name: str, file: BinaryIO) -> Array:
        """Return the array in a file; IndexFormatError if it is not as the manifest says."""
        entry, size = self._entries[name], os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            problem = f"incomplete index: {name}.npy has the wrong size"
            raise self._error(problem, expected=f"{entry['bytes']} bytes", found=f"{size} bytes")
        try:
            dtype = np.lib.format.descr_to_dtype(entry["dtype"])
            if dtype.hasobject:
                raise ValueError("an array of Python objects")
            values_offset = size - dtype.itemsize * math.prod(entry["shape"])
            if size > MAX_READ_BYTES:
                return np.memmap(file, dtype, "r", values_offset, tuple(entry["shape"]))
            data = file.read()
            array = np.frombuffer(data, dtype, offset=values_offset).reshape(entry["shape"])
        except (MemoryError, RecursionError, TypeError, ValueError) as error:
            problem = f"damaged index: {name}.npy cannot be read"
            raise self._error(problem, found=error) from error
        self._check_digest(name, hashlib.sha256(data).hexdigest())
        return array

    def _check_digest(self, name: str, found: str) -> None:
        """Raise IndexFormatError unless `found` is the SHA-256 of an array in the manifest."""
        expected = self._entries[name]["sha256"]
        if found != expected:
            problem = f"damaged index: the bytes of {name}.npy have changed since they were written"
            file = self.folder / f"{name}.npy"
            raise self._error(problem, path=file, expected=f"SHA-256 {expected}", found=found)


class Columns(Mapping[str, Array]):
    """The columns of an index by name, each checked at its first use."""

    def __init__(self, arrays: Arrays, names: Mapping[str, str]) -> None:
        self._arrays = arrays
        self._names = names

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(
                f"no column {name!r}: the index has the columns {list(self)}; a Reader reads fields"
            )
        return self._arrays.verified_array(self._names[name])

    def types(self) -> dict[str, str]:
        """Return a dict from each column to its type and shape as text, without reading any."""
        stored = {name: self._arrays[number] for name, number in self._names.items()}
        return {name: f"{array.dtype}{[*array.shape]}" for name, array in stored.items()}

    def __repr__(self) -> str:
        return f"<Columns {self.types()}>"

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _mapped_digest(mapped: Any) -> str:
    """Return the SHA-256 of a memory-mapped file, without keeping all its pages in memory."""
    digest = hashlib.sha256()
    with memoryview(mapped) as view:
        for start in range(0, len(view), CHUNK):
            digest.update(view[start : start + CHUNK])
            mapped.madvise(mmap.MADV_DONTNEED, start, min(CHUNK, len(view) - start))
    return digest.hexdigest()
