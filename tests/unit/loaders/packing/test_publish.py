"""Packed files come into place whole, replace what the packer made before, and nothing else."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs.killed_pack import samples
from support import PROGRAMS
from support.shards import numbered, tree

from twinfeed.loaders import build_index, open_index, pack, verify
from twinfeed.loaders.support import temporary
from twinfeed.loaders.support.temporary import MARK

SPLIT = {"train": 8, "eval": 4}


def state(out: Path, name: str) -> list[list[int]] | None:
    """The content of a split, or None if it has no index."""
    if not (out / f"{name}.index").exists():
        return None
    index = open_index(out / f"{name}.index")
    assert verify(index.path).ok
    return [index.columns[column].tolist() for column in ("state", "number")]


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_pack_killed_at_any_change_leaves_all_or_no_index(tmp_path: Path, step: int) -> None:
    """Of each split; and of what was left, the next pack needs only the shards removed."""
    whole = tmp_path / "whole"
    pack(samples(2), whole, split=SPLIT, seed=2, shards=2)
    for name in ("empty", "killed"):
        (tmp_path / name).mkdir()
    script = str(PROGRAMS / "killed_pack.py")
    command = [sys.executable, script, str(tmp_path / "empty"), str(tmp_path / "killed"), "pack"]
    subprocess.run([*command, "2", str(step)], check=True)
    seen = set()
    for out in (tmp_path / "killed").iterdir():
        for name in SPLIT:
            now = state(out, name)
            assert now in (None, state(whole, name))
            seen.add(now is None)
        for left in out.glob("[!.]*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        pack(samples(2), out, split=SPLIT, seed=2, shards=2)
        assert tree(out) == tree(whole)
        for left in out.glob(".*"):  # its packer was killed before it was marked
            assert {path.name for path in left.iterdir()} <= {MARK}
    assert True in seen


def test_failed_or_interrupted_pack_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(error: BaseException) -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise error

    for error in (KeyboardInterrupt(), OSError("unplugged")):
        with pytest.raises(type(error)):
            pack(interrupted(error), tmp_path)
        assert not [*tmp_path.iterdir()]
    with pytest.raises(KeyboardInterrupt):
        pack(interrupted(KeyboardInterrupt()), tmp_path / "new" / "deeper")
    assert not (tmp_path / "new" / "deeper").exists()


@pytest.mark.parametrize(
    "name",
    [
        "data.index",
        "data.index/notes.md",
        "data-00000-of-00001.tar",
        "data-00002-of-00007.tfrecord",
    ],
)
def test_pack_replaces_nothing(tmp_path: Path, name: str) -> None:
    """Nor does it if another packer is first."""
    file = tmp_path / name

    def late() -> Iterator[dict[str, int]]:
        yield {"x": 1}
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"mine")

    for source in (late(), [{"x": 1}]):
        with pytest.raises(FileExistsError, match=r"holds files of these names \(1: data"):
            pack(source, tmp_path)
        assert tree(tmp_path) == {name: b"mine"}


def test_pack_keeps_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    for name in ("data.index", "data-00000-of-00001.tfrecord"):
        (tmp_path / name).symlink_to("nowhere")
        with pytest.raises(FileExistsError, match="holds files of these names"):
            pack([{"x": 1}], tmp_path)
        (tmp_path / name).unlink()


def test_shards_that_pack_has_not_named_are_kept(tmp_path: Path) -> None:
    """They may be the source: webdataset names its shards so."""
    (tmp_path / "data-00000.tar").write_bytes(b"mine")
    pack(numbered(0, 4), tmp_path, container="tar")
    assert (tmp_path / "data-00000.tar").read_bytes() == b"mine"


def test_only_own_folders_of_ended_processes_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a folder in use, nor one without a mark, nor what a link leads to."""
    monkeypatch.setattr(temporary.tempfile, "gettempdir", lambda: str(tmp_path))
    used = temporary.make_temporary()
    names = ("ended", "unmarked", "half-marked", "link")
    ended, _, half_marked, link = kept = [tmp_path / f".twinfeed-{name}" for name in names]
    elsewhere = tmp_path / "elsewhere"
    for folder in (*kept[:-1], elsewhere):
        folder.mkdir()
        (folder / "file").touch()
    for folder in (ended, elsewhere):
        shutil.copy(used / MARK, folder)
    (half_marked / MARK).write_bytes((used / MARK).read_bytes()[:10])
    link.symlink_to(elsewhere)
    another = temporary.make_temporary()
    assert {*tmp_path.iterdir()} == {used, *kept[1:], elsewhere, another}
    assert (link / "file").exists()
    for folder in (used, another):
        temporary.remove_temporary(folder)


def test_reader_that_locks_the_folder_does_not_block_pack(tmp_path: Path) -> None:
    seen: list[int] = []

    def source() -> Iterator[dict[str, int]]:
        (staging,) = tmp_path.glob(".twinfeed-*")
        seen.append(stat.S_IMODE(staging.stat().st_mode))
        yield {"x": 1}

    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        pack(source(), tmp_path)
    finally:
        os.close(fd)
    assert seen == [0o700]


@pytest.mark.parametrize("out", ["link", "link/deeper/x.index"])
@pytest.mark.parametrize(
    "writes",
    [
        lambda _, out: pack(samples(1), out),
        lambda shards, out: build_index(shards / "*.tfrecord", out, root=shards),
    ],
)
def test_fault_112_dangling_link_is_named_without_waiting(
    tmp_path: Path, writes: Callable[[Path, Path], object], out: str
) -> None:
    pack(samples(1), tmp_path / "shards")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"leads nowhere: mount its disk.*/link'$"):
        writes(tmp_path / "shards", tmp_path / out)
    assert not (tmp_path / "nowhere").exists()
