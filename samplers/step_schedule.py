"""Values that change during the training: `{training step: value}`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.state import json_value
from twinfeed.samplers.types import Bools, Int64s

T = TypeVar("T")


class StepSchedule(Generic[T]):
    """A value for each training step: `values[i]` from step `starts[i]` on; `starts[0]` is 0.

    Training steps are counted over all epochs: `epoch * len + step`.

    >>> schedule = StepSchedule([0, 7], [2, 3])
    >>> schedule.index_at(6), schedule.index_at(7), str(schedule)
    (0, 1, '2, 3 from step 7')
    """

    def __init__(self, starts: list[int], values: list[T]) -> None:
        self.starts, self.values = starts, values

    @classmethod
    def parse(cls, name: str, values: Any, check: Callable[[Any], T]) -> StepSchedule[T]:
        """Return the schedule of a user's argument: one value, or `{training step: value}`. `check`
        converts a value. A step at which the value stays the same is left out.
        """
        by_step = {}
        for step, value in (values if isinstance(values, Mapping) else {0: values}).items():
            step = validate.integer(f"a step of {name}", validate.json_key(step), minimum=0)
            if step in by_step:
                raise ValueError(f"{name} has two values for step {step}")
            try:
                by_step[step] = check(value)
            except (TypeError, ValueError) as error:
                if step:
                    error.add_note(f"in the schedule of {name}, from step {step} on")
                raise
        if 0 not in by_step:
            raise ValueError(
                f"{name} as a schedule must have a value at step 0, got steps {sorted(by_step)}"
            )
        schedule = cls([0], [by_step.pop(0)])
        for step, value in sorted(by_step.items()):
            # As JSON, since values may be arrays.
            if json_value(value) != json_value(schedule.values[-1]):
                schedule.starts.append(step)
                schedule.values.append(value)
        return schedule

    def index_at(self, step: int) -> int:
        """Return the index i of the value at a training step: of `starts[i]` and `values[i]`."""
        return bisect_right(self.starts, step) - 1

    def masks(self, steps: Int64s) -> Iterator[tuple[int, Bools | slice]]:
        """Yield (i, mask) for each value that some steps have: `steps[mask]` have value i."""
        if len(self.starts) == 1:
            yield 0, slice(None)
            return
        index = np.searchsorted(self.starts, steps, side="right") - 1  # of the value at each step
        for i in np.unique(index).tolist():
            yield i, index == i

    def parameters(self, name: str) -> dict[str, T]:
        """Return the values as fields of a fingerprint, such as "k" and "k from step 7"."""
        later = zip(self.starts[1:], self.values[1:], strict=True)
        return {name: self.values[0], **{f"{name} from step {step}": v for step, v in later}}

    def __str__(self) -> str:
        return ", ".join(f"{value}{name}" for name, value in self.parameters("").items())
