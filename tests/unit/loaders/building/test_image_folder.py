"""Images in folders: listed in one order everywhere, with their labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.shards import write_files

from twinfeed.loaders import ShardWarning, build_index, pack
from twinfeed.loaders.building.image_folder import SYSTEM_FOLDERS, list_images


def test_folder_is_listed_in_code_point_order_with_classes(tmp_path: Path) -> None:
    write_files(tmp_path, "b/2.png", "b/10.JPG", "a/deep/1.jpg", "top.jpg", "é/1.jpg")
    write_files(tmp_path, ".hidden/1.jpg", "a/.hidden.jpg")
    assert [(entry.paths["image"], entry.label) for entry in list_images(tmp_path)] == [
        ("a/deep/1.jpg", "a"),
        ("b/10.JPG", "b"),
        ("b/2.png", "b"),
        ("top.jpg", None),
        ("é/1.jpg", "é"),
    ]


def test_folder_keys_keep_extension_only_where_names_collide(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.jpg", "a/1.png", "a/2.jpg")
    assert [entry.key for entry in list_images(tmp_path)] == ["a/1.jpg", "a/1.png", "a/2"]


def test_folder_counts_files_that_are_not_images(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.jpg", "a/2.txt", "b/1.db", "b/3.TXT", "b/README", ".hidden.txt")
    text = rf"files below {tmp_path} are not images .* \(4, first: a/2.txt, b/1.db, .*README\)"
    with pytest.warns(ShardWarning, match=text) as heard:
        assert len(list_images(tmp_path)) == 1
    assert len(heard) == 1


def test_missing_or_unreadable_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list_images(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        list_images(write_files(tmp_path, "file") / "file")


def test_folder_does_not_enter_linked_folders(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "loop.jpg").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.warns(ShardWarning, match=r"left out \(3, first: a/loop\.jpg/, b/, empty/\)"):
        assert [entry.paths["image"] for entry in list_images(tmp_path)] == ["a/1.jpg"]


@pytest.mark.parametrize("call", [build_index, pack])
def test_folders_of_the_system_are_left_out_and_named_once(tmp_path: Path, call: Any) -> None:
    """At the root and in a class, with images of thumbnails or without; index and pack alike."""
    root, out = tmp_path / "images", tmp_path / "out"
    names = ["__MACOSX/a/._1.jpg", "a/@eaDir/1.jpg/THUMB.jpg", "#recycle/2.jpg", "lost+found/3.jpg"]
    write_files(tmp_path, *(f"images/{name}" for name in ["a/1.jpg", "b/2.jpg", *names]))
    text = r"not images .* \(4, first: #recycle/, __MACOSX/, a/@eaDir/, lost\+found/\)"
    with pytest.warns(ShardWarning, match=text) as heard:
        index = call(root, out)
    assert len(heard) == 1
    index = index if call is build_index else index["data"]
    assert (index.classes, len(index)) == (("a", "b"), 2)
    for name in SYSTEM_FOLDERS:
        write_files(tmp_path, f"images/{name}/4.jpg")
    with pytest.warns(ShardWarning, match=rf"left out \({len(SYSTEM_FOLDERS) + 1}, first: "):
        assert len(list_images(root)) == 2
