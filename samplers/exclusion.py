"""Records that are left out from a training step on, and the records that come in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from math import gcd

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Int64s

_ATTEMPTS_OUTSIDE_BATCH = 64  # a batch that has nearly all records may leave no other choice


class Exclusion:
    """Replace records of a permutation of `n` records, from the training steps of `exclude` on.

    The i-th excluded record is replaced by the record at the i-th entry of a keyed permutation of
    the epoch's positions. If that record is excluded too, or is in the same batch, entry
    `i + stride` is next, and so on. So the replacements of an epoch differ from each other as long
    as no entry comes for two records, and later exclusions change no earlier replacement.
    """

    def __init__(self, exclude: Mapping[int, ArrayLike] | None, n: int, seed: int) -> None:
        self._n, self._key = n, root_key(seed, "exclude")
        if exclude is not None and not isinstance(exclude, Mapping):
            raise TypeError(
                f"exclude must be {{training step: ids}}, got {exclude!r}: to leave records out "
                f"from the start, take SubsetSampler"
            )
        schedule = StepSchedule.parse("exclude", {0: [], **(exclude or {})}, self._check_ids)
        by_field = schedule.parameters("exclude").items()
        #: What states compare.
        self.parameters = {field: ids for field, ids in by_field if len(ids)}
        steps = np.repeat(schedule.starts, [len(ids) for ids in schedule.values])
        # The number of a record is the index at which it is excluded first.
        self._records, self._numbers = np.unique(np.concatenate(schedule.values), return_index=True)
        self._steps = steps[self._numbers]  # from which on each is excluded
        if 2 * len(self._records) > n:
            raise ValueError(
                f"exclude must leave half of the records, got {len(self._records)} of {n}: to draw "
                f"from few records, take SubsetSampler"
            )
        self._stride = next(s for s in count(n * 3 // 8 + 1) if gcd(s, n) == 1)
        excludes = bool(len(self._records))
        self.traits = SamplerTraits(repeats=excludes, needs_steps=excludes)

    def _check_ids(self, ids: ArrayLike) -> Int64s:
        return validate.sorted_record_ids(ids, self._n, name="exclude")

    def draw(
        self,
        permutation: Callable[[int, Int64s], Int64s],
        epoch: int,
        positions: Int64s,
        batch_size: int,
        num_steps: int,
    ) -> Int64s:
        """Return the ids at positions of an epoch, which has `num_steps` batches.

        `permutation(epoch, positions)` has the ids of an epoch without exclusions.
        """
        ids = permutation(epoch, positions)
        if not len(self._records):
            return ids
        batch = positions // batch_size
        steps = epoch * num_steps + batch
        key = derive(self._key, epoch)
        excluded = np.flatnonzero(self._is_excluded(ids, steps))
        numbers = self._numbers[np.searchsorted(self._records, ids[excluded])]
        attempt = 0
        while len(excluded):
            entries = (numbers + attempt * self._stride % self._n) % self._n
            other_positions = permute(self._n, key, entries)
            replacements = permutation(epoch, other_positions)
            fits = ~self._is_excluded(replacements, steps[excluded])
            if attempt < _ATTEMPTS_OUTSIDE_BATCH:
                fits &= other_positions // batch_size != batch[excluded]
            ids[excluded[fits]] = replacements[fits]
            excluded, numbers, attempt = excluded[~fits], numbers[~fits], attempt + 1
        return ids

    def _is_excluded(self, ids: Int64s, steps: Int64s) -> NDArray[np.bool_]:
        """Return whether each record is excluded at its training step."""
        index = np.searchsorted(self._records, ids).clip(max=len(self._records) - 1)
        excluded: NDArray[np.bool_] = (self._records[index] == ids) & (self._steps[index] <= steps)
        return excluded
