"""Arrays in a file: mapped, so that all processes share the memory, and pickled as a place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 18


class MappedArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only array in a file. It is pickled as the file's path and its place there.

    A slice, and the result of any calculation, is pickled with its values like any other array.
    """

    _place: tuple[str, int] | None = None  # the file, and the offset of the first byte
    _file: tuple[int, ...] = ()  # what `_identity` says of the file; () if it is gone

    def __reduce__(self) -> Any:
        """Pickle the place in the file. The other process maps the file itself."""
        if self._place is None:
            return np.asarray(self).__reduce__()
        _check_same(self._place[0], self._place[0], self._file)
        order = "C" if self.flags.c_contiguous else "F"
        return _map, (self._place, self._file, self.dtype, self.shape, order)


def held(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view of an array: a `MappedArray` if the array is in a file."""
    place = _place(array)
    if place is None:
        view = array.view()
    else:
        view = mapped = array.view(MappedArray)
        mapped._place = place
        mapped._file = () if _deleted(array.ctypes.data) else _identity(place[0])
    view.flags.writeable = False
    return view


def is_mapped(array: NDArray[Any]) -> bool:
    """Return whether an array lies in a file, so that it need not be copied to be kept."""
    return _place(array) is not None


def pieces(count: int, size: int = _PIECE) -> Iterator[slice]:
    """Yield slices that cover so many entries: calculations over them need little memory."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def ascends(array: NDArray[Any]) -> bool:
    """Return whether each entry is larger than the entry before."""
    return all(
        bool((array[some.start + 1 : some.stop + 1] > array[some]).all())
        for some in pieces(max(0, len(array) - 1))
    )


def _place(array: NDArray[Any]) -> tuple[str, int] | None:
    """Return an array's file and the array's offset there; None if it is in no file."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    # Of a slice, numpy keeps the offset of the whole. The memory address says where it begins.
    while isinstance(base, np.memmap) and isinstance(base.base, np.memmap):
        base = base.base
    if not isinstance(base, np.memmap) or not base.filename or base.mode == "c":
        return None
    if not array.size or not array.flags.forc:
        return None
    return os.fspath(base.filename), int(base.offset) + array.ctypes.data - base.ctypes.data


def _identity(file: str | int) -> tuple[int, ...]:
    """Return what differs once a file is written again, or replaced by a rename."""
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _deleted(address: int) -> bool:
    """Return whether the file that is mapped here was replaced or removed, where Linux says so."""
    with suppress(OSError), open("/proc/self/maps") as mappings:
        gone = [line.split()[0].split("-") for line in mappings if line.endswith("(deleted)\n")]
        return any(int(low, 16) <= address < int(high, 16) for low, high in gone)
    return False


def _check_same(path: str, file: str | int, identity: tuple[int, ...]) -> None:
    """Raise OSError for another file than the one that an array mapped, and still shows."""
    if not identity or _identity(file) != identity:
        raise OSError(errno.ESTALE, "the file changed after an array mapped it: start again", path)


def _map(place: tuple[str, int], identity: tuple[int, ...], *array: Any) -> NDArray[Any]:
    """Map an array of this dtype, shape and order again, of the same file."""
    path, offset = place
    dtype, shape, order = array
    with open(path, "rb") as file:
        _check_same(path, file.fileno(), identity)
        return held(np.memmap(file, dtype, "r", offset, shape, order))
