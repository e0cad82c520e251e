"""The corpus of damage and its readers: the class of the error, its place, and what is left."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.cases import mark_long
from support.damage import CUTS, INDEXES
from support.damaged_shards import RECORDS, SHARDS, Damage, of_members, of_records
from support.formats import archive, contents, flipped, member, no_hang
from support.inside import REBUILD, tar, tfrecord
from support.servers import RangeServer
from support.shards import flip, tars, tfrecords

from twinfeed.loaders import (
    DataCorruptionError,
    IndexFormatError,
    Reader,
    ShardWarning,
    StaleIndexError,
    TruncatedShardError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.samplers import PKBatchSampler

SCANS: dict[str, Callable[..., Any]] = {"tfrecord": tfrecord.scan, "tar": tar.scan}
OPTIONS: dict[str, dict[str, Any]] = {"tfrecord": {"example": False}, "tar": {}, "compressed": {}}


def numbers(path: Path, form: str, **options: Any) -> tuple[int, ...]:
    """Scan a shard, and return the numbers of its records."""
    return tuple(record.number for record in SCANS[form](path, **options))


def check_error(
    row: Damage, place: object, read: Callable[..., object], *arguments: object, **options: Any
) -> DataCorruptionError:
    """Check that reading a damaged shard raises the error of its row, and return the error."""
    with no_hang(), pytest.raises(row.kind) as caught:
        read(place, *arguments, **options)
    error, message = caught.value, str(caught.value)
    words = (row.words,) if isinstance(row.words, str) else row.words
    found = type(error), error.offset, [word for word in words if word not in message]
    assert found == (row.kind, row.offset, []), (row.what, message)
    assert str(error.path).partition(", ")[0] == str(place), row.what
    assert f"byte offset: {row.offset}" in message or row.offset is None, row.what
    assert "what to do: " in message
    assert error.record == row.record or row.record is None, (row.what, message)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), message, vars(error))
    return error


def build(place: object, form: str, out: Path, **options: Any) -> None:
    build_index(place, out, container=form, **options)  # type: ignore[arg-type]


READERS: dict[str, Callable[..., object]] = {
    "scan": lambda place, form, _, **options: numbers(place, form, **options),
    "index": build,
    "index at a URL": build,
    "pack": lambda place, _form, out: pack(place, out),
}


@pytest.mark.parametrize(
    ("form", "reader"),
    [
        *product(SCANS, ("scan", "index")),
        ("tfrecord", "index at a URL"),
        pytest.param("tar", "index at a URL", marks=pytest.mark.long),
        ("compressed", "pack"),
    ],
)
def test_damaged_shard_is_named_with_offset_and_record(
    tmp_path: Path, server: RangeServer, form: str, reader: str
) -> None:
    for number, row in enumerate(SHARDS[form]()):
        path, out = tmp_path / f"{number}", tmp_path / "out"
        path.write_bytes(row.data)
        place = f"{server.url}/{number}" if "URL" in reader else path
        options = OPTIONS[form] | row.options
        error = check_error(row, place, READERS[reader], form, out, **options)
        assert error.record is not None or reader != "scan", row.what
        assert not out.exists()


@pytest.mark.parametrize("form", SCANS)
def test_damaged_records_are_found_by_verify_and_left_out_on_request(
    tmp_path: Path, form: str
) -> None:
    for number, row in enumerate(SHARDS[form]()):
        path, options = tmp_path / f"{number}", OPTIONS[form] | row.options
        path.write_bytes(row.data)
        assert not verify(path, root=tmp_path, container=form, **options).ok, row.what
        bad: list[DataCorruptionError] = []
        try:
            others = numbers(path, form, on_bad=bad.append, **options)
        except DataCorruptionError:
            others = None
        assert others == row.beside, row.what
        assert tuple(error.record for error in bad) == row.bad, row.what


WHOLE = {"tfrecord": of_records(*RECORDS), "tar": of_members()}
FRAMES = {0: 0, 19: 1, 35: 2}
"""The number of records before each byte where a frame of the TFRecord file begins."""


@pytest.mark.parametrize(
    ("form", "step", "index_step"),
    [("tfrecord", 1, 1), ("tar", 8, 64), pytest.param("tar", 1, 64, marks=pytest.mark.long)],
)
def test_a03_b12_b13_shard_cut_at_every_byte_is_found(
    tmp_path: Path, form: str, step: int, index_step: int
) -> None:
    """By scan, index and reader; only by the index if the cut is between records or members."""
    whole, scan, options = WHOLE[form], SCANS[form], OPTIONS[form]
    path, again = tmp_path / f"a.{form}", tmp_path / "y.index"
    path.write_bytes(whole)
    records = contents(scan(path, **options))
    index = build_index(path, tmp_path / "x.index", **options)
    reader = Reader(index)
    for size in range(0, len(whole), step):
        path.write_bytes(whole[:size])
        if size % index_step == 0:
            with pytest.raises(StaleIndexError, match="the file has changed since"):
                open_index(index.path)
            with pytest.raises(StaleIndexError):
                reader.read([0])
        with no_hang(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                found = contents(scan(path, **options))
            except TruncatedShardError as error:
                check_cut(error, path, size)
                if size % index_step == 0:
                    with pytest.raises(TruncatedShardError):
                        build_index(path, again, **options)
                continue
            if found and size % index_step == 0:
                assert len(build_index(path, again, **options)) == len(found)
        if form == "tfrecord":
            assert found == records[: FRAMES[size]]
            continue
        assert {warning.category for warning in warned} == {ShardWarning}
        if size >= len(whole) - 1024:  # the last member's padding belongs to it
            assert found == records
        else:
            assert found in (records[:1], [("1", {"txt": b"one"})]) or size == 0


def check_cut(error: TruncatedShardError, path: Path, size: int) -> None:
    """Check the error of a shard that was cut to `size` bytes."""
    assert isinstance(error, EOFError)
    assert error.path == str(path)
    assert error.advice
    assert f"byte offset: {error.offset}" in str(error)
    if path.suffix == ".tfrecord":
        start = max(offset for offset in FRAMES if offset < size)
        place = error.offset, error.record, error.found
        assert place == (start, FRAMES[start], f"{size - start} bytes")


@pytest.mark.parametrize(
    ("make", "field"), [(tfrecords, "image"), (tars, "png")], ids=["tfrecord", "tar"]
)
def test_flipped_field_bit_is_found(tmp_path: Path, make: Any, field: str) -> None:
    """By reading, with its place and its field; and by verify, with the record's number."""
    shards = make(tmp_path, shards=2)
    index = build_index(shards, tmp_path / "x.index")
    with Reader(index) as reader:
        for number, offset in enumerate(index.table(field)["offset"][10:].tolist()):
            flip(shards[1], offset + number, number % 8)
            reader.read(range(10 + number))
            with pytest.raises(DataCorruptionError, match="corrupted bytes") as caught:
                reader.read(range(20))
            error, message = caught.value, str(caught.value)
            assert (error.path, error.offset, error.record) == (str(shards[1]), offset, number)
            assert f"field '{field}' at byte {offset} of record {10 + number} " in message
            assert message.count("byte ") == 2, "the place of other fields is in the message too"
            assert "what to do: restore the shard" in message
            assert pickle.loads(pickle.dumps(error)).offset == offset
            (bad,) = verify(index).findings
            assert (bad.shard, bad.record) == (shards[1].name, number)
            flip(shards[1], offset + number, number % 8)
    assert verify(index).ok


