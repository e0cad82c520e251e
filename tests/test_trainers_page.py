"""The code of docs/trainers.md runs as it stands there, from top to bottom."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "trainers.md"


@pytest.mark.frameworks
def test_its_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    (tmp_path / "page.py").write_text("\n\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "page.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=os.environ
        | {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
