"""Processes that share work: what they return, raise and warn of, and what is left if one dies."""

import multiprocessing
import os
import signal
import warnings
from concurrent.futures.process import BrokenProcessPool

import pytest

from twinfeed.loaders import LoaderError, ShardWarning
from twinfeed.loaders.support.pool import Pool


def fail() -> None:
    raise LoaderError("no such record", record=3)


def test_results_errors_and_warnings_come_back() -> None:
    with Pool(2) as pool:
        assert list(pool.map(divmod, [7, 8], [2, 3])) == [(3, 1), (2, 2)]
        with pytest.warns(ShardWarning, match="cut"):
            pool.submit(warnings.warn, "cut", ShardWarning).result()
        with pytest.raises(LoaderError, match="no such record") as caught:
            pool.submit(fail).result()
        assert caught.value.record == 3
        assert ", in fail" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()


def test_a_process_that_dies_ends_all() -> None:
    """Also before it has received its arguments, which are longer than a pipe's buffer."""
    with Pool(2) as pool:
        calls = [pool.submit(signal.pause), *(pool.submit(len, bytes(1 << 24)) for _ in range(4))]
        while not (second := list(pool._workers.values())[1:]):
            pass
        second[0][0].kill()
        for call in reversed(calls):
            with pytest.raises(BrokenProcessPool, match="killed by SIGKILL"):
                call.result()
    assert not multiprocessing.active_children()


def test_how_a_process_died_is_known_while_another_starts() -> None:
    """A start asks for the ended processes, as `active_children` does, and takes how they ended.

    A matter of which thread comes first, hence the turns.
    """
    for _ in range(8):
        with Pool(1) as pool:
            call = pool.submit(signal.pause)
            while not pool._workers:
                pass
            with pool._lock:  # as a start has it
                next(iter(pool._workers.values()))[0].kill()
                while multiprocessing.active_children():
                    pass
            with pytest.raises(BrokenProcessPool, match="killed by SIGKILL"):
                call.result()


def test_an_interrupt_is_not_heard() -> None:
    with Pool(1) as pool:
        process = pool.submit(os.getpid).result()
        os.kill(process, signal.SIGINT)
        assert pool.submit(os.getpid).result() == process
        with pytest.raises(BrokenProcessPool, match="exit code 3"):
            pool.submit(os._exit, 3).result()
