"""Pickles, commands and paths in data: none is run or followed."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.damage import with_array
from support.inside import (
    StringColumn,
)
from support.programs import run_code
from support.shards import (
    write_tar,
)

from twinfeed.loaders import (
    Index,
    IndexFormatError,
    Reader,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)


def test_fault_38_pickled_arrays_are_not_loaded(index: Index, tmp_path: Path) -> None:
    """Neither in the index nor in a part, even with digests that fit."""
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    bomb = np.array([Bomb()], dtype=object)
    with_array(index.path, "column-0", bomb)
    with pytest.raises(IndexFormatError, match="cannot be read"):
        open_index(index.path)
    assert not marker.exists()


def test_fault_61_pickled_fields_are_only_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    bomb = pickle.dumps(Bomb())
    write_tar(tmp_path / "a.tar", [("k", {"pkl": bomb, "pth": bomb, "npy": bomb})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index")
    with Reader(index) as reader:
        assert reader.read([0])["pkl"] == [bomb]
    again = pack(index, tmp_path / "out", container="tar")["data"]
    assert verify(again).ok
    show = (
        "import sys; from twinfeed.loaders.command_line import main; main(['cat', *sys.argv[1:]])"
    )
    assert run_code(show, index.path, "0").returncode == 0
    assert not marker.exists()


def test_fault_62_pipe_commands_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for run in (
        lambda: build_index(f"pipe:touch {marker}", tmp_path / "x.index"),
        lambda: build_index([f"PIPE:touch {marker}", "{a,b}.tar"], tmp_path / "x.index"),
        lambda: verify([f"pipe:touch {marker}"], root=tmp_path),
    ):
        with pytest.raises(UnsafeContentError, match=r"(?i)pipe:"):
            run()
    assert not marker.exists()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../secret.tfrecord", "a/../../secret", "file:///etc/passwd", "pipe:id"]
)
def test_fault_65_paths_that_leave_root_are_refused(
    index: Index, tmp_path: Path, path: str
) -> None:
    """A manifest from elsewhere cannot make the reader open what is not below its root."""
    (tmp_path.parent / "secret.tfrecord").touch()
    paths = StringColumn.of([path, *index.shard_paths.tolist()[1:]])
    for name, array in paths.arrays("shardpaths").items():
        with_array(index.path, name, array)
    with pytest.raises(UnsafeContentError, match="unsafe path"):
        open_index(index.path)
