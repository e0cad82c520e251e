"""The schedule of P and K over the training steps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from math import gcd
from typing import NamedTuple, SupportsIndex

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.random_words import random_words, root_key, uniform_below
from twinfeed.samplers.types import Int64s

PerStep = SupportsIndex | Mapping[int, SupportsIndex]


class Phase(NamedTuple):
    """A range of global steps with constant p and k, and the step at which this p started."""

    start: int
    p: int
    k: int
    p_start: int


class BatchShape:
    """The p and k of each global step."""

    def __init__(
        self, p: PerStep, k: PerStep | tuple[SupportsIndex, SupportsIndex], seed: int
    ) -> None:
        self.lowest_k: int | None = None
        if isinstance(k, tuple):
            self.lowest_k, k = _k_range(k)
        for name, value in (("p", p), ("k", k)):
            if callable(value):
                raise TypeError(
                    f"{name} must be a number, or a schedule by global step such as "
                    f"{name}={{0: 2, 1000: 3}}, got {value!r}"
                )
        ps, ks = (
            _schedule(name, v)
            if isinstance(v, Mapping)
            else {0: validate.integer(name, v, minimum=1)}
            for name, v in (("p", p), ("k", k))
        )
        self._starts = sorted({*ps, *ks})
        self.phases = []
        p_start = k_start = 0
        for start in self._starts:
            p_start = start if start in ps else p_start
            k_start = start if start in ks else k_start
            self.phases.append(Phase(start, ps[p_start], ks[k_start], p_start))
        self.p_text = _schedule_text(ps)
        self.k_text = f"{self.lowest_k}..{k}" if self.lowest_k else _schedule_text(ks)
        self.fixed = len(self.phases) == 1 and not self.lowest_k
        self._key = root_key(seed, "pk k")
        self.largest_batch = max(phase.p * phase.k for phase in self.phases)
        # Two consecutive values of K have no common divisor.
        one_k = self.lowest_k in (None, k)
        self.size_divisor = gcd(*(phase.p * (phase.k if one_k else 1) for phase in self.phases))
        self.largest_p, self.largest_k = max(ps.values()), max(ks.values())

    def sizes(self, steps: Int64s) -> Int64s:
        """Return the batch sizes at consecutive global steps."""
        return np.concatenate(
            [phase.p * self.ks(phase, part) for phase, part in self.split_by_phase(steps)]
        )

    def ks(self, phase: Phase, steps: Int64s) -> Int64s:
        """Return K at each of these global steps, random if k is a range."""
        low = self.lowest_k or phase.k
        return low + uniform_below(random_words(self._key, steps), phase.k - low + 1)

    def split_by_phase(self, steps: Int64s) -> list[tuple[Phase, Int64s]]:
        """Split consecutive global steps, at least one, into (phase, the steps in it)."""
        first, last = (bisect_right(self._starts, int(step)) for step in steps[[0, -1]])
        phases = self.phases[first - 1 : last]
        cuts = np.searchsorted(steps, self._starts[first:last])
        return list(zip(phases, np.split(steps, cuts), strict=True))


def _schedule(name: str, value: Mapping[int, SupportsIndex]) -> dict[int, int]:
    """Return a schedule {first global step: value} without entries that repeat the value."""
    steps = {
        validate.integer(f"a step of {name}", step, minimum=0): validate.integer(name, v, minimum=1)
        for step, v in value.items()
    }
    if 0 not in steps:
        raise ValueError(f"{name} as a schedule must say its value at step 0, got {value!r}")
    ordered = sorted(steps.items())
    return dict([ordered[0], *(b for a, b in pairwise(ordered) if a[1] != b[1])])


def _k_range(k: tuple[SupportsIndex, ...]) -> tuple[int, int]:
    """Return the lowest and the highest K of the range `k=(low, high)`, checked."""
    ends = [validate.integer("k", end, minimum=1) for end in k]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise ValueError(f"k must be a range (low, high) with low at most high, got {k!r}")
    return ends[0], ends[1]


def text_until(text: str, step: int) -> str:
    """Remove from the text of a schedule the changes at this global step and later.

    >>> text_until("2, 3 from step 7, 4 from step 9", 9)
    '2, 3 from step 7'
    """
    return re.sub(
        r", \d+ from step (\d{1,19})", lambda match: match[0] * (int(match[1]) < step), text
    )


def _schedule_text(values: dict[int, int]) -> str:
    first, *later = values.items()
    return ", ".join([str(first[1]), *(f"{v} from step {step}" for step, v in later)])
