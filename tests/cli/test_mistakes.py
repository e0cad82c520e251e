"""The command line refuses what it would otherwise pass over, and names what to do instead."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from pathlib import Path

import pytest
from support.inside import load_feed, main
from support.shards import tars, write_tar

from twinfeed.loaders import ShardWarning, build_index, open_index, pack

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_shard_with_warning_is_not_reported_as_well(
    tmp_path: Path, capfd: Capture, jobs: str
) -> None:
    """Alone, and among good shards; workers print by themselves, and are counted too."""
    tars(tmp_path)
    bad = tmp_path / "x.tar"
    bad.touch()
    for target, records in ((str(bad), "0 records in 1 shard"), (f"{tmp_path}/*.tar", "30 rec")):
        assert main(["verify", target, "--jobs", jobs, "-q"]) == 1
        out, error = capfd.readouterr()
        finding, summary, _ = out.splitlines()
        assert finding == f"{bad}: it has no records"
        assert summary.startswith(records)
        assert summary.endswith(": 1 bad, 1 warning")
        assert error.startswith(f"twinfeed: warning: {bad}: ")


def test_verify_counts_bad_records_and_warnings(tmp_path: Path, capsys: Capture) -> None:
    tars(tmp_path, shards=1)
    for name in "ab":
        (tmp_path / f"{name}.tar").touch()
    write_tar(tmp_path / "c.tar", [("k", {"png": bytes(3000)})])
    (tmp_path / "c.tar").write_bytes((tmp_path / "c.tar").read_bytes()[:2000])
    assert main(["verify", f"{tmp_path}/*.tar", "-q"]) == 1
    assert "10 records in 4 shards: 3 bad, 2 warnings\n" in capsys.readouterr().out


def test_shard_verified_twice_warns_twice(tmp_path: Path, capsys: Capture) -> None:
    (shard,) = tars(tmp_path, shards=1)
    shard.write_bytes(shard.read_bytes()[:-1024])
    with pytest.warns(ShardWarning, match="two zero blocks"):
        build_index(shard, f"{tmp_path}/x.index")
    for target in (f"{tmp_path}/x.index", str(shard)):
        assert main(["verify", target, "-q"]) == 1
        said = capsys.readouterr().out
        assert said == "10 records in 1 shard: nothing is bad, 1 warning\n"


# The words of a command in the folder of `world`, its exit status, and what its one line has.
REFUSED: list[tuple[str, int, str]] = [
    ("cat data.index 3", 2, "record must lie in [0, 3), got 3"),
    ("cat data.index -1", 2, "record must lie in [0, 3), got -1"),
    (f"cat data.index {'9' * 4000}", 2, "record must lie in [0, 3), got 999"),
    ("cat data.index", 2, "--key"),
    ("cat data.index --key nobody", 2, "'nobody'"),
    ("cat data.index 0 --field image", 2, "'image'"),
    ("cat tars/x.index 0", 1, "d-000001.tar"),
    ("info none.index", 1, "no index here (no manifest.json); check the name"),
    ("info data.index/none", 1, "no index here"),
    ("index {a,b --out x.index", 2, "unbalanced or nested braces"),
    ("index no*.tar --out x.index", 1, "no*.tar"),
    ("index set/d-*.tar --out set/x.index", 1, "--incomplete"),
    ("index data.index --out x.index", 1, "data.index"),
    ("index data.index/manifest.json --out x.index", 1, "data.index/manifest.json"),
    ("index tars/d-000000.tar --out x.index --label-table ''", 1, "No such file"),
    (
        "index tars/d-000000.tar --out x.index --field a=png --field a",
        2,
        "--field gives a name twice, among ['a', 'a']",
    ),
    ("index tars/d-000000.tar --out x.index --field =png", 2, "fields must map each field"),
    ("verify data.index --jobs 0", 2, "jobs must be at least 1"),
    ("verify data.index/manifest.json", 1, "data.index/manifest.json"),
    ("pack empty out", 1, "empty"),
    ("pack tars out", 1, "'tars/*.tar'"),
    ("pack set/one.jpg out", 1, "one.jpg"),
    ("pack tars out --root tars", 1, "no index here"),
    ("pack data.index out --split a=0.5 --split a=1.0", 2, "--split gives a name twice"),
    ("plan --feed data.index", 2, "--feed must be FILE.py:NAME"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of three records, an index that lacks a shard, a shard of a set, and an image."""
    folder = tmp_path_factory.mktemp("world")
    pack([{"x": b"1", "label": n} for n in range(3)], folder)
    for name in ("tars", "set", "empty"):
        (folder / name).mkdir()
    shards = tars(folder / "tars")
    build_index(shards, folder / "tars" / "x.index")
    shards[1].unlink()
    write_tar(folder / "set" / "d-00001-of-00004.tar", [("a", {"x": b"1"})])
    (folder / "set" / "one.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


@pytest.mark.filterwarnings("ignore:files below")
@pytest.mark.parametrize(("words", "status", "said"), REFUSED)
def test_mistake_is_refused_in_one_line_with_advice(
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    words: str,
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(world)
    before = sorted(world.iterdir())
    assert main(shlex.split(words)) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("twinfeed: error: ")
    assert said in error
    assert sorted(world.iterdir()) == before


def test_file_of_feed_parses_its_own_arguments_and_may_not_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["twinfeed", "who", "--epochs", "3"])
    file = tmp_path / "own_arguments.py"
    file.write_text(
        "import argparse, numpy as np\n"
        "from twinfeed import BatchSampler, Feed, SequentialSampler\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--epochs', type=int, default=90)\n"
        "epochs = parser.parse_args().epochs\n"
        "sampler = BatchSampler(SequentialSampler(epochs), batch_size=2)\n"
        "feed = Feed({'x': np.arange(epochs)}, sampler)\n"
    )
    assert len(load_feed(f"{file}:feed")) == 45
    assert sys.argv == ["twinfeed", "who", "--epochs", "3"]
    for name, ending in (("exits", "0"), ("needs", "2")):
        exiting = tmp_path / f"{name}.py"
        exiting.write_text(f"feed = 1\nimport sys\nsys.exit({ending})\n")
        with pytest.raises(ValueError, match=rf"{name}\.py exits \(status {ending}\) .*: put what"):
            load_feed(f"{exiting}:feed")
    assert sys.argv[0] == "twinfeed"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("pack a b --split train", "'NAME=SIZE' value: 'train'"),
        ("pack a b --split train=half", "'NAME=SIZE' value: 'train=half'"),
        ("pack a b --shard-bytes x", "'BYTES' value: 'x'"),
        ("pack a b --shards x", "'N' value: 'x'"),
        ("cat a cat/0001", "'N' value: 'cat/0001'"),
        ("index a --out b --label-file (", "'REGEX' value: '('"),
        ("index a --out b --label-folder-level x", "'LEVEL' value: 'x'"),
    ],
)
def test_unparsable_options_show_usage(capsys: Capture, words: str, value: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: twinfeed {words.partition(' ')[0]}")
    assert error.endswith(f": invalid {value}\n")


def test_help_of_missing_distinguishes_named_fields(tmp_path: Path, capsys: Capture) -> None:
    """The help says what is so: a field that nobody names may be missing."""
    with pytest.raises(SystemExit):
        main(["index", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a record without a label, or without a field that --field names, is an error" in said
    assert "any other field may be missing" in said
    shard = str(write_tar(tmp_path / "a.tar", [("a", {"x": b"1", "y": b"2"}), ("b", {"x": b"3"})]))
    words = ["index", shard, "--out", f"{tmp_path}/x.index", "-q"]
    assert main(words) == 0
    assert open_index(f"{tmp_path}/x.index").fields["y"].missing == 1
    assert main([*words, "--field", "y"]) == 1
    assert main([*words, "--label", "y"]) == 1


@pytest.mark.parametrize("name", ["nofile.tar", "cli/nofile.tar", "nofile.tfrecord", "nophotos"])
@pytest.mark.parametrize("root", [[], ["--root", "cli"]])
def test_missing_shard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, name: str, root: list[str]
) -> None:
    """Whether it would lie below the root or not; what is there and lies elsewhere is refused."""
    monkeypatch.chdir(tmp_path)
    Path("cli").mkdir()
    assert main(["index", name, "--out", "cli/x.index", *root, "-q"]) == 1
    error = capsys.readouterr().err
    assert error == f"twinfeed: error: {tmp_path}/{name}: No such file or directory\n"
    write_tar(Path("there.tar"), [("a", {"x": b"1"})])
    assert main(["index", "there.tar", "--out", "cli/x.index", *root, "-q"]) == 2
    assert "shards must lie below the root" in capsys.readouterr().err


def test_path_without_index_suggests_command_to_build_it(tmp_path: Path, capsys: Capture) -> None:
    """The advice is followed word by word."""
    (tmp_path / "data").mkdir()
    shards = tars(tmp_path / "data")
    assert main(["info", str(tmp_path / "data")]) == 1
    out = capsys.readouterr().err.rpartition("--out ")[2].rstrip()
    assert main(["index", *map(str, shards), "--out", out, "-q"]) == 0


def test_one_shard_of_set_is_indexed_with_incomplete(tmp_path: Path, capsys: Capture) -> None:
    shard = write_tar(tmp_path / "d-00001-of-00004.tar", [("a", {"x": b"1"})])
    words = ["index", str(shard), "--out", str(tmp_path / "x.index"), "-q"]
    assert main(words) == 1
    assert "give all of them, or index those that exist with " in capsys.readouterr().err
    assert main([*words, "--incomplete"]) == 0
    assert len(open_index(tmp_path / "x.index")) == 1


def test_unreadable_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A glob finds nothing in it. The rights of a folder do not bind every user of a test."""

    def refused(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("os.listdir", refused)
    pattern = str(tmp_path / "*.tar")
    assert main(["index", pattern, "--out", str(tmp_path / "x.index")]) == 1
    assert capsys.readouterr().err == f"twinfeed: error: {tmp_path}: Permission denied\n"


@pytest.mark.parametrize("command", ["index", "info", "verify"])
def test_unknown_option_shows_usage_of_command(capsys: Capture, command: str) -> None:
    more = ["--out", "y"] if command == "index" else []
    with pytest.raises(SystemExit) as stop:
        main([command, "x", *more, "--unheard"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: twinfeed {command} [-h]")
    assert error.endswith(f"twinfeed {command}: error: unrecognized arguments: --unheard\n")


def test_options_may_come_anywhere(tmp_path: Path, capsys: Capture) -> None:
    """Between the arguments too; what is left over is still an error with the command's usage."""
    index = str(pack([{"word": b"to"}, {"word": b"be"}], tmp_path)["data"].path)
    root = ["--root", str(tmp_path)]
    for words in (
        [index, *root, "0", "1"],
        [*root, index, "0", "1"],
        [index, "0", *root, "1"],
        [index, "0", "1", *root],
    ):
        assert main(["cat", *words]) == 0
        assert [line[-3:-1] for line in capsys.readouterr().out.splitlines()[1::2]] == ["to", "be"]
    with pytest.raises(SystemExit) as stop:
        main(["info", index, *root, "0"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: twinfeed info [-h]")
    assert error.endswith("twinfeed info: error: unrecognized arguments: 0\n")
    with pytest.raises(SystemExit):
        main(["index", index])
    error = capsys.readouterr().err
    assert error.startswith("usage: twinfeed index [-h]")
    assert error.endswith("the following arguments are required: --out\n")


def test_messages_name_the_options_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """An error of the library names an argument, and the option too that is called otherwise."""
    monkeypatch.chdir(tmp_path)
    some = {"cls": b"a", "json": b'{"label": "a b", "w": 1, "v": {"a b": 1}}'}
    write_tar(Path("a.tar"), [("a", some | {"txt": b"1"}), ("b", some)])
    out = ["a.tar", "--out", "x.index", "-q"]
    for words, option in [
        (["index", *out, "--label-json", "json:lable"], "(--label-json)"),
        (["index", *out, "--label", "json"], "FromJson (--label-json)\n"),
        (["index", *out, "--label-json", "json:v"], "FromJson (--label-json)\n"),
        (["index", *out, "--field", "txt"], "--missing empty"),
        (["index", *out, "--field", "txt"], "--missing skip"),
        (["index", *out, "--field", "txt"], "--join"),
        (["index", *out, "--key", "a"], "(--raw)"),
        (["index", *out, "--field", "label=cls", "--label-json", "json:w"], "--field text=label"),
        (["index", *out, "--max-record-bytes", "9"], "raise --max-record-bytes"),
        (["index", "a.tar", "--out", "new/x.index"], "--root"),
    ]:
        assert main(words) in (1, 2)
        assert option in capsys.readouterr().err, words
    assert main(["index", *out]) == 0
    Path("my data").mkdir()
    Path("a.tar").rename("my data/a.tar")
    assert main(["info", "x.index"]) == 1
    assert "--root in a terminal" in capsys.readouterr().err
    assert main(["verify", "x.index", "--root", f"{tmp_path}/my data", "-q"]) == 0


def test_missing_field_is_reported(tmp_path: Path, capsys: Capture) -> None:
    """Its bytes are not written, unless the index allows it."""
    shard = str(write_tar(tmp_path / "a.tar", [("a", {"x": b"1", "y": b"2"}), ("b", {"x": b"3"})]))
    refusing, filling = f"{tmp_path}/x.index", f"{tmp_path}/y.index"
    assert main(["index", shard, "--out", refusing, "-q"]) == 0
    assert main(["index", shard, "--out", filling, "--field", "y", "--missing", "empty", "-q"]) == 0
    assert main(["cat", refusing, "1", "--field", "y"]) == 1
    assert "lacks the field 'y'" in capsys.readouterr().err
    assert main(["cat", refusing, "1"]) == main(["info", refusing]) == 0
    said = capsys.readouterr().out
    assert "  y: missing\n" in said
    assert "y: bytes, 1 byte per record, 1 byte in total, 1 missing\n" in said
    assert main(["cat", filling, "1", "--field", "y"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["cat", filling, "1"]) == main(["info", filling]) == 0
    said = capsys.readouterr().out
    assert "  y: missing\n" in said
    assert ", 1 missing, read as empty\n" in said
