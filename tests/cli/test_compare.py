"""`twinfeed compare` of two backends."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.inside import main

from twinfeed.loaders import pack

COMPARE = ["compare", "--backends", "numpy", "numpy", "--feed"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_compare_runs_the_functions_of_the_file_and_its_modules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A process of a backend imports them."""
    pack([{"word": f"w{n}", "label": n % 3} for n in range(30)], "data")
    Path("parts.py").write_text("def longer(sample):\n    return {'w': sample['word'] * 2}\n")
    Path("train.py").write_text(
        "from parts import longer\nfrom twinfeed import *\nindex = open_index('data/data.index')\n"
        "def decode(sample):\n    return longer(sample)\n"
        "feed = Feed(index, PKBatchSampler(index, p=2, k=2, seed=0), decode=decode)\n"
        "other = Feed(index, feed.sampler, decode=longer)\n"
        "if __name__ == '__main__':\n    raise AssertionError('this trains')\n"
    )
    for name in ("feed", "other"):
        assert main([*COMPARE, f"train.py:{name}", "--batches", "3"]) == 0
        out = capsys.readouterr().out
        assert "records/s" in out
        assert "w: the same" in out


def test_image_that_does_not_decode_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    Image.effect_noise((40, 40), 50).save(file := io.BytesIO(), "jpeg")
    index = str(pack([{"image": file.getvalue()[:-400]}], "data")["data"].path)
    Path("train.py").write_text(
        f"from twinfeed import *\nindex = open_index({index!r})\n"
        "sampler = BatchSampler(SequentialSampler(1), batch_size=1)\n"
        "feed = Feed(index, sampler, decode=DecodeImage('image', size=(8, 8)))\n"
    )
    assert main([*COMPARE, "train.py:feed"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("twinfeed: error: record 0 (data-00000-of-00001.tfrecord, number 0): ")
    assert line.endswith("; in backend 'numpy'")
    assert len(line) < 500
    assert main(["verify", index, "--decode", "-q"]) == 1
    assert "record 0: it does not decode: " in capsys.readouterr().out
