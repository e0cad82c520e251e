"""Nothing hangs: each fault in a process of its own, with a limit. Each process reads both ways."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support import PROGRAMS
from support.programs import PYTHON, QUIET

SCRIPT = PROGRAMS / "torch_faults.py"
LIMIT = 300  # seconds; each takes a few


MOUNT = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
LITTLE = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, "sh"]


def little_shared_memory() -> list[str]:
    """What to put before a command, so that the command has 16 MB of shared memory.

    If the system forbids mounting, no file may have more than 4 MB, those in /dev/shm included.
    """
    mounts = subprocess.run([*LITTLE, "true"], check=False, stderr=subprocess.DEVNULL)
    return ["prlimit", f"--fsize={4 << 20}"] if mounts.returncode else LITTLE


def run(scenario: str, *before: str, warn: str = "error") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable if before else PYTHON, "-W", warn, SCRIPT, scenario],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env=os.environ | QUIET,
    )


def start(scenario: str) -> tuple[subprocess.Popen[str], int]:
    """Start a scenario; return its process, and the id of its process group."""
    process = subprocess.Popen(
        [PYTHON, SCRIPT, scenario],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | QUIET,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(
    ("scenario", "how", "advice"),
    [
        ("killed", "was killed by SIGKILL", r"out of memory \(see `dmesg`\).*num_workers"),
        ("bus", "was killed by SIGBUS", r"/dev/shm.*\d+ MiB.*--shm-size.*prefetch_factor"),
        pytest.param("left", "ended with exit code 0", "num_workers=0", marks=pytest.mark.long),
    ],
)
def test_worker_death_is_an_error_with_advice(scenario: str, how: str, advice: str) -> None:
    done = run(scenario)
    assert done.returncode == 0, done.stderr
    said = rf"^\d worker 0 of 2 \(process \d+\) {how}\n  what to do: .*{advice}"
    assert len(re.findall(said, done.stdout, re.MULTILINE)) == 2


@pytest.mark.parametrize("scenario", ["full", pytest.param("full, ragged", marks=pytest.mark.long)])
def test_full_shared_memory_is_an_error(scenario: str) -> None:
    """Once a thread of the worker dropped the batch, and the loop waited for ever."""
    done = run(scenario, *little_shared_memory(), warn="default")
    assert done.returncode == 0, done.stderr
    said = r"worker \d of 2 .* cannot share its batch: unable to "
    assert len(re.findall(rf"{said}.*\n  what to do: .*/dev/shm.*--shm-size", done.stdout)) == 2


def test_worker_killed_while_sending_is_named() -> None:
    done = run("killed while sending")
    assert "was killed by SIGKILL" in done.stdout, done.stderr


def test_worker_ended_before_its_tensors_arrive_is_named() -> None:
    """torch does not say that the worker died, where the system says it a moment later."""
    done = run("ends before its tensors come", warn="default")
    # Under load torch may say first that the worker has ended. So may the loop, which looks at the
    # workers while it waits: then there is no error of torch.
    errors = "(FileNotFound|ConnectionRefused|EOF|Runtime)Error|NoneType"
    said = rf"({errors}) worker 0 of 1 .* ended with exit code 3"
    assert re.match(said, done.stdout), done.stderr


def test_worker_killed_during_training_step_is_named() -> None:
    """Once torch's handler of the signal raised torch's error in the body of the loop."""
    done = run("killed in the body", warn="default")
    assert re.match(r"WorkerDiedError worker \d of 2 .* was killed by SIGKILL", done.stdout)


def test_workers_run_with_long_temporary_folder_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path may have 107 bytes. Once a worker could not send its batch, in silence."""
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    done = run("both ways", warn="default")
    assert (done.returncode, done.stdout) == (0, "6\n6\n"), done.stderr


def test_spawning_script_without_main_guard_is_advised_to_add_it(tmp_path: Path) -> None:
    """A spawned worker imports the script, which starts a worker of its own, and ends."""
    script = tmp_path / "script.py"
    script.write_text("import torch_faults\ntorch_faults.spawned()\n")
    done = subprocess.run(
        [PYTHON, script],
        env=os.environ | QUIET | {"PYTHONPATH": f"{SCRIPT.parent}:{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    said = done.stderr[done.stderr.rindex("WorkerDiedError") :]
    assert "ended with exit code 1" in said
    assert "guard the start of a script with if __name__ == '__main__'" in said
    assert "num_workers=0" not in said


def test_many_fields_fit_descriptor_limit_or_are_refused() -> None:
    assert run("many small fields").stdout == f"{24 * 8 * 59}\n"
    assert "each of the 260 large tensors of a batch by a descriptor, about 2" in (
        run("many large fields").stdout
    )


@pytest.mark.parametrize(
    "scenario",
    ["waiting", pytest.param("waiting for spawned workers", marks=pytest.mark.long)],
)
def test_fault_113_workers_end_with_killed_main_process(scenario: str) -> None:
    """However they were started. All have its stdout, which so ends with the last of them."""
    process, group = start(scenario)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waiting\n"
        os.kill(group, signal.SIGKILL)
        process.communicate(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(group, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("what", [pytest.param("threads", marks=pytest.mark.long), "workers"])
def test_ctrl_c_ends_loop_and_workers(what: str) -> None:
    """As a terminal sends it: to the process and all its workers."""
    process, group = start(f"interrupted {what}")
    assert process.stdout is not None
    try:
        for _ in range(8):
            assert process.stdout.readline() == "batch\n"
        os.killpg(group, signal.SIGINT)
        out, errors = process.communicate(timeout=LIMIT)
    finally:
        process.kill()  # which ends the program
    assert "interrupted, and went on" in out
    assert process.returncode == -signal.SIGINT
    assert errors.count("KeyboardInterrupt") == 1


@pytest.mark.parametrize("what", [pytest.param("threads", marks=pytest.mark.long), "workers"])
def test_live_iterator_at_exit_ends_silently(what: str) -> None:
    done = run(f"broken off {what}", "env")  # a fork of an interpreter keeps its modules at exit
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_exception_in_training_step_is_raised_unchanged() -> None:
    done = run("failed")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("failed in 'the training step'") == 4
