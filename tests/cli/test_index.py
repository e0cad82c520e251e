"""`twinfeed index`: labels, excluded records, and options of reading."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.formats import archive, member
from support.inside import main, tfrecord
from support.shards import flip, tars, tfrecords, write_tar, write_tfrecord

from twinfeed.loaders import build_index, open_index


def test_index_takes_labels_of_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tars(tmp_path)
    pattern, out = str(tmp_path / "d-{000000..000002}.tar"), str(tmp_path / "x.index")
    table = tmp_path / "labels.csv"
    table.write_text("label,key\n" + "".join(f"t{n % 2},k{n}\n" for n in range(30)))
    (tmp_path / "classes.txt").write_text("name2\nname1\nname0\n")
    for options, classes in [
        (["--label", "cls"], ()),
        (["--label-json", "json:object.name"], ("name0", "name1", "name2")),
        (["--label-json", "json:object.name", "--classes", str(tmp_path / "classes.txt")],
         ("name2", "name1", "name0")),
        (["--label-table", str(table)], ("t0", "t1")),
        (["--label", "txt", "--background", "none"], ("none",)),
        (["--label", "cls", "--field", "image=jpg;png", "--jobs", "2"], ()),
    ]:  # fmt: skip
        assert main(["index", pattern, "--out", out, *options, "-q"]) == 0, options
        assert open_index(out).classes == classes
    assert list(open_index(out).fields) == ["image"]
    assert "30 records, 3 shards" in capsys.readouterr().out


def test_index_takes_folders_examples_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [("cats/kittens/1", {"txt": b"a"}), ("dogs/puppies/2", {"txt": b"b"})]
    tar = str(write_tar(tmp_path / "a.tar", samples))
    rows = [{"target": text} for text in ("2", "10")]
    records = str(write_tfrecord(tmp_path / "a.tfrecord", rows))
    out = str(tmp_path / "x.index")
    for shard, options, classes in [
        (tar, ["--label-folder"], ("cats", "dogs")),
        (tar, ["--label-folder-level", "-1"], ("kittens", "puppies")),
        (tar, ["--label-folder-level", "1"], ("kittens", "puppies")),
        (records, ["--raw", "--label-example", "target"], ()),
        (records, ["--label", "target", "--label-names"], ("10", "2")),
    ]:
        assert main(["index", shard, "--out", out, *options, "-q"]) == 0, options
        assert open_index(out).classes == classes
    for wrong, message in [
        (["--label-folder-level", "x"], "invalid"),
        (["--label-names", "--classes", out], "not allowed with argument"),
        (["--label-folder", "--label-example", "a"], "not allowed with argument"),
    ]:
        with pytest.raises(SystemExit):
            main(["index", tar, "--out", out, *wrong])
        assert message in capsys.readouterr().err


def test_help_says_what_a_table_of_labels_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["index", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--label-table TABLE a CSV .* header key,label; see", text)


def test_index_excludes_rest_of_broken_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [str(shard) for shard in tfrecords(tmp_path, shards=2)]
    out, listed = f"{tmp_path}/x.index", f"{tmp_path}/bad.jsonl"
    offset = [record.offset for record in tfrecord.scan(shards[1])][7]
    flip(Path(shards[1]), offset)
    assert main(["index", *shards, "--out", out, "-q"]) == 1
    assert "twinfeed index --exclude FILE" in capsys.readouterr().err
    verify = ["verify", *shards, "--root", str(tmp_path), "-q"]
    assert main(verify) == 1
    lines = capsys.readouterr().out.splitlines()
    name = Path(shards[1]).name
    assert lines[0] == f"{name}, record 7 and all after it: corrupted length at offset {offset}"
    assert lines[2].endswith("SHARDS --bad-list FILE, and index them again with --exclude FILE")
    assert main([*verify, "--bad-list", listed]) == 1
    assert capsys.readouterr().out.splitlines()[2].endswith(f" with --exclude {listed}")
    assert main(["index", *shards, "--out", out, "--exclude", listed, "-q"]) == 0
    line = "17 records, 2 shards, 1 excluded record, 1 incomplete shard"
    assert line in capsys.readouterr().out
    assert main(["verify", out, "-q"]) == 0
    assert main(["info", out]) == 0
    assert "left_out=1, broken=1\n" in capsys.readouterr().out


def test_exclude_follows_bad_list_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list of shards without an index names them by full paths, that of a root below it."""
    (tmp_path / "w").mkdir()
    shards = tfrecords(tmp_path / "w")
    flip(shards[1], 20)
    monkeypatch.chdir(tmp_path)
    words = ["w/d-*.tfrecord", "-q"]
    assert main(["verify", *words, "--bad-list", "bad"]) == 1
    assert capsys.readouterr().out.startswith(f"{shards[1]}, record 0: corrupted")
    for out in ("w/x.index", "x.index"):
        assert main(["index", *words, "--out", out, "--exclude", "bad"]) == 0
        assert "29 records, 3 shards, 1 excluded" in capsys.readouterr().out
    assert main(["verify", *words, "--root", "w", "--bad-list", "bad"]) == 1
    assert main(["index", *words, "--out", "x.index", "--root", "w", "--exclude", "bad"]) == 0
    (tmp_path / "bad").write_text('{"shard": "/elsewhere/a.tfrecord", "record": 0}\n')
    assert main(["index", *words, "--out", "w/x.index", "--exclude", "bad"]) == 2
    assert "not indexed (1: ['/elsewhere/a.tfrecord'])" in capsys.readouterr().err


