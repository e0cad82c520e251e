"""Overlap: every equal record by brute force, nothing false, and what cannot be read is named."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forging import forged
from support.inside import main
from support.servers import RangeServer
from support.shards import flip

from twinfeed import ExactOnceBatchSampler, SubsetSampler, build_index, open_index, pack, split
from twinfeed.loaders import FromFolder, Index, Overlap, overlap
from twinfeed.loaders.reading.reader import Reader

WORDS = [b"", b"a", b"b", b"aa", b"ab", b"ba", None]


def packed(folder: Path, words: Sequence[bytes | None], **options: Any) -> Index:
    """Pack a record for each word, by its number; None is a record without the field."""
    samples = [{"n": n} if word is None else {"n": n, "x": word} for n, word in enumerate(words)]
    return pack(samples, folder, **options)["data"]


def folders(folder: Path, files: dict[str, bytes]) -> None:
    """Write files by their names."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def by_brute_force(train: Sequence[Any], words: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return (first equal training record, record, number of equal training records)."""
    return [
        (train.index(word), n, train.count(word))
        for n, word in enumerate(words)
        if word and word in train
    ]


def rows(found: Overlap) -> list[tuple[int, int, int]]:
    return [(a, b, n) for (a, b), n in zip(found.records.tolist(), found.counts, strict=True)]


@pytest.mark.filterwarnings("ignore:fields that some")
@settings(deadline=None, max_examples=15)
@given(st.lists(st.sampled_from(WORDS), min_size=1), st.lists(st.sampled_from(WORDS), min_size=1))
def test_overlap_is_that_of_brute_force(
    tmp_path_factory: pytest.TempPathFactory, train: list[bytes | None], words: list[bytes | None]
) -> None:
    """Also in blocks of the CRCs, of the parts of a split, and of a single index."""
    train, words = [*train, b"first"], [*words, b"last"]  # so that each has the field
    folder = tmp_path_factory.mktemp("overlap")
    a, b = packed(folder / "a", train), packed(folder / "b", words, shards=2)
    expected = by_brute_force(train, words)
    for max_keys in (1 << 22, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("twinfeed.loaders.tools.overlap._MAX_KEYS", max_keys)
            found = overlap(a, b, field="x")
        assert rows(found) == expected
        assert found.ok == (not expected)
        kept = {*range(len(words))} - {record for _, record, _ in expected}
        assert found.records_to_keep.tolist() == sorted(kept)
    doubles = overlap(a, field="x")
    assert rows(doubles) == [
        (train.index(word), n, train.count(word) - 1)
        for n, word in enumerate(train)
        if word and train.index(word) < n
    ]
    ids = [*range(0, len(train), 2)], [*range(1, len(train), 2)]
    parts = overlap(a, field="x", records=ids)
    odd, even = ([train[n] for n in part] for part in ids)
    assert rows(parts) == [
        (ids[0][one], ids[1][other], n) for one, other, n in by_brute_force(odd, even)
    ]


def test_containers_are_compared_by_bytes(tmp_path: Path) -> None:
    """A tar, a TFRecord and a folder; the fields have different names."""
    draw = np.random.default_rng(0)
    images = [b"\xff\xd8" + draw.bytes(100) for _ in range(6)]
    for n, image in enumerate(images):
        path = tmp_path / "images" / str(n % 2) / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    loose = build_index(tmp_path / "images", tmp_path / "i.index", label=FromFolder())
    tar = pack([{"jpg": i} for i in images[2:]], tmp_path / "tar", container="tar")["data"]
    example = pack([{"image/encoded": i} for i in images[:3]], tmp_path / "tf")["data"]
    assert len(overlap(tar, example).records) == 1
    assert len(overlap(loose, tar, field=("image", "jpg")).records) == 4
    assert len(overlap(example, loose).records) == 3


def test_forged_crc_is_no_pair(tmp_path: Path) -> None:
    """Three records of one length and one CRC-32C, of which two are equal."""
    one = b"buy everything!!"
    other = forged(b"sell everything!", _crc(tmp_path, one))
    found = overlap(packed(tmp_path / "a", [one]), packed(tmp_path / "b", [other, one]), field="x")
    assert rows(found) == [(0, 1, 1)]
    assert not len(overlap(packed(tmp_path / "c", [one, other]), field="x").records)


def _crc(folder: Path, data: bytes) -> int:
    return int(packed(folder / "crc", [data]).table("x")["crc"][0])


def test_equal_images_on_both_sides_are_a_row_for_each_evaluation_record(tmp_path: Path) -> None:
    black = [bytes(10)] * 20_000
    a, b = packed(tmp_path / "a", black), packed(tmp_path / "b", black)
    found = overlap(a, b, field="x")
    assert (found.records[:, 0] == 0).all()
    assert (found.counts == 20_000).all()
    assert len(str(found)) < 2000


def test_other_labels_are_a_finding_of_their_own(tmp_path: Path) -> None:
    for side, names in {"a": "cat/1 dog/2 dog/3", "b": "dog/4 dog/5 cat/6"}.items():
        for name in names.split():
            path = tmp_path / side / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"image %d" % (int(name[-1]) % 3))
    a, b = (build_index(tmp_path / n, tmp_path / f"{n}.index", label=FromFolder()) for n in "ab")
    found = overlap(a, b)  # by name: 1 and 4, 2 and 5, 3 and 6
    assert len(found.records) == 3
    assert [b.describe(found.records[row, 1])[:14] for row in found.other_labels] == [
        "record 0 (b/ca",
        "record 1 (b/do",
    ]
    assert found.classes == {"dog": 2, "cat": 1}
    assert len(found.findings) == 2
    assert "of these, with another label there: 2\n" in str(found)


