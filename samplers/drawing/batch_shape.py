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
        if isinstance(k, tuple):
            self.lowest_k, k = _k_range(k)
        for name, value in (("p", p), ("k", k)):
            if callable(value):
                raise TypeError(
                    f"{name} must be a number, or a schedule by global step such as "
                    f"{name}={{0: 2, 1000: 3}}, got {value!r}"
                )
        p_values, k_values = (  # {first global step: value}
            _schedule(name, value)
            if isinstance(value, Mapping)
            else {0: validate.integer(name, value, minimum=1)}
            for name, value in (("p", p), ("k", k))
        )
        self._starts = sorted({*p_values, *k_values})
        self.phases = []
        p_start = k_start = 0
        for start in self._starts:
            p_start = start if start in p_values else p_start
            k_start = start if start in k_values else k_start
            self.phases.append(Phase(start, p_values[p_start], k_values[k_start], p_start))
        self.p_text = _schedule_text(p_values)
        self.k_text = f"{self.lowest_k}..{k}" if self.lowest_k else _schedule_text(k_values)
        self.fixed = len(self.phases) == 1 and not self.lowest_k
        self._key = root_key(seed, "pk k")
        self.largest_batch = max(phase.p * phase.k for phase in self.phases)
        # A random K is any number of its range, and two consecutive numbers have no common divisor.
        fixed_k = self.lowest_k in (None, k)
        self.size_divisor = gcd(*(phase.p * (phase.k if fixed_k else 1) for phase in self.phases))
        self.largest_p, self.largest_k = max(p_values.values()), max(k_values.values())

    def sizes(self, steps: Int64s) -> Int64s:
        """Return the batch sizes P * K at consecutive global steps, int64[steps]."""
        parts = self.split_by_phase(steps)
        return np.concatenate([phase.p * self.k_of_steps(phase, part) for phase, part in parts])

    def k_of_steps(self, phase: Phase, steps: Int64s) -> Int64s:
        """Return K at each of these global steps of a phase, random if k is a range."""
        low = self.lowest_k or phase.k
        return low + uniform_below(random_words(self._key, steps), phase.k - low + 1)

    def split_by_phase(self, steps: Int64s) -> list[tuple[Phase, Int64s]]:
        """Return consecutive global steps, at least one, divided into pairs (phase, its steps).

        A phase is a range of global steps with constant P and K.
        """
        # How many phases have started at the first step, and at the last step.
        num_first, num_last = (bisect_right(self._starts, int(step)) for step in steps[[0, -1]])
        phases = self.phases[num_first - 1 : num_last]
        bounds = np.searchsorted(steps, self._starts[num_first:num_last])
        return list(zip(phases, np.split(steps, bounds), strict=True))


def _schedule(name: str, changes: Mapping[int, SupportsIndex]) -> dict[int, int]:
    """Return a schedule {first global step: value}, sorted, without steps that change nothing."""
    values = {
        validate.integer(f"a step of {name}", step, minimum=0): validate.integer(name, v, minimum=1)
        for step, v in changes.items()
    }
    if 0 not in values:
        raise ValueError(f"{name} as a schedule must say its value at step 0, got {changes!r}")
    items = sorted(values.items())
    real_changes = (item for previous, item in pairwise(items) if item[1] != previous[1])
    return dict([items[0], *real_changes])


def _k_range(k: tuple[SupportsIndex, ...]) -> tuple[int, int]:
    """Return the lowest and the highest K of the range `k=(low, high)`, checked."""
    bounds = [validate.integer("k", bound, minimum=1) for bound in k]
    if len(bounds) != 2 or bounds[0] > bounds[1]:
        raise ValueError(f"k must be a range (low, high) with low at most high, got {k!r}")
    return bounds[0], bounds[1]


def text_until(text: str, step: int) -> str:
    """Return the text of a schedule without its changes at this global step and later.

    >>> text_until("2, 3 from step 7, 4 from step 9", 9)
    '2, 3 from step 7'
    """
    change = r", \d+ from step (\d{1,19})"
    return re.sub(change, lambda match: match[0] if int(match[1]) < step else "", text)


def largest_value(text: str) -> int:
    """Return the largest value in the text of a schedule or of a range; 0 of another text.

    >>> largest_value("2, 3 from step 7"), largest_value("2..5")
    (3, 5)
    """
    values = re.findall(r"(?:^|, |\.\.)(\d{1,18})(?=$|,| from|\.\.)", text)
    return max(map(int, values), default=0)


def _schedule_text(values: dict[int, int]) -> str:
    """Return a schedule as text, for states and `repr`: "2, 3 from step 7"."""
    first, *changes = values.items()
    return ", ".join([str(first[1]), *(f"{value} from step {step}" for step, value in changes)])
