"""Nothing hangs: each fault in a process of its own, with a limit. Each process reads both ways."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "torch_faults.py"
LIMIT = 60  # seconds; each takes a few


def run(scenario: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, scenario],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


@pytest.mark.parametrize(
    ("scenario", "how", "advice", "times"),
    [
        ("killed", "was killed by SIGKILL", r"out of memory \(see `dmesg`\).*num_workers", 2),
        ("full", "was killed by SIGBUS", r"/dev/shm.*\d+ MiB.*--shm-size.*prefetch_factor", 2),
        ("left", "ended with exit code 0", "num_workers=0", 1),
    ],
)
def test_a_worker_that_dies_is_an_error(scenario: str, how: str, advice: str, times: int) -> None:
    done = run(scenario)
    assert done.returncode == 0, done.stderr
    said = rf"^\d worker 0 of 2 \(process \d+\) {how}\n  what to do: .*{advice}"
    assert len(re.findall(said, done.stdout, re.MULTILINE)) == times


def test_a_worker_killed_in_the_midst_of_a_message() -> None:
    done = run("killed while sending")
    assert "was killed by SIGKILL" in done.stdout, done.stderr


def test_a_script_without_a_guard_is_told_to_guard_its_start(tmp_path: Path) -> None:
    """A spawned worker imports the script, which starts a worker of its own, and ends."""
    script = tmp_path / "script.py"
    script.write_text("import torch_faults\ntorch_faults.spawned()\n")
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = done.stderr[done.stderr.rindex("WorkerDiedError") :]
    assert "ended with exit code 1" in said
    assert "guard the start of a script with if __name__ == '__main__'" in said
    assert "num_workers=0" not in said


@pytest.mark.parametrize("what", ["threads", "workers"])
def test_ctrl_c(what: str) -> None:
    """As a terminal sends it: to the process and all its workers."""
    command = [sys.executable, SCRIPT, f"interrupted {what}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    try:
        for _ in range(8):
            assert process.stdout.readline() == "batch\n"
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert "interrupted, and went on" in out
    assert process.returncode == -signal.SIGINT
    assert errors.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("what", ["threads", "workers"])
def test_a_break_and_a_live_iterator_at_exit(what: str) -> None:
    done = run(f"broken off {what}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_an_exception_in_the_training_step() -> None:
    done = run("failed")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("failed in 'the training step'") == 4
