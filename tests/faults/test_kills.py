"""A short form of soak.py: each framework's trainings survive kills, breaks and looks."""

import subprocess
import sys

import pytest
from support import TESTS

pytestmark = [pytest.mark.frameworks, pytest.mark.long]


def test_killed_trainings_equal_plain_loop() -> None:
    script = TESTS / "faults" / "soak.py"
    routes = ["torch workers", "tensorflow", "keras fit"]
    command = [sys.executable, script, "--seconds", "0", "--seed", "3", "--routes", *routes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "3 trainings through" in done.stdout
