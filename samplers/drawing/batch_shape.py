"""The schedule of P and K over the training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd
from typing import NamedTuple, SupportsIndex

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.random_words import random_words, root_key, uniform_below
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.types import Int64s

PerStep = SupportsIndex | Mapping[int, SupportsIndex]


class Phase(NamedTuple):
    """A range of global steps with constant P and K, and the step since which P has been `p`."""

    start: int
    p: int
    k: int
    p_start: int


class BatchShape:
    """P (classes of a batch) and K (records of each class) at each global step.

    `lowest_k` is set if K is drawn for each batch, from `lowest_k` to the `k` of the phase.
    """

    def __init__(
        self, p: PerStep, k: PerStep | tuple[SupportsIndex, SupportsIndex], seed: int
    ) -> None:
        self.lowest_k: int | None = None
        if isinstance(k, Sequence) and not isinstance(k, str):  # a list by way of JSON, or Hydra's
            self.lowest_k, k = _k_range(k)
        for name, value in (("p", p), ("k", k)):
            if callable(value):
                raise TypeError(
                    f"{name} must be a number, or a schedule by global step such as "
                    f"{name}={{0: 2, 1000: 3}}, got {value!r}"
                )
        ps, ks = (
            StepSchedule.parse(name, value, partial(validate.integer, name, minimum=1))
            for name, value in (("p", p), ("k", k))
        )
        starts = sorted({*ps.starts, *ks.starts})
        self.phases = []
        for start in starts:
            i, j = ps.index_at(start), ks.index_at(start)
            self.phases.append(Phase(start, ps.values[i], ks.values[j], ps.starts[i]))
        self._by_step = StepSchedule(starts, self.phases)
        self.p_text = str(ps)
        self.k_text = f"{self.lowest_k}..{k}" if self.lowest_k else str(ks)
        # What states compare.
        k_parameters = {"k": self.k_text} if self.lowest_k else ks.parameters("k")
        self.parameters = {**ps.parameters("p"), **k_parameters}
        self.fixed = len(starts) == 1 and not self.lowest_k
        self._key = root_key(seed, "pk k")
        self.largest_batch = max(phase.p * phase.k for phase in self.phases)
        # A random K is any number of its range, and two consecutive numbers have no common divisor.
        fixed_k = self.lowest_k in (None, k)
        self.size_divisor = gcd(*(phase.p * (phase.k if fixed_k else 1) for phase in self.phases))
        self.largest_p, self.largest_k = max(ps.values), max(ks.values)

    def sizes(self, steps: Int64s) -> Int64s:
        """Return the batch sizes P * K at consecutive global steps, int64[steps]."""
        parts = self.split_by_phase(steps)
        return np.concatenate([phase.p * self.k_of_steps(phase, part) for phase, part in parts])

    def k_of_steps(self, phase: Phase, steps: Int64s) -> Int64s:
        """Return K at each of these global steps of a phase, random if k is a range."""
        low = self.lowest_k or phase.k
        return low + uniform_below(random_words(self._key, steps), phase.k - low + 1)

    def split_by_phase(self, steps: Int64s) -> list[tuple[Phase, Int64s]]:
        """Return pairs (phase, its steps) for consecutive global steps, at least one."""
        return [(self.phases[i], steps[mask]) for i, mask in self._by_step.masks(steps)]


def _k_range(k: Sequence[SupportsIndex]) -> tuple[int, int]:
    """Return the lowest and the highest K of the range `k=(low, high)`, checked."""
    bounds = [validate.integer("k", bound, minimum=1) for bound in k]
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise ValueError(f"k must be a range (low, high) with low at most high, got {k!r}")
    return bounds[0], bounds[1]
