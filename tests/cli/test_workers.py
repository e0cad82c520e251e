"""Commands with worker processes that are interrupted or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.cases import mark_long


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["pack", "images", "out"], "; nothing was written"),
        (["index", "images", "--out", "x.index"], "; nothing was written"),
        (["index", "images", "--out", "x.index", "--jobs", "2"], "; nothing was written"),
        (["verify", "images"], "\n"),
    ],
)
def test_interrupt_reports_what_was_kept(tmp_path: Path, command: list[str], text: str) -> None:
    """The command is at work for much longer than the test, so that the interrupt finds it so."""
    images = long_images(tmp_path / "images" / "a")
    running = start(tmp_path, *command, "-q")
    wait_for_reading(running, images)
    error = interrupted(running)
    assert error.startswith(f"twinfeed: interrupted{text}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_interrupt_ends_idle_workers_silently(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for n in range(LONG):
        (tmp_path / "images" / f"{n}.png").touch()
    long_images(tmp_path / "images")
    command = ["index", "images", "--out", "x.index", "--jobs", "2"]
    running = start(tmp_path, *command, before=TWO_PARTS)
    seen = b""
    while b"1/2" not in seen:  # one worker is through, the other has long images
        assert running.poll() is None, seen
        seen += os.read(running.stderr.fileno(), 1)
    assert "Traceback" not in interrupted(running)


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_interrupt_ends_starting_workers_silently(tmp_path: Path, delay: float) -> None:
    """While they import; the images are long, so that none of them is through."""
    long_images(tmp_path / "images")
    command = ["index", "images", "--out", "x.index", "--jobs", "2", "-q"]
    started(running := start(tmp_path, *command, before=TELLS))
    time.sleep(delay)
    assert interrupted(running).count("\n") == 1


@pytest.mark.parametrize(
    ("command", "delay"),
    mark_long([("verify", 0.0), ("index", 0.001), ("index", 0.5), ("verify", 0.08)], but_every=2),
)
def test_killed_worker_ends_command_with_one_line(
    tmp_path: Path, command: str, delay: float
) -> None:
    """As it starts, while it imports, and at work: each of two has long images to read."""
    long_images(tmp_path / "images", "first")
    long_images(tmp_path / "images", "last")
    options = ["--jobs", "2", "-q", *(["--out", "x.index"] if command == "index" else [])]
    running = start(tmp_path, command, "images", *options, before=TWO_PARTS + TELLS)
    worker = started(running)
    time.sleep(delay)
    os.kill(worker, signal.SIGKILL)
    error = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 1
    assert error.startswith("twinfeed: error: a worker process was killed by SIGKILL; what to do: ")
    assert error.count("\n") == 1
    for _ in range(6000):
        if not group(running.pid):
            return
        time.sleep(0.01)
    pytest.fail(f"left behind: {group(running.pid)}")


def long_images(folder: Path, name: str = "last") -> Path:
    """Make images that take a minute to read, and no room: files of zeros that are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(LONG):
        with (folder / f"{name}-{n:03}.png").open("wb") as file:
            file.truncate(1 << 28)
    return folder


def wait_for_reading(running: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a process of a command's group reads a file of the folder."""
    while running.poll() is None:
        for stat in group(running.pid):
            for fd in Path(f"/proc/{stat.split()[0]}/fd").glob("*"):
                with suppress(OSError):  # it has been closed meanwhile
                    if Path(os.readlink(fd)).parent == folder:
                        return
        time.sleep(0.01)
    pytest.fail(f"the command has ended: {running.communicate()[1].decode()}")


def group(leader: int) -> list[str]:
    """The processes of a group that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            found.append(path.read_text())
    return [stat for stat in found if stat.rpartition(")")[2].split()[2] == str(leader)]


LONG = 400


# Each of two workers has as many images.
TWO_PARTS = f"""
from twinfeed.loaders.building import sources
sources.FILES_PER_PART = {LONG}
"""


# Prints the number of each worker that the command has started.
TELLS = """
from multiprocessing import util
start = util.spawnv_passfds
def tell(path, words, fds):
    child = start(path, words, fds)
    if "spawn_main" in str(words):
        print(child, flush=True)
    return child
util.spawnv_passfds = tell
"""


def started(running: subprocess.Popen[bytes]) -> int:
    """Wait until a command has started a worker, and return the worker's process id."""
    line = running.stdout.readline()
    assert line, f"the command has ended: {running.communicate()[1].decode()}"
    return int(line)


def start(folder: Path, *command: str, before: str = "") -> subprocess.Popen[bytes]:
    """Start a command as a terminal does: interrupts end it, and reach its workers too."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from twinfeed.loaders.command_line import main\n"
        "if __name__ == '__main__': sys.exit(main())"
    )
    (folder / "run.py").write_text(before + code)
    return subprocess.Popen(
        [sys.executable, "run.py", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def interrupted(running: subprocess.Popen[bytes]) -> str:
    """Interrupt a command, and return what it says."""
    os.killpg(running.pid, signal.SIGINT)
    error = running.communicate(timeout=60)[1].decode()
    assert running.returncode == 130
    return error
