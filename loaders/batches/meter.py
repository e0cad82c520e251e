"""Measure the time that a pass spends in each stage: a few clock readings per batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple, TypeVar

from twinfeed.samplers.validate import counted

T = TypeVar("T")

Stage = Literal["reading", "decoding", "transforming", "collating"]


class StageTimes(NamedTuple):
    """The times of one batch that a worker process has made, which it sends with the batch.

    Attributes:
        stages: ns spent in each stage.
        ready_at: clock time in ns at which the batch was made.
    """

    stages: dict[str, int]
    ready_at: int


@dataclass(frozen=True)
class PassReport:
    """Say where the time of a pass went, in seconds.

    Several batches are made at once, so sums over all batches may exceed `seconds`. `waiting`,
    `first` and `ready` are None if a framework iterates, as in Keras's `fit`, and not a loop over
    the loader.

    Attributes:
        reading: sum over all batches.
        decoding: sum over all batches.
        transforming: sum over all batches.
        collating: sum over all batches.
        waiting: how long the loop waited for batches.
        first: how much of `waiting` was for the first batch.
        ready: sum over all batches of how long the batch was ready before the loop asked for it.
            The time before the loop received the previous batch does not count.

    >>> print(PassReport(batches=4, seconds=2.0, reading=0.5, decoding=1.4))
    4 batches in 2.0 s
      how long the loop waited is not known here
      making them: reading 500.0 ms, decoding 1.4 s, transform 0.0 ms, collation 0.0 ms
    """

    batches: int = 0
    seconds: float = 0.0
    reading: float = 0.0
    decoding: float = 0.0
    transforming: float = 0.0
    collating: float = 0.0
    waiting: float | None = None
    first: float | None = None
    ready: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the figures by name.

        >>> PassReport(batches=4).as_dict()["batches"]
        4
        """
        return asdict(self)

    def __str__(self) -> str:
        """Return the report as lines of text that say whether the loop has waited for data."""
        lines = [f"{counted(self.batches, 'batch')} in {_time(self.seconds)}"]
        if self.waiting is None or self.first is None or self.ready is None:
            lines.append("  how long the loop waited is not known here")
        elif self.batches:
            share = self.waiting / max(self.seconds, 1e-9)
            only_first = self.waiting - self.first <= 0.1 * (self.seconds - self.first)
            slow = "only the first batch holds it back" if only_first else "data hold it back"
            verdict = slow if share > 0.1 else "data do not hold it back"
            lines += [
                f"  the loop waited {_time(self.waiting)}, {share:.0%} of the time, "
                f"{_time(self.first)} of it for the first batch: {verdict}",
                f"  a batch was ready {_time(self.ready / self.batches)} before the loop asked for "
                "it, on average",
            ]
        lines.append(
            f"  making them: reading {_time(self.reading)}, decoding {_time(self.decoding)}, "
            f"transform {_time(self.transforming)}, collation {_time(self.collating)}"
        )
        return "\n".join(lines)


def _time(seconds: float) -> str:
    """Return a time as text: "1.5 s" or "20.0 ms"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


class Meter:
    """Add up how long the threads of a pass spend in each stage, and how long the loop waits.

    All times are in ns of `perf_counter_ns`. A batch is first made (`batch_done`), on any thread,
    and later received by the loop (`received`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start(0)
        self.end()

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        """Pickle without the times."""
        return Meter, ()

    def start(self, step: int, *, measures_loop: bool = True) -> None:
        """Reset all times, to measure a pass whose first batch is that of `step`.

        With `measures_loop`, `received` must be called for each batch. Without it, a framework
        iterates, as in Keras's `fit`: how long its loop waits is not known.
        """
        with self._lock:
            self._measures_loop = self._loop_running = measures_loop
            # The time of all batches in each stage; and, if it is known, how long the loop waited
            # for all batches, and for the first, and how long batches were ready before the loop
            # asked for them.
            self._times: Counter[str] = Counter()
            if measures_loop:
                self._times.update(waiting=0, first=0, ready=0)
            self._num_batches = 0
            self._start_time = self._last_batch_time = perf_counter_ns()
            # When each batch was made, by step, until the loop receives the batch.
            self._ready_at: dict[int, int] = {}
            self._next_step = step  # of the batch that the loop receives next

    def start_external(self) -> None:
        """Start to measure the batches that a framework takes, as in Keras's `fit`.

        If the user's own loop over the loader is running too, do nothing, so that the times of the
        loop are not reset.
        """
        if not self._loop_running:
            self.start(0, measures_loop=False)  # the step is only used for a loop

    def end(self) -> None:
        """End the pass of a loop; `report` still returns its times."""
        self._loop_running = False

    def timed(self, stage: Stage, function: Callable[..., T], /, *arguments: Any) -> T:
        """Return `function(*arguments)`, and add the time of the call to a stage."""
        start = perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            elapsed = perf_counter_ns() - start
            with self._lock:
                self._times[stage] += elapsed

    def batch_done(self, step: int, num_steps: int = 1) -> None:
        """Record that the batches of the steps [step, step + num_steps) were made just now.

        If a loop over the loader receives the batches, `received` will count them: here only the
        time is stored, for how long they wait. If a framework takes the batches, `received` is
        never called, so they are counted here.
        """
        now = perf_counter_ns()
        with self._lock:
            if self._measures_loop:
                for number in range(step, step + num_steps):
                    self._ready_at[number] = now
            else:
                self._num_batches += num_steps
                self._last_batch_time = now

    def take(self) -> StageTimes:
        """Return the times since the last call of `take`, and reset them.

        A worker process calls this when it has made a batch, and sends the times with the batch to
        the main process, which calls `add`.
        """
        with self._lock:
            stages, self._times = self._times, Counter()
            self._ready_at.clear()  # no loop in this process receives batches, which would do it
            return StageTimes(stages, ready_at=perf_counter_ns())

    def add(self, step: int, times: StageTimes) -> None:
        """Add the times of the batch of a step that a worker process has made."""
        with self._lock:
            self._times.update(times.stages)
            self._ready_at[step] = times.ready_at

    def received(self, requested: int) -> None:
        """Record that the loop has just received a batch, which it requested at `requested`.

        For example, batch 4 is received at 10, and batch 5 is made at 8, requested at 13 and
        received at 14. So batch 5 was ready for 3 (not 5: before 10 the loop wanted batch 4), the
        loop waited 1, and the step took 4 (from 10 to 14).
        """
        now = perf_counter_ns()
        with self._lock:
            ready_since = max(self._ready_at.pop(self._next_step, now), self._last_batch_time)
            self._times["ready"] += max(0, requested - ready_since)
            self._times["waiting"] += now - requested
            if not self._num_batches:
                self._times["first"] = now - requested
            self._next_step += 1
            self._num_batches += 1
            self._last_batch_time = now

    def report(self) -> PassReport:
        """Return the report of the last pass, which may still be running."""
        with self._lock:
            seconds = (self._last_batch_time - self._start_time) / 1e9
            in_seconds = {name: elapsed / 1e9 for name, elapsed in self._times.items()}
            return PassReport(self._num_batches, seconds, **in_seconds)
