"""Samples of a tar that are found together: the same records and errors as member by member."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formats import END, archive, block, member, pax

from twinfeed.loaders import DataCorruptionError, build_index
from twinfeed.loaders.formats import tar
from twinfeed.loaders.formats.records import RecordChunk

ODD = (
    b"d/2.png d/4.jpg d/9 d/9.jpg d/9/9.jpg d.v/9.jpg d/.jpg __d__/a.jpg __d/a.jpg d/\xc3\xa9.jpg "
    b"d/\xff.jpg 9.jpg d/9.tar.gz ./9.jpg d/9. d/%b.jpg d/%b.jpg" % (b"n" * 92, b"n" * 94)
)
MEMBERS = [
    *(member(name, b"abc") for name in [*ODD.split(), b"d/\n.jpg", b""]),
    *(member(b"d/9.jpg", b"", kind) for kind in (b"\0", b"1", b"2", b"5", b"7", b"g", b"L", b"S")),
    pax({b"path": b"d/8.jpg"}) + member(b"d/7.jpg", b"abc"),
    pax({b"path": b"d/8.jpg"}, b"g"),
    pax({b"size": b"2"}) + member(b"d/7.jpg", b"ab"),
    member(b"7.jpg", b"abc", prefix=b"d"),
    member(b"d/7.jpg", b"abc", magic=b"ustar  \0"),
    member(b"d/7.jpg", b"abc", size=b"        003\0"),
    member(b"d/7.jpg", b"abc", size=b"\x80" + bytes(10) + b"\x03"),
    block(b"d/7.jpg", 100_000),
    END,
    bytes(512),
]


def plain_members(
    numbers: Iterable[int] = range(6), key: str = "d/%d", extensions: Iterable[str] = ("jpg", "CLS")
) -> list[bytes]:
    """The members of samples, which are a chunk by default."""
    return [
        member(f"{key % number}.{extension}".encode(), b"%d" % number)
        for number in numbers
        for extension in extensions
    ]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Have every member read by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar, "chunk_samples", lambda *_: None)
        yield


def scanned(path: Path, **options: Any) -> list[Any]:
    """Everything that a scan gives: records, errors of samples, warnings, and the last error."""
    found: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found.extend(tar.scan(path, on_bad=lambda error: found.append(str(error)), **options))
        except DataCorruptionError as error:
            found.append((type(error), str(error), error.offset, error.record))
    return [*found, *(str(warning.message) for warning in caught)]


def check(path: Path, **options: Any) -> None:
    """Compare chunks with a scan member by member."""
    found = scanned(path, **options)
    with one_by_one():
        assert repr(scanned(path, **options)) == repr(found)


def test_samples_of_same_fields_form_a_chunk_except_the_last(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", *plain_members())
    options: dict[str, Any] = {"max_record_bytes": 1 << 20, "join": False, "on_bad": print}
    chunk, last = tar.scan_chunks(path, **options)
    assert isinstance(chunk, RecordChunk)
    assert chunk.keys == [f"d/{number}" for number in range(5)]
    assert last.number == 5
    check(path, max_record_bytes=1)
    check(path, join=True)


def test_global_headers_and_metadata_names_end_a_chunk(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.tar", plain_members(extensions=["jpg"])
    glob = pax({b"path": b"d/8.jpg"}, b"g") + member(b"a.jpg", b"a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar, "CHUNK_BYTES", 2048)
        own = pax({b"path": b"d/9.jpg"}) + member(b"b.jpg", b"b")
        check(archive(path, glob, own, *plain))
    for name in (b"__m__/1.jpg", b"d/__MACOSX/1.jpg", b"d/._d/1.jpg", b"._d/1.jpg"):
        check(archive(path, *plain[:3], member(name, b"a"), *plain[3:]))


KEYS = ["d/%d", "__m__/%d", "d/é%d", "d/" + "n" * 92 + "%d", "d/" + "n" * 93 + "%d"]


@settings(max_examples=300)
@given(
    numbers=st.permutations(range(6)) | st.lists(st.integers(0, 9), max_size=6),
    key=st.sampled_from(KEYS),
    extensions=st.sampled_from([("jpg",), ("jpg", "JPG"), ("jpg", "CLS", "seg.png")]),
    changes=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(MEMBERS)), max_size=1),
    chunk_bytes=st.sampled_from([2048, 10_000, 1 << 22]),
    cut=st.none() | st.integers(0, 30_000),
)
def test_odd_members_equal_scan_member_by_member(
    numbers: list[int],
    key: str,
    extensions: tuple[str, ...],
    changes: list[tuple[int, bytes]],
    chunk_bytes: int,
    cut: int | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pieces = plain_members(numbers, key, extensions)
    for position, piece in changes:
        pieces.insert(position, piece)
    path = tmp_path_factory.mktemp("a") / "a.tar"
    archive(path, *pieces)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar, "CHUNK_BYTES", chunk_bytes)
        check(path)


def test_any_changed_header_byte_equals_scan_member_by_member(tmp_path: Path) -> None:
    pieces = plain_members()
    whole = pieces[4]
    for position in range(512):
        for new in {ord("1"), whole[position] ^ 1}:
            damaged = whole[:position] + bytes([new]) + whole[position + 1 :]
            total = sum(damaged[:148]) + sum(damaged[156:512]) + 8 * 32
            pieces[4] = damaged[:148] + b"%06o\0 " % total + damaged[156:]
            check(archive(tmp_path / "a.tar", *pieces))
        pieces[4] = damaged
        check(archive(tmp_path / "a.tar", *pieces))


def index_files(path: Path, options: dict[str, Any]) -> dict[str, bytes]:
    """The files of the index of a shard."""
    out = path.with_name("x.index")
    build_index(path, out, **options)
    return {file.name: file.read_bytes() for file in out.rglob("*") if file.is_file()}


@pytest.mark.parametrize("options", [{}, {"label": "cls"}, {"fields": {"x": "png;jpg"}}])
def test_chunks_give_same_index_as_member_by_member(
    options: dict[str, Any], tmp_path: Path
) -> None:
    path = archive(tmp_path / "a.tar", *plain_members())
    whole = index_files(path, options)
    with one_by_one():
        assert index_files(path, options) == whole
