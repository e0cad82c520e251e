"""A fork in mid-pass: two real processes, and neither hangs, loses a batch or ends the other's."""

import os
import subprocess
from pathlib import Path

import pytest
from support import PROGRAMS
from support.cases import mark_long
from support.programs import PYTHON, QUIET
from support.servers import RangeServer

from twinfeed.loaders import pack

SCRIPT = PROGRAMS / "forking.py"
LIMIT = 300  # seconds, for several children


def forked(*arguments: str) -> list[str]:
    """What the processes print."""
    done = subprocess.run(
        [PYTHON, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=os.environ | QUIET,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(lines: list[str], *, begins: str = "True 1 0", after: tuple[int, int] = (1, 2)) -> None:
    """The child's loop raises, its own pass is whole, and the parent's pass is whole."""
    assert lines[0].startswith("RuntimeError: this pass was ended before its last batch"), lines
    assert lines[1:3] == ["goes_on 0", "drops 0"]
    assert lines[3].startswith(begins)
    one, two = after
    assert lines[4:] == ["begins 0", f"parent True {one} 0", "drops 0", f"parent 24 {two} 0"]


@pytest.mark.parametrize(
    "loader",
    ["numpy", pytest.param("numpy, copied", marks=pytest.mark.long), "numpy, nothing ahead"],
)
def test_forked_child_keeps_pass_of_parent(loader: str) -> None:
    check(forked(loader))


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "loader", mark_long(["torch, workers", "torch", "torch, workers that stay"], but_every=3)
)
def test_forked_child_keeps_workers_of_parent(loader: str) -> None:
    """Once the child's garbage collector ended the parent's workers, and the parent waited."""
    check(forked(loader))


@pytest.mark.parametrize(
    "loader",
    [
        "numpy, evaluation",
        pytest.param("torch, workers, evaluation", marks=pytest.mark.frameworks),
    ],
)
def test_forked_child_continues_in_mid_evaluation(loader: str) -> None:
    check(forked(loader), begins="True 0 0", after=(0, 0))


@pytest.mark.frameworks
def test_forked_child_keeps_reading_for_workers_of_parent(tmp_path: Path) -> None:
    """The parent reads remote shards for its workers, which a child's exit must not end."""
    pack(({"word": b"%d" % number} for number in range(96)), tmp_path)
    with RangeServer(tmp_path) as server:
        check(forked("torch, workers", f"{server.url}/data.index"))


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "loader", ["tensorflow", pytest.param("tensorflow, choose", marks=pytest.mark.long)]
)
def test_forked_child_is_refused_a_tensorflow_pass(loader: str) -> None:
    """TensorFlow itself would wait for threads that the child does not have."""
    check(forked(loader), begins="RuntimeError: TensorFlow does not work in a fork")