def test_flipped_label_bit_is_found_by_verify(tmp_path: Path) -> None:
    """A tar has no checksum of its members, and the index keeps only the label of this member."""
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls", fields=["png"])
    assert verify(index).ok
    shard = tmp_path / index.shard_paths[1]
    flip(shard, shard.read_bytes().index(b".cls") // 512 * 512 + 512)
    assert "the shard has changed" in verify(index).findings[0].problem
    assert [(bad.shard, bad.record) for bad in verify(index).findings] == [(shard.name, -1)]


def test_scattered_members_are_indexed_verified_and_read(tmp_path: Path) -> None:
    archive(
        tmp_path / "a.tar",
        *(member(b"%d.jpg" % n, b"image %d" % n) for n in range(9)),
        *(member(b"%d.cls" % n, b"%d" % (n % 3)) for n in range(9)),
    )
    with pytest.raises(DataCorruptionError, match="join=True"):
        build_index(tmp_path / "a.tar", tmp_path / "x.index", label="cls")
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index", label="cls", join=True)
    assert index.labels.tolist() == [n % 3 for n in range(9)]
    with Reader(index) as reader:
        assert reader.read([5, 2])["jpg"] == [b"image 5", b"image 2"]
    assert verify(index).ok
    assert verify(tmp_path / "a.tar", root=tmp_path, join=True).ok
    flip(tmp_path / "a.tar", int(index.table("jpg")["offset"][4]))
    (bad,) = verify(index).findings
    assert bad.record == 4
    without = build_index(
        tmp_path / "a.tar",
        tmp_path / "x.index",
        label="cls",
        join=True,
        exclude=[bad],
    )
    assert len(without) == 8


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an index and of its shard."""
    folder = tmp_path_factory.mktemp("whole")
    names = [f"class {n}" for n in range(7)]
    shards = tars(folder, shards=1)
    build_index(shards, folder / "x.index", label="cls", classes=names, digest=True)
    return folder


def index_error(place: str, kinds: type[Exception] | tuple[type[Exception], ...], word: str) -> Any:
    """Return the error of a damaged index on a disk or at a URL, which names the index."""
    with pytest.raises(kinds) as caught:
        PKBatchSampler(open_index(place).class_order, p=2, k=2, seed=0)
    assert word in str(caught.value)
    assert place in str(caught.value)
    return caught.value


@pytest.mark.parametrize("what", INDEXES)
def test_index_of_wrong_values_is_refused(tmp_path: Path, index: Path, what: str) -> None:
    """The checksums are right, as an attacker would have them.

    Ids beyond the records would give an error of numpy in the middle of a training.
    """
    change, word = INDEXES[what]
    shutil.copytree(index, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "x.index")
    index_error(str(tmp_path / "x.index"), IndexFormatError, word)


@pytest.mark.parametrize("what", mark_long(INDEXES, but_every=4))
def test_index_of_wrong_values_at_a_url_is_refused(
    tmp_path: Path, index: Path, server: RangeServer, what: str
) -> None:
    change, word = INDEXES[what]
    shutil.copytree(index, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "x.index")
    index_error(f"{server.url}/x.index", IndexFormatError, word)


FILES = {**CUTS, "flipped": lambda data: flipped(data, len(data) - 1), "missing": None}
"""What is left of a file."""


@pytest.mark.parametrize("how", FILES)
def test_fault_33_index_with_one_damaged_file_is_refused(
    tmp_path: Path, index: Path, server: RangeServer, how: str
) -> None:
    shutil.copytree(index, tmp_path, dirs_exist_ok=True)
    folder, damage = tmp_path / "x.index", FILES[how]
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        data = file.read_bytes()
        if damage is None:
            file.unlink()
            for place in (str(folder), f"{server.url}/x.index"):
                index_error(place, (IndexFormatError, FileNotFoundError), "")
        else:
            file.write_bytes(damage(data))
            index_error(f"{server.url}/x.index", IndexFormatError, "")
            error = index_error(str(folder), IndexFormatError, "")
            if how == "flipped" and file.suffix == ".npy":
                assert f"the bytes of {file.name} have changed" in str(error)
                assert (error.path, error.advice) == (str(file), REBUILD)
        file.write_bytes(data)
