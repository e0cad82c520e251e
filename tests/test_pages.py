"""The code of each page in docs/ runs as it stands there, from top to bottom."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
FRAMEWORKS = {"tensorflow", "torch", "trainers"}
BACKENDS = {"trainers": "torch", "tensorflow": "tensorflow"}


def code(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


PAGES = [path.stem for path in sorted(DOCS.glob("*.md")) if code(path)]


def test_there_are_pages_with_code() -> None:
    assert set(PAGES) >= {"concepts", "migrating", "samplers", *FRAMEWORKS}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=[pytest.mark.frameworks] if name in FRAMEWORKS else [])
        for name in PAGES
    ],
)
def test_its_code_runs(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text("\n\n".join(code(DOCS / f"{page}.md")))
    done = subprocess.run(
        [sys.executable, "page.py"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        | ({"KERAS_BACKEND": BACKENDS[page]} if page in BACKENDS else {}),
    )
    assert done.returncode == 0, done.stderr
