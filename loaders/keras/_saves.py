"""The saves of a run: folders that are written atomically; all but the last two are deleted."""

from __future__ import annotations

import json
import math
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import fsync_path, temporary_name
from twinfeed.loaders.support.checksum import crc32c
from twinfeed.loaders.support.deletable import delete_folder, is_deletable, mark_deletable
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import open_file, read_file

VERSION = 3

_NUM_SAVES = 2
_NAME = re.compile(r"(\d+)-epoch\d+-step\d+(-end)?")
_ARRAY = "twinfeed.array"
_FILES = "state.json", "arrays.npz", "model.weights.h5"
_CHECKSUMS = "checksums.json"
_TYPES = {
    bool: ("final",),
    str: ("optimizer",),
    dict: ("loader", "callbacks"),
    list: ("weights", "random", "metrics", "rates"),
}
"""The values of a state, by type."""
_UNREADABLE = OSError, EOFError, KeyError, TypeError, RuntimeError, UnicodeDecodeError


class Save(NamedTuple):
    """A save. `final`: the model is as `fit` left it, after the callbacks' `on_train_end`."""

    folder: Path
    state: dict[str, Any]

    @property
    def final(self) -> bool:
        return bool(self.state["final"])

    @property
    def weights(self) -> Path:
        return self.folder / "model.weights.h5"


