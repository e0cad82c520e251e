"""Tar shards: equal to webdataset's reading, whatever wrote them; and written so that webdataset
reads them.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formats import (
    END,
    archive,
    block,
    contents,
    member,
    pax,
    webdataset_samples,
)
from webdataset.tariterators import base_plus_ext

from twinfeed.loaders import DataCorruptionError, ShardWarning
from twinfeed.loaders.formats._tarkeys import split_name
from twinfeed.loaders.formats.tar import TarWriter, scan
from twinfeed.loaders.support.checksum import crc32c

segment = st.text(st.sampled_from("ab.é_- A"), min_size=1, max_size=12)
long_segment = st.text(st.sampled_from("abcdé"), min_size=60, max_size=120)
paths = st.lists(st.one_of(segment, long_segment), min_size=1, max_size=4).map("/".join)
extensions = st.sampled_from(["jpg", "JPG", "seg.png", "cls", "txt", "json"])
names = st.tuples(paths, extensions).map(".".join).filter(lambda name: "/._" not in f"/{name}")


@given(name=st.text(st.sampled_from("ab./_é \n"), max_size=20))
def test_names_split_as_in_webdataset(name: str) -> None:
    key, extension = base_plus_ext(name)
    assert split_name(name) == (None if key is None else (key, extension.lower()))


def test_unusual_member_names_are_split_or_skipped() -> None:
    assert split_name("README") is None
    assert split_name(".hidden") is None
    assert split_name("a/b.JPG") == ("a/b", "jpg")
    assert split_name("a/b.seg.png") == ("a/b", "seg.png")
    assert split_name("a.b/c.jpg") == ("a.b/c", "jpg")


def write_by_tarfile(path: Path, files: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> None:
    """Write an archive with Python's own writer."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@settings(max_examples=60)
