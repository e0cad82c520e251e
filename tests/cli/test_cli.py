"""The command line, as a person or a script uses it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.cases import mark_long
from support.formats import archive, member
from support.inside import _parser, main, tfrecord
from support.servers import RangeServer
from support.shards import flip, tars, tfrecords, write_tar, write_tfrecord

from twinfeed.loaders import ShardWarning, build_index, open_index, pack


def test_help_of_every_command_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    names = "pack", "index", "verify", "info", "cat", "compare", "show", "mixing", "plan"
    names += "who", "when", "diff"
    for command in ((), *((name,) for name in names)):
        with pytest.raises(SystemExit) as stop:
            main([*command, "--help"])
        assert stop.value.code == 0
        assert f"  twinfeed {command[0] if command else 'pack'}" in capsys.readouterr().out


def test_every_option_has_help() -> None:
    (commands,) = (each for each in _parser()._actions if isinstance(each.choices, dict))
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.help, (name, action.dest)
            assert not action.help.startswith("default"), (name, action.dest)
            if isinstance(action.default, int) and action.type is int:
                assert action.help.endswith(f"; default {action.default}"), (name, action.dest)


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["pack"], ["verify"], ["plan"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        text = capsys.readouterr().out.partition("examples:")[0]
        assert max(map(len, text.splitlines())) <= 80, command


def test_sizes_take_units() -> None:
    for text, size in [("7", 7), ("2k", 2000), ("3MB", 3 * 10**6), ("4g", 4 * 10**9)]:
        assert _parser().parse_args(["pack", "x", "y", "--shard-bytes", text]).shard_bytes == size
    assert _parser().parse_args(["pack", "x", "y", "--shard-bytes", "2T"]).shard_bytes == 2 * 10**12


def test_plan_compares_blocks_with_uniform_shuffle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = pack([{"x": bytes(1000)} for _ in range(600)], tmp_path)["data"]
    fsspec.filesystem("memory").put(f"{tmp_path}/", "/plan", recursive=True)
    assert main(["plan", str(index.path), "--root", "memory://plan", "--batch-size", "10"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("uniform: an epoch of 60 batches")  # the shuffle to take is last
    assert "\nblocks of 4, 128 at once: an epoch of 60 batches, 600 samples\n" in said
    assert main(["plan", str(index.path), "--block", "50", "--window", "3"]) == 0
    assert "blocks of 50, 3 at once" in capsys.readouterr().out


def test_plan_needs_no_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index alone says how long shards and records are."""
    index = pack([{"x": bytes(1000)}] * 90, tmp_path / "data")["data"]
    assert main(["plan", str(index.path)]) == 0
    with_shards = capsys.readouterr().out
    copied_index = shutil.copytree(index.path, tmp_path / "elsewhere" / "data.index")
    assert main(["plan", str(copied_index)]) == 0
    assert capsys.readouterr().out == with_shards
    assert main(["cat", str(copied_index), "0"]) == 1  # which needs the shards


def test_version_option_prints_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"twinfeed {version('twinfeed')}\n"


