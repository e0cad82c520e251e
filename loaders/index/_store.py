"""A folder of `.npy` arrays and a JSON manifest, switched from old to new by one rename.

The arrays of one state lie in a folder that is named after their content. The manifest names the
folder. `os.replace` of the manifest is the switch: a reader sees the whole old state or the whole
new state. No time, user or place is in the bytes. So two processes that build the same index write
the same files, and the last writer changes nothing.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._atomic import beside, locked, replace_file, sync, writable
from twinfeed.loaders._checks import Array
from twinfeed.loaders.errors import IndexFormatError
from twinfeed.loaders.formats._sniff import FORMAT, MANIFEST, is_index
from twinfeed.loaders.formats.files import IMAGES
from twinfeed.loaders.limits import LIMITS

VERSION = 2
COLUMNS = re.compile(r"columns-[0-9a-f]{16}")
_PART = re.compile(r"\.?[0-9a-f]{32}\.part(-[0-9a-f]{16})?")
ARRAY_NAME = re.compile(r"[a-z]+(-[a-z0-9]+)*")
CHUNK = 1 << 24
_BUFFER = 1 << 17
DAY = 86400.0
"""The seconds that a build waits for another build of the same index."""
_ELSEWHERE = (
    "the index cannot be written here; write it elsewhere (twinfeed index --out) and give root= "
    "the folder that holds the shards"
)


class HashedFile:
    """Write a new file, and take the SHA-256 of its bytes as they pass."""

    def __init__(self, file: Path, /) -> None:
        self._out = file.open("xb", buffering=_BUFFER)
        self.file = file
        self.digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | memoryview, /) -> None:
        """Write bytes."""
        self._out.write(data)
        self.digest.update(data)
        self.bytes += len(data)

    def write_array(self, array: Array, /) -> None:
        """Write the bytes of an array; numpy's own writing hides a full disk."""
        self.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def close(self, *, durable: bool = False) -> None:
        """Write what is left, with `durable` to the disk. A second call is harmless."""
        if durable:
            self._out.flush()
            os.fsync(self._out.fileno())
        self._out.close()


class ArrayFile(HashedFile):
    """Write one array of an index piece by piece; `size` is the size of the finished file."""

    def __init__(self, file: Path, dtype: npt.DTypeLike, shape: Sequence[int], /) -> None:
        super().__init__(file)
        self.dtype, self.shape = np.dtype(dtype), tuple(shape)
        self._descr = np.lib.format.dtype_to_descr(self.dtype)
        header = {"descr": self._descr, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(self, header)
        self.size = self.bytes + self.dtype.itemsize * math.prod(shape)

    def add(self, piece: Array, /) -> None:
        """Write the next rows, as the type of the array."""
        self.write_array(piece.astype(self.dtype, copy=False))

    def entry(self) -> dict[str, Any]:
        """End the array, and return what the manifest tells of it."""
        self.close(durable=True)
        if self.bytes != self.size:
            raise IndexFormatError(
                "a part is missing or damaged: its shard has other records than it tells",
                path=self.file,
                expected=f"{self.size} bytes",
                found=f"{self.bytes} bytes",
                advice="build the parts again with build_parts",
            )
        told = {"dtype": self._descr, "shape": list(self.shape), "bytes": self.bytes}
        return told | {"sha256": self.digest.hexdigest()}


class Store:
    """Write the arrays of an index in a folder that nobody sees yet, and then switch to them."""

    def __init__(self, path: Path, folder: Path, /) -> None:
        self.path = path
        self.folder = folder
        self.open: dict[str, ArrayFile] = {}
        self._entries: dict[str, Any] = {}

    def new(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int], /) -> ArrayFile:
        """Begin an array."""
        self.open[name] = ArrayFile(self.folder / f"{name}.npy", dtype, shape)
        return self.open[name]

    def add(self, arrays: Mapping[str, Array], /) -> None:
        """Write arrays that are whole."""
        for name, array in arrays.items():
            self.new(name, array.dtype, array.shape).add(array)

    def finished(self, name: str, /) -> Array:
        """End an array, and return it mapped."""
        file = self.open.pop(name)
        self._entries[name] = file.entry()
        return np.asarray(np.lib.format.open_memmap(file.file, mode="r"))

    def finish(self, facts: Mapping[str, Any], options: Mapping[str, Any], /) -> None:
        """Switch the index to the arrays, `facts` and `options`.

        The manifest's `fingerprint` is taken over the facts and the arrays' bytes; `options` only
        say how the index was made.
        """
        entries = self._entries | {name: file.entry() for name, file in self.open.items()}
        manifest = {"format": FORMAT, "version": VERSION, **facts, "arrays": entries}
        manifest |= {"fingerprint": digest_of(manifest), "options": dict(options)}
        manifest["folder"] = f"columns-{digest_of(entries)[:16]}"
        _move_folder(self.folder, self.path / manifest["folder"])
        manifest["checksum"] = digest_of(manifest)
        text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
        replace_file(self.path / MANIFEST, text.encode())  # now the new state is the index
        for old in self.path.iterdir():
            if old.name != manifest["folder"] and _is_columns(old):
                shutil.rmtree(old)


