"""Draw in processes: one for each rank, joined by gloo, or one that can be ended when it hangs."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any

from twinfeed.loaders.audit.isolation import environment
from twinfeed.loaders.audit.maker import Maker, TimeOverError
from twinfeed.loaders.audit.streams import Pass, StoppedError
from twinfeed.loaders.support.pool import Pool

_GRACE = 5.0  # seconds that a process has to end by itself


class _TerminateError(BaseException):
    """Ends a `with` block of pools, which then do not wait for their workers."""


def draw_by_processes(
    maker: Maker, epochs: Iterable[int], world_size: int, seconds: float
) -> list[list[Pass]]:
    """Draw epochs by real ranks, which may use collectives: a list of passes for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/meeting"
        ranks = [
            (maker, list(epochs), rank, world_size, path, seconds) for rank in range(world_size)
        ]
        return call_in_processes(_draw_rank, ranks, seconds)


def _draw_rank(
    maker: Maker, epochs: list[int], rank: int, world_size: int, path: str, seconds: float
) -> list[Pass]:
    from twinfeed.loaders.torch.process_groups import join_group

    maker.until = time.monotonic() + seconds
    with environment(rank, world_size):
        join_group(path, rank, world_size, seconds)
        return maker.passes(epochs, rank, world_size)


def call_in_processes(
    function: Callable[..., Any], calls: list[tuple[Any, ...]], seconds: float
) -> list[Any]:
    """Return the results of calls with these arguments, each in a process of its own.

    Raises:
        StoppedError: a call raised it, or a process died, or took too long. The rank is named.
    """
    found: list[Any] = []
    try:
        with ExitStack() as pools:
            jobs = [pools.enter_context(Pool(1)).submit(function, *call) for call in calls]
            done, _ = wait(jobs, seconds + _GRACE, FIRST_EXCEPTION)
            # The first that failed; else the first that is not done.
            for job in sorted(jobs, key=lambda job: job not in done or job.exception() is None):
                rank = f"the process of rank {jobs.index(job)} of {len(jobs)}"
                try:
                    job.result(0)
                except TimeoutError:
                    raise _TerminateError(TimeOverError(f"{rank} hangs")) from None
                except BrokenProcessPool as error:
                    raise _TerminateError(StoppedError(f"{rank}: {error}")) from None
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    reason = f"make must be at the top level of a module, to pickle: {error}"
                    raise _TerminateError(StoppedError(reason)) from None
                except Exception as error:
                    raise _TerminateError(StoppedError(str(error))) from None
            found = [job.result() for job in jobs]
    except _TerminateError as ended:
        raise ended.args[0] from None
    return found
