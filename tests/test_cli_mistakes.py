"""The command line refuses what it would otherwise pass over, and names what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from making_shards import tars, write_tar

from twinfeed.loaders.command_line import main
from twinfeed.loaders.command_line._commands import _feed
from twinfeed.loaders.command_line._parser import _parser
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index import open_index
from twinfeed.loaders.index.build import build_index
from twinfeed.loaders.packing import pack

Capture = pytest.CaptureFixture[str]


def zeros_first(path: Path) -> None:
    """Write a tar whose first 20,000 bytes were lost."""
    write_tar(path, [(f"k{n}", {"png": bytes([n]) * 3000}) for n in range(20)])
    path.write_bytes(bytes(20_000) + path.read_bytes()[20_000:])


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("kind", ["zeros", "empty"])
def test_a_warning_is_never_well(tmp_path: Path, capfd: Capture, kind: str, jobs: str) -> None:
    """Alone, and among good shards; workers print by themselves, and are counted too."""
    good, bad = tars(tmp_path), tmp_path / "x.tar"
    zeros_first(bad) if kind == "zeros" else bad.touch()
    for target, records in ((str(bad), "0 records in 1 shard"), (f"{tmp_path}/*.tar", "30 rec")):
        assert main(["verify", target, "--jobs", jobs, "-q"]) == 1
        out, error = capfd.readouterr()
        assert out.startswith(records)
        assert out.endswith(": 1 warning\n")
        assert error.startswith(f"twinfeed: warning: {bad}: ")
    build_index(good, f"{tmp_path}/x.index")
    assert main(["verify", f"{tmp_path}/x.index", str(bad), "--jobs", jobs, "-q"]) == 1
    out, error = capfd.readouterr()
    assert out.splitlines() == [
        f"{tmp_path}/x.index: 30 records in 3 shards: all is well",
        f"{bad}: 0 records in 1 shard: 1 warning",
    ]


def test_what_is_bad_and_what_warns_are_told_together(tmp_path: Path, capsys: Capture) -> None:
    tars(tmp_path, shards=1)
    for name in "ab":
        (tmp_path / f"{name}.tar").touch()
    write_tar(tmp_path / "c.tar", [("k", {"png": bytes(3000)})])
    (tmp_path / "c.tar").write_bytes((tmp_path / "c.tar").read_bytes()[:2000])
    assert main(["verify", f"{tmp_path}/*.tar", "-q"]) == 1
    assert "10 records in 4 shards: 1 bad, 2 warnings\n" in capsys.readouterr().out


def test_a_shard_that_is_met_again_warns_again(tmp_path: Path, capsys: Capture) -> None:
    (shard,) = tars(tmp_path, shards=1)
    shard.write_bytes(shard.read_bytes()[:-1024])
    with pytest.warns(ShardWarning, match="two zero blocks"):
        build_index(shard, f"{tmp_path}/x.index")
    assert main(["verify", f"{tmp_path}/x.index", str(shard), "-q"]) == 1
    assert capsys.readouterr().out.count("10 records in 1 shard: 1 warning\n") == 2


def test_what_is_given_twice_is_refused(tmp_path: Path, capsys: Capture) -> None:
    shard, index = str(tars(tmp_path, shards=1)[0]), str(tmp_path / "x.index")
    build_index(shard, index)
    for command, option in [
        (["pack", index, f"{tmp_path}/out", "--split", "a=0.5", "--split", "a=1.0"], "--split"),
        (["index", shard, "--out", f"{index}2", "--field", "a=png", "--field", "a"], "--field"),
    ]:
        assert main([*command, "-q"]) == 2
        assert f"{option} gives 'a' 2 times: give it once" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["block", "window"])
@pytest.mark.parametrize("command", ["plan", pytest.param("mixing", marks=pytest.mark.frameworks)])
def test_zero_is_no_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, command: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    index = str(pack([{"x": b"1"}] * 9, tmp_path)["data"].path)
    for number in ("0", "-3"):
        assert main([command, index, f"--{option}", number]) == 2
        assert f"{option} must be at least 1, got {number}" in capsys.readouterr().err


def test_a_table_without_a_name_is_not_passed_over(tmp_path: Path, capsys: Capture) -> None:
    (shard,) = tars(tmp_path, shards=1)
    words = ["index", str(shard), "--out", f"{tmp_path}/x.index", "--label-table", "", "-q"]
    assert main(words) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", pytest.param("show", marks=pytest.mark.frameworks)])
def test_k_needs_p(tmp_path: Path, capsys: Capture, command: str) -> None:
    index = str(pack([{"x": b"1", "label": n % 3} for n in range(9)], tmp_path)["data"].path)
    assert main([command, index, "--k", "3"]) == 2
    assert "--k is of P x K batches: give --p too" in capsys.readouterr().err


def test_p_takes_four_records_of_a_class_unless_k_says_more(tmp_path: Path) -> None:
    index = str(pack([{"x": b"1", "label": n % 3} for n in range(60)], tmp_path)["data"].path)
    for words, records in ([], 8), (["--k", "7"], 14):
        feed = _feed(_parser().parse_args(["compare", index, "--p", "2", *words]))
        assert feed.sampler.batch_size == records


def test_the_help_of_missing_tells_named_fields_from_others(
    tmp_path: Path, capsys: Capture
) -> None:
    """The help says what is so: a field that nobody names may be missing."""
    with pytest.raises(SystemExit):
        main(["index", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a record that lacks a label, or a field that --field names, is an error" in said
    assert "any other field may be missing" in said
    shard = str(write_tar(tmp_path / "a.tar", [("a", {"x": b"1", "y": b"2"}), ("b", {"x": b"3"})]))
    words = ["index", shard, "--out", f"{tmp_path}/x.index", "-q"]
    assert main(words) == 0
    assert open_index(f"{tmp_path}/x.index").fields["y"].missing == 1
    assert main([*words, "--field", "y"]) == 1
    assert main([*words, "--label", "y"]) == 1


@pytest.mark.parametrize("name", ["nofile.tar", "cli/nofile.tar", "nofile.tfrecord", "nophotos"])
@pytest.mark.parametrize("root", [[], ["--root", "cli"]])
def test_a_shard_that_is_not_there_is_said_to_be_missing(
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


def test_what_is_no_index_leads_to_one(tmp_path: Path, capsys: Capture) -> None:
    """The advice is followed word by word."""
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "1.PNG").write_bytes(b"...")
    for folder in (tmp_path / "photos", tmp_path / "photos" / "a"):
        assert main(["info", str(folder)]) == 1
        error = capsys.readouterr().err.rstrip()
        assert "no index here, but images" in error
        advice = error.partition("index them: twinfeed ")[2].split()
        assert advice == ["index", str(folder), "--out", f"{folder}.index"]
        assert main([*advice, "-q"]) == 0
        capsys.readouterr()
        assert main(["info", advice[-1]]) == 0
        capsys.readouterr()
    (tmp_path / "data").mkdir()
    shards = tars(tmp_path / "data")
    assert main(["info", str(tmp_path / "data")]) == 1
    out = capsys.readouterr().err.rpartition("--out ")[2].rstrip()
    assert main(["index", *map(str, shards), "--out", out, "-q"]) == 0


def test_a_part_of_an_index_leads_to_the_index(tmp_path: Path, capsys: Capture) -> None:
    index = pack([{"x": b"1"}], tmp_path)["data"]
    array = next(index.path.glob("columns-*/*.npy"))
    for part in (index.path / "manifest.json", array, array.parent):
        assert main(["info", str(part)]) == 1
        want = f"a part of an index; open the whole index, the folder {index.path}\n"
        assert capsys.readouterr().err == f"twinfeed: error: {part}: {want}"
        with pytest.raises(FileNotFoundError, match="open the whole index, the folder"):
            open_index(part)
    none = index.path / "none"
    assert main(["info", str(none)]) == 1
    assert "no index here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["index", "info", "plan"])
def test_an_unknown_option_shows_the_usage_of_its_command(capsys: Capture, command: str) -> None:
    more = ["--out", "y"] if command == "index" else []
    with pytest.raises(SystemExit) as stop:
        main([command, "x", *more, "--unheard"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: twinfeed {command} [-h]")
    assert error.endswith(f"twinfeed {command}: error: unrecognized arguments: --unheard\n")
