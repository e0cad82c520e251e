"""`twinfeed audit` over the functions of Python files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.inside import main

Capture = pytest.CaptureFixture[str]
TRAIN = """
import numpy as np
from twinfeed import PKBatchSampler, RandomSampler

def make(rank, world_size, seed=0):
    return RandomSampler(40, seed=seed).shard(rank, world_size)

def wrong(epoch):
    return [0, 0, *range(2, 40)]

def pk(seed=0):
    return PKBatchSampler([n % 4 for n in range(40)], p=2, k=2, seed=seed)

def pairs(rank, world_size):
    return [(0, {"id": n}) for n in range(rank, 40, world_size)]
"""

GATHERED = """
def make(rank, world_size):
    import torch.distributed as dist
    dist.all_gather_object([None] * world_size, rank)
    return list(range(rank, 40, world_size))

def other("""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("train.py").write_text(TRAIN)
    np.save("labels.npy", np.arange(40) % 4)


def test_the_status_is_1_if_there_is_a_fault(capsys: Capture) -> None:
    command = ["audit", "train.py:make", "--records", "40", "--world", "1,2,4"]
    assert main([*command, "--expect", "training", "--epochs", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("make (expect='training'): no faults\n")
    assert "coverage    4 ranks: each record once in each epoch" in text
    assert main(["audit", "train.py:wrong", "--expect", "evaluation"]) == 1
    assert "! coverage    1 rank: epoch 0: 1 too many" in capsys.readouterr().out


def test_labels_are_of_a_file(capsys: Capture) -> None:
    assert main(["audit", "train.py:pk", "--labels", "labels.npy", "--expect", "pk"]) == 0
    assert "batches hold 2 classes of 2" in capsys.readouterr().out


def test_a_path_says_where_the_ids_are(capsys: Capture) -> None:
    command = ["audit", "train.py:pairs", "--records", "40", "--expect", "evaluation"]
    assert main([*command, "--ids", "1.id"]) == 0
    assert main(command) == 1
    assert "an item has no ids: tuple (0, {'id': 0})" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.frameworks
def test_ranks_are_processes_that_import_the_file(capsys: Capture) -> None:
    Path("train.py").write_text(TRAIN.replace("def make(", GATHERED))
    command = ["audit", "train.py:make", "--records", "40", "--world", "2"]
    assert main([*command, "--processes"]) == 0
    assert "2 ranks: each record once" in capsys.readouterr().out
    assert main(command) == 1
    assert "pass processes=True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["train.py"], 2, "make must be FILE.py:NAME"),
        (["train.py:none"], 2, "train.py has no 'none'"),
        (["train.py:np"], 2, "must be a function that builds a sampler"),
        (["train.py:make", "--labels", "train.py"], 2, "train.py holds no array: write the labels"),
        (["train.py:make", "--labels", "none.npy"], 1, "none.npy"),
        (["train.py:make", "--records", "-1"], 2, "num_records must be"),
        (["train.py:make", "--world", "0"], 2, "world_size must be"),
    ],
)
def test_mistakes(arguments: list[str], status: int, text: str, capsys: Capture) -> None:
    assert main(["audit", *arguments]) == status
    assert text in capsys.readouterr().err


def test_choices_are_checked_by_the_parser(capsys: Capture) -> None:
    for wrong in (["--expect", "fun"], ["--world", "1,x"]):
        with pytest.raises(SystemExit) as caught:
            main(["audit", "train.py:make", *wrong])
        assert caught.value.code == 2
    assert "invalid" in capsys.readouterr().err
