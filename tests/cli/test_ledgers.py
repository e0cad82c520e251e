"""`twinfeed who`, `when` and `diff` on ledgers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.inside import main

from twinfeed.loaders import pack


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
        "other = Feed(index, BatchSampler(SequentialSampler(5), batch_size=2))\n"
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
        (
            ["who", asked[0], "--feed", "ledger_feed.py:other", "--step", "0"],
            2,
            "the ledger's: give",
        ),
        (["when", *asked], 2, "no record is given"),
        (["diff", "run/ledger.jsonl", "ledger_feed.py"], 1, "line 1 is not a ledger line"),
    ]:
        assert main(command) == status
        assert message in capsys.readouterr().err
