"""The checkpoints of a run: files, written atomically; all but the last two are deleted.

Each is a file of Keras's weights (HDF5), with a group for the state, and a checksum after its end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.atomic import new_file
from twinfeed.loaders.support.checksum import crc32c

VERSION = 5

ADVISE_NEW_RUN = "start a new run in another folder"

_NUM_CHECKPOINTS = 2
_NAME = re.compile(r"\d{6,}-epoch\d+-step\d+\.weights\.h5")
_UNFINISHED = ".unfinished.weights.h5"  # Keras demands the suffix
_GROUP = "twinfeed.state"  # not the path of any weight: names of attributes have no dot
_ARRAY = "twinfeed.array"
_CHECKSUM_BYTES = 4


class Checkpoint(NamedTuple):
    """A checkpoint: its file, and the state of the run."""

    file: Path
    state: dict[str, Any]


def last_checkpoint(folder: Path) -> Checkpoint | None:
    """Read and return the last checkpoint in a folder, or None if there is none."""
    files = _files(folder)
    return _read(files[-1]) if files else None


def write(folder: Path, state: dict[str, Any], save_weights: Callable[[Path], object]) -> Path:
    """Write a checkpoint, delete all but the last two, and return the file of the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _files(folder)
    number = _number_of(files[-1]) + 1 if files else 1
    file = folder / "{:06}-epoch{epoch}-step{step}.weights.h5".format(number, **state["loader"])
    unfinished = folder / _UNFINISHED
    unfinished.unlink(missing_ok=True)  # of a killed process; or a link, which is not followed
    with new_file(file, unfinished) as out:
        save_weights(unfinished)
        _add_state(unfinished, state)
        size = out.seek(0, os.SEEK_END)
        out.write(_checksum(unfinished, size))
    for old in files[: 1 - _NUM_CHECKPOINTS]:
        old.unlink()
    return file


def _files(folder: Path) -> list[Path]:
    """Return the files of the checkpoints in a folder, from the oldest to the newest."""
    files = [file for file in folder.glob("*.weights.h5") if _NAME.fullmatch(file.name)]
    return sorted(files, key=_number_of)


def _number_of(file: Path) -> int:
    """Return the number of a checkpoint: 7 for a file named 000007-epoch1-step0.weights.h5."""
    return int(file.name.partition("-")[0])


def _add_state(file: Path, state: dict[str, Any]) -> None:
    """Add the state of a run to a file of weights.

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


def _read(file: Path) -> Checkpoint:
    """Read a checkpoint, without its weights."""
    size = max(0, file.stat().st_size - _CHECKSUM_BYTES)
    with file.open("rb") as data:
        data.seek(size)
        is_whole = data.read() == _checksum(file, size)
    if not is_whole:
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
            f"version {VERSION}: {ADVISE_NEW_RUN}"
        )
    return Checkpoint(file, state)


def _checksum(file: Path, size: int) -> bytes:
    """Return the CRC-32C of the first `size` bytes of a file, as bytes."""
    checksum = 0
    with file.open("rb") as data:
        while part := data.read(max(0, min(size - data.tell(), 1 << 20))):  # 1 MiB at a time
            checksum = crc32c(part, checksum)
    return checksum.to_bytes(_CHECKSUM_BYTES, "little")


def _to_json(value: Any, arrays: list[Array], where: str) -> Any:
    """Return a value that JSON can hold, and append its arrays to `arrays`."""
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
