"""Whatever name of a folder is opened leads to a regular file, or is refused at once.

A FIFO would wait for a writer, and a device such as /dev/zero never ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.damage import rewrite
from support.formats import no_hang
from support.shards import tfrecords

from twinfeed.loaders import (
    FromTable,
    Index,
    LoaderError,
    Results,
    SideTable,
    build_index,
    open_index,
    pack,
)
from twinfeed.loaders.building.bad_records import read_bad_records
from twinfeed.loaders.building.image_folder import list_images
from twinfeed.loaders.command_line import main
from twinfeed.loaders.formats.files import Entry

Case = tuple[Path, Callable[[], object]]
"""The file that something else takes the place of, and what opens the file."""

REFUSED = "not a regular file|leaves its root|Too many levels|holds other bytes"
KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "endless link": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
}


def made(folder: Path) -> Index:
    return build_index(tfrecords(folder, shards=1), folder / "x.index")


def manifest(folder: Path) -> Case:
    index = made(folder)
    return index.path / "manifest.json", lambda: open_index(index.path)


def array_of(bytes_: int | None) -> Callable[[Path], Case]:
    """An array of an index whose manifest gives these bytes; None: those of what is there."""

    def array(folder: Path) -> Case:
        index = made(folder)
        file = index.path / "manifest.json"
        path = index.path / json.loads(file.read_text())["folder"] / "shards.npy"

        def use() -> None:
            size = path.stat().st_size if bytes_ is None else bytes_
            rewrite(index.path, lambda manifest: manifest["arrays"]["shards"].update(bytes=size))
            open_index(index.path)

        return path, use

    return array


def image(folder: Path) -> Case:
    (folder / "img" / "cat").mkdir(parents=True)
    (folder / "img" / "cat" / "0.jpg").write_bytes(b"\xff\xd8\xff")
    return folder / "img/cat/1.jpg", lambda: pack(folder / "img", folder / "out")


def indexed_image(folder: Path) -> Case:
    return image(folder)[0], lambda: build_index(folder / "img", folder / "x.index")


def loose_file(folder: Path) -> Case:
    entries = [Entry("a", {"text": "a.txt"})]
    return folder / "a.txt", lambda: build_index(entries, folder / "x.index")


def labels(folder: Path) -> Case:
    return folder / "labels.csv", lambda: FromTable(folder / "labels.csv").labels


def bad_records(folder: Path) -> Case:
    return folder / "bad.jsonl", lambda: read_bad_records(folder / "bad.jsonl")


def side_table(folder: Path) -> Case:
    np.save(folder / "t.npy", np.zeros(3))
    return folder / "t.npy", lambda: SideTable(folder / "t.npy")


def results(folder: Path) -> Case:
    return folder / "rank.npz", lambda: Results.load(folder / "rank.npz")


def classes(folder: Path) -> Case:
    tfrecords(folder, shards=1)
    words = ["index", f"{folder}/*.tfrecord", "--out", f"{folder}/x.index", "--classes"]
    return folder / "classes.txt", lambda: run([*words, f"{folder}/classes.txt"])


def run(words: list[str]) -> None:
    """Run a command; the error that it says becomes an error here."""
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("sys.stderr.write", said.append)
        if main([*words, "-q"]):
            raise LoaderError("".join(said))


CASES: dict[str, Callable[[Path], Case]] = {
    "manifest": manifest,
    "array": array_of(None),
    "array of 0 bytes": array_of(0),
    "mapped array": array_of(1 << 20),
    "image": image,
    "indexed image": indexed_image,
    "loose file": loose_file,
    "label table": labels,
    "bad records": bad_records,
    "side table": side_table,
    "results": results,
    "classes": classes,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_special_file_is_refused_without_waiting(tmp_path: Path, case: str, kind: str) -> None:
    path, use = CASES[case](tmp_path)
    if kind == "folder" and "image" in case:
        return  # a folder in a folder of images is looked into
    path.unlink(missing_ok=True)
    KINDS[kind](path)
    with no_hang(5), pytest.raises((LoaderError, OSError), match=REFUSED):
        use()


@pytest.mark.filterwarnings("ignore:files below")
@pytest.mark.parametrize("kind", KINDS)
def test_special_file_named_manifest_among_images_is_ignored(tmp_path: Path, kind: str) -> None:
    image(tmp_path)
    KINDS[kind](tmp_path / "img/cat/manifest.json")
    with no_hang(5):
        assert len(list_images(tmp_path / "img")) == 1


def test_huge_sparse_file_is_not_read(tmp_path: Path) -> None:
    """A file of 2 TB without a block on the disk, in the place of each small file."""
    for case, make in CASES.items():
        if "array" not in case and case != "side table":
            (tmp_path / case).mkdir()
            path, use = make(tmp_path / case)
            path.touch()
            os.truncate(path, 1 << 41)
            with (
                no_hang(5),
                pytest.raises(LoaderError, match=r"too many bytes|max_record_bytes|pickled"),
            ):
                use()
