"""Bad bytes of shards: every fault made for real, and what must come of it.

The letters and numbers are those of the project's list of faults: A is TFRecord, B is tar, G is
security.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.damage import mutated
from support.damaged_shards import HTML, LFS
from support.formats import (
    archive,
    block,
    contents,
    flipped,
    member,
    no_hang,
    pax,
    webdataset_samples,
    write_records,
)
from support.inside import (
    LIMITS,
    decode_list,
    encode,
    length_delimited,
    locate,
    parse_sequence,
    tar,
    tfrecord,
    varint,
)

from twinfeed.loaders import (
    DataCorruptionError,
    LoaderError,
    ShardWarning,
    TruncatedShardError,
    verify,
)


def records(path: Path, **options: Any) -> list[bytes]:
    """Scan raw records."""
    return [r.fields["data"].data for r in tfrecord.scan(path, example=False, **options)]


def scan_error(form: Any, path: Path, **options: Any) -> DataCorruptionError:
    """Return the error of a scan, after checking its path, offset and advice."""
    with no_hang(), pytest.raises(DataCorruptionError) as caught:
        list(form.scan(path, **options))
    error = caught.value
    assert error.path == str(path)
    assert error.offset is not None
    assert error.advice
    assert f"byte offset: {error.offset}" in str(error)
    assert "what to do: " in str(error)
    return error


# A. TFRecord bytes


def test_a08_record_may_begin_like_html_page(tmp_path: Path) -> None:
    write_records(tmp_path / "a", HTML, LFS)
    assert records(tmp_path / "a") == [HTML, LFS]


def test_a09_unclosed_writer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    program = (
        "import os, sys\n"
        "from twinfeed.loaders.formats.tfrecord import TFRecordWriter\n"
        "writer = TFRecordWriter(sys.argv[1])\n"
        "for _ in range(30): writer.write(bytes(99_999))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    error = scan_error(tfrecord, path, example=False)
    assert isinstance(error, TruncatedShardError)
    assert "its writer may not have been closed" in str(error)


# B. tar bytes


def test_short_texts_are_not_called_text(tmp_path: Path) -> None:
    for form, options in ((tfrecord, {"example": False}), (tar, {})):
        for content in (b"0001.txt", b"\xff\n" * 300, b"a\x00\n" * 300):
            (tmp_path / "a").write_bytes(content)
            assert "text" not in scan_error(form, tmp_path / "a", **options).problem


def test_names_and_lists_longer_than_any_are_refused() -> None:
    with pytest.raises(DataCorruptionError, match="name of more than") as caught:
        locate(encode({"x" * 5000: 1}))
    assert len(str(caught.value)) < 1000
    values = b"\x0a\x00" * (LIMITS.values + 1)
    with pytest.raises(DataCorruptionError, match=f"more than {LIMITS.values} values"):
        decode_list("bytes_list", values)
    assert len(decode_list("bytes_list", values[2:])) == LIMITS.values


def test_b13_empty_tar_is_a_warning_and_a_finding(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.warns(ShardWarning, match=r"a\.tar: the archive does not end"):
        (found,) = verify(tmp_path / "a.tar", root=tmp_path).findings
    assert str(found) == "a.tar: it has no records"


def test_b13_missing_end_of_archive_is_a_warning(tmp_path: Path) -> None:
    for end in (b"", bytes(512), bytes(100)):
        path = archive(tmp_path / "a.tar", member(b"1.txt", b"one"), end=end)
        with pytest.warns(ShardWarning, match="zero block"):
            assert contents(tar.scan(path)) == [("1", {"txt": b"one"})]


def test_b14_flipped_header_bit_is_found_or_harmless(tmp_path: Path) -> None:
    """Each bit of a header, in one of three headers; the error names the offset of the header."""
    path = tmp_path / "a.tar"
    members = [member(b"%d.txt" % n, b"x" * 700) for n in range(3)]
    shard = archive(path, *members).read_bytes()
    whole = contents(tar.scan(path))
    for bit in range(8 * 512):
        header, byte = bit % 3 * len(members[0]), bit // 8
        path.write_bytes(flipped(shard, header + byte, 1 << bit % 8))
        in_checksum = 148 <= byte < 156
        try:
            assert contents(tar.scan(path)) == whole
        except DataCorruptionError as error:
            assert error.offset == header  # noqa: PT017
            assert in_checksum or "checksum" in error.problem  # noqa: PT017
        else:
            assert in_checksum  # of which a leading zero or a blank may be another


def test_b15_gnu_long_name_is_read_and_offset_follows_real_header(
    tmp_path: Path,
) -> None:
    name = b"n" * 150 + b".txt"
    for value in (name + b"\0", name):
        long = member(b"././@LongLink", value, b"L")
        link = member(b"././@LongLink", b"t" * 150 + b"\0", b"K")
        path = archive(tmp_path / "a.tar", long, link, member(name[:100], b"one"))
        [record] = tar.scan(path)
        assert (record.key, record.offset) == ("n" * 150, 0)
        assert record.fields["txt"].offset == 5 * 512
        assert path.read_bytes()[5 * 512 :][:3] == b"one" == record.fields["txt"].data


def test_b16_pax_size_locates_next_header(tmp_path: Path) -> None:
    """A member whose ustar size is 0 hides another archive in its data (CVE-2025-62518)."""
    hidden = member(b"evil.txt", b"evil") + member(b"worse.txt", b"worse")
    size = pax({b"size": b"%d" % len(hidden)})
    path = archive(tmp_path / "a.tar", size, block(b"1.tar", 0) + hidden, member(b"2.txt", b"two"))
    assert contents(tar.scan(path)) == [("1", {"tar": hidden}), ("2", {"txt": b"two"})]
    assert contents(tar.scan(path)) == webdataset_samples(path)


def test_b16_pax_header_skips_gnu_header_between(tmp_path: Path) -> None:
    """PAX, then a GNU long name, then the file (GHSA-3pv8-6f4r-ffg2)."""
    extended = pax({b"size": b"3"})
    long = member(b"././@LongLink", b"n" * 120 + b".txt\0", b"L")
    path = archive(tmp_path / "a.tar", extended, long, block(b"short", 0) + b"one" + bytes(509))
    assert contents(tar.scan(path)) == [("n" * 120, {"txt": b"one"})]


def test_b16_pax_path_is_key(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", pax({b"path": "é/1.txt".encode()}), member(b"x", b"one"))
    assert contents(tar.scan(path)) == [("é/1", {"txt": b"one"})]


def test_b17_global_pax_header_may_only_have_what_does_not_matter(tmp_path: Path) -> None:
    one = member(b"1.txt", b"one")
    path = archive(tmp_path / "a.tar", pax({b"comment": b"of git archive"}, b"g"), one)
    assert contents(tar.scan(path)) == [("1", {"txt": b"one"})]
    for name in (b"path", b"linkpath", b"size", b"GNU.sparse.name"):
        archive(path, pax({name: b"3"}, b"g"), one)
        assert f"a global PAX header may not have [{name!r}]" in scan_error(tar, path).problem


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K"])
def test_b19_extended_header_claiming_gigabytes_is_refused(kind: bytes, tmp_path: Path) -> None:
    """The claim is true, the file being sparse, and still nothing of the kind is read."""
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(block(b"long", 8**11 - 1, kind))
        file.truncate(1 << 36)
    assert scan_error(tar, path).expected == f"1 to {LIMITS.header_bytes} bytes"


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=oldgnu"],
        ["--format=posix", "--sparse-version=0.0"],
        ["--format=posix", "--sparse-version=0.1"],
        ["--format=posix", "--sparse-version=1.0"],
    ],
    ids="-".join,
)
def test_b20_sparse_members_are_refused(options: list[str], tmp_path: Path) -> None:
    with (tmp_path / "1.bin").open("wb") as file:
        file.write(b"start")
        file.seek(1 << 20)
        file.write(b"end")
    run = ["tar", *options, "--sparse", "-cf", tmp_path / "a.tar", "-C", tmp_path, "1.bin"]
    subprocess.run(run, check=True)
    assert (tmp_path / "a.tar").stat().st_size < 1 << 20
    error = scan_error(tar, tmp_path / "a.tar")
    assert error.problem == "a sparse member is not supported"
    assert "without --sparse" in str(error.advice)  # the shard is sound


def test_b21_sizes_of_members_without_data_are_ignored(tmp_path: Path) -> None:
    for kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
        path = archive(tmp_path / "a.tar", block(b"thing", 5000, kind), member(b"1.txt", b"one"))
        assert contents(tar.scan(path)) == [("1", {"txt": b"one"})] == webdataset_samples(path)


def test_b22_names_with_parent_folders_are_only_keys(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", member(b"../x.txt", b"1"), member(b"/abs/y.txt", b"2"))
    assert [record.key for record in tar.scan(path)] == ["../x", "/abs/y"]
    assert list(tmp_path.iterdir()) == [path]


def test_b24_scattered_members_are_joined_on_request(tmp_path: Path) -> None:
    path = archive(
        tmp_path / "a.tar",
        member(b"1.jpg", b"one"),
        member(b"2.jpg", b"two"),
        member(b"1.cls", b"1"),
        member(b"3.jpg", b"three"),
        member(b"2.cls", b"2"),
        member(b"1.txt", b"!"),
    )
    records = list(tar.scan(path, join=True))
    assert contents(records) == [
        ("3", {"jpg": b"three"}),
        ("2", {"jpg": b"two", "cls": b"2"}),
        ("1", {"jpg": b"one", "cls": b"1", "txt": b"!"}),
    ]
    assert [record.number for record in records] == [2, 1, 0]


def test_b26_names_split_at_first_dot_of_base_name(tmp_path: Path) -> None:
    members = member(b"d.v1/1.Seg.PNG", b"1"), member(b"d.v1/1", b"2"), member(b".x", b"3")
    path = archive(tmp_path / "a.tar", *members)
    assert contents(tar.scan(path)) == [("d.v1/1", {"seg.png": b"1"})] == webdataset_samples(path)


def test_sample_of_max_record_bytes_is_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", member(b"1.txt", b"x" * 600), member(b"1.cls", b"x" * 600))
    assert len(list(tar.scan(path, max_record_bytes=1200))) == 1


def test_b28_zeros_after_end_are_read(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", member(b"1.txt", b"one"), end=bytes(10240))
    assert contents(tar.scan(path)) == [("1", {"txt": b"one"})]
    path.write_bytes(bytes(20 * 512))  # what tar makes of no files
    assert contents(tar.scan(path)) == []


# G. security


def bombs() -> Iterator[bytes]:
    """Yield messages that cost much for their size, if read carelessly."""
    yield b"\x0b" * 300_000  # groups in groups
    yield length_delimited(0x0A, b"\x0a\x00" * 100_000)  # empty features
    yield b"\x0a\x00" * 200_000  # messages in pieces
    lists = b"\x0a\x00" * 100_000
    entry = length_delimited(0x0A, b"x") + length_delimited(0x12, lists)
    yield length_delimited(0x0A, length_delimited(0x0A, entry))  # a list in pieces
    values = length_delimited(0x0A, b"\x0a\x00" * 100_000)
    entry = length_delimited(0x0A, b"x") + length_delimited(0x12, values)
    yield length_delimited(0x0A, length_delimited(0x0A, entry))  # empty values
    yield b"\x0a" + varint((1 << 31) - 1)  # two gigabytes promised
    yield b"\x0a" + varint((1 << 64) - 1)
    yield b"\xff" * 1_000_000
    packed = length_delimited(0x1A, length_delimited(0x0A, b"\xff" * 1_000_000))
    entry = length_delimited(0x0A, b"x") + length_delimited(0x12, packed)
    yield length_delimited(0x0A, length_delimited(0x0A, entry))  # a number of a million bytes


def test_g63_example_bombs_end_soon() -> None:
    for bomb in bombs():
        for read in (locate, parse_sequence):
            with no_hang():
                try:
                    read(bomb)
                except DataCorruptionError as error:
                    assert "not a valid tf.train.Example" in str(error)  # noqa: PT017


# what is no shard at all


def test_folders_pipes_and_devices_are_no_shards(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        for scan in (tar.scan, tfrecord.scan):
            with no_hang(), pytest.raises(LoaderError, match="not a regular file"):
                list(scan(path))
    for scan in (tar.scan, tfrecord.scan):
        with pytest.raises(FileNotFoundError):
            list(scan(tmp_path / "none"))


def test_shard_that_shrinks_during_scan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_records(path, *[bytes(1_000_000)] * 8)
    scan = tfrecord.scan(path, example=False)
    next(scan)
    os.truncate(path, 5_000_000)
    with pytest.raises(TruncatedShardError):
        list(scan)
    archive(path, *(member(b"%d.bin" % n, bytes(1_000_000)) for n in range(8)))
    samples = tar.scan(path)
    next(samples)
    os.truncate(path, 5_000_000)
    with pytest.raises(TruncatedShardError):
        list(samples)


# fuzzing


def test_mutated_tfrecord_is_refused_at_first_changed_frame(
    tmp_path: Path,
) -> None:
    """Whole records that are lost or repeated read on; any other change is found, and there."""
    path = tmp_path / "a"
    frames = [write_records(path, encode({"image": bytes(50), "label": n})) for n in range(4)]
    shard = b"".join(frames)
    accepted = 0
    for seed in range(1500):
        changed = mutated(shard, random.Random(seed))
        path.write_bytes(changed)
        good = 0
        while frame := next((f for f in frames if changed.startswith(f, good)), b""):
            good += len(frame)
        if good == len(changed):
            assert len(list(tfrecord.scan(path))) == good // len(frames[0])
            accepted += 1
            continue
        assert scan_error(tfrecord, path, example=False).offset == good
    assert 0 < accepted < 700


def test_example_message_cut_at_every_byte_is_refused() -> None:
    usual = encode({"image": bytes(200), "label": [1, 1 << 40], "box": [0.5, 1.5], "name": "é"})
    for size in range(1, len(usual)):
        for read in (parse_sequence, locate):
            with pytest.raises(DataCorruptionError, match="not a valid tf"):
                read(usual[:size])