def test_what_cannot_be_read_is_counted_and_named(tmp_path: Path) -> None:
    words = [b"record %d" % n for n in range(8)]
    a = packed(tmp_path / "a", words)
    b = packed(tmp_path / "b", words, shards=4, container="tar")
    Path(b.root, b.shard_paths[1]).unlink()
    flip(Path(b.root, b.shard_paths[2]), int(b.table("x")["offset"][4]))
    found = overlap(a, b, field="x")
    assert [(side, record) for side, record, _ in found.unread] == [
        ("evaluation", 2),
        ("evaluation", 3),
        ("evaluation", 4),
    ]
    assert found.records[:, 1].tolist() == [0, 1, 5, 6, 7]
    assert "not compared, since it could not be read: 3 records\n" in str(found)
    assert str(b.shard_paths[1]) in found.unread[0][2]
    only_unread = overlap(a, b, field="x", records=([0, 1, 2, 3], [2, 3]))
    assert not only_unread.ok
    assert not len(only_unread.records)


def test_shards_that_changed_since_the_index_are_named(tmp_path: Path) -> None:
    """The index of a rebuild that is under way fits its own shards; another one is refused."""
    words = [b"record %d" % n for n in range(4)]
    a, b = packed(tmp_path / "a", words), packed(tmp_path / "b", words)
    shutil.rmtree(tmp_path / "b")  # b, which is open, is the old one
    packed(tmp_path / "b", [*words, b"more"])
    found = overlap(a, b, field="x")
    assert len(found.unread) == 4
    assert "changed" in found.unread[0][2]
    assert len(overlap(a, open_index(b.path), field="x").records) == 4


def test_only_candidates_are_requested(tmp_path: Path, server: RangeServer) -> None:
    draw = np.random.default_rng(0)
    words = [draw.bytes(1000) for _ in range(100)]
    packed(tmp_path, words)
    here = packed(tmp_path / "here", [words[3], b"none", words[70]])
    there = open_index(tmp_path / "data.index", root=server.url)
    server.clear()
    assert rows(overlap(there, here, field="x")) == [(3, 0, 1), (70, 2, 1)]
    assert server.asked == {"GET": 2}


def test_groups_are_found_without_reading(tmp_path: Path) -> None:
    def side(name: str, patients: list[int]) -> Index:
        samples = [
            {"x": b"%s %d" % (name.encode(), n), "patient": p} for n, p in enumerate(patients)
        ]
        index = pack(samples, tmp_path / name)["data"]
        Path(index.root, index.shard_paths[0]).unlink()
        return index

    a, b = side("a", [7, 7, -1, 9]), side("b", [8, 7, -1, 9, 9])
    found = overlap(a, b, group="patient")
    assert rows(found) == [(0, 1, 2), (3, 3, 1), (3, 4, 1)]
    assert found.records_to_keep.tolist() == [0, 2]
    by_patient = split(5, fraction=0.4, seed=0, groups=b.columns["patient"])
    assert overlap(b, group="patient", records=by_patient).ok


