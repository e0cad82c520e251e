"""The command line, as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from making_shards import flip, tars, tfrecords, write_tar, write_tfrecord

from twinfeed.loaders.command_line.parser import main
from twinfeed.loaders.index import open_index
from twinfeed.loaders.index.build import build_index
from twinfeed.loaders.packing.pack import pack


def test_help_of_every_command_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ((), ("pack",), ("index",), ("verify",), ("info",), ("cat",), ("compare",)):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == 0
        assert f"  twinfeed {command[0] if command else 'pack'}" in capsys.readouterr().out


def test_pack_index_info_verify_and_cat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    images, data = tmp_path / "images", tmp_path / "data"
    for name in ("cat", "dog"):
        (images / name).mkdir(parents=True)
        for n in range(5):
            Image.new("RGB", (8, 6), (n, 0, 0)).save(images / name / f"{n}.png")
    split = ["--split", "train=0.8", "--split", "eval=2", "--seed", "1"]
    assert main(["pack", str(images), str(data), *split]) == 2
    assert "split= must be counts, or fractions that add up to 1" in capsys.readouterr().err
    split = ["--split", "train=8", "--split", "eval=2", "--seed", "1"]
    assert main(["pack", str(images), str(data), "--container", "tar", *split, "-q"]) == 0
    assert "train.index: 8 records, 1 shards, 2 classes" in capsys.readouterr().out
    train = str(data / "train.index")
    assert main(["info", train]) == 0
    out = capsys.readouterr().out
    assert "records: 8\n" in out
    assert "class names: cat, dog\n" in out
    assert main(["info", train, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class names"] == ["cat", "dog"]
    assert main(["verify", train, "-q"]) == 0
    assert capsys.readouterr().out == "8 records in 1 shards: all is well\n"
    assert main(["cat", train, "0", "-1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("record 0 (train-00000-of-00001.tar, number 0 at byte offset 512, key ")
    assert out.count("PNG image, 8 x 6, RGB") == 2
    key = open_index(train).keys([3])[0]
    assert main(["cat", train, key]) == 0
    assert capsys.readouterr().out.startswith("record 3 ")
    assert main(["pack", train, str(tmp_path / "again"), "-q", "--shard-size", "1k"]) == 0
    repacked = open_index(tmp_path / "again" / "data.index")
    assert repacked.classes == ("cat", "dog")


def test_cat_writes_the_bytes_of_a_field(tmp_path: Path) -> None:
    build_index(tars(tmp_path, shards=1), tmp_path / "x.index")
    command = [sys.executable, "-m", "twinfeed.loaders", "cat", str(tmp_path / "x.index"), "4"]
    done = subprocess.run([*command, "--field", "png"], capture_output=True, check=True)
    assert done.stdout == b"000004" * 4


def test_cat_never_sends_control_characters_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tar(
        tmp_path / "a.tar", [("k\x1b[31m", {"txt": b"a\x1b]0;title\x07b", "bin": b"\xff\x00"})]
    )
    build_index(tmp_path / "a.tar", tmp_path / "x.index")
    assert main(["cat", str(tmp_path / "x.index"), "0"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"'a\x1b]0;title\x07b'" in out
    assert "begins with ff 00" in out


def test_index_takes_its_labels_as_the_library_does(
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


def test_bad_data_ends_with_status_1_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tfrecords(tmp_path)
    out = str(tmp_path / "x.index")
    index = build_index(shards, out)
    flip(shards[1], int(index.table("image")["offset"][13]))
    assert main(["verify", out, "-q"]) == 1
    assert f"{shards[1].name}, record 3: corrupted" in capsys.readouterr().out
    assert main(["cat", out, "13"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for fact in ("twinfeed: error: corrupted bytes", shards[1].name, "record 13", "what to do"):
        assert fact in error
    pattern = str(tmp_path / "*.tfrecord")
    assert main(["index", pattern, "--out", out, "-q"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    bad = str(tmp_path / "bad.jsonl")
    options = ["--root", str(tmp_path), "--bad-list", bad, "-q", "--jobs", "2"]
    assert main(["verify", pattern, *options]) == 1
    assert main(["index", pattern, "--out", out, "--exclude", bad, "-q"]) == 0
    assert "29 records, 3 shards, 1 left out" in capsys.readouterr().out


def test_wrong_usage_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack([{"word": b"to"}], tmp_path)
    index = str(tmp_path / "data.index")
    for arguments, text in [
        (["cat", index, "1"], "ids must lie in [0, 1), not 1"),
        (["cat", index, "nobody"], "no record has the key 'nobody'"),
        (["cat", index, "0", "--field", "image"], "no field 'image'"),
        (["index", str(tmp_path / "{a,b"), "--out", index], "unbalanced braces"),
        (["verify", index, "--jobs", "0"], "--jobs must be at least 1"),
    ]:
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1
    for words in (["pack", "a", "b", "--split", "train"], ["pack", "a", "b", "--shard-size", "x"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2


def test_what_is_missing_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(tmp_path / "none.index")]) == 1
    assert "no index here" in capsys.readouterr().err
    assert main(["index", str(tmp_path / "*.tar"), "--out", str(tmp_path / "x.index")]) == 1
    assert "no shard matches" in capsys.readouterr().err
    assert main(["pack", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "no images below" in capsys.readouterr().err


def test_a_pipe_that_closes_early_is_no_error(tmp_path: Path) -> None:
    build_index(tars(tmp_path, shards=1, each=400), tmp_path / "x.index")
    numbers = " ".join(map(str, range(400)))
    command = f"{sys.executable} -m twinfeed.loaders cat {tmp_path}/x.index {numbers} | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_progress_is_shown_on_the_error_stream_unless_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tars(tmp_path)
    words = ["index", str(tmp_path / "*.tar"), "--out", str(tmp_path / "x.index")]
    assert main(words) == 0
    assert "indexing: 100%" in capsys.readouterr().err
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as where it is not installed
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_cat_shows_lists_numbers_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [{"words": [b"to", b"be"], "wide": [0.5] * 40}, {"json": b'{"a": [1, 2]}'}]
    write_tfrecord(tmp_path / "a.tfrecord", samples)
    build_index(tmp_path / "a.tfrecord", tmp_path / "x.index")
    assert main(["cat", str(tmp_path / "x.index"), "0", "1"]) == 0
    out = capsys.readouterr().out
    for line in (
        "  json: missing\n",
        "  wide: float32[40]: [0.5 0.5 0.5 ... 0.5 0.5 0.5]\n",
        "  words: 2 values: text: to; text: be\n",
        '  json: 13 bytes, text: {"a": [1, 2]}\n',
    ):
        assert line in out


def test_compare_says_what_is_the_same_and_how_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([{"word": f"w{n}", "label": n % 3} for n in range(30)], tmp_path)
    index = str(tmp_path / "data.index")
    options = ["--backends", "plain", "torch", "--batches", "3"]
    assert main(["compare", index, *options, "--batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "records/s" in out
    assert "word: the same" in out
    assert main(["compare", index, *options, "--p", "2", "--k", "2"]) == 0
    pack([{"word": "w"}] * 3, tmp_path / "plain")
    assert main(["compare", str(tmp_path / "plain" / "data.index"), "--p", "2"]) == 2
    assert "--p needs labels" in capsys.readouterr().err
