"""Write an index: a folder of `.npy` arrays and a JSON manifest, replaced atomically.

The arrays are in a folder that is named after their content, and the manifest names the folder.
`os.replace` of the manifest is the commit point: a reader sees the whole old state or the whole new
state. The bytes contain no time, user or path. So two processes that build the same index write
the same files, and the last writer changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.building._parts import damaged_part
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index.manifest import (
    ARRAYS_FOLDER,
    FORMAT,
    MANIFEST,
    VERSION,
    array_files,
    is_index,
    json_digest,
    read_manifest,
)
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import (
    LOCK,
    explain_unwritable,
    fsync_path,
    locked,
    temporary_name,
)
from twinfeed.loaders.support.deletable import (
    MARK,
    add_deletable,
    deletable_files,
    delete_folder,
    delete_listed,
    mark_deletable,
)
from twinfeed.loaders.support.regular import open_file

_PART = re.compile(r"\.?[0-9a-f]{32}\.part(-[0-9a-f]{16})?")
PART_MAGIC = b"PK\x03\x04"
"""The first bytes of every part, which is a zip."""
_BUFFER = 1 << 17  # bytes
DAY = 86400.0
"""The timeout, in seconds, of the lock on an index that another process builds."""
_UNWRITABLE_ADVICE = (
    "the index cannot be written here; write it elsewhere (twinfeed index --out) and give root= "
    "the folder that holds the shards"
)


class ArrayFile:
    """Write one `.npy` file in blocks, and compute its SHA-256.

    `size` is the size of the finished file in bytes.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, shape: Sequence[int], /) -> None:
        self._out = path.open("xb", buffering=_BUFFER)
        self.path = path
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self._descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": self._descr, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self, header)
        self.size = self.bytes + self.dtype.itemsize * math.prod(shape)

    def write(self, data: bytes | memoryview, /) -> None:
        """Write bytes, and add them to the digest. numpy calls this for the header."""
        self._out.write(data)
        self.digest.update(data)
        self.bytes += len(data)

    def add(self, rows: Array, /) -> None:
        """Append rows, converted to the dtype of the file."""
        rows = np.ascontiguousarray(rows, self.dtype)  # ndarray.tofile would hide a full disk
        self.write(rows.reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Close the file."""
        self._out.close()

    def finish(self) -> dict[str, Any]:
        """Finish the file, and return what the manifest says of it.

        Raises:
            IndexFormatError: fewer or more rows were written than the shape has.
        """
        self._out.flush()
        os.fsync(self._out.fileno())
        self.close()
        if self.bytes != self.size:
            raise damaged_part(self.path)
        entry = {"dtype": self._descr, "shape": list(self.shape), "bytes": self.bytes}
        return entry | {"sha256": self.digest.hexdigest()}


class IndexWriter:
    """Write an index to a temporary folder, which `finish` publishes at `path`."""

    def __init__(self, path: Path, folder: Path, /) -> None:
        self.path = path
        self.folder = folder
        self.open_arrays: dict[str, ArrayFile] = {}
        self._entries: dict[str, Any] = {}

    def new(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], /) -> ArrayFile:
        """Create the file of an array, to be written in blocks."""
        add_deletable(self.folder, f"{name}.npy")
        self.open_arrays[name] = ArrayFile(self.folder / f"{name}.npy", dtype, shape)
        return self.open_arrays[name]

    def add(self, arrays: Mapping[str, Array], /) -> None:
        """Write whole arrays."""
        for name, array in arrays.items():
            self.new(name, array.dtype, array.shape).add(array)

    def finish_array(self, name: str, /) -> Array:
        """Finish the file of an array, and return the array memory-mapped."""
        file = self.open_arrays.pop(name)
        self._entries[name] = file.finish()
        return np.asarray(np.lib.format.open_memmap(file.path, mode="r"))

    def finish(self, content: Mapping[str, Any], options: Mapping[str, Any], /) -> None:
        """Write a manifest with `content` and `options`, and publish the index.

        The manifest is written to the temporary folder of the arrays. This folder is renamed to the
        folder of the index named after the content, and then the manifest is moved to its place:
        from now on the index is the new one. At last the arrays of older indexes are deleted.

        The manifest's `fingerprint` covers `content` and the bytes of the arrays, but neither
        `options`, which say how the index was built, nor the ETags of the shards (the arrays
        "tags-…"), which differ between stores.
        """
        entries = self._entries | {name: file.finish() for name, file in self.open_arrays.items()}
        manifest = {"format": FORMAT, "version": VERSION, **content}
        data = {name: entry for name, entry in entries.items() if not name.startswith("tags-")}
        manifest |= {"fingerprint": json_digest({**manifest, "arrays": data}), "arrays": entries}
        manifest["options"] = dict(options)
        manifest["folder"] = f"columns-{json_digest(entries)[:16]}"
        manifest["checksum"] = json_digest(manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
        add_deletable(self.folder, MANIFEST)  # if this build is killed now, the next deletes it
        (self.folder / MANIFEST).write_bytes(text.encode())
        fsync_path(self.folder / MANIFEST)
        array_folder = self.path / manifest["folder"]
        old_manifest = _old_manifest(self.path)
        if old_manifest is None or old_manifest["folder"] != array_folder.name:
            delete_listed(array_folder)  # a build that was killed has left it
        manifest_folder = _publish_arrays(self.folder, array_folder)
        with _deletable(self.path, old_manifest):
            os.replace(manifest_folder / MANIFEST, self.path / MANIFEST)  # the commit point
            fsync_path(self.path)
        (array_folder / MARK).unlink(missing_ok=True)  # the arrays are in use: do not delete them
        for folder in self.path.iterdir():
            if folder != array_folder and ARRAYS_FOLDER.fullmatch(folder.name.removeprefix(".")):
                delete_listed(folder)


@contextmanager
def _deletable(path: Path, old: Mapping[str, Any] | None) -> Iterator[None]:
    """Mark the old arrays deletable while the manifest is replaced, so that the next build can
    remove them if this one is killed.
    """
    if old is None:
        yield
        return
    folder = path / old["folder"]
    with suppress(OSError):  # the arrays are missing
        mark_deletable(folder, [f"{name}.npy" for name in old["arrays"]])
    try:
        yield
    except BaseException:
        (folder / MARK).unlink(missing_ok=True)
        raise


def _old_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the index at `path`, or None if it is missing or damaged."""
    with suppress(LoaderError, OSError):
        return read_manifest(path)
    return None


@contextmanager
def index_writer(path: Path) -> Iterator[IndexWriter]:
    """Yield a writer of the index at `path`, under a lock; delete temporary files at the end."""
    check_own_folder(path)
    with locked(path, make=make_folder, wait=DAY):
        store = IndexWriter(path, temporary_name(path / "columns"))
        store.folder.mkdir()
        mark_deletable(store.folder)
        try:
            yield store
        finally:
            for file in store.open_arrays.values():
                with suppress(OSError):  # a full disk was reported already
                    file.close()
            with suppress(OSError):  # renamed to the folder of the index
                delete_folder(store.folder)


def make_folder(path: Path) -> None:
    """Create a folder; if that is not allowed, the error has advice."""
    with explain_unwritable(path, _UNWRITABLE_ADVICE):
        path.mkdir(parents=True, exist_ok=True)


def check_own_folder(path: Path) -> Path:
    """Return `path` if an index may be written there: it is new, an empty folder or an index.

    Hidden files in the folder are ignored, and the files that a killed build has left.

    Raises:
        FileExistsError: it is a file, or a folder with other files.
    """
    if path.is_file():
        problem, example = "it is a file", path.with_suffix(".index")
    elif not path.exists() or is_index(path):
        return path
    else:
        foreign = [file for file in foreign_files(path) if not re.search(r"(^|/)\.", file)]
        if not foreign or is_index(path):  # another process may have finished the index meanwhile
            return path
        problem, example = f"it holds other files ({', '.join(foreign[:5])})", path / "train.index"
    raise FileExistsError(
        errno.EEXIST, f"{problem}; an index needs a folder of its own, such as {example}", str(path)
    )


def foreign_files(path: Path, /) -> list[str]:
    """Return the paths, relative to the folder of an index, of files that no build has written.

    A build writes the manifest, the arrays that the manifest lists, lock files, parts, and folders
    with a marker file, which lists their files.
    """
    written = {LOCK, MANIFEST} if is_index(path) else {LOCK}
    if (manifest := _old_manifest(path)) is not None:
        written |= set(array_files(manifest))
    found = set[str]()
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            listed = deletable_files(child)  # by the marker file of the folder, if it has one
            expected = {LOCK} if listed is None else {LOCK, MARK, *listed}
            files = [file for file in child.iterdir() if not is_part(file)]
            found |= {f"{child.name}/{file.name}" for file in files if file.name not in expected}
        else:
            found.add(child.name)
    return sorted(found - written)


def is_part(path: Path) -> bool:
    """Return whether a file is a part of a build, or a part that is still being written.

    The file of a part has a name of its own kind and begins with `PART_MAGIC`. If its writer was
    killed, it may have only a few of these bytes, or none.
    """
    if not _PART.fullmatch(path.name):
        return False
    with suppress(LoaderError, FileNotFoundError), open_file(path) as file:
        first_bytes = file.read(len(PART_MAGIC))
        return PART_MAGIC.startswith(first_bytes)
    return False


def _publish_arrays(temporary: Path, final: Path) -> Path:
    """Rename the folder `temporary` to `final`, or move its arrays to `final` if this exists.

    A folder `final` has the same arrays, since its name is a digest of them. Return the folder that
    has the new manifest afterwards.
    """
    fsync_path(temporary)
    try:
        os.rename(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        for file in temporary.glob("*.npy"):  # replaces equal files, or damaged ones
            os.replace(file, final / file.name)
        return temporary
    return final
