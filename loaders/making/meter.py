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
    """The times of a batch in ns, which a worker process sends with it: of each stage, and when
    the batch was ready.
    """

    stages: dict[Stage, int]
    ready_at: int


@dataclass(frozen=True)
class PassReport:
    """Say where the time of a pass went, in seconds.

    Several batches are made at once, so sums over all batches may exceed `seconds`. `waiting`,
    `ready` and `waited` are None if the loop is not over the loader, as in `fit`.

    Attributes:
        reading: sum over all batches.
        decoding: sum over all batches.
        transforming: sum over all batches.
        collating: sum over all batches.
        waiting: how long the loop waited for batches.
        ready: the sum of how long each batch was ready before the loop asked for the batch, counted
            from when the batch before was received.
        waited: the fraction of steps in which waiting took more than a tenth of the step.

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
    ready: float | None = None
    waited: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return the figures by name.

        >>> PassReport(batches=4).as_dict()["batches"]
        4
        """
        return asdict(self)

    def __str__(self) -> str:
        """Return the report as lines of text that say whether the loop has waited for data."""
        lines = [f"{counted(self.batches, 'batch')} in {_time(self.seconds)}"]
        if self.waiting is None or self.ready is None or self.waited is None:
            lines.append("  how long the loop waited is not known here")
        elif self.batches:
            lines += [
                f"  the loop waited {_time(self.waiting)}, at {self.waited:.0%} of the steps: "
                f"{'data hold it back' if self.waited > 0.1 else 'data do not hold it back'}",
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
    """Add up the time that all threads of a pass spend in each stage, and that the loop waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start(0)
        self.end()

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        """Pickle without the times."""
        return Meter, ()

    def start(self, step: int, *, counted: bool = True) -> None:
        """Start to measure a pass from a step on.

        `counted` says that `received` will be called for each batch. Otherwise a framework
        iterates, and only the stages are measured.
        """
        with self._lock:
            self._loop_running = counted
            self._stages: Counter[Stage] = Counter()
            self._ready_times: dict[int, int] = {}  # by step, until the batch is received
            self._next_step, self._measures_loop = step, counted
            self._num_batches = self._total_waiting = self._total_ready = self._num_slow_steps = 0
            self._start_time = self._last_batch_time = perf_counter_ns()

    def start_external(self) -> None:
        """Start to measure a pass of a framework, unless a counted pass is running."""
        if not self._loop_running:
            self.start(0, counted=False)

    def end(self) -> None:
        """End a counted pass; `report` still returns its times."""
        self._loop_running = False

    def timed(self, stage: Stage, function: Callable[..., T], /, *arguments: Any) -> T:
        """Return `function(*arguments)`, and add the time of the call to a stage."""
        start = perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            elapsed = perf_counter_ns() - start
            with self._lock:
                self._stages[stage] += elapsed

    def batch_done(self, step: int, steps: int = 1) -> None:
        """Record that the batches of the steps [step, step + steps) are ready now."""
        now = perf_counter_ns()
        with self._lock:
            if self._measures_loop:
                self._ready_times.update(dict.fromkeys(range(step, step + steps), now))
            else:
                self._num_batches, self._last_batch_time = self._num_batches + steps, now

    def take(self) -> StageTimes:
        """Return the times since the last call of `take`, and reset them.

        A worker process sends them with each batch to the main process, which calls `add`.
        """
        with self._lock:
            stages, self._stages = self._stages, Counter()
            self._ready_times.clear()
            return StageTimes(stages, perf_counter_ns())

    def add(self, step: int, times: StageTimes) -> None:
        """Add the times of a batch that another process has made."""
        with self._lock:
            self._stages.update(times.stages)
            self._ready_times[step] = times.ready_at

    def received(self, requested: int) -> None:
        """Record that the loop has received a batch, which it requested at `requested` (ns)."""
        now = perf_counter_ns()
        with self._lock:
            # A batch counts as ready once it is made and the batch before has been received.
            ready = max(self._ready_times.pop(self._next_step, now), self._last_batch_time)
            self._total_ready += max(0, requested - ready)
            waiting = now - requested
            self._total_waiting += waiting
            self._num_slow_steps += (
                10 * waiting > now - self._last_batch_time
            )  # more than a tenth of the step
            self._next_step, self._num_batches, self._last_batch_time = (
                self._next_step + 1,
                self._num_batches + 1,
                now,
            )

    def report(self) -> PassReport:
        """Return the report of the last pass, which may still be running."""
        with self._lock:
            stages = {stage: elapsed / 1e9 for stage, elapsed in self._stages.items()}
            loop: dict[str, float] = {}
            if self._measures_loop:
                loop = {"waiting": self._total_waiting / 1e9, "ready": self._total_ready / 1e9}
                loop["waited"] = self._num_slow_steps / max(1, self._num_batches)
            seconds = (self._last_batch_time - self._start_time) / 1e9
            return PassReport(self._num_batches, seconds, **stages, **loop)
