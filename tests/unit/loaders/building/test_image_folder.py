"""Images in folders: listed in one order everywhere, with their labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shards import write_files

from twinfeed.loaders import ShardWarning
from twinfeed.loaders.building.image_folder import list_images
from twinfeed.loaders.formats.files import Entry


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


def test_folder_takes_other_extensions(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.WAV", "a/1.jpg")
    found = list_images(tmp_path, extensions=[".wav"])
    assert found == [Entry("a/1", {"image": "a/1.WAV"}, "a")]


def test_missing_or_unreadable_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list_images(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        list_images(write_files(tmp_path, "file") / "file")


def test_folder_does_not_enter_linked_folders(tmp_path: Path) -> None:
    write_files(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "loop.jpg").symlink_to(tmp_path)
    with pytest.warns(ShardWarning, match=r"left out \(1, first: a/loop\.jpg/\)"):
        assert [entry.paths["image"] for entry in list_images(tmp_path)] == ["a/1.jpg"]
