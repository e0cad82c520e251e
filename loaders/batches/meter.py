"""Measure the time that a pass spends in each stage: a few clock readings per batch."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal, TypeVar

from twinfeed.samplers.validate import counted

T = TypeVar("T")

Stage = Literal["reading", "decoding", "transforming", "collating"]


@dataclass(frozen=True)
class PassReport:
    """Say where the time of a pass went, in seconds.

    Several batches are made at once, so sums over all batches may exceed `seconds`. `waiting` and
    `first` are None if a framework iterates, as in Keras's `fit`, and not a loop over the loader.

    Attributes:
        reading: sum over all batches.
        decoding: sum over all batches.
        transforming: sum over all batches.
        collating: sum over all batches.
        waiting: how long the loop waited for batches.
        first: how much of `waiting` was for the first batch.

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

    def __str__(self) -> str:
        """Return the report as lines of text that say whether the loop has waited for data."""
        lines = [f"{counted(self.batches, 'batch')} in {_time(self.seconds)}"]
        if self.waiting is None or self.first is None:
            lines.append("  how long the loop waited is not known here")
        elif self.batches:
            share = self.waiting / max(self.seconds, 1e-9)
            only_first = self.waiting - self.first <= 0.1 * (self.seconds - self.first)
            slow = "only the first batch holds it back" if only_first else "data hold it back"
            verdict = slow if share > 0.1 else "data do not hold it back"
            lines.append(
                f"  the loop waited {_time(self.waiting)}, {share:.0%} of the time, "
                f"{_time(self.first)} of it for the first batch: {verdict}"
            )
        lines.append(
            f"  making them: reading {_time(self.reading)}, decoding {_time(self.decoding)}, "
            f"transform {_time(self.transforming)}, collation {_time(self.collating)}"
        )
        return "\n".join(lines)


def _time(seconds: float) -> str:
    """Return a time as text: "1.5 s" or "20.0 ms"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


class Meter:
    """Add up how long the threads of a pass spend in each stage, and how long the loop waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start()
        self.end()

    def __reduce__(self) -> tuple[type[Meter], tuple[()]]:
        """Pickle without the times."""
        return Meter, ()

    def start(self, *, measures_loop: bool = True) -> None:
        """Reset all times, to measure a pass."""
        with self._lock:
            self._measures_loop = self._loop_running = measures_loop
            # The time in each stage; and, if it is known, how long the loop waited.
            self._times = Counter(dict.fromkeys(("waiting", "first") if measures_loop else (), 0))
            self._num_batches = 0
            self._start_time = self._last_batch_time = perf_counter_ns()

    def start_external(self) -> None:
        """Start to measure the batches that a framework takes, unless a loop of the user runs."""
        if not self._loop_running:
            self.start(measures_loop=False)

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

    def count_batches(self, num_batches: int) -> None:
        """Count batches that were made just now, unless `received` will count them."""
        if not self._measures_loop:
            with self._lock:
                self._num_batches += num_batches
                self._last_batch_time = perf_counter_ns()

    def take(self) -> dict[str, int]:
        """Return the times since the last call, which a worker process sends with its batch."""
        with self._lock:
            times, self._times = self._times, Counter()
            return times

    def add(self, times: dict[str, int]) -> None:
        """Add the times of a batch that a worker process has made."""
        with self._lock:
            self._times.update(times)

    def received(self, requested: int) -> None:
        """Record that the loop has just received a batch, which it requested at `requested`."""
        now = perf_counter_ns()
        with self._lock:
            self._times["waiting"] += now - requested
            if not self._num_batches:
                self._times["first"] = now - requested
            self._num_batches += 1
            self._last_batch_time = now

    def report(self) -> PassReport:
        """Return the report of the last pass, which may still be running."""
        with self._lock:
            seconds = (self._last_batch_time - self._start_time) / 1e9
            in_seconds = {name: elapsed / 1e9 for name, elapsed in self._times.items()}
            return PassReport(self._num_batches, seconds, **in_seconds)
