"""A program runs in a fork (support/start/forks.py) as in an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cases import mark_long
from support.programs import PYTHON, QUIET

pytestmark = pytest.mark.frameworks

PROGRAMS = {
    "what it is": (
        "import os, resource, sys\n"
        "main = sys.modules['__main__']\n"
        "print(__name__, __file__, main.__file__, sys.argv, os.getcwd(), sys.path)\n"
        "print(sys.stdin.read(), os.environ['MINE'], resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "print(sys.warnoptions, __spec__ and __spec__.name, 'twinfeed' in sys.modules)\n"
    ),
    "an exit": "import atexit, sys\natexit.register(print, 'the end')\nsys.exit(3)",
    "an error": "def f():\n    raise ValueError('mine')\n\ntry:\n    1 / 0\nfinally:\n    f()",
    "an interrupt": "raise KeyboardInterrupt",
    "a kill": "import os\nprint('said', flush=True)\nos.kill(os.getpid(), 9)",
    "a warning": "import warnings\nwarnings.warn('mine')",
    "workers": (
        "from multiprocessing import get_context\n"
        "def work(n):\n    return n + 1\n"
        "if __name__ == '__main__':\n"
        "    with get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, [1]))\n"
    ),
}


NEED_A_FILE = {"what it is", "workers"}


@pytest.mark.parametrize(
    ("name", "how"),
    mark_long(
        [
            (name, how)
            for name in PROGRAMS
            for how in ("script", "-m", "-c")
            if how != "-c" or name not in NEED_A_FILE
        ],
        but_every=2,
    ),
)
def test_forked_program_behaves_like_fresh_interpreter(tmp_path: Path, name: str, how: str) -> None:
    (tmp_path / "mine.py").write_text(PROGRAMS[name])
    words = {"script": ["mine.py"], "-c": ["-c", PROGRAMS[name]], "-m": ["-m", "mine"]}[how]
    ended = [
        subprocess.run(
            [python, "-W", "error", *words, "one", "two"],
            input="given",
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=os.environ | QUIET | {"MINE": "yes"},
            timeout=300,
        )
        for python in (PYTHON, sys.executable)
    ]
    forked, fresh = ((done.returncode, done.stdout, done.stderr) for done in ended)
    assert forked == fresh