def test_pack_index_info_verify_and_cat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    images, data = tmp_path / "images", tmp_path / "data"
    for name in ("cat", "dog"):
        (images / name).mkdir(parents=True)
        for n in range(5):
            Image.new("RGB", (8, 6), (n, 0, 0)).save(images / name / f"{n}.png")
    split = ["--split", "train=0.8", "--split", "eval=2", "--seed", "1"]
    assert main(["pack", str(images), str(data), *split]) == 2
    assert "error: split= must be counts, or fractions that add up to 1" in capsys.readouterr().err
    split = ["--split", "train=8", "--split", "eval=2", "--seed", "1"]
    assert main(["pack", str(images), str(data), "--container", "tar", *split, "-q"]) == 0
    assert "train.index: 8 records, 1 shard, 2 classes" in capsys.readouterr().out
    train = str(data / "train.index")
    assert main(["info", train]) == 0
    out = capsys.readouterr().out
    assert "records: 8\n" in out
    assert "class names: cat, dog\n" in out
    assert main(["info", train, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class names"] == ["cat", "dog"]
    assert main(["verify", train, "-q"]) == 0
    assert capsys.readouterr().out == "8 records in 1 shard: all is well\n"
    assert main(["cat", train, "0", "-1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("record 0 (train-00000-of-00001.tar, number 0, key ")
    assert out.count(" bytes at byte 512, PNG image, 8 x 6, RGB") == 1
    assert out.count("PNG image, 8 x 6, RGB") == 2
    key = open_index(train).keys([3])[0]
    assert main(["cat", train, key]) == 0
    assert capsys.readouterr().out.startswith("record 3 ")
    assert main(["pack", train, str(tmp_path / "again"), "-q", "--shard-bytes", "1k"]) == 0
    repacked = open_index(tmp_path / "again" / "data.index")
    assert repacked.classes == ("cat", "dog")


def test_cat_writes_the_bytes_of_a_field(tmp_path: Path) -> None:
    build_index(tars(tmp_path, shards=1), tmp_path / "x.index")
    command = [sys.executable, "-m", "twinfeed", "cat", str(tmp_path / "x.index"), "4"]
    done = subprocess.run([*command, "--field", "png"], capture_output=True, check=True)
    assert done.stdout == b"000004" * 4


def test_cat_distinguishes_keys_from_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["7", "000001", "0", "7", "-1", "cat"]
    samples = [{"__key__": key, "x": b"%d" % n} for n, key in enumerate(keys)]
    index = str(pack(samples, tmp_path)["data"].path)
    for words, records in [
        (["1", "000001"], [1, 1]),
        (["cat", "-1", "000001", "2"], [5, 5, 1, 2]),
        (["--key", "0"], [2]),
        (["0", "--key", "7", "--key=-1"], [0, 0, 3, 4]),
    ]:
        assert main(["cat", index, *words]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line[:1] != " "]
        assert [int(line.split()[1]) for line in shown] == records, words
    assert main(["cat", index, "--key", "5"]) == 2
    assert "no record has the key '5': give a key, such as '7', '000001'" in capsys.readouterr().err
    assert main(["cat", index, "6"]) == 2
    assert "give a key that is a number with --key" in capsys.readouterr().err


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
    assert r"text: a\x1b]0;title\x07b" in out
    assert "begins with ff 00" in out


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
    assert "29 records, 3 shards, 1 excluded" in capsys.readouterr().out


def test_cat_into_closed_pipe_is_no_error(tmp_path: Path) -> None:
    build_index(tars(tmp_path, shards=1, each=400), tmp_path / "x.index")
    numbers = " ".join(map(str, range(400)))
    command = f"{sys.executable} -m twinfeed cat {tmp_path}/x.index {numbers} | head -1"
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


def test_cat_shows_lists_numbers_and_missing_fields(
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
        '  json: 13 bytes at byte 246, text: {"a": [1, 2]}\n',
    ):
        assert line in out


@pytest.mark.frameworks
def test_compare_reports_equality_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([{"word": f"w{n}", "label": n % 3} for n in range(30)], tmp_path)
    index = str(tmp_path / "data.index")
    options = ["--backends", "numpy", "torch", "--batches", "3"]
    assert main(["compare", index, *options, "--batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "records/s" in out
    assert "word: the same" in out
    options[2] = "numpy"
    assert main(["compare", index, *options, "--p", "2", "--k", "2"]) == 0
    pack([{"word": "w"}] * 3, tmp_path / "plain")
    assert main(["compare", str(tmp_path / "plain" / "data.index"), "--p", "2"]) == 2
    assert "--p needs labels" in capsys.readouterr().err


def test_verify_checks_each_index_alone_and_shards_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [str(shard) for shard in tars(tmp_path)]
    one, two = f"{tmp_path}/1.index", f"{tmp_path}/2.index"
    build_index(shards[0], one)
    offset = int(build_index(shards[1:], two).table("png")["offset"][3])
    flip(Path(shards[1]), offset)
    assert main(["verify", one, two, *shards, "--root", str(tmp_path), "-q"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{one}: 10 records in 1 shard: all is well"
    assert "d-000001.tar, record 3: corrupted" in out[1]
    assert out[2:4] == [
        f"{two}: 20 records in 2 shards: 1 bad",
        "30 records in 3 shards: all is well",  # a tar has no checksum of its members
    ]
    assert out[4].startswith("what to do: restore the shards")
    assert main(["verify", one, two, "--bad-list", f"{tmp_path}/bad", "-q"]) == 2
    assert "--bad-list takes one index, or shards" in capsys.readouterr().err


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
    assert lines[2].endswith(
        "list the bad records with --bad-list FILE and exclude them with index --exclude FILE"
    )
    assert main([*verify, "--bad-list", listed]) == 1
    assert capsys.readouterr().out.splitlines()[2].endswith(f"with index --exclude {listed}")
    assert main(["index", *shards, "--out", out, "--exclude", listed, "-q"]) == 0
    line = "17 records, 2 shards, 1 excluded, 1 incomplete shard"
    assert line in capsys.readouterr().out
    assert main(["verify", out, "-q"]) == 0
    assert main(["info", out]) == 0
    assert "incomplete shards: 1\n" in capsys.readouterr().out


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


def test_verify_reports_changed_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shard is cut, and another has a bad record: the advice leads to an index."""
    monkeypatch.chdir(tmp_path)
    cut, flipped = tfrecords(tmp_path, shards=2)
    build_index("d-*.tfrecord", "x.index")
    os.truncate(cut, cut.stat().st_size - 5)
    flip(flipped, 20)
    assert main(["verify", "x.index", "--bad-list", "bad.jsonl", "-q"]) == 1
    (line,) = capsys.readouterr().out.splitlines()[3:]
    assert line.startswith("what to do: restore what is missing or has changed")
    assert main(["verify", "d-*.tfrecord", "--bad-list", "bad.jsonl", "-q"]) == 1
    assert main(["index", "d-*.tfrecord", "--out", "x.index", "--exclude", "bad.jsonl", "-q"]) == 0
    assert main(["verify", "x.index", "-q"]) == 0


@pytest.mark.parametrize("kind", ["shards", "images"])
def test_verify_finds_targets_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for name in ("here", "data/a", "data/b", "images/x"):
        (tmp_path / name).mkdir(parents=True)
    shards = [tmp_path / "data" / "a" / "1.tar", tmp_path / "data" / "b" / "2.tar"]
    for shard in shards:
        write_tar(shard, [("k", {"txt": b"..."})])
    (tmp_path / "images" / "x" / "1.png").write_bytes(b"...")
    targets = {
        "shards": list(map(str, shards)),
        "images": [f"{tmp_path}/images"],
    }
    monkeypatch.chdir(tmp_path / "here")
    assert main(["verify", *targets[kind], "-q"]) == 0
    assert "all is well" in capsys.readouterr().out


def test_folder_without_data_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pack([{"a": 1}], "out")
    (tmp_path / "empty").mkdir()
    for command in (["verify"], ["index", "--out", "x.index"]):
        for folder in ("out", "empty"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ShardWarning)
                assert main([*command, folder, "-q"]) == 1
            out, error = capsys.readouterr()
            assert out == ""
            assert f"below the folder '{folder}': give a folder that" in error.splitlines()[-1]
    assert main(["verify", "out/data.index", "--bad-list", "/proc/bad", "-q"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "twinfeed: error: /proc/bad: No such file or directory\n"


def test_verify_continues_to_last_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tars(tmp_path, shards=4)
    made = [f"{tmp_path}/{n}.index" for n in range(3)]
    for index, shard in zip(made, shards, strict=False):
        build_index(shard, index)
    shards[0].unlink()
    (column,) = Path(made[1]).glob("columns-*/shards.npy")
    flip(column, column.stat().st_size - 1)
    root = ["--root", str(tmp_path), "-q"]
    assert main(["verify", *made, str(shards[0]), str(shards[3]), *root]) == 1
    out, error = capsys.readouterr()
    assert [line.split(": ")[2] for line in error.splitlines()] == [
        str(tmp_path),
        "damaged index",
    ]
    assert out.splitlines()[:3] == [
        f"{made[2]}: 10 records in 1 shard: all is well",
        f"{shards[0].name}: No such file or directory",
        "10 records in 2 shards: 1 bad",
    ]
    assert out.splitlines()[3].startswith("what to do: restore what is missing or has changed")
    assert len(out.splitlines()) == 4


def test_info_describes_index_with_changed_shard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = tars(tmp_path, shards=1)
    index = f"{tmp_path}/x.index"
    build_index(shard, index, label="cls", missing="skip", max_record_bytes=10**6)
    line = "built with: --container tar --max-record-bytes 1000000 --missing skip --label cls\n"
    assert main(["info", index]) == 0
    assert line in capsys.readouterr().out
    assert main(["info", index, "--json"]) == 0
    built = json.loads(capsys.readouterr().out)["built with"]
    assert (built["label"], built["missing"], built["key"]) == ("cls", "skip", None)
    shard.write_bytes(shard.read_bytes() + b"more")
    assert main(["info", index]) == 1
    out, error = capsys.readouterr()
    name = "d-000000.tar"
    start = f"records: 10\nshards: 1\nfirst shard: {name}\nlast shard: {name}\n"
    assert out.startswith(start)
    assert "\nclasses: 7\nlabels: 0 to 6\n" in out
    assert out.endswith(line)
    assert "with the options it was built with, which twinfeed info tells" in error


def test_info_counts_classes_without_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard,) = tars(tmp_path, shards=1)
    classes = [str(number) for number in range(9)]
    build_index(shard, tmp_path / "x.index", label="cls", classes=classes)
    assert main(["info", f"{tmp_path}/x.index"]) == 0
    out = capsys.readouterr().out
    assert "\nclasses: 9\nlabels: 0 to 6\nrecords a class: 0 to 2\nclass names: 0, 1," in out


@pytest.mark.parametrize(
    "options",
    [
        ["--container", "tar", "--label-json", "json:object.name"],
        ["--incomplete", "--container", "tar", "--label", "cls"],
        ["--background", "none", "--container", "tar", "--label", "txt"],
        ["--background", "b", "--container", "tar", "--field", "x=jpg;png", "--label-folder"],
        ["--container", "tar", "--label-file", r"(\d+)\.tar$"],
        ["--container", "tar", "--label-table", "CSV"],
    ],
)
def test_info_prints_options_of_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    shards = [str(shard) for shard in tars(tmp_path)]
    table = tmp_path / "CSV"
    table.write_text("".join(f"k{n},t{n % 2}\n" for n in range(30)))
    given = [str(table) if word == "CSV" else word for word in options]
    out = str(tmp_path / "x.index")
    assert main(["index", *shards, "--out", out, *given, "-q"]) == 0
    capsys.readouterr()
    assert main(["info", out]) == 0
    assert f"built with: {shlex.join(options)}\n" in capsys.readouterr().out


def test_info_prints_root_and_exclude(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tfrecords(tmp_path, shards=1)[0].name
    listed = tmp_path / "bad.jsonl"
    listed.write_text(json.dumps({"shard": shard, "record": 3}) + "\n")
    with RangeServer(tmp_path) as server:
        build_index(f"{server.url}/{shard}", tmp_path / "x.index", exclude=listed)
        assert main(["info", str(tmp_path / "x.index"), "--root", server.url]) == 0
    line = f"built with: --container tfrecord --root {server.url} --exclude FILE\n"
    assert capsys.readouterr().out.endswith(line)


def test_command_in_message_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "two words"
    odd.mkdir()
    shard = tfrecords(odd, shards=1)[0]
    quoted = shlex.quote(str(odd))
    for command, pasted in (
        (["info", str(shard)], f"twinfeed index {quoted[:-1]}/{shard.name}' --out '"),
        (["info", f"{odd}/x"], f"twinfeed index SHARDS --out {quoted[:-1]}/x'"),
    ):
        assert main(command) == 1
        assert pasted in capsys.readouterr().err
    flip(shard, 20)
    assert main(["verify", str(shard), "--bad-list", f"{odd}/bad", "--root", str(odd), "-q"]) == 1
    assert capsys.readouterr().out.endswith(f"index --exclude {quoted[:-1]}/bad'\n")


def test_info_reports_labels_by_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = tars(tmp_path)
    build_index(shards, tmp_path / "x.index", label=lambda record: len(record["png"]))
    assert main(["info", str(tmp_path / "x.index")]) == 0
    line = "built with: --container tar (and labels by a function, which build_index takes)\n"
    assert capsys.readouterr().out.endswith(line)


NUMBERS = [str(n) for n in range(11)]  # sorted as text, "10" is the third


def test_info_counts_the_bytes_of_loose_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(1, 4):
        (tmp_path / f"{n}.png").write_bytes(bytes(n))
    build_index(tmp_path, tmp_path / "x.index")
    assert main(["info", str(tmp_path / "x.index")]) == 0
    assert "bytes: 6\n" in capsys.readouterr().out


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
@pytest.mark.parametrize("what", ["folder", "names", "numbers", "nothing", "names of a few"])
@pytest.mark.filterwarnings("ignore:fields that some")
def test_info_prints_options_that_rebuild_packed_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], container: Any, what: str
) -> None:
    """The same labels and the same class names, with nothing but what info printed."""
    for name in NUMBERS:
        (tmp_path / "images" / name).mkdir(parents=True)
        for n in range(2):
            (tmp_path / "images" / name / f"{n}.{'png' if n else 'jpg'}").write_bytes(b"...")
    sources: dict[str, Any] = {
        "folder": tmp_path / "images",
        "names": [{"__key__": f"k{n}", "x": b"1", "label": name} for n, name in enumerate(NUMBERS)],
        "numbers": [{"x": b"1", "label": n} for n in range(11)],
        "nothing": [{"x": b"1"} if n else {"x": b"2", "y": "z"} for n in range(11)],
        "names of a few": [{"x": b"1", "label": name} for name in ("cat", "dog", "emu")],
    }
    source = sources[what]
    split = {"a": 2, "b": (22 if what == "folder" else len(source)) - 2}
    packed = pack(source, tmp_path / "out", container=container, split=split, seed=1)
    for name, index in packed.items():
        assert main(["info", str(index.path)]) == 0
        line = capsys.readouterr().out.splitlines()[-1].removeprefix("built with: ")
        shards = [str(tmp_path / "out" / shard) for shard in index.shard_paths.tolist()]
        out = str(tmp_path / "out" / f"{name}-again.index")
        assert main(["index", *shards, "--out", out, *shlex.split(line), "-q"]) == 0
        again = open_index(out)
        assert (again.fingerprint, again.classes) == (index.fingerprint, index.classes)
        assert main(["index", *shards, "--out", str(index.path), *shlex.split(line), "-q"]) == 0
        assert open_index(index.path).fingerprint == index.fingerprint


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
    assert "built with: --join --container tar\n" in capsys.readouterr().out
    assert main(["verify", out, "-q"]) == 0


def test_failed_pack_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/1.png", "b/1.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True)
        (tmp_path / "images" / name).write_bytes(b"...")
    pack_it = ["pack", str(tmp_path / "images"), str(tmp_path / "out"), "-q"]
    assert main([*pack_it, "--split", "a=1", "--seed", "1"]) == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "images" / "top.png").write_bytes(b"...")
    assert main(pack_it) == 1
    assert "images lie outside any class folder (1: top.png)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert main(pack_it) == 1
    assert (tmp_path / "out").exists()


def test_warning_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("1.png", "1.txt"):
        (tmp_path / "images" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / "a" / name).write_bytes(b"...")
    images = str(tmp_path / "images")
    want = f"twinfeed: warning: files below {images} are not images and are left out "
    want += "(1, first: a/1.txt)\n"
    for command in (["pack", images, f"{tmp_path}/out"], ["index", images, "--out", f"{images}.i"]):
        assert main([*command, "-q"]) == 0
        assert capsys.readouterr().err == want


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["pack", "images", "out"], "; nothing was written"),
        (["index", "images", "--out", "x.index"], "; finished shards are kept: run the command"),
        (["index", "images", "--out", "x.index", "--jobs", "2"], "; finished shards are kept"),
        (["verify", "images"], "\n"),
    ],
)
def test_interrupt_reports_what_was_kept(tmp_path: Path, command: list[str], text: str) -> None:
    """The command is at work for much longer than the test, so that the interrupt finds it so."""
    images = long_images(tmp_path / "images" / "a")
    running = start(tmp_path, *command, "-q")
    wait_for_reading(running, images)
    error = interrupted(running)
    assert error.startswith(f"twinfeed: interrupted{text}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_interrupt_ends_idle_workers_silently(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for n in range(LONG):
        (tmp_path / "images" / f"{n}.png").touch()
    long_images(tmp_path / "images")
    command = ["index", "images", "--out", "x.index", "--jobs", "2"]
    running = start(tmp_path, *command, before=TWO_PARTS)
    seen = b""
    while b"1/2" not in seen:  # one worker is through, the other has long images
        assert running.poll() is None, seen
        seen += os.read(running.stderr.fileno(), 1)
    assert "Traceback" not in interrupted(running)


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_interrupt_ends_starting_workers_silently(tmp_path: Path, delay: float) -> None:
    """While they import; the images are long, so that none of them is through."""
    long_images(tmp_path / "images")
    command = ["index", "images", "--out", "x.index", "--jobs", "2", "-q"]
    started(running := start(tmp_path, *command, before=TELLS))
    time.sleep(delay)
    assert interrupted(running).count("\n") == 1


@pytest.mark.parametrize(
    ("command", "delay"),
    mark_long([("verify", 0.0), ("index", 0.001), ("index", 0.5), ("verify", 0.08)], but_every=2),
)
def test_killed_worker_ends_command_with_one_line(
    tmp_path: Path, command: str, delay: float
) -> None:
    """As it starts, while it imports, and at work: each of two has long images to read."""
    long_images(tmp_path / "images", "first")
    long_images(tmp_path / "images", "last")
    options = ["--jobs", "2", "-q", *(["--out", "x.index"] if command == "index" else [])]
    running = start(tmp_path, command, "images", *options, before=TWO_PARTS + TELLS)
    worker = started(running)
    time.sleep(delay)
    os.kill(worker, signal.SIGKILL)
    error = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 1
    assert error.startswith("twinfeed: error: a worker process was killed by SIGKILL; what to do: ")
    assert error.count("\n") == 1
    for _ in range(6000):
        if not group(running.pid):
            return
        time.sleep(0.01)
    pytest.fail(f"left behind: {group(running.pid)}")


def long_images(folder: Path, name: str = "last") -> Path:
    """Make images that take a minute to read, and no room: files of zeros that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(LONG):
        with (folder / f"{name}-{n:03}.png").open("wb") as file:
            file.truncate(1 << 28)
    return folder


def wait_for_reading(running: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a process of a command's group reads a file of the folder."""
    while running.poll() is None:
        for stat in group(running.pid):
            for fd in Path(f"/proc/{stat.split()[0]}/fd").glob("*"):
                with suppress(OSError):  # it has been closed meanwhile
                    if Path(os.readlink(fd)).parent == folder:
                        return
        time.sleep(0.01)
    pytest.fail(f"the command has ended: {running.communicate()[1].decode()}")


def group(leader: int) -> list[str]:
    """The processes of a group that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            found.append(path.read_text())
    return [stat for stat in found if stat.rpartition(")")[2].split()[2] == str(leader)]


LONG = 400
# Each of two workers has as many images.
TWO_PARTS = f"""
from twinfeed.loaders.building import sources
sources.FILES_PER_PART = {LONG}
"""

# Prints the number of each worker that the command has started.
TELLS = """
from multiprocessing import util
start = util.spawnv_passfds
def tell(path, words, fds):
    child = start(path, words, fds)
    if "spawn_main" in str(words):
        print(child, flush=True)
    return child
util.spawnv_passfds = tell
"""


def started(running: subprocess.Popen[bytes]) -> int:
    """Wait until a command has started a worker, and return the worker's process id."""
    told = running.stdout.readline()
    assert told, f"the command has ended: {running.communicate()[1].decode()}"
    return int(told)


def start(folder: Path, *command: str, before: str = "") -> subprocess.Popen[bytes]:
    """Start a command as a terminal does: interrupts end it, and reach its workers too."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from twinfeed.loaders.command_line import main\n"
        "if __name__ == '__main__': sys.exit(main())"
    )
    (folder / "run.py").write_text(before + code)
    return subprocess.Popen(
        [sys.executable, "run.py", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def interrupted(running: subprocess.Popen[bytes]) -> str:
    """Interrupt a command, and return what it says."""
    os.killpg(running.pid, signal.SIGINT)
    error = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 130
    return error


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\n"


def test_no_command_prints_terminal_controls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of shards, fields and classes, keys, texts, and the errors that have them."""
    monkeypatch.chdir(tmp_path)
    name, field = f"a{HOSTILE}.tfrecord", f"f{HOSTILE}"
    write_tfrecord(Path(name), [{field: HOSTILE.encode(), "cls": f"c{HOSTILE}x", "key": HOSTILE}])
    index = build_index(name, "x.index", label="cls", key="key").path
    Path(f"table{HOSTILE}.csv").write_text(f"k,\0{HOSTILE}")
    printed = ""
    for command in (
        ["info", index],
        ["info", index, "--json"],
        ["cat", index, "0"],
        ["cat", index, "--key", HOSTILE],
        ["cat", index, HOSTILE * 2],
        ["cat", index, "0", "--field", HOSTILE],
        ["verify", index, name, "-q"],
        ["pack", index, "out", "-q"],
        ["pack", name, "out2", "-q"],
        ["index", name, "--out", f"y{HOSTILE}.index", "--label", HOSTILE, "-q"],
        ["index", name, "--out", "z.index", "--label-table", f"table{HOSTILE}.csv", "-q"],
        ["info", f"none{HOSTILE}"],
    ):
        assert main([str(word) for word in command]) in (0, 1, 2), command
        out, error = capsys.readouterr()
        assert out or error, command
        printed += out + error
    flip(Path(name), 30)
    assert main(["verify", str(index), name, "-q"]) == 1
    out, error = capsys.readouterr()
    printed += out + error
    bad = {char for char in printed if not char.isprintable() and char != "\n"}
    assert not bad
    assert r"c\x1b]0;owned\x07\x1b[2J\u202e\nx" in printed


def test_pack_takes_root_of_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "far").mkdir()
    build_index(tars(tmp_path / "far"), tmp_path / "x.index", root=tmp_path / "far")
    root = ["--root", str(tmp_path / "far")]
    words = ["pack", str(tmp_path / "x.index"), str(tmp_path / "out"), "-q"]
    assert main([*words, *root]) == 0
    assert capsys.readouterr().out.endswith("data.index: 30 records, 1 shard\n")


def test_who_when_and_diff_read_ledger_by_feed_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    records = [{"__key__": f"k{n}", "word": b"%d" % n, "label": n % 2} for n in range(5)]
    pack(records, "data", container="tar")
    Path("ledger_feed.py").write_text(
        "from twinfeed import BatchSampler, Feed, SequentialSampler, open_index\n"
        "index = open_index('data/data.index')\n"
        "feed = Feed(index, BatchSampler(SequentialSampler(5), batch_size=3, last_batch='pad'))\n"
    )
    code = (
        "from twinfeed import NumpyLoader; from ledger_feed import feed\n"
        "for rank in range(2):\n"
        "    with NumpyLoader(feed.shard(rank, 2), ledger='run/ledger.jsonl') as loader:\n"
        "        for batch in [*loader, *loader]: pass\n"
        "        loader.load_state_dict(loader.state_at(0, 1))\n"
        "        for batch in loader: pass\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    asked = ["run/ledger.jsonl", "--feed", "ledger_feed.py:feed"]
    assert main(["who", *asked, "--step", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "step 3 (epoch 1, step 1)"
    where = "data-00000-of-00001.tar, number 3, key 'k3'"
    assert printed[1] == f"  id 3: record 3 ({where}), byte {3 * 2048 + 512}, label 1"
    assert len(printed) == 3  # not the padding
    assert main(["who", *asked, "--step", "1", "--rank", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[::2] == [f"step 1 (epoch 0, step 1), occurrence {time} of 2" for time in (1, 2)]
    assert [line.partition(" (")[0] for line in printed[1::2]] == ["  id 4: record 4"] * 2
    assert main(["when", *asked, "--record", "k4", "--record", "-5"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] == " "] == [
        *("  step 1 (epoch 0)", "  step 3 (epoch 1)", "  step 1 (epoch 0)"),
        *("  step 0 (epoch 0)", "  step 2 (epoch 1)"),
    ]
    assert main(["diff", "run/ledger.jsonl", "run/ledger.rank1.jsonl"]) == 0
    assert capsys.readouterr().out == "the same records\n"
    for command, status, message in [
        (["who", *asked, "--step", "9"], 2, "run/ledger.jsonl has no step 9: the last is 3"),
        (["who", asked[0], "--feed", "ledger_feed.py", "--step", "0"], 2, "FILE.py:NAME"),
        (["who", asked[0], "--feed", "none.py:feed", "--step", "0"], 1, "none.py"),
        (["who", asked[0], "--feed", "ledger_feed.py:fed", "--step", "0"], 2, "has no 'fed'"),
        (["who", asked[0], "--feed", "ledger_feed.py:index", "--step", "0"], 2, "must be Feed"),
        (["when", *asked], 2, "no record is given"),
        (["diff", "run/ledger.jsonl", "ledger_feed.py"], 1, "line 1 is not a ledger line"),
    ]:
        assert main(command) == status
        assert message in capsys.readouterr().err
