"""Packed files come into place whole, replace what the packer made before, and nothing else."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from programs.killed_pack import samples
from support import PROGRAMS
from support.damage import with_shard_names
from support.shards import numbered, tree

from twinfeed.loaders import IndexFormatError, Reader, build_index, open_index, pack, verify
from twinfeed.loaders.building import build
from twinfeed.loaders.index.paths import PUBLISHING
from twinfeed.loaders.support import atomic
from twinfeed.loaders.support.deletable import MARK, delete_stale, mark_deletable, new_folder

SPLIT = {"train": 8, "eval": 4}
REFUSED = (FileNotFoundError, IndexFormatError)


def state(out: Path) -> dict[str, list[tuple[int, int]]] | None:
    """The content of each split, or None if it does not open."""
    found = {}
    for name in SPLIT:
        with suppress(*REFUSED):
            with Reader(open_index(out / f"{name}.index")) as reader:
                got = reader.index.columns
                found[name] = list(zip(got["state"].tolist(), got["number"].tolist(), strict=True))
            assert verify(out / f"{name}.index").ok
    return found or None


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.long)])
def test_pack_killed_at_any_change_leaves_old_new_or_refused_state(
    tmp_path: Path, step: int
) -> None:
    """And whatever was left, the next pack goes on from there."""
    whole = [tmp_path / "old", tmp_path / "new"]
    for number, shards, out in zip((1, 2), (2, 1), whole, strict=True):
        pack(samples(number), out, split=SPLIT, seed=number, shards=shards)
    script = str(PROGRAMS / "killed_pack.py")
    (tmp_path / "killed").mkdir()
    command = [sys.executable, script, str(whole[0]), str(tmp_path / "killed"), "pack", "1"]
    subprocess.run([*command, str(step)], check=True)
    old, new = map(state, whole)
    seen = []
    for out in sorted((tmp_path / "killed").iterdir(), key=lambda path: int(path.name)):
        now = state(out)
        seen.append("old" if now == old else "new" if now == new else "refused")
        if seen[-1] == "refused":
            assert now is None
            with pytest.raises(IndexFormatError, match="old shards and new ones are mixed"):
                open_index(out / "train.index")
            with pytest.raises(IndexFormatError, match="pack to this folder again"):
                verify(out / "*.tfrecord")  # nor are the shards alone taken for whole
            with pytest.raises(FileExistsError, match="already holds"):  # but put in place first
                pack(samples(3), out, split=SPLIT, seed=3)
            assert tree(out) == tree(whole[1])
        else:
            pack(samples(2), out, split=SPLIT, seed=2, shards=1, overwrite=True)
            assert tree(out) == tree(whole[1])
            assert not list(out.glob(".*"))
    assert sorted(seen, key=["old", "refused", "new"].index) == seen
    assert set(seen) == {"old", "refused", "new"}


@pytest.mark.parametrize("length", [None, 0, 10])
def test_half_marked_work_folder_is_removed(tmp_path: Path, length: int | None) -> None:
    """Its packer was killed then. What somebody else put there is left alone."""
    own, other = (tmp_path / f".packing-{digit * 16}" for digit in "ab")
    for folder in (own, other):
        folder.mkdir()
        if length is not None:
            mark_deletable(folder)
            os.truncate(folder / MARK, length)
    (other / "notes.md").touch()
    pack(numbered(0, 4), tmp_path)
    assert list(tmp_path.glob(".*")) == [other]
    assert (other / "notes.md").exists()


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


def test_unmarked_folder_named_as_a_work_folder_is_kept(tmp_path: Path) -> None:
    for name in (".packing-notes", ".packing-0123456789abcdeF"):
        (tmp_path / name).mkdir()
    (tmp_path / ".packing-0123456789abcdef").symlink_to(tmp_path / ".packing-notes")
    (tmp_path / ".packing-fedcba9876543210").mkdir()
    (tmp_path / ".packing-fedcba9876543210" / "mine").touch()
    (tmp_path / ".packing-0000000000000000").mkdir()
    mark_deletable(tmp_path / ".packing-0000000000000000")  # what a killed packer has left
    before = {path.name for path in tmp_path.glob(".packing-*")}
    pack(numbered(0, 4), tmp_path)
    left = {path.name for path in tmp_path.glob(".packing-*")}
    assert left == before - {".packing-0000000000000000"}
    assert (tmp_path / ".packing-fedcba9876543210" / "mine").exists()


def test_only_own_folders_of_ended_processes_are_stale(tmp_path: Path) -> None:
    """Neither a folder in use, nor one without a mark, nor what a link leads to."""
    names = ["used", "ended", "unmarked", "link"]
    used, ended, unmarked, link = (tmp_path / name for name in names)
    locks = [new_folder(folder) for folder in (used, ended)]
    unmarked.mkdir()
    link.symlink_to(ended)
    (ended / "file").touch()
    os.close(locks[1])
    for folder in (used, unmarked, link, tmp_path / "missing"):
        delete_stale(folder)
    assert {path.name for path in tmp_path.iterdir()} == {*names}
    assert (ended / "file").exists()
    delete_stale(ended)
    assert not ended.exists()
    os.close(locks[0])


def test_foreign_publishing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / PUBLISHING).mkdir()
    (tmp_path / PUBLISHING / "x.index").write_text("mine")
    with pytest.raises(FileExistsError, match="did not create this"):
        pack(numbered(0, 4), tmp_path)
    assert (tmp_path / PUBLISHING / "x.index").read_text() == "mine"


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


def test_reader_that_locks_the_folder_does_not_block_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "WAIT", 0)
    seen: list[int] = []

    def source() -> Iterator[dict[str, int]]:
        (work,) = tmp_path.glob(".packing-*")
        seen.append(stat.S_IMODE(work.stat().st_mode))
        yield {"x": 1}

    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        pack(source(), tmp_path)
    finally:
        os.close(fd)
    assert seen == [0o700]
    assert not (tmp_path / atomic.LOCK).exists()


def test_locked_folder_warns_and_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_WARN_AFTER", 0)
    with atomic.locked(tmp_path):
        lock = tmp_path / atomic.LOCK
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
        monkeypatch.setattr(atomic, "WAIT", 0.1)
        with (
            pytest.warns(RuntimeWarning, match="waiting for another process that writes there"),
            pytest.raises(TimeoutError, match=f"if nobody writes there, delete {lock}"),
        ):
            pack(numbered(0, 4), tmp_path)
        assert list(tmp_path.iterdir()) == [lock]
    assert len(pack(numbered(0, 4), tmp_path)["data"]) == 4


def test_lock_is_exclusive_while_folder_is_recreated(tmp_path: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with atomic.locked(tmp_path / "f", make="advice"):
                inside += 1
                most = max(most, inside)
                (tmp_path / "f" / "made").touch()
                (tmp_path / "f" / "made").unlink()
                inside -= 1
            with suppress(OSError):
                (tmp_path / "f").rmdir()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


@pytest.mark.parametrize("out", ["link", "link/deeper/x.index"])
@pytest.mark.parametrize(
    "writes",
    [
        lambda _, out: pack(samples(1), out),
        lambda shards, out: build_index(shards / "*.tfrecord", out, root=shards),
    ],
)
def test_fault_112_dangling_link_is_named_without_waiting(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: Callable[[Path, Path], object],
    out: str,
) -> None:
    for module, name in ((atomic, "WAIT"), (build, "DAY")):
        monkeypatch.setattr(module, name, 0.1)
    pack(samples(1), tmp_path / "shards")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"leads nowhere: mount its disk.*/link'$"):
        writes(tmp_path / "shards", tmp_path / out)
    assert not (tmp_path / "nowhere").exists()


def test_lock_file_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / atomic.LOCK).symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic link"):
        pack(numbered(0, 4), tmp_path)
    assert not (tmp_path / "made").exists()
