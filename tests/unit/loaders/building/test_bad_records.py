"""Bad records: listed by verify, and left out of an index."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.shards import flip, numbered, tars, tfrecords, write_tfrecord

from twinfeed.loaders import (
    DataCorruptionError,
    Reader,
    ShardWarning,
    build_index,
    verify,
)
from twinfeed.loaders.building.bad_records import read_bad_records
from twinfeed.loaders.formats import tar, tfrecord


def test_bad_records_are_listed_and_excluded(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    clean = build_index(shards, tmp_path / "clean.index")
    where = int(clean.table("image")["offset"][13])
    flip(shards[1], where)
    with pytest.raises(DataCorruptionError, match="corrupted data"):
        build_index(shards, tmp_path / "x.index")
    report = verify(shards, root=tmp_path, bad_list=tmp_path / "bad.jsonl")
    assert [(bad.shard, bad.record) for bad in report.findings] == [(shards[1].name, 3)]
    index = build_index(shards, tmp_path / "x.index", exclude=tmp_path / "bad.jsonl")
    assert len(index) == 19
    assert index.options.left_out == 1
    with (tmp_path / "bad.jsonl").open("a") as listed:
        listed.write(" \n\n")
    assert read_bad_records(tmp_path / "bad.jsonl") == report.findings
    with Reader(index) as reader:
        images = reader.read(range(19))["image"]
    want = [sample["image"] for sample in numbered(0, 20)]
    assert images == want[:13] + want[14:]
    assert verify(index).ok


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_count_records_that_are_left_out(tmp_path: Path, skips: bool, seed: int) -> None:
    """Else a key names another record once one is left out, and `exclude=` takes a good one."""
    rng = np.random.default_rng(seed)
    shards, kept, exclude = [], [], []
    for shard in range(6):
        rows: list[dict[str, Any]] = []
        keep = rng.random(9) < (0, 0.2, 0.5, 1)[rng.integers(4)]
        keep[0] |= shard == 3  # the index has a record
        for number in range(9):
            rows.append({"x": b"%d %d" % (shard, number), "label": number % 2})
            if keep[number]:
                kept.append((f"{shard}.tfrecord", number))
            elif skips and rng.random() < 0.5:
                del rows[-1]["label"]
            else:
                exclude.append((f"{shard}.tfrecord", number))
        shards.append(write_tfrecord(tmp_path / f"{shard}.tfrecord", rows))
    options: Any = {"label": "label", "missing": "skip"} if skips else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardWarning)  # shards without records
        index = build_index(shards, tmp_path / "x.index", exclude=exclude, **options)
    assert [index.location(record) for record in range(len(index))] == kept
    assert index.keys() == ["{}#{}".format(*where) for where in kept]
    with Reader(index) as reader:
        values = reader.read(range(len(index)), ["x"])["x"]
    assert values == [f"{shard[0]} {number}".encode() for shard, number in kept]


@pytest.mark.parametrize("place", [0, 4, 9])
@pytest.mark.parametrize("how", ["header", "cut"])
@pytest.mark.parametrize("container", ["tfrecord", "tar"])
def test_rest_of_broken_shard_is_listed_and_excluded(
    tmp_path: Path, container: str, how: str, place: int
) -> None:
    """Listed by verify, of the shards; all is well with the index of the rest."""
    shards = (tfrecords if container == "tfrecord" else tars)(tmp_path, shards=2)
    scan = tfrecord.scan if container == "tfrecord" else tar.scan
    offset = [record.offset for record in scan(shards[1])][place]
    if how == "header":
        flip(shards[1], offset + 2)
    else:
        os.truncate(shards[1], offset + 15)
    # A tar's last sample before a header is known to be whole only once that header is read.
    first = max(place - 1, 0) if container == "tar" else place
    listed = tmp_path / "bad.jsonl"
    (bad,) = verify(shards, root=tmp_path, bad_list=listed).findings
    assert (bad.shard, bad.record, bad.rest) == (shards[1].name, first, True)
    with pytest.raises(DataCorruptionError, match=r"what to do: .* --bad-list FILE, then"):
        build_index(shards, tmp_path / "x.index", exclude=[(bad.shard, bad.record)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardWarning)  # of a shard without records
        index = build_index(shards, tmp_path / "x.index", exclude=listed)
    assert len(index) == 10 + first
    assert index.options.broken == 1
    with Reader(index) as reader:
        reader.read(range(len(index)))
    assert verify(index).ok
    if first > 0:  # another break, before that break
        flip(shards[1], 2)
        assert [bad.record for bad in verify(index).findings] == [-1]


@pytest.mark.parametrize(
    ("make", "damage", "left_out"),
    [
        (tfrecords, lambda shard: os.truncate(shard, shard.stat().st_size // 2), r"\d record"),
        (tars, lambda shard: os.truncate(shard, shard.stat().st_size // 2), r"\d record"),
        (tfrecords, lambda shard: flip(shard, shard.stat().st_size - 9), "1 record "),
    ],
)
def test_list_of_a_shard_that_was_restored_warns(
    tmp_path: Path, make: Any, damage: Any, left_out: str
) -> None:
    """It leaves out good records."""
    (shard,), listed = make(tmp_path, shards=1), tmp_path / "bad.jsonl"
    whole = shard.read_bytes()
    damage(shard)
    (bad,) = verify([shard], root=tmp_path, bad_list=listed).findings
    shard.write_bytes(whole)
    problem = rf"^{left_out}.*can be read again \(first: {bad.record}\): make the list again"
    with pytest.warns(ShardWarning, match=problem):
        index = build_index([shard], tmp_path / "x.index", exclude=listed)
    assert len(index) == (bad.record if bad.rest else 9)


def test_bad_loose_file_is_excluded(tmp_path: Path) -> None:
    folder = tmp_path / "images" / "c"
    folder.mkdir(parents=True)
    for n in range(5):
        (folder / f"{n}.png").write_bytes(b"12345")
    index, listed = build_index(tmp_path / "images", tmp_path / "x.index"), tmp_path / "bad.jsonl"
    (folder / "3.png").write_bytes(b"54321")
    verify(index, bad_list=listed)
    index = build_index(tmp_path / "images", index.path, exclude=listed)
    assert index.keys(range(4)) == ["c/0", "c/1", "c/2", "c/4"]
    assert verify(index).ok
