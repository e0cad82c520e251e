"""The examples run as a user runs them; those of each backend are tested beside that backend."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.frameworks


def run(name: str, folder: Path, *options: str, status: int = 0) -> str:
    command = [sys.executable, EXAMPLES / name, "--out", folder, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout


def test_quickstart(tmp_path: Path) -> None:
    shown = run("quickstart.py", tmp_path)
    assert shown.count("the same record ids and bytes in 400 batches") == 4
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


def test_crops(tmp_path: Path) -> None:
    """24 images, 8 live: 31 at most where each is decoded once, and met at both ends."""
    naive, reuse, _ = run("crops.py", tmp_path).splitlines()
    assert int(naive.split(", ")[1].split()[0]) > 300
    assert reuse.startswith("live images are reused: 384 crops, ")
    assert 24 <= int(reuse.split(", ")[1].split()[0]) <= 31


def test_annotations(tmp_path: Path) -> None:
    """Killed in the second epoch, the run ends as one that was not."""
    run("annotations.py", tmp_path / "killed", "--kill-after", "35", status=-signal.SIGKILL)
    resumed = run("annotations.py", tmp_path / "killed").splitlines()
    assert resumed[0] == "goes on at epoch 1, step 10"
    whole = run("annotations.py", tmp_path / "whole").splitlines()
    assert resumed[1:] == whole[1:]
    assert whole[-1].endswith("right, each met once")


def test_captions(tmp_path: Path) -> None:
    *_, last = run("captions.py", tmp_path).splitlines()
    assert last.startswith("every caption came once; a table of 0.96 GB took ")
    assert int(last.split(" took ")[1].split()[0]) < 300


def test_mixing_datasets(tmp_path: Path) -> None:
    assert "of 40 in each batch 30 to 30 are of the small set" in run(
        "mixing_datasets.py", tmp_path
    )
