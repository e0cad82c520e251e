"""`twinfeed who`, `when` and `diff` over the feeds of Python files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.inside import main

from twinfeed import BatchSampler, DatasetSource, Feed, NumpyLoader, SequentialSampler, pack

Capture = pytest.CaptureFixture[str]
TRAIN = """
from twinfeed import *
index = open_index('data/data.index')
feed = Feed(index, BatchSampler(SequentialSampler(5), batch_size=3, last_batch='pad'))
table = Feed({'x': index.labels}, BatchSampler(SequentialSampler(5), batch_size=2))
part = feed.shard(0, 2)
if __name__ == '__main__':
    raise AssertionError('this trains')
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    records = [{"__key__": f"k{n}", "word": b"%d" % n, "label": n % 2} for n in range(5)]
    pack(records, "data", container="tar")
    Path("train.py").write_text(TRAIN)


def lines_of(capsys: Capture, *command: str, status: int = 0) -> list[str]:
    """What a command prints, below the fingerprint."""
    assert main(command) == status
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("fingerprint ")
    assert first.endswith("; steps count as loader.global_step in the loop, from 1")
    return lines


def test_who_prints_the_records_of_a_step(capsys: Capture) -> None:
    who = ("who", "--feed", "train.py:feed", "--step")
    where = "data-00000-of-00001.tar, number 3, key 'k3'"
    assert lines_of(capsys, *who, "4") == [
        "step 4 (feed[1, 1])",
        f"  id 3: record 3 ({where}), label 1",
        f"  id 4: record 4 ({where.replace('3', '4')}), label 0",
    ]
    title, line = lines_of(capsys, *who, "2", "--rank", "0", "--world-size", "3")
    assert title == "step 2 (feed[0, 1]), rank 0 of 3"
    assert line.startswith("  id 3: ")


def test_when_prints_the_steps_of_records(capsys: Capture) -> None:
    until = ("--until", "4")
    lines = lines_of(capsys, "when", "--feed", "train.py:feed", "--key", "k4", *until)
    assert lines[0].endswith("key 'k4'): 2 steps up to step 4")
    assert lines[1:] == ["  step 2 (feed[0, 1])", "  step 4 (feed[1, 1])"]
    assert lines_of(capsys, "when", "--feed", "train.py:feed", "--record", "4", *until) == lines
    lines = lines_of(capsys, "when", "--feed", "train.py:table", "--record", "3", *until)
    assert lines == ["record 3 of a dict: 1 step up to step 4", "  step 2 (feed[0, 1])"]


@pytest.mark.filterwarnings("ignore:the state and the source share no digest")
def test_state_of_another_feed_is_refused(capsys: Capture) -> None:
    numbers = DatasetSource({"x": np.arange(5)})
    for size in (2, 3):
        feed = Feed(numbers, BatchSampler(SequentialSampler(5), batch_size=size))
        Path("state.json").write_text(json.dumps(NumpyLoader(feed).state_at(0, 1)))
        command = ["who", "--feed", "train.py:table", "--step", "1", "--state", "state.json"]
        assert main(command) == (0 if size == 2 else 2)
        assert ("batch_size: the state has 3, this" in capsys.readouterr().err) == (size == 3)


def test_diff_imports_two_files_of_one_name_with_modules_of_their_own(capsys: Capture) -> None:
    """Of two versions of a program, each has the modules that lie beside it."""
    for seed, name in enumerate(("old", "new")):
        (Path(name) / "parts").mkdir(parents=True)
        Path(name, "parts", "__init__.py").write_text("")
        Path(name, "parts", "settings.py").write_text(f"SEED = {seed}")
        Path(name, "orders.py").write_text(
            "from parts.settings import SEED\nfrom twinfeed import *\n"
            "order = RandomSampler(20, seed=SEED)\n"
        )
        Path(name, "train.py").write_text(
            "from orders import order\nfrom twinfeed import *\n"
            "source = DatasetSource({'x': [0] * 20}, digest='zeros')\n"
            "feed = Feed(source, BatchSampler(order, batch_size=4))\n"
        )
    title, *findings = lines_of(
        capsys, "diff", "--feed", "old/train.py:feed", "new/train.py:feed", status=1
    )
    assert title == "step 1 differs"
    assert findings == ["  seed: order.seed is 0 and 1", "  seed: seed is 0 and 1"]
    same = lines_of(capsys, "diff", "--feed", "new/train.py:feed", "new/train.py:feed")
    assert same == ["the same records in every step"]
    lines_of(capsys, "who", "--feed", "train.py:feed", "--step", "1")
    assert not {"orders", "parts", "parts.settings"} & sys.modules.keys()


def test_file_may_have_the_name_of_a_module(capsys: Capture) -> None:
    """Of one that is imported already, too."""
    Path("random.py").write_text(TRAIN)
    assert len(lines_of(capsys, "who", "--feed", "random.py:feed", "--step", "1")) == 4


