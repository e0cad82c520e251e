"""Packed files come into place whole, replace what the packer made before, and nothing else."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from programs.killed_pack import samples
from support import PROGRAMS
from support.damage import with_shard_names
from support.shards import numbered, tree

from twinfeed.loaders import DataCorruptionError, build_index, open_index, pack, verify
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
def test_pack_killed_at_any_change_leaves_old_new_or_no_index(tmp_path: Path, step: int) -> None:
    """Of each split, never shards of both, and whatever was left, the next pack replaces it."""
    whole = [tmp_path / "old", tmp_path / "new"]
    for number, shards, out in zip((1, 2), (3, 2), whole, strict=True):
        pack(samples(number), out, split=SPLIT, seed=number, shards=shards)
    script = str(PROGRAMS / "killed_pack.py")
    (tmp_path / "killed").mkdir()
    command = [sys.executable, script, str(whole[0]), str(tmp_path / "killed"), "pack", "2"]
    subprocess.run([*command, str(step)], check=True)
    seen = set()
    for out in (tmp_path / "killed").iterdir():
        for name in SPLIT:
            now = state(out, name)
            seen.add([*(state(folder, name) for folder in whole), None].index(now))
            if now is None and list(out.glob(f"{name}-*")):
                with suppress(DataCorruptionError):  # incomplete, or else of one pack
                    found = build_index(out / f"{name}-*", tmp_path / "x.index", root=out)
                    assert len(set(found.columns["state"].tolist())) == 1
        pack(samples(2), out, split=SPLIT, seed=2, shards=2, overwrite=True)
        assert tree(out) == tree(whole[1])
        for left in out.glob(".*"):  # its packer was killed before it was marked
            assert {path.name for path in left.iterdir()} <= {MARK}
    assert seen >= {0, 1}


def test_failed_or_interrupted_pack_leaves_old_files(tmp_path: Path) -> None:
    pack(numbered(0, 4), tmp_path)
    before = tree(tmp_path)

    def interrupted(error: BaseException) -> Iterator[dict[str, int]]:
        yield {"x": 1}
        raise error

    for error in (KeyboardInterrupt(), OSError("unplugged")):
        with pytest.raises(type(error)):
            pack(interrupted(error), tmp_path, overwrite=True)
        assert tree(tmp_path) == before
    with pytest.raises(KeyboardInterrupt):
        pack(interrupted(KeyboardInterrupt()), tmp_path / "new" / "deeper")
    assert not (tmp_path / "new" / "deeper").exists()


@pytest.mark.parametrize("victim", ["../victim", "{}/victim", "notes.md", "sub/data-00000.tar"])
def test_overwrite_deletes_no_file_that_an_index_falsely_names(tmp_path: Path, victim: str) -> None:
    out = tmp_path / "out"
    pack(numbered(0, 4), out)
    name = victim.format(tmp_path)
    file = out / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"mine")
    with_shard_names(out / "data.index", name)
    assert len(pack(numbered(0, 6), out, overwrite=True)["data"]) == 6
    assert file.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name", ["data.index", "data.index/notes.md", "data-00000-of-00001.tfrecord/notes.md"]
)
def test_overwrite_refuses_files_that_pack_did_not_write(tmp_path: Path, name: str) -> None:
    if name == "data.index/notes.md":
        pack(numbered(0, 4), tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"mine")
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match=r"holds files .* pack has not written .*\(1: data"):
        pack(numbered(0, 6), tmp_path, overwrite=True)
    assert tree(tmp_path) == before


def test_shards_that_pack_has_not_named_are_kept(tmp_path: Path) -> None:
    """They may be the source: webdataset names its shards so."""
    (tmp_path / "data-00000.tar").write_bytes(b"mine")
    for _ in range(2):
        pack(numbered(0, 4), tmp_path, container="tar", overwrite=True)
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


def test_files_of_others_in_an_index_folder_are_kept(tmp_path: Path) -> None:
    """A new index takes the place of an old index, whose folder had other files by then."""
    index = pack(numbered(0, 4), tmp_path)["data"]
    for mine in (index.path / "notes", index.path / index.manifest["folder"] / "mydata.npy"):
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        with pytest.raises(
            FileExistsError, match=f"holds files .* pack has not written .*{mine.name}"
        ):
            pack(numbered(0, 5), tmp_path, overwrite=True)
        mine.unlink()
    assert len(pack(numbered(0, 5), tmp_path, overwrite=True)["data"]) == 5


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
