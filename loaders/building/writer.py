"""Write an index: a folder of `.npy` arrays and a JSON manifest, replaced atomically.

The arrays are in a folder that is named after their content, and the manifest names the folder.
`os.replace` of the manifest is the commit point: a reader sees the whole old state or the whole new
state. The bytes contain no time, user or path.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index.manifest import (
    ARRAYS_FOLDER,
    FORMAT,
    MANIFEST,
    VERSION,
    array_files,
    file_digest,
    is_index,
    json_digest,
    read_manifest,
)
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import (
    check_replaceable,
    new_file,
    publish_folder,
)

Json = Mapping[str, Any]  # an object of JSON
_BUILT = re.compile(rf"\..*|{ARRAYS_FOLDER.pattern}", re.DOTALL)
_BUFFER = 1 << 17  # bytes
_REGULAR = "a regular file", bool  # a build replaces these names in an index, but no links
UNWRITABLE_ADVICE = (
    "the index cannot be written here; write it elsewhere (twinfeed index --out) and give root= "
    "the folder that holds the shards"
)


class ArrayFile:
    """Write one `.npy` file in blocks, or in a map of it."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, shape: Sequence[int], /) -> None:
        self._out = path.open("xb", buffering=_BUFFER)
        self.path = path
        self.digest, self.is_mapped = hashlib.sha256(), False
        self.bytes = 0
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self._descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": self._descr, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self, header)

    def write(self, data: bytes | memoryview, /) -> None:
        """Write bytes, and add them to the digest. numpy calls this for the header."""
        self._out.write(data)
        self.digest.update(data)
        self.bytes += len(data)

    def add(self, rows: Array, /) -> None:
        """Append rows, converted to the dtype of the file."""
        rows = np.ascontiguousarray(rows, self.dtype)  # ndarray.tofile would hide a full disk
        self.write(rows.reshape(-1).view(np.uint8).data)

    def mapped(self) -> np.memmap[Any, Any]:
        """Return the array of a file with all its rows, to be changed in memory."""
        self._out.flush()
        self.is_mapped = True
        return np.lib.format.open_memmap(self.path, mode="r+")

    def close(self) -> None:
        """Close the file."""
        self._out.close()

    def finish(self) -> dict[str, Any]:
        """Flush and close the file, and return its description for the manifest of the index."""
        self._out.flush()
        os.fsync(self._out.fileno())
        self.close()
        description = {"dtype": self._descr, "shape": list(self.shape), "bytes": self.bytes}
        sha256 = file_digest(self.path) if self.is_mapped else self.digest.hexdigest()
        return description | {"sha256": sha256}


class IndexWriter:
    """Write the arrays of an index to `folder`, which `finish` publishes at `path`."""

    def __init__(self, path: Path, folder: Path, /) -> None:
        self.path = path
        self.folder = folder
        self.open_arrays: dict[str, ArrayFile] = {}
        # by array: its description for the manifest, such as its shape and its digest
        self._finished: dict[str, Any] = {}

    def new(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], /) -> ArrayFile:
        """Create the file of an array, to be written in blocks."""
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

        The new arrays get a folder of their own. Then the manifest is replaced: from now on,
        readers open the new arrays. At last the arrays that the old manifest names are deleted. A
        kill leaves the old index or the new one, and perhaps a folder that nobody reads.
        """
        # `arrays` has a description of each array: its shape, dtype and SHA-256.
        arrays = self._finished | {name: file.finish() for name, file in self.open_arrays.items()}
        manifest = _manifest(content, options, arrays)
        text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
        old_files = _indexed_files(self.path)
        _publish_arrays(self.folder, self.path / manifest["folder"])
        with new_file(self.path / MANIFEST, self.folder.with_name(MANIFEST)) as file:
            file.write(text.encode())
        for name in sorted(old_files - {*array_files(manifest)}):  # such as "columns-…/field-0.npy"
            folder = (self.path / name).parent
            if not folder.is_symlink():
                (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):  # there are other files
                folder.rmdir()


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


def _indexed_files(path: Path) -> set[str]:
    """Return the array files of the index at `path`, relative to it; none without an index."""
    with suppress(LoaderError, OSError):
        return {*array_files(read_manifest(path))}
    return set()


@contextmanager
def index_writer(path: Path, work: Path) -> Iterator[IndexWriter]:
    """Yield a writer of the index at `path`, which writes to the folder `work` until it is whole.

    `work` is a temporary folder in the index.
    """
    store = IndexWriter(path, work / "arrays")
    store.folder.mkdir()
    try:
        yield store
    finally:
        for file in store.open_arrays.values():
            with suppress(OSError):  # a full disk was reported already
                file.close()


def check_own_folder(path: Path) -> Path:
    """Return `path` if an index may be written there: it is new, an index, or holds no other files.

    Hidden files, and what killed builds have left, do not count.

    Raises:
        FileExistsError: it is a file, or a folder with other files.
    """
    if path.exists() and not path.is_dir():
        problem, example = "it is a file", path.with_suffix(".index")
    else:
        names = [file.name for file in path.iterdir()] if path.exists() else []
        foreign = [name for name in sorted(names) if not _BUILT.fullmatch(name)]
        if not foreign or is_index(path):
            check_replaceable(path / MANIFEST, *_REGULAR)
            return path
        problem, example = f"it holds other files ({', '.join(foreign[:5])})", path / "train.index"
    raise FileExistsError(
        errno.EEXIST, f"{problem}; an index needs a folder of its own, such as {example}", str(path)
    )


def _publish_arrays(temporary: Path, final: Path) -> None:
    """Move the new arrays to `final`; if it has the same arrays already, replace each of them."""
    try:
        publish_folder(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        for file in temporary.iterdir():  # replaces equal files, or damaged ones
            check_replaceable(final / file.name, *_REGULAR)
            os.replace(file, final / file.name)
