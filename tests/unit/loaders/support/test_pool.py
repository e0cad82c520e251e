"""Processes that share work: what they return, raise and warn of, and what is left if one dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures.process import BrokenProcessPool

import pytest

from twinfeed.loaders import LoaderError, ShardWarning
from twinfeed.loaders.support.pool import Pool


def fail() -> None:
    raise LoaderError("no such record", record=3)


def test_results_errors_and_warnings_are_returned() -> None:
    with Pool(2) as pool:
        assert list(pool.map(divmod, [7, 8], [2, 3])) == [(3, 1), (2, 2)]
        with pytest.warns(ShardWarning, match="cut"):
            pool.submit(warnings.warn, "cut", ShardWarning).result()
        with pytest.raises(LoaderError, match="no such record") as caught:
            pool.submit(fail).result()
        assert caught.value.record == 3
        assert ", in fail" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_killed_worker_fails_all_calls() -> None:
    """Also before it has received its arguments, which are longer than a pipe's buffer."""
    with Pool(2) as pool:
        calls = [pool.submit(signal.pause), *(pool.submit(len, bytes(1 << 24)) for _ in range(4))]
        pool._workers[1][0].kill()
        for call in reversed(calls):
            with pytest.raises(BrokenProcessPool, match="killed by SIGKILL"):
                call.result()
    assert not multiprocessing.active_children()


def test_worker_is_started_before_its_call_is_waited_for() -> None:
    """An interrupt may be lost on the main thread that waits; the end of the worker wakes it."""
    counts = []
    with Pool(2) as pool:
        for _ in range(3):
            pool.submit(time.sleep, 0.1)
            counts.append(len(multiprocessing.active_children()))
    assert counts == [1, 2, 2]


def test_exit_of_worker_is_known_while_another_starts() -> None:
    """A start asks for the ended processes, as `active_children` does, and takes how they ended.

    A matter of which thread comes first, hence the turns.
    """
    for _ in range(8):
        with Pool(1) as pool:
            call = pool.submit(signal.pause)
            with pool._lock:  # as a start has it
                pool._workers[0][0].kill()
                while multiprocessing.active_children():
                    pass
            with pytest.raises(BrokenProcessPool, match="killed by SIGKILL"):
                call.result()


def test_exit_code_of_worker_is_named() -> None:
    with Pool(1) as pool, pytest.raises(BrokenProcessPool, match="exit code 3"):
        pool.submit(os._exit, 3).result()


def test_interrupted_worker_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(1) as pool:
        os.kill(pool.submit(os.getpid).result(), signal.SIGINT)
        with pytest.raises(BrokenProcessPool, match="killed by SIGINT"):
            pool.submit(signal.pause).result()
    assert capfd.readouterr().err == ""


INTERRUPTED = """
import os, signal, sys, time
from twinfeed.loaders.building import build
from twinfeed.loaders.support.pool import Pool

def interrupted_at(number):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGINT)
    try:
        with Pool(2) as pool:
            sys.settrace(trace)
            try:
                list(build._run_on(pool, [(0.5,), (0.5,)]))
            finally:
                sys.settrace(None)
    except KeyboardInterrupt:
        return True

signal.signal(signal.SIGINT, signal.default_int_handler)
build.build_part = time.sleep
number = 1
while interrupted_at(number):
    number += 5
print(number)
"""


def test_interrupt_at_any_call_leaves_no_lock_locked() -> None:
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 50
