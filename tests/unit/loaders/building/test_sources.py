"""What an index is built of: folders of images, loose files, links to shards."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from support.shards import tars

from twinfeed.loaders import (
    DecodeImage,
    Feed,
    FromFile,
    FromFolder,
    LoaderError,
    Reader,
    ShardWarning,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.building.image_folder import list_images
from twinfeed.loaders.formats.files import Entry
from twinfeed.samplers import BatchSampler, SequentialSampler


def test_image_folder_is_indexed_in_place(tmp_path: Path) -> None:
    for name in ("dog/1.png", "cat/1.png", "cat/2.jpg"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).write_bytes(name.encode())
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    assert index.container == "files"
    assert index.classes == ("cat", "dog")
    assert index.labels.tolist() == [0, 0, 1]
    assert index.keys([0, 1, 2]) == ["cat/1", "cat/2", "dog/1"]
    with Reader(index) as reader:
        assert reader.read([2, 0])["image"] == [b"dog/1.png", b"cat/1.png"]
    assert verify(index).ok


def test_symlinked_image_folder_is_followed_within_its_root(tmp_path: Path) -> None:
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    (scratch / "photos" / "cat").mkdir(parents=True)
    (scratch / "photos" / "cat" / "1.png").write_bytes(b"...")
    home.mkdir()
    link, path = home / "photos", home / "x.index"
    link.symlink_to(scratch / "photos")
    for built in (build_index(link, path, root=scratch), open_index(path, root=scratch)):
        with Reader(built) as reader:
            assert reader.read([0])["image"] == [b"..."]
    with Reader(open_index(path)) as reader, pytest.raises(UnsafeContentError) as caught:
        reader.read([0])
    assert f"found: {scratch}/photos/cat/1.png" in str(caught.value)
    for root in (None, home):
        with pytest.raises(ValueError, match=f"below the root {home}, not at {scratch}/photos"):
            build_index(link, path, root=root)
    assert verify(link).ok
    build_index(link, scratch / "x.index")
    assert verify(scratch / "x.index").ok  # beside the photos, no root is needed


def test_symlinked_shards_are_followed_beside_the_index(
    tmp_path: Path,
) -> None:
    scratch, home = tmp_path / "scratch", tmp_path / "home"
    scratch.mkdir()
    home.mkdir()
    tars(scratch, shards=2)
    (home / "data").symlink_to(scratch)
    shards = f"{home}/data/*.tar"
    with pytest.raises(UnsafeContentError, match=f"leaves its root(?s:.*)found: {scratch}/"):
        build_index(shards, home / "x.index")
    build_index(shards, scratch / "x.index")
    assert verify(scratch / "x.index").ok
    index = build_index(shards, home / "x.index", root=scratch)
    assert index.shard_paths[0] == sorted(scratch.glob("*.tar"))[0].name
    assert verify(home / "x.index", root=scratch).ok


def test_loose_files_of_one_key_share_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"image")
    (tmp_path / "a.xml").write_bytes(b"<xml/>")
    entries = [Entry("a", {"image": "a.jpg", "annotation": "a.xml"})]
    index = build_index(entries, tmp_path / "x.index")
    with Reader(index) as reader:
        assert reader.read([0]) == {"annotation": [b"<xml/>"], "image": [b"image"]}


def test_empty_class_folders_warn(tmp_path: Path) -> None:
    for name in ("cat", "dog", ".hidden"):
        (tmp_path / "images" / name).mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.jpg").write_bytes(b"...")
    with pytest.warns(ShardWarning, match=r"left out \(1, first: dog/\)"):
        build_index(tmp_path / "images", tmp_path / "x.index")


def test_container_follows_file_name_not_folder_name(tmp_path: Path) -> None:
    (tmp_path / "my.tfrecords").mkdir()
    (shard,) = tars(tmp_path / "my.tfrecords", shards=1)
    plain = shard.rename(shard.with_suffix(""))
    assert build_index(plain, tmp_path / "x.index").container == "tar"


def test_verify_names_missing_loose_file(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for number in range(3):
        (tmp_path / "x" / f"{number}.png").write_bytes(b"...")
    entries = list_images(tmp_path)
    (tmp_path / "x" / "1.png").unlink()
    (entry,) = verify(entries, root=tmp_path).findings
    assert entry.shard == f"{tmp_path}/x/1.png"


def test_index_inside_image_folder_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"...")
    index = build_index(tmp_path, tmp_path / "x.index")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = build_index(tmp_path, tmp_path / "x.index")
        pack(tmp_path, tmp_path / "out", container="tar")
    assert again.fingerprint == index.fingerprint


def test_paths_of_images_are_loose_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list in its order, or a pattern; in `build_index`, `verify`, `Feed` and `pack` alike."""
    monkeypatch.chdir(tmp_path)
    names = ["b/1.png", "a/2.JPG", "a/1.png", "a/1.jpg"]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(name.encode())
    wanted = [name.encode() for name in names]
    index = build_index(names, "x.index")
    assert index.keys() == ["b/1", "a/2", "a/1.png", "a/1.jpg"]
    with Reader(index) as reader:
        assert reader.read(range(4)) == {"image": wanted}
    assert (index.has_labels, index.container) == (False, "files")
    assert verify(names).ok
    paths = [tmp_path / name for name in names]
    index = build_index(paths, "y.index", label=FromFolder())
    assert (index.classes, index.labels.tolist()) == (("a", "b"), [1, 0, 0, 0])
    index = build_index(paths, "y.index", label=FromFile(r"(\d)\."))
    assert index.labels.tolist() == [1, 2, 1, 1]
    assert build_index("a/*.jpg", "a/z.index").keys() == ["1"]
    sampler = BatchSampler(SequentialSampler(4), batch_size=4)
    for source in (names, tuple(paths)):
        assert Feed(source, sampler)[0, 0]["image"] == wanted
    with Reader(pack(names, "out")["data"]) as reader:
        assert reader.read(range(4)) == {"image": wanted}


def test_paths_of_images_that_are_wrong_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, twice, outside the root, damaged, or beside shards."""
    monkeypatch.chdir(tmp_path)
    for name in ("1.png", "2.png"):
        Path(name).write_bytes(b"no image")
    (shard,) = tars(tmp_path, shards=1)
    for call in (lambda p: build_index(p, "x.index"), lambda p: pack(p, "out")):
        with pytest.raises(FileNotFoundError, match=r"3\.png"):
            call(["1.png", "3.png"])
        with pytest.raises(ValueError, match=r"named twice \(1: 1\.png and \./1\.png\)"):
            call(["1.png", "./1.png"])
        with pytest.raises(LoaderError, match=r"1\.png|2\.png"):
            call(["1.png", str(shard)])
    with pytest.raises(ValueError, match="must lie below the root"):
        build_index(["1.png"], "x.index", root=tmp_path / "x.index")
    sampler = BatchSampler(SequentialSampler(2), batch_size=2)
    with pytest.raises(LoaderError, match=r"record 1, 3\.png: .* FileNotFoundError"):
        Feed(["1.png", "3.png"], sampler)[0, 0]
    with pytest.raises(LoaderError, match=r"record 0, 1\.png"):
        Feed(["1.png", "2.png"], sampler, decode=DecodeImage())[0, 0]
