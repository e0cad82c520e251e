"""`twinfeed cat`: records by number or key, and the bytes of fields."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.inside import main
from support.shards import tars, write_tar, write_tfrecord

from twinfeed.loaders import build_index, pack


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
        (["2", "--key", "cat", "--key", "000001"], [2, 5, 1]),
        (["--key", "0"], [2]),
        (["0", "--key", "7", "--key=-1"], [0, 0, 3, 4]),
    ]:
        assert main(["cat", index, *words]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if line[:1] != " "]
        assert [int(line.split()[1]) for line in shown] == records, words
    assert main(["cat", index, "--key", "5"]) == 2
    assert "no record has the key '5': give a key, such as '7', '000001'" in capsys.readouterr().err
    for number in ("6", "-1"):
        assert main(["cat", index, number]) == 2
        assert f"record must lie in [0, 6), got {number}" in capsys.readouterr().err


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
    assert r"b'a\x1b]0;title\x07b'" in out
    assert r"b'\xff\x00'" in out


def test_cat_into_closed_pipe_is_no_error(tmp_path: Path) -> None:
    build_index(tars(tmp_path, shards=1, each=400), tmp_path / "x.index")
    numbers = " ".join(map(str, range(400)))
    command = f"{sys.executable} -m twinfeed cat {tmp_path}/x.index {numbers} | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


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
        "  wide: [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...]\n",
        "  words: [b'to', b'be']\n",
        "  json: 13 bytes, b'{\"a\": [1, 2]}'\n",
    ):
        assert line in out
