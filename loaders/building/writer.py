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
    check_replaceable,
    fsync_path,
    locked,
    publish_folder,
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

Json = Mapping[str, Any]  # an object of JSON
_PART_NAME = re.compile(r"\.?[0-9a-f]{32}\.part(-[0-9a-f]{16})?")
PART_MAGIC = b"PK\x03\x04"
"""The first bytes of every part, which is a zip."""
_BUFFER = 1 << 17  # bytes
DAY = 86400.0
"""The timeout, in seconds, of the lock on an index that another process builds."""
_REGULAR = "a regular file", bool  # a build replaces these names in an index, but no links
UNWRITABLE_ADVICE = (
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
        """Flush and close the file, and return its description for the manifest of the index.

        Raises:
            IndexFormatError: fewer or more rows were written than the shape has.
        """
        self._out.flush()
        os.fsync(self._out.fileno())
        self.close()
        if self.bytes != self.size:
            raise damaged_part(self.path)
        description = {"dtype": self._descr, "shape": list(self.shape), "bytes": self.bytes}
        return description | {"sha256": self.digest.hexdigest()}


class IndexWriter:
    """Write an index to a temporary folder, which `finish` publishes at `path`."""

    def __init__(self, path: Path, folder: Path, /) -> None:
        self.path = path
        self.folder = folder
        self.open_arrays: dict[str, ArrayFile] = {}
        # by array: its description for the manifest, such as its shape and its digest
        self._finished: dict[str, Any] = {}

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
        self._finished[name] = file.finish()
        return np.asarray(np.lib.format.open_memmap(file.path, mode="r"))

    def finish(self, content: Json, options: Json, /) -> None:
        """Write a manifest with `content` and `options`, and publish the index.

        If this process is killed at any moment, the index is the old one or the new one, and the
        next build can delete the other's files:

        1. Write the manifest, a JSON file, beside the new arrays in their temporary folder.
        2. Rename this folder to its final name, which the manifest contains.
        3. Replace the index's manifest by the new one: from now on, readers open the new arrays.
        4. Delete the old arrays.

        An array is deleted only if the marker file (`MARK`) of its folder lists it, and no index
        uses the folder. The new arrays are listed until step 4, the old ones from step 3 on.
        """
        # 1. `arrays` has a description of each array: its shape, dtype and SHA-256.
        arrays = self._finished | {name: file.finish() for name, file in self.open_arrays.items()}
        manifest = _manifest(content, options, arrays)
        text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
        add_deletable(self.folder, MANIFEST)  # the marker file lists the arrays already
        (self.folder / MANIFEST).write_bytes(text.encode())
        fsync_path(self.folder / MANIFEST)
        # 2. A folder of the final name that no index uses is left over from a killed build.
        array_folder = self.path / manifest["folder"]
        old_manifest = _old_manifest(self.path)
        if old_manifest is None or old_manifest["folder"] != array_folder.name:
            delete_listed(array_folder)
        manifest_folder = _publish_arrays(self.folder, array_folder)
        # 3. The folder of the old arrays gets its marker file before, and is kept nevertheless
        # while the manifest names it. So if this process is killed, the next build can delete it.
        if old_manifest is not None:
            with suppress(OSError):  # the arrays are missing
                old_files = [f"{name}.npy" for name in old_manifest["arrays"]]
                mark_deletable(self.path / old_manifest["folder"], old_files)
        os.replace(manifest_folder / MANIFEST, self.path / MANIFEST)
        fsync_path(self.path)
        # 4. Without a marker file, the new arrays are never deleted, from now on.
        (array_folder / MARK).unlink(missing_ok=True)
        for folder in self.path.iterdir():
            if folder != array_folder and ARRAYS_FOLDER.fullmatch(folder.name.removeprefix(".")):
                delete_listed(folder)


def _manifest(content: Json, options: Json, arrays: Json) -> dict[str, Any]:
    """Return the manifest of an index with these `arrays`, which are described by name.

    The `fingerprint` identifies the content: not `options`, nor the ETags ("tags-…"), which differ
    between stores. The name of the folder depends on all arrays.
    """
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, **content}
    stable_arrays = {name: array for name, array in arrays.items() if not name.startswith("tags-")}
    manifest["fingerprint"] = json_digest({**manifest, "arrays": stable_arrays})
    manifest |= {"arrays": dict(arrays), "options": dict(options)}
    manifest["folder"] = f"columns-{json_digest(arrays)[:16]}"
    manifest["checksum"] = json_digest(manifest)
    return manifest


