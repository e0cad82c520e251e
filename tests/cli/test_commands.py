"""What all commands share: help, options, progress, one line of error, and safe terminals."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from support.inside import (
    BACKENDS,
    CONTAINERS,
    SHARD_BYTES,
    Missing,
    Reading,
    ReadingOptions,
    ShardContainer,
    _parser,
    main,
)
from support.shards import flip, tars, tfrecords, write_tfrecord

from twinfeed.loaders import build_index, open_index


def test_help_of_every_command_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    names = "pack", "index", "verify", "info", "cat", "compare", "show", "plan"
    names += "who", "when", "diff", "overlap"
    for name in names:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"  twinfeed {name} " in capsys.readouterr().out


def test_every_option_has_help() -> None:
    (commands,) = (each for each in _parser()._actions if isinstance(each.choices, dict))
    for name, command in commands.choices.items():
        for action in command._actions:
            assert action.help, (name, action.dest)
            assert not action.help.startswith("default"), (name, action.dest)


def test_table_has_the_choices_and_defaults_of_the_library() -> None:
    index = vars(_parser().parse_args(["index", "a", "--out", "b"]))
    defaults = {**vars(Reading()), "lists": []}
    assert {name: index[name] for name in ReadingOptions.__annotations__} == defaults
    pack = _parser().parse_args(["pack", "a", "b"])
    assert (pack.shard_bytes, pack.shards, pack.container) == (SHARD_BYTES, 1, "tfrecord")
    (commands,) = (each for each in _parser()._actions if isinstance(each.choices, dict))
    for name, option, choices in (
        ("pack", "--container", get_args(ShardContainer)),
        ("index", "--container", CONTAINERS),
        ("index", "--missing", get_args(Missing)),
        ("compare", "--backends", BACKENDS),
    ):
        (action,) = (a for a in commands.choices[name]._actions if option in a.option_strings)
        assert sorted(action.choices) == sorted(choices), (name, option)


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["pack"], ["verify"], ["plan"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        text = capsys.readouterr().out.partition("examples:")[0]
        assert max(map(len, text.splitlines())) <= 80, command


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
    assert out.startswith("8 records in 1 shard, ")
    assert "class names: cat, dog\n" in out
    assert main(["verify", train, "-q"]) == 0
    assert capsys.readouterr().out == "8 records in 1 shard: all is well\n"
    assert main(["cat", train, "0", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("record 0 (train-00000-of-00001.tar, number 0, key ")
    assert out.count("  image: ") == out.count(" bytes, b'\\x89PNG") == 2
    key = open_index(train).keys([3])[0]
    assert main(["cat", train, "--key", key]) == 0
    assert capsys.readouterr().out.startswith("record 3 ")
    assert main(["pack", train, str(tmp_path / "again"), "-q", "--shard-bytes", "1k"]) == 0
    repacked = open_index(tmp_path / "again" / "data.index")
    assert repacked.classes == ("cat", "dog")


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
    assert "29 records, 3 shards, 1 excluded record" in capsys.readouterr().out


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
    assert capsys.readouterr().out.endswith(f" --exclude {quoted[:-1]}/bad'\n")


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
        ["cat", index, "0"],
        ["cat", index, "--key", HOSTILE],
        ["cat", index, "--key", HOSTILE * 2],
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