@given(files=st.dictionaries(names, st.binary(max_size=1100), max_size=8), data=st.data())
def test_equals_webdataset_on_generated_archives(
    files: dict[str, bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    form = data.draw(
        st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    )
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    try:
        write_by_tarfile(path, dict(sorted(files.items())), form)
    except ValueError:
        return  # a name too long for ustar
    try:
        expected = webdataset_samples(path)
    except ValueError:
        expected = None  # one extension twice
    if expected is None or len({key for key, _ in expected}) < len(expected):
        with pytest.raises(DataCorruptionError, match=r"twice|met again"):
            list(scan(path))
    elif files and not expected:
        with pytest.raises(DataCorruptionError, match=r"is called KEY\.EXTENSION"):
            list(scan(path))
    else:
        assert contents(scan(path)) == expected


FORMATS = ["v7", "oldgnu", "gnu", "ustar", "posix"]


@pytest.mark.parametrize("form", FORMATS)
def test_equals_webdataset_on_archives_of_the_tar_program(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    long = "n" * 60 if form == "v7" else "n" * 90
    for name in ("1.jpg", "1.cls", f"deep/{long}.jpg", "2.tar.gz", "README", "é.txt"):
        (folder / name).write_bytes(name.encode() * 200)
    subprocess.run(
        ["tar", f"--format={form}", "--sort=name", "-cf", tmp_path / "a.tar", "-C", folder, "."],
        check=True,
    )
    found = contents(scan(tmp_path / "a.tar"))
    assert found == webdataset_samples(tmp_path / "a.tar")
    assert len(found) == 4


@pytest.mark.parametrize("form", ["oldgnu", "gnu", "posix"])
def test_names_longer_than_100_and_255_bytes_are_read(form: str, tmp_path: Path) -> None:
    deep = tmp_path / "data" / ("d" * 120) / ("é" * 60)
    deep.mkdir(parents=True)
    name = "n" * 200 + ".txt"
    (deep / name).write_bytes(b"abc")
    subprocess.run(
        ["tar", f"--format={form}", "-cf", tmp_path / "a.tar", "-C", tmp_path / "data", "d" * 120],
        check=True,
    )
    [record] = scan(tmp_path / "a.tar")
    assert record.key == f"{'d' * 120}/{'é' * 60}/{'n' * 200}"
    part = record.fields["txt"]
    shard = (tmp_path / "a.tar").read_bytes()
    assert shard[part.offset : part.offset + part.length] == b"abc" == part.data


def test_reads_what_webdataset_writes(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{n:04d}", "jpg": bytes([n]) * 700, "cls": str(n).encode(), "json": b"{}"}
        for n in range(20)
    ]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for sample in samples:
            writer.write(sample)
    found = contents(scan(tmp_path / "a.tar"))
    assert found == [(s["__key__"], {k: s[k] for k in ("jpg", "cls", "json")}) for s in samples]


def takes(writer: TarWriter, key: str, parts: dict[str, bytes]) -> bool:
    """Write a sample; return whether the writer took it."""
    try:
        writer.write(key, parts)
    except ValueError:
        return False
    return True


@settings(max_examples=40)
@given(samples=st.dictionaries(paths, st.dictionaries(extensions, st.binary(max_size=600))))
def test_webdataset_and_the_tar_program_read_what_is_written(
    samples: dict[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    with TarWriter(path) as writer:
        written = [sample for sample in samples.items() if takes(writer, *sample) and sample[1]]
    assert webdataset_samples(path) == written
    assert contents(scan(path)) == written
    listed = subprocess.run(["tar", "-tf", path], check=True, capture_output=True)
    assert listed.stderr == b""


def test_files_of_macos_are_left_out_and_named_once(tmp_path: Path) -> None:
    """As bsdtar and zip of macOS write them, before, between and after the others."""
    path = tmp_path / "a.tar"
    samples = [("c/1", {"jpg": b"1", "cls": b"0"}), ("d/2", {"jpg": b"2", "cls": b"1"})]
    for of_macos in ("._1", "c/._1", "./c/._1", "__MACOSX/c/._1", "__MACOSX/c/1"):
        odd = member(f"{of_macos}.jpg".encode(), b"Mac")
        plain = [
            member(f"{key}.{name}".encode(), data)
            for key, fields in samples
            for name, data in fields.items()
        ]
        for place in (*range(5), slice(None)):
            members = plain[:]
            if isinstance(place, slice):
                members = [part for one in plain for part in (odd, one)]
            else:
                members.insert(place, odd)
            path.write_bytes(b"".join(members) + END)
            with pytest.warns(ShardWarning, match="files of macOS are left out") as caught:
                assert contents(scan(path)) == samples
            assert len(caught) == 1
            with pytest.warns(ShardWarning, match="files of macOS"):
                assert contents(scan(path, join=True)) == samples


def test_written_bytes_are_reproducible_without_owner(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with TarWriter(tmp_path / name) as writer:
            writer.write("k" * 150, {"txt": b"1", "cls": b"2"})
            writer.write("é", {"txt": b"1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as tar:
        facts = {(i.mtime, i.uid, i.gid, i.uname, i.gname, i.mode) for i in tar.getmembers()}
    assert facts == {(0, 0, 0, "", "", 0o644)}


@pytest.mark.parametrize(
    "key",
    ["a.b", "a\nb", "", "__meta__/a", "c/._1", "__MACOSX/a", "\udcff", "/a", "../a", "a/../b"],
)
def test_writer_refuses_keys_that_would_not_be_read_back(key: str, tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        with pytest.raises(ValueError, match="is not a valid name"):
            writer.write(key, {"txt": b""})
        with pytest.raises(ValueError, match="is not a valid name"):
            writer.write("a", {"TXT": b""})
    assert (tmp_path / "a.tar").read_bytes() == END


def test_writer_writes_no_end_block_after_an_exception(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TarWriter(tmp_path / "a.tar") as writer:
            writer.write("1", {"txt": b"one"})
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert (tmp_path / "a.tar").stat().st_size == 1024


def test_extents_cover_headers_and_data(tmp_path: Path) -> None:
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write("one", {"txt": b"x" * 513, "cls": b""})
        writer.write("n" * 200, {"txt": b"y"})
    shard = (tmp_path / "a.tar").read_bytes()
    one, two = scan(tmp_path / "a.tar")
    assert (one.offset, one.length) == (0, 512 + 1024 + 512)
    assert two.offset == one.length
    assert two.offset + two.length == len(shard) - len(END)
    checksum = crc32c(two.fields["txt"].data).to_bytes(4, "little")
    assert two.header == shard[two.offset : two.fields["txt"].offset] + checksum
    assert [one.number, two.number] == [0, 1]


def test_members_that_are_no_fields_are_skipped(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar",
        member(b"folder/", b"", b"5"),
        member(b"old/", b"", b"\0"),
        member(b"README", b"text"),
        member(b"__index__", b"{}"),
        member(b"__shard__/x.json", b"{}"),
        member(b"pipe", b"", b"6"),
        member(b"link", b"", b"2", link=b"elsewhere"),
        member(b"strange", b"abc", b"Z"),
        member(b"1.txt", b"one"),
    )
    assert contents(scan(path)) == [("1", {"txt": b"one"})] == webdataset_samples(path)


def test_global_pax_headers_without_names_are_skipped(tmp_path: Path) -> None:
    comment = pax({b"comment": b"0" * 40}, b"g")
    path = archive(tmp_path / "a.tar", comment, member(b"1.txt", b"one"), member(b"2.txt", b"two"))
    assert contents(scan(path)) == webdataset_samples(path)
    only = archive(tmp_path / "c.tar", comment)
    assert list(scan(only)) == []


def test_sound_archives_do_not_warn(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_by_tarfile(tmp_path / "a.tar", {"1.txt": b"one"})
        assert len(list(scan(tmp_path / "a.tar"))) == 1
        write_by_tarfile(tmp_path / "b.tar", {})
        assert list(scan(tmp_path / "b.tar")) == []


@settings(max_examples=60)
@given(
    keys=st.lists(st.sampled_from(["a", "b", "bb", "c", "cc", "d"]), max_size=12),
    broken=st.booleans(),
)
def test_repeated_key_is_reported_with_first_offset(
    keys: list[str], broken: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tail = block(b"z.txt", 9000) if broken else END
    path = archive(
        tmp_path_factory.mktemp("tar") / "a.tar",
        *(member(f"{key}.{n}".encode(), b"") for n, key in enumerate(keys)),
        end=tail,
    )
    expected = list[str]()
    for n, key in enumerate(keys):
        if not n or keys[n - 1] != key:
            first = keys.index(key)
            again = f"key {key!r} occurs again, first at offset {512 * first}"
            expected.append(again if first < n else key)
    found = list[str | None]()
    with pytest.raises(DataCorruptionError) if broken else nullcontext():
        for record in scan(path, on_bad=lambda error: found.append(error.problem)):
            found.append(record.key)
    assert found == (expected[:-1] if broken else expected)