def test_records_to_keep_are_those_of_samplers(tmp_path: Path) -> None:
    a, b = packed(tmp_path / "a", [b"a", b"b"]), packed(tmp_path / "b", [b"b", b"c", b"d", b"a"])
    keep = overlap(a, b, field="x").records_to_keep
    assert list(ExactOnceBatchSampler(b, batch_size=8, records=keep)) == [[1, 2]]
    assert list(SubsetSampler(keep, of=b)) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"field": "z"}, ValueError, "the fields of bytes, ['x', 'y'], got 'z'"),
        ({"field": "list"}, ValueError, "the fields of bytes, ['x', 'y'], got 'list'"),
        ({}, ValueError, "field= must name one of the fields of bytes, ['x', 'y']"),
        ({"field": ("x", "y", "x")}, ValueError, "must be a name, or two"),
        ({"field": ""}, ValueError, "['x', 'y'], got ''"),
        ({"group": "z"}, ValueError, "must be a column of integers, got 'z'"),
        ({"group": "score"}, ValueError, "must be a column of integers, got 'score'"),
        ({"group": "n", "field": "x"}, ValueError, "takes the place of field="),
        ({"field": "x", "records": [[0]]}, ValueError, "must be the ids of the training and"),
        ({"field": "x", "records": [[0], [9]]}, IndexError, "records must lie in [0, 2), got 9"),
        ({"field": "x", "records": [[0], [0.5]]}, TypeError, "records must be integers"),
    ],
)
def test_wrong_argument_is_refused(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    samples = [{"x": b"1", "y": b"2", "n": n, "score": 0.5, "list": [1] * n} for n in (1, 2)]
    index = pack(samples, tmp_path)["data"]
    with pytest.raises(error) as refused:
        overlap(index, index, **arguments)
    assert message in str(refused.value)
    with pytest.raises(TypeError, match="open_index"):
        overlap(index.path, index, field="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", [([], [0, 1]), ([0, 1], []), ([], [])])
def test_empty_part_has_no_overlap(tmp_path: Path, empty: Any) -> None:
    for name in "ab":
        folders(tmp_path / name, {"cat/1.png": b"1", "dog/2.png": b"2"})
    a, b = (build_index(tmp_path / n, tmp_path / f"{n}.index", label=FromFolder()) for n in "ab")
    for options in ({}, {"group": "label"}):
        found = overlap(a, b, records=empty, **options)
        assert found.ok
        assert found.records_to_keep.tolist() == empty[1]


def test_names_and_numbers_of_classes_are_not_compared(tmp_path: Path) -> None:
    """Labels of one kind only have a meaning in common: "no overlap" would be false."""
    folders(tmp_path / "a", {"cat/1.png": b"1", "dog/2.png": b"2"})
    names = build_index(tmp_path / "a", tmp_path / "a.index", label=FromFolder())
    numbers = pack([{"x": b"1", "label": 0}, {"x": b"2", "label": 1}], tmp_path / "b")["data"]
    for sides in ((names, numbers), (numbers, names)):
        with pytest.raises(ValueError, match="names of classes, those of the other are numbers"):
            overlap(*sides, group="label")


def test_findings_hold_no_terminal_controls(tmp_path: Path) -> None:
    """Names of files and classes cannot write lines of their own, nor colours."""
    folders(tmp_path / "a", {"cat/1.png": b"1"})
    folders(tmp_path / "b", {"\x1b[31mdog\nno overlap/1.png": b"1"})
    a, b = (build_index(tmp_path / n, tmp_path / f"{n}.index", label=FromFolder()) for n in "ab")
    lines = str(overlap(a, b)).split("\n")
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)


def test_large_records_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their bytes: 256 records of 40 MB would be 10 GB."""
    a = packed(tmp_path / "a", [bytes(10)] * 20 + [bytes(50)] * 2 + [bytes(10)])
    read, sizes = Reader.read_values, []

    def counting(reader: Reader, ids: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append(int(a.table("x")[ids]["length"].sum()))
        return read(reader, ids, *arguments, **options)

    monkeypatch.setattr(Reader, "read_values", counting)
    monkeypatch.setattr("twinfeed.loaders.tools.overlap._BATCH_BYTES", 40)
    assert len(overlap(a, field="x").records) == 21
    assert max(sizes) < 40 + 50
    assert len(sizes) >= 8


def test_command_prints_the_first_pairs_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tmp_path / "a", [b"a", b"b"])
    packed(tmp_path / "b", [b"c", b"b"], container="tar")
    packed(tmp_path / "c", [b"e"])
    a, b, c = (str(tmp_path / name / "data.index") for name in "abc")
    assert main(["overlap", a, b, "--field", "x", "-q"]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [
        "an equal x in training: 1 of 2 evaluation records",
        "  record 1 (data-00000-of-00001.tar, number 1, key '000000001') = "
        "record 1 (data-00000-of-00001.tfrecord, number 1)",
    ]
    assert main(["overlap", a, c, "--field", "x=x", "-q"]) == 0
    assert capsys.readouterr().out.startswith("no overlap\n")
    assert main(["overlap", a, "--field", "x", "-q"]) == 0
    assert main(["overlap", a, c, "--group", "n", "-q"]) == 1
    assert main(["overlap", a, b, "--field", "z"]) == 2
