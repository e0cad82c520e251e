"""Processes that are ended when they hang: one for all of an audit, or one for each rank."""

from __future__ import annotations

import faulthandler
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process
from types import ModuleType
from typing import Any

from twinfeed.loaders.audit.drawing import Maker, StoppedError, Stream, TimeOverError
from twinfeed.loaders.support.pool import Pool

_GRACE = 3.0  # seconds that a process has to end by itself


def call_in_child(function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
    """Return the result of a call in a new process, or None if the arguments are unknown there, as
    those of the main script, which is not imported.
    """
    try:
        pickled = pickle.dumps(arguments)
    except Exception:
        return None
    if b"__main__" in pickled or current_process().daemon:
        return None
    pool, main = Pool(1), sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        imported = pool.submit(_import, pickled)
    finally:
        sys.modules["__main__"] = main
    if imported.exception() is not None:
        pool.__exit__(None)
        return None
    job = pool.submit(_call, seconds + _GRACE, function, *arguments)
    return _results([pool], [job], seconds + _GRACE)[0]


def _import(pickled: bytes) -> None:
    pickle.loads(pickled)


def _call(seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. After the seconds, standard error says where it hangs."""
    faulthandler.dump_traceback_later(seconds + _GRACE / 2)
    return function(*arguments)


def draw_by_processes(maker: Maker, epochs: range, world_size: int) -> list[Stream]:
    """Draw epochs by ranks that are joined by gloo, and may use collectives."""
    pools, seconds = [Pool(1) for _ in range(world_size)], maker.until - time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        same = (maker, epochs, f"{folder}/meeting", world_size, seconds)
        jobs = [
            pool.submit(_call, seconds, _draw_rank, rank, *same) for rank, pool in enumerate(pools)
        ]
        return _results(pools, jobs, seconds)


def _draw_rank(
    rank: int, maker: Maker, epochs: range, path: str, world_size: int, seconds: float
) -> Stream:
    from twinfeed.loaders.torch.process_groups import join_group

    maker.until = time.monotonic() + seconds
    join_group(path, rank, world_size, seconds)
    return maker.draw(epochs, rank, world_size)


def _results(pools: list[Pool], jobs: list[Future[Any]], seconds: float) -> list[Any]:
    """Return the results of jobs, one in each pool; StoppedError names the rank that failed."""
    leave: type[BaseException] | None = KeyboardInterrupt  # then no pool waits for its worker
    try:
        done, hanging = wait(jobs, seconds + _GRACE, FIRST_EXCEPTION)
        for job in [job for job in jobs if job in done and job.exception()] or hanging:
            error = job.exception() if job in done else None
            rank = f" of rank {jobs.index(job)} of {len(jobs)}" if len(jobs) > 1 else ""
            if error is None:
                raise TimeOverError(f"the process{rank} hangs")
            if isinstance(error, BrokenProcessPool):
                raise StoppedError(f"the process{rank}: {error}")
            if "pickle" in str(error):
                raise StoppedError(f"make must be at the top level of a module, to pickle: {error}")
            raise StoppedError(str(error))
        leave = None
        return [job.result() for job in jobs]
    finally:
        for pool in pools:
            pool.__exit__(leave)
