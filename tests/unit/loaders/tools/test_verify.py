"""Verifying: what an index leaves out hides nothing else, and an executor is sent little."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.damage import with_array
from support.forging import forged
from support.formats import archive, member
from support.shards import flip, tars, tfrecords, write_tfrecord

from twinfeed import ExactOnceBatchSampler
from twinfeed.loaders import (
    BadRecord,
    DataCorruptionError,
    DecodeImage,
    Feed,
    Index,
    IndexFormatError,
    Reader,
    Report,
    StaleIndexError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.formats import tfrecord
from twinfeed.loaders.index.manifest import file_digest


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
@pytest.mark.parametrize("leave_out", [False, True])
def test_verify_reports_changed_label_beside_excluded_records(
    tmp_path: Path, container: str, leave_out: bool
) -> None:
    shard = tmp_path / f"a.{container}"

    def write(label: int) -> None:
        """Ten records, the third of this label, and the seventh damaged if it is to be left out."""
        labels = [n if n != 3 else label for n in range(10)]
        if container == "tfrecord":
            write_tfrecord(shard, [{"image": b"i", "label": n} for n in labels])
            if leave_out:
                flip(shard, [record.offset for record in tfrecord.scan(str(shard))][7] + 20)
        else:
            members = []
            for n, value in enumerate(labels):
                members += [member(b"%d.png" % n, b"i"), member(b"%d.cls" % n, b"%d" % value)]
                members += [member(b"%d.png" % n, b"i")] if leave_out and n == 7 else []
            archive(shard, *members)

    write(3)
    fields = {"image": "image;png"}
    label = "label" if container == "tfrecord" else "cls"
    bad = verify(shard, root=tmp_path).findings
    assert [one.record for one in bad] == [7] * leave_out
    index = build_index(shard, tmp_path / "x.index", label=label, fields=fields, exclude=bad)
    assert verify(index).ok
    write(5)
    (found,) = verify(index).findings
    assert "the shard has changed" in found.problem
    write(3)
    assert verify(index).ok


def test_crcs_are_compared_by_what_promises_it_whatever_the_index_was_opened_for(
    tmp_path: Path,
) -> None:
    """An index for fast loaders compares none; a copy by `pack` would give damage a valid CRC."""
    index = pack([{"x": b"%d" % n * 40} for n in range(8)], tmp_path)["data"]
    flip(tmp_path / index.shard_paths[0], int(index.table("x")["offset"][5]) + 3)
    unchecked = open_index(index.path, checksums=False)
    assert unchecked[5]["x"] != b"5" * 40
    assert str(verify(unchecked)) == str(verify(index))
    assert [found.record for found in verify(unchecked).findings] == [5]
    with pytest.raises(DataCorruptionError, match="record 5"):
        pack(unchecked, tmp_path / "copy")


@pytest.mark.parametrize("workers", [None, 2])
def test_verify_with_executor_gives_same_report(tmp_path: Path, workers: int | None) -> None:
    shards = tars(tmp_path, shards=5)
    index = build_index(shards, tmp_path / "x.index", label="cls")
    for number in (1, 3):
        flip(shards[number], int(index.table("png")["offset"][10 * number + 4]))
    with ProcessPoolExecutor(workers) as pool:
        found = verify(index.path, executor=pool if workers else None)
    assert (found.shards, found.records) == (5, 50)
    assert [(bad.shard, bad.record) for bad in found.findings] == [
        ("d-000001.tar", 4),
        ("d-000003.tar", 4),
    ]


def test_break_of_a_shard_is_one_finding(tmp_path: Path) -> None:
    """By its index the whole shard, and by itself the first record that cannot be read."""
    (shard,) = tfrecords(tmp_path, shards=1)
    index = build_index(shard, tmp_path / "x.index")
    flip(shard, [record.offset for record in tfrecord.scan(shard)][7])
    for source, record, rest in ((index, -1, False), (shard, 7, True)):
        (bad,) = verify(source, root=tmp_path).findings
        assert (bad.record, bad.rest) == (record, rest)


class Counting(Executor):
    """Run tasks at once, and count them."""

    def __init__(self) -> None:
        self.tasks = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks += 1
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def test_verify_gives_an_executor_groups_of_shards(tmp_path: Path) -> None:
    index = build_index(tars(tmp_path, shards=120, each=1), tmp_path / "x.index")
    executor = Counting()
    assert verify(open_index(index.path), executor=executor).shards == 120
    assert executor.tasks == 60


def altered(index: Index) -> bytes:
    """Write other bytes of equal length and CRC to record 3 of a shard, and return them."""
    row = index.rows(["text"], np.array([3]))[0]
    shard = Path(index.root, index.shard_paths[int(row["file"])])
    other = forged(b"sell everything!", int(row["crc"]))
    data = bytearray(shard.read_bytes())
    data[int(row["offset"]) : int(row["offset"]) + 16] = other
    shard.write_bytes(data)
    return other


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_verify_finds_altered_bytes_of_equal_length_and_crc(tmp_path: Path, container: Any) -> None:
    samples = [{"__key__": f"k{n}", "text": b"keep everything%d" % n} for n in range(6)]
    index = pack(samples, tmp_path, container=container, shards=2)["data"]
    plain = build_index(
        [tmp_path / path for path in index.shard_paths.tolist()], tmp_path / "plain.index"
    )
    assert verify(index).ok
    other = altered(index)
    with Reader(index) as reader:  # a checksum is no signature
        assert reader.read([3], ["text"]) == {"text": [other]}
    assert verify(plain).ok
    (bad,) = verify(index).findings
    assert (bad.shard, bad.record) == (index.shard_paths[1], -1)
    assert "its SHA-256 is not that of the index" in bad.problem


def test_index_digest_covers_every_byte(tmp_path: Path) -> None:
    """To the manifest, from there to the digests of the shards, and from there to the shards."""
    shards = tars(tmp_path)
    index = build_index(shards, tmp_path / "x.index", digest=True)
    sums = index.shard_sums
    assert [one.tobytes().hex() for one in sums] == [file_digest(shard) for shard in shards]
    digest = index.digest
    (row,) = index.rows(["png"], np.array([10]))
    flip(shards[1], int(row["offset"] + row["length"]))  # the padding, which no checksum covers
    (bad,) = verify(open_index(index.path, digest=digest)).findings
    assert "its SHA-256 is not that of the index" in bad.problem
    (file,) = index.path.glob("columns-*/shardsums.npy")
    rows = np.load(file, mmap_mode="r+")
    rows[1] = np.frombuffer(hashlib.sha256(shards[1].read_bytes()).digest(), np.uint8)
    rows.flush()
    with pytest.raises(IndexFormatError, match=r"the bytes of shardsums\.npy have changed"):
        open_index(index.path, digest=digest)
    with_array(index.path, "shardsums", np.load(file))
    assert verify(open_index(index.path)).ok  # all of it was forged
    with pytest.raises(StaleIndexError, match="this is another index"):
        open_index(index.path, digest=digest)


def test_loose_files_have_no_digest(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(b"...")
    with pytest.raises(ValueError, match="digest= is for shards, not files"):
        build_index(tmp_path / "a", tmp_path / "x.index", digest=True)


def test_printed_report_has_one_line_per_finding() -> None:
    bad = BadRecord("a\n\x1b[1m.tar", 7, problem="corrupted\ndata", rest=True)
    report = Report(2, 1000, [bad] * 23)
    *findings, more, summary = str(report).split("\n")
    assert findings == [r"a\n\x1b[1m.tar, record 7 and all after it: corrupted; data"] * 20
    assert (more, summary) == ("... and 3 more", "1,000 records in 2 shards: 23 bad")
    assert not report.ok
    assert str(Report(1, 1, [])) == "1 record in 1 shard: all is well"


def images(**broken: bytes) -> list[dict[str, Any]]:
    """Eight JPEGs, and what is in the place of some of them, such as n3=b"…"."""
    from PIL import Image

    rows: list[dict[str, Any]] = []
    for n in range(8):
        noise = np.random.default_rng(n).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(noise).save(file := io.BytesIO(), "jpeg")
        data = file.getvalue()
        rows.append({"__key__": f"{n}", "image": broken.get(f"n{n}", data), "label": n % 2})
    rows[5]["image"] = rows[5]["image"][:-300]
    return rows


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_verify_lists_images_that_do_not_decode(
    tmp_path: Path, container: Any, workers: int | None
) -> None:
    """A truncated image has right checksums. Its list makes an index, its report an epoch."""
    rows, listed = images(n2=b"GIF89a, but no image", n6=b""), tmp_path / "bad.jsonl"
    index = pack(rows, tmp_path, container=container, shard_records=4)["data"]
    assert verify(index).ok
    assert not verify(index, decode=DecodeImage(strict=False)).ok
    shards = sorted(tmp_path.glob(f"*.{container}"))
    with ProcessPoolExecutor(workers) as pool:
        executor = pool if workers else None
        for source in (index, shards):
            options = {} if source is index else {"root": tmp_path}
            report = verify(source, decode=True, bad_list=listed, executor=executor, **options)
            places = [(bad.shard, bad.record) for bad in report.findings]
            assert places == [(shards[0].name, 2), (shards[1].name, 1), (shards[1].name, 2)]
            fields = {"image": "image;jpg;gif"}
            good = build_index(shards, tmp_path / "x.index", fields=fields, exclude=listed)
            assert verify(good, decode=True).ok
            assert len(good) == 5
    report = verify(index, decode=True)
    assert report.good_records is not None
    assert report.good_records.tolist() == [0, 1, 3, 4, 7]
    sampler = ExactOnceBatchSampler(8, records=report.good_records, batch_size=5)
    assert Feed(index, sampler, decode=DecodeImage())[0, 0]["id"].tolist() == [0, 1, 3, 4, 7]


def test_good_records_of_an_index_that_leaves_out_records(tmp_path: Path) -> None:
    """A bad list would not have those that are left out already."""
    shards = tfrecords(tmp_path, shards=3)
    index = build_index(shards, tmp_path / "x.index", exclude=[(shards[0].name, 2)])
    assert verify(index).good_records.tolist() == list(range(29))  # type: ignore[union-attr]
    offsets = [record.offset for record in tfrecord.scan(str(shards[1]))]
    flip(shards[0], int(index.table("image")["offset"][4]))  # record 5 of the shard
    flip(shards[1], offsets[7])  # the header, which no field covers
    shards[2].unlink()
    report = verify(index)
    assert [bad.record for bad in report.findings] == [5, -1, -1]
    assert report.good_records.tolist() == [0, 1, 2, 3, *range(5, 9)]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"x\.index leaves out records, .*: make it by"):
        verify(index, bad_list=tmp_path / "bad.jsonl")
    assert verify(shards[:1], root=tmp_path).good_records is None


def test_undecodable_loose_files_are_listed(tmp_path: Path) -> None:
    for row in images(n0=b"text"):
        folder = tmp_path / "images" / f"{row['label']}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{row['__key__']}.jpg").write_bytes(row["image"])
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    for source in (index, tmp_path / "images"):
        found = verify(source, decode=True, bad_list=tmp_path / "bad.jsonl").findings
        assert [bad.record for bad in found] == [0, 6]
    assert verify(index, decode=True).good_records.tolist() == [1, 2, 3, 4, 5, 7]  # type: ignore[union-attr]
    good = build_index(tmp_path / "images", tmp_path / "y.index", exclude=tmp_path / "bad.jsonl")
    assert len(good) == 6
    (tmp_path / "images" / "0" / "-.jpg").write_bytes(b"text!")  # now all have other numbers
    with pytest.raises(ValueError, match="which is not record 0"):
        build_index(tmp_path / "images", tmp_path / "z.index", exclude=tmp_path / "bad.jsonl")


def test_undecodable_image_does_not_explain_a_changed_shard(tmp_path: Path) -> None:
    shard = (
        pack(images(), tmp_path, container="tar")["data"].path.parent / "data-00000-of-00001.tar"
    )
    index = build_index(shard, tmp_path / "x.index", fields={"image": "jpg"}, label="cls")
    data = shard.read_bytes()
    name = data.index(b"3.cls\0")
    shard.write_bytes(data[: name + 512] + b"7" + data[name + 513 :])
    found = verify(index, decode=True).findings
    assert [bad.record for bad in found] == [5, -1]
    with pytest.raises(TypeError, match="decode must be True or a function"):
        verify(index, decode="image")  # type: ignore[arg-type]
