"""Loose files, read as records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.shards import write_files

from twinfeed.loaders import DataCorruptionError, UnsafeContentError
from twinfeed.loaders.formats.files import Entry, scan


def test_scan_reads_what_the_entries_name(tmp_path: Path) -> None:
    write_files(tmp_path, "1.jpg", "1.xml")
    [record] = scan(tmp_path, [Entry("1", {"image": "1.jpg", "boxes": "1.xml"}, "cat")])
    assert record.paths == ("1.jpg", "1.xml")
    assert {n: (p.file_number, p.offset, p.length, p.data) for n, p in record.fields.items()} == {
        "image": (0, 0, 5, b"1.jpg"),
        "boxes": (1, 0, 5, b"1.xml"),
    }
    assert (record.key, record.label, record.length) == ("1", "cat", 10)
    assert record.header == b"1.jpg\x005\n1.xml\x005\n"


def test_scan_reads_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.jpg")
    (tmp_path / name).write_bytes(b"abc")
    [record] = scan(tmp_path, [Entry("1", {"image": name})])
    assert record.header.startswith(b"\xff.jpg\0")


def test_scan_refuses_paths_outside_root(tmp_path: Path) -> None:
    root = write_files(tmp_path / "root", "1.jpg")
    write_files(tmp_path, "secret")
    (root / "link").symlink_to("../secret")
    (root / "up").symlink_to("..")
    (root / "inner").symlink_to("1.jpg")
    for path in ("../secret", str(tmp_path / "secret"), "link", "up/secret", "a/../../secret"):
        with pytest.raises(UnsafeContentError, match="leaves its root"):
            list(scan(root, [Entry("x", {"image": path})]))
    assert next(scan(root, [Entry("x", {"image": "inner"})])).fields["image"].data == b"1.jpg"


def test_scan_passes_too_long_records_to_on_bad(tmp_path: Path) -> None:
    write_files(tmp_path, "1.jpg", "long-name.jpg")
    bad: list[DataCorruptionError] = []
    entries = [Entry(name, {"image": f"{name}.jpg"}) for name in ("1", "long-name")]
    found = list(scan(tmp_path, entries, max_record_bytes=6, on_bad=bad.append))
    assert [record.key for record in found] == ["1"]
    assert [(error.record, error.key, error.found) for error in bad] == [
        (1, "long-name", "13 bytes")
    ]
    with pytest.raises(DataCorruptionError, match="max_record_bytes=6"):
        list(scan(tmp_path, entries, max_record_bytes=6))


def test_scan_of_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    (tmp_path / "link.jpg").symlink_to("nowhere.jpg")
    for name in ("none.jpg", "link.jpg"):
        with pytest.raises(FileNotFoundError, match=f"'{tmp_path / name}'$"):
            list(scan(tmp_path, [Entry("1", {"image": name})]))
