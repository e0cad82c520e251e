"""`twinfeed compare` of two backends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image
from support.inside import main

from twinfeed.loaders import pack


def test_compare_reports_equality_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack([{"word": f"w{n}", "label": n % 3} for n in range(30)], tmp_path)
    index = str(tmp_path / "data.index")
    options = ["--backends", "numpy", "numpy", "--batches", "3"]
    assert main(["compare", index, *options, "--batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert "records/s" in out
    assert "word: the same" in out
    assert main(["compare", index, *options, "--p", "2", "--k", "2"]) == 0
    pack([{"word": "w"}] * 3, tmp_path / "plain")
    assert main(["compare", str(tmp_path / "plain" / "data.index"), "--p", "2"]) == 1
    assert "the index has no labels" in capsys.readouterr().err


def test_image_that_does_not_decode_is_one_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.effect_noise((40, 40), 50).save(file := io.BytesIO(), "jpeg")
    index = str(pack([{"image": file.getvalue()[:-400]}], tmp_path)["data"].path)
    assert main(["compare", index, "--backends", "numpy", "numpy", "--size", "8"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("twinfeed: error: record 0 (data-00000-of-00001.tfrecord, number 0): ")
    assert line.endswith("; in backend 'numpy'")
    assert len(line) < 500
    assert main(["verify", index, "--decode", "-q"]) == 1
    assert "record 0: it does not decode: " in capsys.readouterr().out
