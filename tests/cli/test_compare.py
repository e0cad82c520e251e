"""`twinfeed compare` of two backends."""

from __future__ import annotations

from pathlib import Path

import pytest
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
    assert main(["compare", str(tmp_path / "plain" / "data.index"), "--p", "2"]) == 2
    assert "--p needs labels" in capsys.readouterr().err
