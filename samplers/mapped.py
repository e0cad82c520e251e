"""Memory-mapped arrays: shared by all processes, and pickled as a path and an offset."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from twinfeed.samplers.types import Array

_CHUNK = 1 << 18


class MappedArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only array in a file. It is pickled as the file's path and its offset there.

    A slice, and the result of any calculation, is pickled with its values like any other array.
    """

    _location: tuple[str, int] | None = None  # the file, and the offset of the first byte
    _file_identity: tuple[int, ...] = ()  # when it was mapped; () if it was deleted

    def __reduce__(self) -> Any:
        """Pickle path and offset. The other process maps the file itself."""
        if self._location is None:
            return np.asarray(self).__reduce__()
        _check_unchanged(self._location[0], self._location[0], self._file_identity)
        order = "C" if self.flags.c_contiguous else "F"
        return _map, (self._location, self._file_identity, self.dtype, self.shape, order)


def as_mapped(array: Array) -> Array:
    """Return a read-only view of an array: a `MappedArray` if the array is mapped from a file."""
    location = _path_and_offset(array)
    if location is None:  # in memory
        view = array.view()
    else:
        view = mapped = array.view(MappedArray)
        mapped._location = location
        # If the file that is mapped at the array's address was deleted, its path may now lead to
        # another file: then the identity is (), which no file has, so that unpickling raises.
        mapped._file_identity = () if _is_deleted(array.ctypes.data) else _identity_of(location[0])
    view.flags.writeable = False
    return view


def is_mapped(array: Array) -> bool:
    """Return whether an array is mapped from a file, so that it need not be copied to be kept."""
    return _path_and_offset(array) is not None


def slices(count: int, size: int = _CHUNK) -> Iterator[slice]:
    """Yield slices that cover `range(count)`, `size` entries each, to bound temporary memory."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def is_increasing(array: Array, *, strictly: bool = True) -> bool:
    """Return whether the values of an array increase; with `strictly=False` they may be equal.

    The comparison is in chunks, as the array may be a large file that is mapped.
    """
    is_above = np.greater if strictly else np.greater_equal
    return all(
        bool(is_above(array[chunk.start + 1 : chunk.stop + 1], array[chunk]).all())
        for chunk in slices(max(0, len(array) - 1))
    )


def _path_and_offset(array: Array) -> tuple[str, int] | None:
    """Return the path and the byte offset of a mapped array; None for an array in memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    # A slice of a memmap has the attribute `offset` of the whole memmap. So find the whole memmap,
    # and compute the offset of the array from the difference of their addresses.
    while isinstance(base, np.memmap) and isinstance(base.base, np.memmap):
        base = base.base
    # With mode "c" (copy on write), changes are only in memory, not in the file.
    if not isinstance(base, np.memmap) or not base.filename or base.mode == "c":
        return None
    if not array.size or not array.flags.forc:  # only contiguous bytes, in C or Fortran order
        return None
    return os.fspath(base.filename), int(base.offset) + array.ctypes.data - base.ctypes.data


def _identity_of(file: str | int) -> tuple[int, ...]:
    """Return (inode, size, mtime), which change if the file is written or replaced."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_deleted(address: int) -> bool:
    """Return whether the file mapped at this address was deleted or replaced, as /proc/self/maps
    says.
    """
    with suppress(OSError), open("/proc/self/maps") as mappings:
        ranges = [line.split()[0].split("-") for line in mappings if line.endswith("(deleted)\n")]
        return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
    return False


def _check_unchanged(path: str, file: str | int, identity: tuple[int, ...]) -> None:
    """Raise OSError if a file was written or replaced after an array mapped it."""
    if not identity or _identity_of(file) != identity:
        raise OSError(errno.ESTALE, "the file changed after an array mapped it: start again", path)


def _map(
    location: tuple[str, int], identity: tuple[int, ...], dtype: Any, shape: Any, order: Any
) -> Array:
    """Map an array from a file, in the process that unpickles a `MappedArray`."""
    path, offset = location
    with open(path, "rb") as file:
        _check_unchanged(path, file.fileno(), identity)
        return as_mapped(np.memmap(file, dtype, "r", offset, shape, order))
