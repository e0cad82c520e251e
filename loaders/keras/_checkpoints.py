"""The checkpoints of a run: folders, written atomically; all but the last two are deleted."""

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
from twinfeed.samplers.validate import a_type

VERSION = 3

_NUM_CHECKPOINTS = 2
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
"""The keys of a checkpoint's state, by the type of their values."""
_UNREADABLE = OSError, EOFError, KeyError, TypeError, RuntimeError, UnicodeDecodeError


class Checkpoint(NamedTuple):
    """A checkpoint: its folder, and the values of its state.json.

    It is `final` if the model is as `fit` left it, after the callbacks' `on_train_end`.
    """

    folder: Path
    state: dict[str, Any]

    @property
    def final(self) -> bool:
        return bool(self.state["final"])

    @property
    def weights(self) -> Path:
        return self.folder / "model.weights.h5"


class Checkpoints:
    """The checkpoints in a folder.

    Each checkpoint is a folder: weights, arrays, a state in JSON, and their checksums. It is
    written under a hidden name, and renamed when all its bytes are on the disk. A folder without
    the marker file of this library is not a checkpoint, whatever its name: it is never read or
    deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def last(self) -> Checkpoint | None:
        """Read and return the last checkpoint, or None if there is none."""
        folders = self._folders()
        return _read(folders[-1]) if folders else None

    def before_train_end(self, final: Checkpoint) -> Checkpoint | None:
        """Return the checkpoint with the model as it was before `on_train_end` of the callbacks.

        At the end of a run, `fit` writes a checkpoint after the last batch, and a final one after
        `on_train_end` of the callbacks, which may have changed the model: it may then have averaged
        weights, for example. A run with more epochs trains on from the first of the two.

        Returns None if the checkpoint before the final one has another position: then no checkpoint
        was written after the last batch, or it was deleted.
        """
        number = _number_of(final.folder)
        older = [folder for folder in self._folders() if _number_of(folder) < number]
        previous = _read(older[-1]) if older else None
        if previous is None or previous.state["loader"] != final.state["loader"]:
            return None
        return previous

    def write(self, state: dict[str, Any], save_weights: Callable[[Path], object]) -> Checkpoint:
        """Write a checkpoint atomically, delete all but the last two, and return the new one.

        `save_weights(path)` writes the weights of the model. The returned checkpoint has no arrays.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(map(_number_of, self._named_folders()), default=0) + 1
        epoch, step = state["loader"]["epoch"], state["loader"]["step"]
        name = f"{number:06}-epoch{epoch}-step{step}{'-end' if state['final'] else ''}"
        checkpoint = Checkpoint(self.folder / name, state)
        work = temporary_name(checkpoint.folder)
        try:
            work.mkdir()
            mark_deletable(work)  # so that a later run deletes it if this process is killed
            save_weights(work / checkpoint.weights.name)
            _write(work, state)
            (work / _CHECKSUMS).write_text(json.dumps(checksums(work)))
            for file in work.iterdir():
                fsync_path(file)
            fsync_path(work)
            work.rename(checkpoint.folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        fsync_path(self.folder)
        self._delete_old()
        return Checkpoint(checkpoint.folder, {"final": state["final"]})  # the arrays take memory

    def _folders(self) -> list[Path]:
        """Return the folders of the checkpoints, from the oldest to the newest."""
        return sorted(filter(is_deletable, self._named_folders()), key=_number_of)

    def _named_folders(self) -> list[Path]:
        """Return the folders with the name of a checkpoint, such as 000001-epoch0-step100."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return [folder for folder in entries if _NAME.fullmatch(folder.name)]

    def _delete_old(self) -> None:
        """Delete all but the last two checkpoints, and the hidden folders of killed processes."""
        for old in self._folders()[:-_NUM_CHECKPOINTS]:
            old.rename(temporary_name(old))  # a half-deleted folder must not look like a checkpoint
        for hidden in filter(is_deletable, self.folder.glob(".*-epoch*-step*-*")):
            delete_folder(hidden)


def _number_of(folder: Path) -> int:
    """Return the number of a checkpoint: 7 for a folder named 000007-epoch1-step0."""
    return int(folder.name.partition("-")[0])


def _write(folder: Path, state: dict[str, Any]) -> None:
    """Write the arrays of a state to arrays.npz in a folder, and all else to state.json.

    The state {"rates": [r, s]} with arrays r and s becomes the JSON
    {"rates": [{"twinfeed.array": 0}, {"twinfeed.array": 1}]} and the arrays "0" and "1".
    """
    arrays: list[Array] = []
    # `to_json` appends each array that it finds in the state to `arrays`: [r, s].
    (folder / "state.json").write_bytes(json.dumps(to_json(state, arrays)).encode())
    named: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
    with (folder / "arrays.npz").open("xb") as file:
        np.savez(file, **named)


def _read(folder: Path) -> Checkpoint:
    """Read a checkpoint, without its weights.

    Raises:
        OSError: the checkpoint is damaged.
        ValueError: another version of twinfeed wrote the checkpoint.
    """
    with readable(folder):
        text = read_file(folder / "state.json", LIMITS.manifest_bytes)
        state = json.loads(text)
        if not isinstance(state, dict):
            raise TypeError("its state.json does not hold a dict")
        if state["version"] != VERSION:
            raise ValueError(
                f"{folder}: this checkpoint is of version {state['version']}, and this twinfeed "
                f"reads version {VERSION}: start a new run with restart=True"
            )
        if checksums(folder) != json.loads(read_file(folder / _CHECKSUMS, LIMITS.manifest_bytes)):
            raise OSError("the checksums of its files are wrong")
        _check_types(state)
        with open_file(folder / "arrays.npz") as file:
            _check_arrays(file)
            with np.load(file, allow_pickle=False) as arrays:
                insert_array = partial(_insert_array, arrays=arrays)
                return Checkpoint(folder, json.loads(text, object_hook=insert_array))


def _insert_array(value: dict[str, Any], *, arrays: Mapping[str, Array]) -> Any:
    """Replace a dict {"twinfeed.array": n} of a JSON file by array n; return other dicts as is."""
    return arrays[str(value[_ARRAY])] if value.keys() == {_ARRAY} else value


def _check_types(state: dict[str, Any]) -> None:
    """Raise TypeError if a value of a state that was read from a file has an unexpected type.

    `state["weights"]` must have [path, shape] for each weight, such as ["dense/kernel", [5, 7]].
    """
    for expected, keys in _TYPES.items():
        for key in keys:
            if not isinstance(state[key], expected):
                raise TypeError(f"{key!r} of its state is of type {type(state[key]).__name__}")
    if any(list(map(type, weight)) != [str, list] for weight in state["weights"]):
        raise TypeError("'weights' of its state must have a path and a shape for each weight")


def checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32C of each file of a checkpoint, in a dict by file name."""
    checksum_by_name = dict.fromkeys(_FILES, 0)
    for name in _FILES:
        with open_file(folder / name) as file:
            while data := file.read(1 << 20):  # 1 MiB at a time
                checksum_by_name[name] = crc32c(data, checksum_by_name[name])
    return checksum_by_name


def _check_arrays(file: Any) -> None:
    """Raise OSError if the arrays of an .npz file would take more memory than the file has bytes.

    A damaged file could claim terabytes, like a decompression bomb, and loading it would exhaust
    the memory. So only the header of each array is read here. `_write` never compresses arrays, so
    a compressed array is refused too: its size on the disk does not bound its size in memory.
    """
    with zipfile.ZipFile(file) as members:  # an .npz file is a zip with a member for each array
        for member in members.infolist():
            with members.open(member) as array:
                np.lib.format.read_magic(array)
                shape, _, dtype = np.lib.format.read_array_header_1_0(array)
            is_compressed = member.compress_type != zipfile.ZIP_STORED
            if is_compressed or math.prod(shape) * dtype.itemsize > member.file_size:
                raise OSError("its arrays claim more bytes than the file has")
    file.seek(0)


def check_weights(path: Path) -> None:
    """Raise OSError if the weights of an HDF5 file would take more memory than the file has bytes.

    A damaged file could claim terabytes, like a decompression bomb, and loading it would exhaust
    the memory. So the sizes are read first, without the weights. The file is in the folder of a
    checkpoint, which `readable` names if the file cannot be read at all.
    """
    sizes: list[int] = []  # the bytes of each array of weights

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
    """Raise OSError in place of the many errors that reading a damaged checkpoint may raise."""
    try:
        yield
    except (*_UNREADABLE, json.JSONDecodeError, zipfile.BadZipFile) as error:
        raise OSError(
            f"{folder}: this checkpoint cannot be read: {error}: delete the folder; if there is a "
            f"previous checkpoint, the next run restores that one"
        ) from error


def to_json(value: Any, arrays: list[Array]) -> Any:
    """Return a value that JSON can hold: each array becomes {"twinfeed.array": its index}.

    The arrays are appended to the list `arrays`.

    Raises:
        TypeError: a value cannot be saved.
    """
    if isinstance(value, np.generic):
        return to_json(value.item(), arrays)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects cannot be saved")
        # A .npy file cannot hold bfloat16 and other types that NumPy lacks (kind "V" is for them).
        # float32 has all their values.
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
    raise TypeError(f"{a_type(value)} cannot be saved")
