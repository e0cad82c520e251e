"""The TensorFlow examples run as a user runs them; one of them over devices and processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_distribute(tmp_path: Path, workers: int) -> None:
    """P x K by whole classes, and 761 records exactly once, over two replicas."""
    shown = run("tensorflow_distribute.py", "--out", tmp_path, "--workers", workers)
    results: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("worker-*.json"))
    ]
    assert len(results) == max(1, workers)
    assert shown.count("accuracy over all 761") == len(results)
    for batches in zip(*(result["labels"] for result in results), strict=True):
        replicas = [labels for parts in batches for labels in parts]
        classes = [labels[::4] for labels in replicas]
        assert [sorted(part * 4) for part in classes] == [sorted(labels) for labels in replicas]
        assert len({label for part in classes for label in part}) == 6
    evaluated = [record for result in results for record in result["evaluated"]]
    assert sorted(evaluated) == list(range(761))
    assert len({result["accuracy"] for result in results}) == 1


def test_keras_fit(tmp_path: Path) -> None:
    interrupted = run("keras_fit.py", "--out", tmp_path, "--stop-after", 25)
    assert "stopped at epoch 1, step 5" in interrupted
    resumed = run("keras_fit.py", "--out", tmp_path)
    assert "resuming at epoch 1, step 5" in resumed
    whole = run("keras_fit.py", "--out", tmp_path / "whole")
    assert "evaluated 761 images" in whole
    assert resumed.splitlines()[-1] == whole.splitlines()[-1]


def test_shuffle_bias(tmp_path: Path) -> None:
    lines = run("shuffle_bias.py", "--out", tmp_path).splitlines()
    buffered, blocks, uniform = (float(line.split(": ")[-1].split()[0]) for line in lines[:3])
    assert buffered < 0.7 * blocks
    assert abs(blocks - uniform) < 0.5
    assert (tmp_path / "mixing.png").stat().st_size > 10_000


def test_many_classes(tmp_path: Path) -> None:
    ours, classic = run("many_classes.py", "--out", tmp_path, "--classes", 1100).splitlines()
    assert ours.startswith("index and sampler, 1,100 classes: set-up ")
    assert classic.startswith("a dataset a class, 500 classes: set-up ")


def test_tensorflow_loop(tmp_path: Path) -> None:
    interrupted = run("tensorflow_loop.py", "--out", tmp_path, "--stop-after", 25)
    assert "stopped at epoch 1, step 5" in interrupted
    resumed = run("tensorflow_loop.py", "--out", tmp_path)
    assert "resuming at epoch 1, step 5" in resumed
    assert resumed.count("accuracy on 761") == 2