class Saves:
    """The saves in a folder.

    Each save is a folder: weights, arrays, a state in JSON, and their checksums. It is written
    under a hidden name, and renamed when all its bytes are on the disk. A folder that is not marked
    as deletable is no save, whatever its name: it is never read or deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def last(self) -> Save | None:
        """Return the last save, or None if there is no save."""
        folders = self._folders()
        return _read(folders[-1]) if folders else None

    def previous(self, save: Save) -> Save | None:
        """Return the save before `save`, or None unless both have the same position."""
        older = [folder for folder in self._folders() if _number(folder) < _number(save.folder)]
        previous = _read(older[-1]) if older else None
        if previous is None or previous.state["loader"] != save.state["loader"]:
            return None
        return previous

    def write(self, state: dict[str, Any], save_weights: Callable[[Path], object]) -> Save:
        """Write a save, delete all but the last two, and return the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(map(_number, self._named_folders()), default=0) + 1
        epoch, step = state["loader"]["epoch"], state["loader"]["step"]
        name = f"{number:06}-epoch{epoch}-step{step}{'-end' if state['final'] else ''}"
        save = Save(self.folder / name, state)
        work = temporary_name(save.folder)
        try:
            work.mkdir()
            mark_deletable(work)
            save_weights(work / save.weights.name)
            _write(work, state)
            (work / _CHECKSUMS).write_text(json.dumps(checksums(work)))
            for file in work.iterdir():
                fsync_path(file)
            fsync_path(work)
            work.rename(save.folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        fsync_path(self.folder)
        self._delete_old()
        return save._replace(state={"final": state["final"]})  # the arrays would stay in memory

    def _folders(self) -> list[Path]:
        """Return the folders of the saves, the last save at the end."""
        return sorted(filter(is_deletable, self._named_folders()), key=_number)

    def _named_folders(self) -> list[Path]:
        """Return the folders with the name of a save."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return [folder for folder in entries if _NAME.fullmatch(folder.name)]

    def _delete_old(self) -> None:
        """Delete old saves, and the hidden folders of killed processes."""
        for old in self._folders()[:-_NUM_SAVES]:
            old.rename(temporary_name(old))  # so that a half-deleted folder is not taken for a save
        for hidden in filter(is_deletable, self.folder.glob(".*-epoch*-step*-*")):
            delete_folder(hidden)


def _number(folder: Path) -> int:
    """Return the number of a save, from the name of its folder."""
    return int(folder.name.partition("-")[0])


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Write a state to a folder: its arrays to one file, and all else to JSON."""
    arrays: list[Array] = []
    (folder / "state.json").write_bytes(json.dumps(to_json(state, arrays)).encode())
    named: dict[str, Any] = {str(n): array for n, array in enumerate(arrays)}
    with (folder / "arrays.npz").open("xb") as file:
        np.savez(file, **named)


def _read(folder: Path) -> Save:
    """Read the state of a save; raise OSError if it is damaged, ValueError for another version."""
    with readable(folder):
        text = read_file(folder / "state.json", LIMITS.manifest_bytes)
        state = json.loads(text)
        if not isinstance(state, dict):
            raise TypeError("its state is no dict")
        if state["version"] != VERSION:
            raise ValueError(
                f"{folder}: this save is of version {state['version']}, and this twinfeed reads "
                f"version {VERSION}: start a new run with restart=True"
            )
        if checksums(folder) != json.loads(read_file(folder / _CHECKSUMS, LIMITS.manifest_bytes)):
            raise OSError("its bytes are not those that were saved")
        _check_types(state)
        with open_file(folder / "arrays.npz") as file:
            _check_arrays(file)
            with np.load(file, allow_pickle=False) as arrays:
                insert_array = partial(_insert_array, arrays=arrays)
                return Save(folder, json.loads(text, object_hook=insert_array))


def _insert_array(value: dict[str, Any], *, arrays: Mapping[str, Array]) -> Any:
    """Return the array that a dict of `to_json` stands for; any other dict as it is."""
    return arrays[str(value[_ARRAY])] if value.keys() == {_ARRAY} else value


def _check_types(state: dict[str, Any]) -> None:
    """Raise TypeError if a value of a state has another type than in a save."""
    for kind, names in _TYPES.items():
        for name in names:
            if not isinstance(state[name], kind):
                raise TypeError(f"its {name} are of type {type(state[name]).__name__}")
    if any(list(map(type, weight)) != [str, list] for weight in state["weights"]):
        raise TypeError("its weights have no shapes")


def checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32C of each file of a save."""
    checksum_of = {}
    for name in _FILES:
        checksum_of[name] = 0
        with open_file(folder / name) as file:
            while chunk := file.read(1 << 20):
                checksum_of[name] = crc32c(chunk, checksum_of[name])
    return checksum_of


def _check_arrays(file: Any) -> None:
    """Raise OSError if the arrays in a file would take more memory than the file has bytes."""
    with zipfile.ZipFile(file) as members:
        for member in members.infolist():
            with members.open(member) as array:
                np.lib.format.read_magic(array)
                shape, _, dtype = np.lib.format.read_array_header_1_0(array)
            is_compressed = member.compress_type != zipfile.ZIP_STORED
            if is_compressed or math.prod(shape) * dtype.itemsize > member.file_size:
                raise OSError("its arrays claim more bytes than the file has")
    file.seek(0)


def check_weights(path: Path) -> None:
    """Raise OSError if the weights in a file would take more memory than the file has bytes."""
    sizes: list[int] = []

    def add_size(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            sizes.append(item.nbytes)

    with readable(path.parent):
        with h5py.File(path) as file:
            file.visititems(add_size)
        if sum(sizes) > path.stat().st_size:
            raise OSError("its weights claim more bytes than the file has")


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn the errors that a damaged save causes in the `with` block into an OSError."""
    try:
        yield
    except (*_UNREADABLE, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise OSError(
            f"{folder}: this save cannot be read: {error}: delete the folder, and the save before "
            f"it is restored, if there is one"
        ) from error


def to_json(value: Any, arrays: list[Array]) -> Any:
    """Return a value as JSON can hold it, with its arrays appended to `arrays`.

    Each array is replaced by a dict with its index in `arrays`.

    Raises:
        TypeError: a value cannot be saved.
    """
    if isinstance(value, np.generic):
        return to_json(value.item(), arrays)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects cannot be saved")
        # NumPy's files lack the small floats of other libraries; float32 has all their values.
        arrays.append(value.astype(np.float32) if value.dtype.kind == "V" else value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"the keys of a dict must be str, got {list(value)}")
        return {key: to_json(item, arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, arrays) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be saved")
