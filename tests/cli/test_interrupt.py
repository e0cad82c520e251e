"""An interrupt at any time ends the command with one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinfeed.loaders import pack

HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
START = "import sys; from twinfeed.__main__ import main; sys.exit(main())"
AT_IMPORT = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize(
    "name", ["numpy", "twinfeed.loaders.batches.feed", "twinfeed.loaders.command_line._parser"]
)
def test_interrupt_during_import_prints_one_line(tmp_path: Path, name: str) -> None:
    code = HEARS + AT_IMPORT.format(name=name) + START
    run = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"twinfeed: interrupted\n")


def test_interrupt_with_semaphores_prints_one_line() -> None:
    """multiprocessing would print lines of its own about semaphores that are left."""
    held = "import multiprocessing\nheld = multiprocessing.get_context('spawn').Queue()\n"
    code = HEARS + held + AT_IMPORT.format(name="numpy") + START
    run = subprocess.run(
        [sys.executable, "-c", code, "info", "x"], capture_output=True, check=False
    )
    assert (run.returncode, run.stderr) == (130, b"twinfeed: interrupted\n")


def test_interrupt_at_exit_prints_nothing(tmp_path: Path) -> None:
    index = pack([{"x": b"1"}], tmp_path)["data"]
    late = "import atexit, os; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    words = [sys.executable, "-c", HEARS + late + START, "info", str(index.path)]
    run = subprocess.run(words, capture_output=True, check=False)
    assert (run.returncode, run.stderr) == (0, b"")
    assert run.stdout.startswith(b"1 record in 1 shard, ")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A feed of which an epoch, in batches of one, takes longer than a test."""
    file = tmp_path_factory.mktemp("many") / "many.py"
    file.write_text(
        "import numpy as np\nfrom twinfeed import *\n"
        "sampler = BatchSampler(SequentialSampler(100_000), batch_size=1)\n"
        "feed = Feed({'x': np.arange(100_000)}, sampler)\n"
    )
    return f"{file}:feed"


@pytest.mark.parametrize("delay", [0.0, pytest.param(0.3, marks=pytest.mark.long), 1.0])
def test_interrupt_of_compare_ends_its_processes(many: str, delay: float) -> None:
    """The process imports or works, and neither prints where nor goes on."""
    words = ["compare", "--feed", many, "--backends", "numpy", "numpy"]
    running = subprocess.Popen(
        [sys.executable, "-c", HEARS + START, *words, "--batches", "100000"],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    while not children.read_text():
        assert running.poll() is None
        time.sleep(0.01)
    time.sleep(delay)
    os.killpg(running.pid, signal.SIGINT)
    assert running.communicate(timeout=60)[1] == b"twinfeed: interrupted\n"
    assert running.returncode == 130