@contextmanager
def new_store(path: Path) -> Iterator[Store]:
    """Give a store for the index at `path` to one process at a time; remove what is unfinished."""
    own_folder(path)
    with locked(path, make=make_folder, wait=DAY):
        store = Store(path, beside(path / "columns"))
        store.folder.mkdir()
        try:
            yield store
        finally:
            for file in store.open.values():
                with suppress(OSError):  # a full disk was reported already
                    file.close()
            shutil.rmtree(store.folder, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read and check the manifest under `path`."""
    file = path / MANIFEST
    rebuild = f"rebuild it with the options it had: twinfeed index SHARDS --out {path}"
    error = partial(IndexFormatError, path=path, advice=rebuild)
    try:
        size, most = file.stat().st_size, LIMITS.manifest_bytes
        if size > most:  # a sparse file could be larger than memory
            problem = "damaged index: its manifest is too long"
            raise error(problem, expected=f"at most {most} bytes", found=f"{size} bytes")
        text = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (path / "parts").is_dir() or any(path.glob(".columns-*")):
            raise error(
                "incomplete index: its build was interrupted, or ended in an error",
                advice="build it again: finished shards are kept, for the same arguments, unless "
                "labels come from a function",
            ) from None
        raise FileNotFoundError(errno.ENOENT, _no_index(path), str(path)) from None
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise error(f"incomplete index: {MANIFEST} is not JSON", found=wrong) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        told = f'"format": "{FORMAT}"'
        raise error(f"not an index: {MANIFEST} is of another kind", expected=told)
    version = manifest.get("version")
    if version != VERSION:
        raise error(
            f"index version {version}, this library reads version {VERSION}",
            advice="upgrade twinfeed, or rebuild the index with this version",
        )
    checksum = manifest.pop("checksum", None)
    found = digest_of(manifest)
    if checksum != found:
        problem = f"damaged index: the checksum of {MANIFEST} does not match"
        raise error(problem, expected=checksum, found=found)
    if not COLUMNS.fullmatch(str(manifest.get("folder"))):
        raise error("damaged index: bad folder name")
    return manifest


def _no_index(path: Path) -> str:
    """Say what is there in place of an index, and what to do."""
    around = [folder for folder in path.parents[:2] if path.exists() and is_index(folder)]
    if around:
        return f"a part of an index; open the whole index, the folder {around[0]}"
    if path.is_file():
        out = path.with_suffix(".index")
        return f"a file, not an index; index it: twinfeed index {path} --out {out}"
    held = sorted(each.parent.name for each in path.glob(f"[!.]*/{MANIFEST}"))
    if held:
        return f"no index here, but in it: {', '.join(held[:5])}; open one of those"
    if _holds_images(path):
        return f"no index here, but images; index them: twinfeed index {path} --out {path}.index"
    new = path / "train.index" if path.is_dir() and any(path.iterdir()) else path
    return f"no index here (no {MANIFEST}); build one: twinfeed index SHARDS --out {new}"


def _holds_images(path: Path) -> bool:
    """Tell whether a folder, or a folder directly in it, holds images."""
    found = itertools.chain(path.glob("*.*"), path.glob("[!.]*/*.*"))
    return any(each.suffix[1:].lower() in IMAGES for each in found)


def make_folder(path: Path) -> Path:
    """Make a folder to write in, or say where else to write."""
    with writable(path, _ELSEWHERE):
        path.mkdir(parents=True, exist_ok=True)
    return path


def own_folder(path: Path) -> Path:
    """Return `path` if an index may have it: it is new, holds nothing else, or is an index."""
    if path.is_file():
        problem, name = "a file", path.with_suffix(".index")
    else:
        held = sorted(each.name for each in path.iterdir()) if path.exists() else []
        others = [] if is_index(path) else [each for each in held if not _may_stay(path / each)]
        if not others or is_index(path):  # another process may have finished it meanwhile
            return path
        problem = f"it holds other files ({', '.join(others[:5])})"
        name = path / "train.index"
    raise FileExistsError(
        errno.EEXIST, f"{problem}; an index needs a folder of its own, such as {name}", str(path)
    )


def _may_stay(path: Path) -> bool:
    """Tell whether a path is hidden, or was left by an interrupted build of a new index."""
    if path.name == "parts" and path.is_dir() and not path.is_symlink():
        return all(each.name.startswith(".") or is_part(each) for each in path.iterdir())
    return path.name.startswith(".") or _is_columns(path)


def _is_columns(path: Path) -> bool:
    """Tell whether a path is a folder of arrays, whole or not, by its name and the names in it."""
    named = COLUMNS.fullmatch(path.name.removeprefix("."))
    if not named or path.is_symlink() or not path.is_dir():
        return False
    names = [each.name for each in path.iterdir()]
    return all(name.endswith(".npy") and ARRAY_NAME.fullmatch(name[:-4]) for name in names)


def is_part(path: Path) -> bool:
    """Tell whether a file is a part, or was to become a part when its process was killed."""
    return bool(_PART.fullmatch(path.name))


def digest_of(data: object) -> str:
    """Return the SHA-256 of `data` as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _move_folder(temporary: Path, final: Path) -> None:
    """Rename the folder into place. A folder that has the name must hold the same bytes."""
    sync(temporary)
    try:
        os.rename(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if any(file_digest(final / f.name) != file_digest(f) for f in temporary.iterdir()):
            raise IndexFormatError(
                "damaged index: a folder of this name holds other bytes",
                path=final,
                advice="delete the index folder and build it again",
            ) from None
