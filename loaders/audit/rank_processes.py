"""Draw in processes: one for each rank, joined by gloo, or one that can be ended when it hangs."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, get_context
from typing import Any

from twinfeed.loaders.audit.isolation import environment
from twinfeed.loaders.audit.maker import Maker, TimeOverError
from twinfeed.loaders.audit.streams import Pass, StoppedError

_GRACE = 5.0  # seconds that a process has to end by itself


def draw_by_processes(
    maker: Maker, epochs: Iterable[int], world_size: int, seconds: float
) -> list[list[Pass]]:
    """Draw epochs by real ranks, which may use collectives: a list of passes for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        calls = [
            (_draw_rank, (maker, list(epochs), rank, world_size, f"{folder}/meeting", seconds))
            for rank in range(world_size)
        ]
        return call_in_processes(calls, seconds, "the process of rank {} of " + str(world_size))


def _draw_rank(
    maker: Maker, epochs: list[int], rank: int, world_size: int, path: str, seconds: float
) -> list[Pass]:
    from twinfeed.loaders.torch.process_groups import join_group

    maker.until = time.monotonic() + seconds
    with environment(rank, world_size):
        join_group(path, rank, world_size, seconds)
        return maker.passes(epochs, rank, world_size)


def call_in_processes(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], seconds: float, name: str
) -> list[Any]:
    """Return the results of calls, each in a process of its own. The processes then end.

    Raises:
        StoppedError: a call raised it, or a process died, or took too long. `name` names it.
    """
    context, until = get_context("spawn"), time.monotonic() + seconds + _GRACE
    pipes, jobs = [], []
    try:
        for call in calls:
            receiver, sender = context.Pipe(duplex=False)
            jobs.append(context.Process(target=_send_result, args=(sender, *call)))
            try:
                jobs[-1].start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                jobs.pop()
                raise StoppedError(
                    f"make does not pickle ({error}): it must be at the top level of a module"
                ) from None
            sender.close()
            pipes.append(receiver)
        found: dict[int, Any] = {}
        while len(found) < len(calls):
            ready = connection.wait(
                [pipe for number, pipe in enumerate(pipes) if number not in found],
                max(0.0, until - time.monotonic()),
            )
            if not ready:
                late = min({*range(len(calls))} - found.keys())
                raise TimeOverError(f"{name.format(late)} gave nothing in {seconds:.0f} s: a hang")
            for pipe in ready:
                number = pipes.index(pipe)  # type: ignore[arg-type]
                found[number] = _received(pipe, jobs[number], name.format(number))
        return [found[number] for number in range(len(calls))]
    finally:
        for job in jobs:
            job.join(0 if len(jobs) > 1 else 1)
            if job.is_alive():
                job.kill()


def _received(pipe: Any, job: Any, name: str) -> Any:
    """Return the result that a process sent, or raise what it raised."""
    try:
        result = pipe.recv()
    except EOFError:
        job.join(_GRACE)
        raise StoppedError(f"{name} died, exit code {job.exitcode}") from None
    if isinstance(result, BaseException):
        raise result
    return result


def _send_result(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Send what a call returns, or its error, to the process that waits for it."""
    try:
        result = function(*arguments)
    except StoppedError as error:
        result = error
    except Exception as error:
        result = StoppedError(f"{type(error).__name__}: {str(error)[:120]}")
    sender.send(result)
