"""`twinfeed plan` of a feed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.inside import main

from twinfeed.loaders import pack


def test_plan_prints_what_an_epoch_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    pack([{"x": bytes(1000)} for _ in range(600)], "data")
    Path("train.py").write_text(
        "from twinfeed import *\nindex = open_index('data/data.index')\n"
        "feed = Feed(index, BatchSampler(shuffled(index, seed=0), batch_size=10))\n"
    )
    assert main(["plan", "--feed", "train.py:feed"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("an epoch of 60 batches, 600 samples\n")
    assert "  requests   " in said