def test_index_excludes_records_of_cut_shard_by_bad_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index says what has changed, the shards what is left."""
    monkeypatch.chdir(tmp_path)
    tfrecords(tmp_path, shards=1)
    build_index("d-*.tfrecord", "x.index")
    (shard,) = tmp_path.glob("d-*")
    os.truncate(shard, shard.stat().st_size - 5)
    assert main(["verify", "x.index", "-q"]) == 1
    line = capsys.readouterr().out.splitlines()[2]
    assert "twinfeed verify SHARDS --bad-list FILE, and index them again with --exclude" in line
    assert main(["index", "d-*.tfrecord", "--out", "x.index", "-q"]) == 1
    assert "twinfeed verify SHARDS --bad-list FILE, then" in capsys.readouterr().err
    assert main(["verify", "d-*.tfrecord", "--bad-list", "bad", "-q"]) == 1
    assert main(["index", "d-*.tfrecord", "--out", "x.index", "--exclude", "bad", "-q"]) == 0
    assert main(["verify", "x.index", "-q"]) == 0


def test_index_and_verify_take_lists_and_long_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tfrecord(tmp_path / "a.tfrecord", [{"words": b"to" * 600}])
    shard, out = str(tmp_path / "a.tfrecord"), str(tmp_path / "x.index")
    assert main(["index", shard, "--out", out, "--list", "words", "-q"]) == 0
    assert open_index(out).fields["words"].kind == "bytes_list"
    assert main(["index", shard, "--out", out, "--max-record-bytes", "1k", "-q"]) == 1
    error = capsys.readouterr().err
    assert "raise --max-record-bytes" in error
    verify = ["verify", shard, "--root", str(tmp_path), "-q", "--max-record-bytes"]
    assert main([*verify, "2k"]) == 0
    assert main([*verify, "1k"]) == 1


def test_info_names_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = str(write_tfrecord(tmp_path / "a.tfrecord", [{"box": 1, "size": [2, 3], "x": b"."}]))
    out = str(tmp_path / "a.index")
    for options, columns in (
        ([], ["box: column, int64[1]", "size: column, int64[1, 2]"]),
        (["--list", "box"], ["size: column, int64[1, 2]"]),
        (["--list", "box", "--list", "size"], []),
    ):
        assert main(["index", shard, "--out", out, *options, "-q"]) == 0
        assert main(["info", out]) == 0
        assert [s for s in capsys.readouterr().out.splitlines() if "column," in s] == columns


def test_index_and_verify_join_scattered_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = [member(b"a.jpg", b"1"), member(b"b.jpg", b"2"), member(b"a.cls", b"x")]
    shard, out = str(archive(tmp_path / "a.tar", *members)), str(tmp_path / "x.index")
    assert main(["index", shard, "--out", out, "-q"]) == 1
    assert "put the members together with --join (in Python join=True)\n" in capsys.readouterr().err
    listed = tmp_path / "bad.jsonl"
    verify = ["verify", shard, "--root", str(tmp_path), "-q"]
    assert main([*verify, "--bad-list", str(listed)]) == 1
    assert capsys.readouterr().out.splitlines() == [  # and no word of leaving out half a sample
        "a.tar: key 'a' occurs again, first at offset 0; write the archive again, sorted by name, "
        "or put the members together with --join (in Python join=True)",
        "3 records in 1 shard: 1 bad",
    ]
    assert listed.read_text() == ""
    assert main([*verify, "--join"]) == 0
    assert main(["index", shard, "--out", out, "--join", "-q"]) == 0
    capsys.readouterr()
    assert main(["info", out]) == 0
    assert "options: container='tar', join=True\n" in capsys.readouterr().out
    assert main(["verify", out, "-q"]) == 0
