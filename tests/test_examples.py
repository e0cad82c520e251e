"""The examples run as a user runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.frameworks
def test_quickstart(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "quickstart.py", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same record ids and bytes in 400 batches") == 4
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
