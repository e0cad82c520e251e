"""The checkpoints of a run: files, written atomically; all but the last two are deleted.

Each is a file of weights, as Keras writes it (HDF5), with two additions: a group that has the state
of the run, and, after the end of the HDF5, a mark and the checksum of all bytes before the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import fsync_path
from twinfeed.loaders.support.checksum import crc32c

VERSION = 4

_NUM_CHECKPOINTS = 2
_NAME = re.compile(r"\d+-epoch\d+-step\d+\.weights\.h5")
_UNFINISHED = ".unfinished.weights.h5"  # Keras demands the suffix
_GROUP = "twinfeed.state"  # not the path of any weight: names of attributes have no dot
_ARRAY = "twinfeed.array"
_MARK = b"twinfeed"
_END_BYTES = len(_MARK) + 4  # the mark and the checksum


class Checkpoint(NamedTuple):
    """A checkpoint: its file, and the state of the run."""

    file: Path
    state: dict[str, Any]


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """Read and return the last checkpoint in a folder, or None if there is none.

    Raises:
        OSError: the checkpoint is damaged.
        ValueError: another version of twinfeed wrote the checkpoint.
    """
    files = _files(folder)
    return _read(files[-1]) if files else None


def write(folder: Path, state: dict[str, Any], save_weights: Callable[[Path], object]) -> Path:
    """Write a checkpoint, delete all but the last two, and return the file of the new one.

    It is written under a hidden name, and renamed when all its bytes are on the disk. A file
    without the mark of this library is never deleted, whatever its name.

    Args:
        folder: the folder of the checkpoints.
        state: the state of the run.
        save_weights: a function that writes the weights of the model to a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = max(map(_number_of, _files(folder)), default=0) + 1
    name = "{:06}-epoch{epoch}-step{step}.weights.h5".format(number, **state["loader"])
    unfinished, file = folder / _UNFINISHED, folder / name
    unfinished.unlink(missing_ok=True)  # of a killed process; or a link, which is not followed
    try:
        save_weights(unfinished)
        _add_state(unfinished, state)
        fsync_path(unfinished)
        unfinished.rename(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    fsync_path(folder)
    for old in filter(_is_own, _files(folder)[:-_NUM_CHECKPOINTS]):
        old.unlink()
    return file


def _files(folder: Path) -> list[Path]:
    """Return the files of the checkpoints in a folder, from the oldest to the newest."""
    entries = folder.iterdir() if folder.is_dir() else ()
    files = [file for file in entries if _NAME.fullmatch(file.name) and file.is_file()]
    return sorted(files, key=_number_of)


def _number_of(file: Path) -> int:
    """Return the number of a checkpoint: 7 for a file named 000007-epoch1-step0.weights.h5."""
    return int(file.name.partition("-")[0])


def _add_state(file: Path, state: dict[str, Any]) -> None:
    """Add the state of a run to a file of weights, then the mark and the checksum of all bytes.

    The state {"rates": [r, s]} with arrays r and s becomes the JSON
    {"rates": [{"twinfeed.array": 0}, {"twinfeed.array": 1}]} and the arrays "0" and "1".
    """
    arrays: list[Array] = []
    saved = {key: _to_json(value, arrays, key) for key, value in state.items()}
    with h5py.File(file, "a") as weights:
        group = weights.create_group(_GROUP)
        group["state"] = json.dumps({"version": VERSION, **saved})
        for number, array in enumerate(arrays):
            group[str(number)] = array
    end = _MARK + _checksum(file, file.stat().st_size)
    with file.open("ab") as out:
        out.write(end)


def _read(file: Path) -> Checkpoint:
    """Read a checkpoint, without its weights."""
    if _end(file) != _MARK + _checksum(file, file.stat().st_size - _END_BYTES):
        raise OSError(
            f"{file}: this checkpoint cannot be read, since its checksum is wrong: delete the "
            f"file; if there is a previous checkpoint, the next run restores that one"
        )
    with h5py.File(file) as weights:
        group = weights[_GROUP]

        def with_array(value: dict[str, Any]) -> Any:
            return np.asarray(group[str(value[_ARRAY])]) if value.keys() == {_ARRAY} else value

        state = json.loads(group["state"].asstr()[()], object_hook=with_array)
    if state["version"] != VERSION:
        raise ValueError(
            f"{file}: this checkpoint is of version {state['version']}, and this twinfeed reads "
            f"version {VERSION}: start a new run with restart=True"
        )
    return Checkpoint(file, state)


def _is_own(file: Path) -> bool:
    """Return whether this library has written a file, and may delete it."""
    return not file.is_symlink() and _end(file).startswith(_MARK)


def _end(file: Path) -> bytes:
    """Return the last bytes of a file, which are the mark and the checksum in a checkpoint."""
    with file.open("rb") as data:
        data.seek(max(0, file.stat().st_size - _END_BYTES))
        return data.read()


def _checksum(file: Path, size: int) -> bytes:
    """Return the CRC-32C of the first `size` bytes of a file, as bytes."""
    checksum = 0
    with file.open("rb") as data:
        while part := data.read(max(0, min(size - data.tell(), 1 << 20))):  # 1 MiB at a time
            checksum = crc32c(part, checksum)
    return checksum.to_bytes(4, "little")


def _to_json(value: Any, arrays: list[Array], where: str) -> Any:
    """Return a value that JSON can hold: each array becomes {"twinfeed.array": its index}.

    The arrays are appended to the list `arrays`. `where` says in the error which value it is.

    Raises:
        TypeError: a value cannot be saved.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcV" and value.dtype.names is None:
        # HDF5 has no bfloat16 and other types that NumPy lacks (kind "V" is for them). float32 has
        # all their values.
        arrays.append(value.astype(np.float32) if value.dtype.kind == "V" else value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _to_json(item, arrays, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, arrays, f"{where}[{n}]") for n, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{where} cannot be saved, got {value!r:.60}: get_state must return numbers, strings, "
        f"arrays of numbers, and lists and dicts of them, with keys that are str"
    )
