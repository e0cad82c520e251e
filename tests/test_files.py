"""Loose files: listed in one order everywhere, with their labels, and read as records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twinfeed.loaders.errors import DataCorruptionError, ShardWarning, UnsafeContentError
from twinfeed.loaders.formats.files import Entry, folder, listed, pairs, scan, table, walk


def tree(root: Path, *names: str) -> Path:
    """Make files that hold their own names."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_folder_is_listed_in_code_point_order_with_the_class_of_each_file(tmp_path: Path) -> None:
    tree(tmp_path, "b/2.png", "b/10.JPG", "a/deep/1.jpg", "top.jpg", "é/1.jpg")
    tree(tmp_path, ".hidden/1.jpg", "a/.hidden.jpg")
    assert [(entry.paths["image"], entry.label) for entry in folder(tmp_path)] == [
        ("a/deep/1.jpg", "a"),
        ("b/10.JPG", "b"),
        ("b/2.png", "b"),
        ("top.jpg", None),
        ("é/1.jpg", "é"),
    ]


def test_folder_keys_keep_the_extension_only_where_it_tells_files_apart(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.jpg", "a/1.png", "a/2.jpg")
    assert [entry.key for entry in folder(tmp_path)] == ["a/1.jpg", "a/1.png", "a/2"]


def test_folder_counts_the_files_that_are_no_images(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.jpg", "a/2.txt", "b/1.db", "b/3.TXT", "b/README", ".hidden.txt")
    text = rf"4 files below {tmp_path} are no images .* \(\.txt 2, \.db 1, no extension 1\)"
    with pytest.warns(ShardWarning, match=text) as heard:
        assert len(folder(tmp_path)) == 1
    assert len(heard) == 1


def test_folder_takes_other_fields_and_extensions(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.WAV", "a/1.jpg")
    found = folder(tmp_path, field="sound", extensions=[".wav"])
    assert found == [Entry("a/1", {"sound": "a/1.WAV"}, "a")]


def test_missing_or_unreadable_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        folder(tmp_path / "none")
    with pytest.raises(NotADirectoryError):
        folder(tree(tmp_path, "file") / "file")


def test_walk_does_not_enter_linked_folders(tmp_path: Path) -> None:
    tree(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert walk(tmp_path) == ["a/1.jpg"]


def test_pairs_join_files_by_what_the_star_stands_for(tmp_path: Path) -> None:
    tree(tmp_path, "img/cat/1.jpg", "img/cat/2.png", "box/cat/1.xml", "box/cat/2.xml")
    found = pairs(tmp_path, {"image": ("img/*.jpg", "img/*.png"), "boxes": "box/*.xml"})
    assert found == [
        Entry("cat/1", {"image": "img/cat/1.jpg", "boxes": "box/cat/1.xml"}, "cat"),
        Entry("cat/2", {"image": "img/cat/2.png", "boxes": "box/cat/2.xml"}, "cat"),
    ]


def test_pairs_that_lack_a_file_are_counted_or_left_out(tmp_path: Path) -> None:
    tree(tmp_path, *(f"{n}.jpg" for n in range(8)), "7.xml")
    with pytest.raises(ValueError, match=r"7 of 8 records lack .* first: 0, 1, 2, 3, 4; leave"):
        pairs(tmp_path, {"image": "*.jpg", "boxes": "*.xml"})
    left = pairs(tmp_path, {"image": "*.jpg", "boxes": "*.xml"}, missing="skip")
    assert [entry.key for entry in left] == ["7"]


def test_pairs_refuse_two_files_for_one_field_and_patterns_without_one_star(tmp_path: Path) -> None:
    tree(tmp_path, "1.jpg", "1.png")
    with pytest.raises(ValueError, match=r"both 1\.jpg and 1\.png"):
        pairs(tmp_path, {"image": ("*.jpg", "*.png")})
    for pattern in ("a.jpg", "*/*.jpg"):
        with pytest.raises(ValueError, match="one"):
            pairs(tmp_path, {"image": pattern})
    with pytest.raises(ValueError, match="missing"):
        pairs(tmp_path, {"image": "*.jpg"}, missing="ignore")


def test_table_keeps_its_order_quotes_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text('\ufefffile,class,more\r\nb.jpg,"big, cat",1\r\na/é.jpg,dog,2\r\n', "utf-8")
    assert table(path, column="file", label="class") == [
        Entry("b", {"image": "b.jpg"}, "big, cat"),
        Entry("a/é", {"image": "a/é.jpg"}, "dog"),
    ]
    assert [entry.label for entry in table(path, column="file", label=None)] == [None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\na.jpg,1\n", "no column 'path'"),
        ("", "no column 'path'"),
        ("path,label\na.jpg\n", "line 2"),
        ("path,label\na.jpg,1\nb.jpg,\n", "line 3"),
        ("path,label\n,1\n", "line 2"),
        ("path,label\na.jpg,1,2\n", "line 2"),
        ("path,label\na.jpg,1\na.jpg,2\n", "1 paths are named twice, first: a.jpg"),
    ],
)
def test_table_that_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        table(tmp_path / "all.csv")


def test_scan_reads_what_the_entries_name(tmp_path: Path) -> None:
    tree(tmp_path, "1.jpg", "1.xml")
    [record] = scan(tmp_path, [Entry("1", {"image": "1.jpg", "boxes": "1.xml"}, "cat")])
    assert record.paths == ("1.jpg", "1.xml")
    assert {n: (p.path_no, p.offset, p.length, p.data) for n, p in record.parts.items()} == {
        "image": (0, 0, 5, b"1.jpg"),
        "boxes": (1, 0, 5, b"1.xml"),
    }
    assert (record.key, record.label, record.length) == ("1", "cat", 10)
    assert record.header == b"1.jpg\x005\n1.xml\x005\n"


def test_scan_of_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.jpg")
    (tmp_path / name).write_bytes(b"abc")
    [record] = scan(tmp_path, folder(tmp_path))
    assert record.header.startswith(b"\xff.jpg\0")


def test_scan_refuses_paths_that_leave_the_root(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", "1.jpg")
    tree(tmp_path, "secret")
    (root / "link").symlink_to("../secret")
    (root / "up").symlink_to("..")
    (root / "inner").symlink_to("1.jpg")
    for path in ("../secret", str(tmp_path / "secret"), "link", "up/secret", "a/../../secret"):
        with pytest.raises(UnsafeContentError, match="leaves its root"):
            list(scan(root, [Entry("x", {"image": path})]))
    assert next(scan(root, [Entry("x", {"image": "inner"})])).parts["image"].data == b"1.jpg"


def test_scan_hands_too_long_records_over(tmp_path: Path) -> None:
    tree(tmp_path, "1.jpg", "long-name.jpg")
    bad: list[DataCorruptionError] = []
    entries = folder(tmp_path)
    found = list(scan(tmp_path, entries, max_record_bytes=6, on_bad=bad.append))
    assert [record.key for record in found] == ["1"]
    assert [(error.record, error.key, error.found) for error in bad] == [
        (1, "long-name", "13 bytes")
    ]
    with pytest.raises(DataCorruptionError, match="max_record_bytes=6"):
        list(scan(tmp_path, entries, max_record_bytes=6))


def test_scan_of_a_missing_file_is_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(scan(tmp_path, listed([("none.jpg", 1)])))
