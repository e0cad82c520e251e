"""The arrays of an index: rows with the byte range of a field, strings, and memory-mapped arrays.

Rows have narrow types in files, and a single type in memory.

- A small array is read and checked when the index is opened. It is not mapped, since each mapping
  keeps a file descriptor.
- A large array is mapped. So opening costs the same for a thousand and ten million records, and all
  processes share one copy. A large array is checked at the first call of `Arrays.check` for it.
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

READ_WHOLE = 1 << 18
"""Files of up to this many bytes are read, and longer files are mapped."""

ROW = np.dtype([("offset", "<i8"), ("length", "<i8"), ("file", "<u4"), ("crc", "<u4")])
"""The location of a field of a record; a `length` of -1 marks a missing field."""

MISSING_ROW = (0, -1, 0)

_DECODED_AT_ONCE, _MAX_SHOWN = 1 << 14, 100  # strings decoded in one call, and shown in a repr


def row_type(location: int, length: int, /, *, whole_files: bool) -> np.dtype[np.void]:
    """Return the narrowest dtype of rows (location, length, CRC) that holds these numbers.

    A location is an offset in a shard, or with `whole_files` the number of a file. The arguments
    are the largest location and the largest length of a field.
    """
    name = "file" if whole_files else "offset"
    lengths = "<i4" if length < 1 << 31 else "<i8"
    return np.dtype([(name, integer_type(location)), ("length", lengths), ("crc", "<u4")])


def row_types(*, whole_files: bool) -> set[np.dtype[np.void]]:
    """Return all dtypes that `row_type` can return."""
    return {
        row_type(location, length, whole_files=whole_files)
        for location in (0, 1 << 32)
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
        convert: changes each string that is taken out.

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
        """Return the string with this number, or a tuple of the strings of a slice."""
        if isinstance(number, slice):
            return tuple(map(self.__getitem__, range(*number.indices(len(self)))))
        number = range(len(self))[number]
        return self._decode(number, number + 1)[0]

    def __iter__(self) -> Iterator[str]:
        """Yield all strings, decoded in chunks."""
        for start in range(0, len(self), _DECODED_AT_ONCE):  # ten times as fast as one by one
            yield from self._decode(start, start + _DECODED_AT_ONCE)

    def _decode(self, start: int, stop: int) -> list[str]:
        """Return the strings with the numbers [start, stop), of which there is at least one."""
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


_HEADER_START = 10
"""The bytes of a `.npy` file before its header: magic string, version and length of the header."""


class Arrays:
    """The arrays that a manifest names, after checks of the size, type and shape of each file.

    `checked` has the names of the mapped arrays that were compared with their digest. Mapping is
    safe, since the file of an array is only ever replaced as a whole, never truncated.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = path / manifest["folder"]
        self.checked: set[str] = set()
        self._error = partial(IndexFormatError, path=self.folder)
        self._entries: Mapping[str, Mapping[str, Any]] = manifest["arrays"]
        self._arrays = {name: self._open(name) for name in self._entries}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        """Return an array without comparing its digest."""
        return np.asarray(self._arrays[name])

    def check(self, name: str) -> Array:
        """Return an array, after comparing a mapped one with its digest at the first call.

        Raises:
            IndexFormatError: its bytes have changed since they were written.
        """
        return np.asarray(self.mapped(name))

    def mapped(self, name: str) -> Array:
        """Return an array as `check` does, but a mapped one as `np.memmap`, with its file name."""
        array = self._arrays[name]
        if isinstance(array, np.memmap) and name not in self.checked:
            self._check_digest(name, _mapped_digest(array.base))
            self.checked.add(name)
        return array

    def _open(self, name: str) -> Array:
        """Return an array, read from its file or mapped."""
        with open_file(self.folder / f"{name}.npy") as file:
            return self._read(name, file)

    def _read(self, name: str, file: BinaryIO) -> Array:
        """Return the array in an open file `{name}.npy`.

        A small array is read and compared with its digest. A large one is mapped, and compared
        later, by `check`.

        Raises:
            IndexFormatError: the file does not have the size, type and shape in the manifest.
        """
        entry, size = self._entries[name], os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            problem = f"incomplete index: {name}.npy has the wrong size"
            raise self._error(problem, expected=f"{entry['bytes']} bytes", found=f"{size} bytes")
        try:
            dtype = np.lib.format.descr_to_dtype(entry["dtype"])
            data = file.read(size if size <= READ_WHOLE else _HEADER_START)
            start = _start(data, dtype, size - dtype.itemsize * math.prod(entry["shape"]))
            if size > READ_WHOLE:
                return np.memmap(file, dtype, "r", start, tuple(entry["shape"]))
            array = np.frombuffer(data, dtype, offset=start).reshape(entry["shape"])
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
        return self._arrays.check(self._names[name])

    def types(self) -> dict[str, str]:
        """Return by name the type and the shape of each column as text, without reading any."""
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


def _start(head: bytes, dtype: np.dtype[Any], start: int) -> int:
    """Check that the values of a `.npy` file begin at byte `start`, and return `start`.

    `head` is the beginning of the file, and `dtype` that of the manifest.

    Raises:
        ValueError: by the header of the file, its values begin elsewhere.
    """
    if head[:8] != b"\x93NUMPY\x01\x00" or dtype.hasobject:
        raise ValueError("not a .npy file of format 1.0, or one of Python objects")
    found = _HEADER_START + int.from_bytes(head[8:_HEADER_START], "little")
    if found != start:
        raise ValueError(f"its values start at byte {found}, and by its shape at {start}")
    return start


def _mapped_digest(mapped: Any) -> str:
    """Return the SHA-256 of a memory-mapped file, without keeping all its pages in memory."""
    digest = hashlib.sha256()
    with memoryview(mapped) as view:
        for start in range(0, len(view), CHUNK):
            digest.update(view[start : start + CHUNK])
            mapped.madvise(mmap.MADV_DONTNEED, start, min(CHUNK, len(view) - start))
    return digest.hexdigest()