def _old_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of the index at `path`, or None if it is missing or damaged."""
    with suppress(LoaderError, OSError):
        return read_manifest(path)
    return None


@contextmanager
def index_writer(path: Path) -> Iterator[IndexWriter]:
    """Yield a writer of the index at `path`, and delete temporary files after the `with` block.

    The folder `path` is locked. If another process writes the same index, this one waits for up to
    a day.

    Raises:
        FileExistsError: `path` is a folder with other files.
    """
    check_own_folder(path)
    with locked(path, make=UNWRITABLE_ADVICE, wait=DAY):
        store = IndexWriter(path, temporary_name(path / "columns"))
        store.folder.mkdir()
        mark_deletable(store.folder)  # so that a later build deletes it if this process is killed
        try:
            yield store
        finally:
            for file in store.open_arrays.values():
                with suppress(OSError):  # a full disk was reported already
                    file.close()
            with suppress(OSError):  # after `finish`, the folder has been renamed
                delete_folder(store.folder)


def check_own_folder(path: Path) -> Path:
    """Return `path` if an index may be written there: it is new, an empty folder or an index.

    Hidden files in the folder are ignored, and the files that a killed build has left.

    Raises:
        FileExistsError: it is a file, or a folder with other files.
    """
    if path.exists() and not path.is_dir():
        problem, example = "it is a file", path.with_suffix(".index")
    elif not path.exists() or is_index(path):
        check_replaceable(path / MANIFEST, *_REGULAR)
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

    A build writes to this folder its lock file and the manifest, and to the folders in it:

    - the arrays that the manifest lists;
    - parts, which are files with the arrays of one scanned shard, and their lock file;
    - files that the folder's marker file (`MARK`) lists, since they may be deleted.
    """
    own_files = {LOCK, MANIFEST} if is_index(path) else {LOCK}
    manifest = _old_manifest(path)
    if manifest is not None:
        own_files |= set(array_files(manifest))  # such as "columns-…/field-0.npy"
    foreign = set[str]()
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            listed = deletable_files(child)  # None if the folder has no marker file
            own_names = {LOCK} if listed is None else {LOCK, MARK, *listed}
            files = [file for file in child.iterdir() if not is_part(file)]
            foreign |= {f"{child.name}/{file.name}" for file in files if file.name not in own_names}
        else:
            foreign.add(child.name)
    return sorted(foreign - own_files)


def is_part(path: Path) -> bool:
    """Return whether a file is a part, which is an intermediate file of a build.

    A part is a zip file with the arrays of one scanned shard. Its name is a digest in hex and
    ".part". Its first bytes are `PART_MAGIC`, with which every zip file begins. If the process that
    wrote it was killed, the name is a hidden name, and the file may end within the magic bytes or
    be empty.
    """
    if not _PART_NAME.fullmatch(path.name):
        return False
    with suppress(LoaderError, FileNotFoundError), open_file(path) as file:
        first_bytes = file.read(len(PART_MAGIC))
        return PART_MAGIC.startswith(first_bytes)
    return False


def _publish_arrays(temporary: Path, final: Path) -> Path:
    """Move the new arrays to `final`, and return the folder in which the manifest is then.

    If `final` exists, with the same arrays, the manifest stays in `temporary`.
    """
    try:
        publish_folder(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        for file in temporary.glob("*.npy"):  # replaces equal files, or damaged ones
            check_replaceable(final / file.name, *_REGULAR)
            os.replace(file, final / file.name)
        return temporary
    return final
