"""Short forms of kills.py and soak.py: what is killed at random moments loses nothing."""

import subprocess
import sys

import pytest
from support import TESTS


def printed_by(script: str, *options: str) -> str:
    """Return what a program of this folder prints."""
    command = [sys.executable, TESTS / "faults" / script, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_kills_at_random_moments_lose_nothing() -> None:
    """Of packs, builds and caches."""
    options = ["--seconds", "5", "--rooms", "pack", "build", "cache"]
    assert ", 0 findings" in printed_by("kills.py", *options)


@pytest.mark.frameworks
@pytest.mark.long
def test_killed_trainings_equal_plain_loop() -> None:
    """Each framework's trainings survive kills, breaks and looks."""
    routes = ["torch workers", "tensorflow", "keras fit"]
    options = ["--seconds", "0", "--seed", "3", "--routes", *routes]
    assert "3 trainings through" in printed_by("soak.py", *options)