STARTS = {
    "a loop": "for batch in NumpyLoader(feed): Path('trained').touch()",
    "a caught error": "try:\n    next(iter(NumpyLoader(feed)))\n"
    "    Path('trained').touch()\nexcept Exception: pass",
    "any caught exception": "try:\n    next(iter(NumpyLoader(feed)))\n"
    "    Path('trained').touch()\nexcept BaseException: pass",
    "a thread": "from threading import Thread\n"
    "def train():\n    for batch in NumpyLoader(feed): Path('trained').touch()\n"
    "thread = Thread(target=train)\nthread.start()\nthread.join()",
    "torch": "from twinfeed import TorchLoader\n"
    "for batch in TorchLoader(feed, device='cpu', num_workers=1): Path('trained').touch()",
    "a DataLoader": "from twinfeed import TorchLoader\n"
    "for batch in TorchLoader(feed).dataloader(): Path('trained').touch()",
    "a DataLoader of one's own": "from torch.utils.data import DataLoader\n"
    "from twinfeed import RecordDataset, RequestSampler, as_tensors\n"
    "parts = {'batch_sampler': RequestSampler(feed), 'collate_fn': as_tensors}\n"
    "for batch in DataLoader(RecordDataset(feed), **parts): Path('trained').touch()",
    "webdataset": "from twinfeed import samples\n"
    "for batch in samples(feed): Path('trained').touch()",
    "Grain": "from twinfeed.loaders.grain import as_map_dataset\n"
    "for batch in as_map_dataset(feed, epochs=1): Path('trained').touch()",
    "tensorflow": "from twinfeed import TensorFlowLoader\n"
    "for batch in TensorFlowLoader(feed): Path('trained').touch()",
    "a tf.data.Dataset": "from twinfeed import TensorFlowLoader\n"
    "for batch in TensorFlowLoader(feed).dataset: Path('trained').touch()",
}


@pytest.mark.frameworks
# Python ignores a SystemExit in a thread, and pytest's own hook does not.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("start", STARTS)
def test_file_that_starts_a_loader_is_refused_before_it_trains(capsys: Capture, start: str) -> None:
    feed = TRAIN.replace(", last_batch='pad'", "").partition("part =")[0]
    Path("trains.py").write_text(f"from pathlib import Path{feed}{STARTS[start]}\n")
    assert main(["who", "--feed", "trains.py:feed", "--step", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]  # TensorFlow writes lines of its own
    assert "trains.py starts a loader while it is imported: put what trains" in error
    assert not Path("trained").exists()
    with NumpyLoader(Feed({"x": [0]}, BatchSampler(SequentialSampler(1), batch_size=1))) as loader:
        assert len([*loader]) == 1  # afterwards loaders start as ever


def test_file_may_make_a_loader_and_look_at_a_batch(capsys: Capture) -> None:
    Path("looks.py").write_text(
        f"{TRAIN}\nloader = NumpyLoader(feed)\nassert feed[0, 0]['id'].tolist() == [0, 1, 2]\n"
        "assert [*SequentialSampler(3)] == [0, 1, 2]\nprint('what the file says')\n"
    )
    assert len(lines_of(capsys, "who", "--feed", "looks.py:feed", "--step", "1")) == 4


DEEP = "[" * 5000
FEED = ["--feed", "train.py:feed"]
MISTAKES = {
    "step 0": (["who", *FEED, "--step", "0"], 2, "step must be at least 1, got 0"),
    "no step": (["who", *FEED, "--step", "-3"], 2, "step must be at least 1, got -3"),
    "no colon": (["who", "--feed", "train.py", "--step", "1"], 2, "FILE.py:NAME"),
    "no file": (["who", "--feed", "none.py:feed", "--step", "1"], 1, "none.py"),
    "no name": (["who", "--feed", "train.py:fed", "--step", "1"], 2, "has no 'fed'"),
    "an index": (["who", "--feed", "train.py:index", "--step", "1"], 2, "must be Feed"),
    "one rank": (["who", "--feed", "train.py:part", "--step", "1"], 2, "without shard"),
    "no such rank": (["who", *FEED, "--step", "1", "--rank", "2"], 2, "rank"),
    "ranks alone": (["who", *FEED, "--step", "1", "--world-size", "2"], 2, "needs rank="),
    "no state": (["who", *FEED, "--step", "1", "--state", "none.json"], 1, "none.json"),
    "other text": (["who", *FEED, "--step", "1", "--state", "train.py"], 2, "train.py is no JSON"),
    "a folder": (["who", *FEED, "--step", "1", "--state", "data"], 1, "data"),
    "a deep state": (["who", *FEED, "--step", "1", "--state", "deep.json"], 2, "is no JSON"),
    "a list": (["who", *FEED, "--step", "1", "--state", "list.json"], 2, "must be what state_dict"),
    "no record": (["when", *FEED, "--until", "4"], 2, "no record is given"),
    "other record": (
        ["when", *FEED, "--record", "5", "--until", "4"],
        2,
        "record must lie in [0, 5), got 5",
    ),
    "other key": (["when", *FEED, "--key", "4", "--until", "4"], 2, "such as 'k0', 'k1', 'k2'"),
    "a table's key": (
        ["when", "--feed", "train.py:table", "--key", "k", "--until", "4"],
        2,
        "the key 'k' needs an index",
    ),
    "until 0": (["when", *FEED, "--record", "0", "--until", "0"], 2, "until must be at least 1"),
    "an index as feed": (["diff", *FEED, "train.py:index"], 2, "must be Feed"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line(capsys: Capture, mistake: str) -> None:
    Path("list.json").write_text("[]")
    Path("deep.json").write_text(DEEP)
    command, status, message = MISTAKES[mistake]
    assert main(command) == status
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
