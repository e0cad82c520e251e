"""Records that are left out from a training step on, and the records that come in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.state import first_step
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Int64s

_ATTEMPTS_OUTSIDE_BATCH = 64  # to find a replacement that is in another batch


def excluded_ids(exclude: Mapping[int, ArrayLike] | None, n: int) -> dict[str, Int64s]:
    """Return the record ids that a user excludes, as fields of a sampler's fingerprint.

    `exclude` is `{training step: ids}`, and `n` the number of records. The names of the fields have
    the steps: `{7: [4, 2]}` gives `{"exclude from step 7": [2, 4]}`.
    """
    if exclude is not None and not isinstance(exclude, Mapping):
        raise TypeError(
            f"exclude must be {{training step: ids}}, got a {type(exclude).__name__}: to leave "
            f"records out from the start, give the others as records, or take SubsetSampler"
        )
    check = partial(validate.sorted_record_ids, num_records=n, name="exclude")
    schedule = StepSchedule.parse("exclude", {0: [], **(exclude or {})}, check)
    return {field: ids for field, ids in schedule.parameters("exclude").items() if len(ids)}


class Exclusion:
    """Replace records of a permutation of `n` records, from the training steps of `exclude` on.

    The i-th excluded record is replaced by the record at the i-th entry of a keyed permutation of
    the epoch's positions. If that record is excluded too, or is in the same batch, entry
    `i + stride` is next, and so on. So the replacements of an epoch differ from each other as long
    as no entry comes for two records, and later exclusions change no earlier replacement.
    """

    def __init__(self, exclude: Mapping[int, ArrayLike] | None, n: int, seed: int) -> None:
        self._num_records, self._key = n, root_key(seed, "exclude")
        #: What states compare.
        self.parameters = excluded_ids(exclude, n)
        ids = [np.zeros(0, np.int64), *self.parameters.values()]
        # The number of a record is the index at which it is excluded first.
        self._excluded_ids, self._numbers = np.unique(np.concatenate(ids), return_index=True)
        starts = [0, *map(first_step, self.parameters)]
        # The training steps from which on each record is excluded.
        self._first_steps = np.repeat(starts, [*map(len, ids)])[self._numbers]
        if 2 * len(self._excluded_ids) > n:
            raise ValueError(
                f"exclude must leave half of the records, got {len(self._excluded_ids)} of {n}: to "
                f"draw from few records, take SubsetSampler"
            )
        self._stride = next(s for s in count(n * 3 // 8 + 1) if gcd(s, n) == 1)

    def declare(self, traits: SamplerTraits) -> SamplerTraits:
        """Return the traits of a sampler with these exclusions, from those without."""
        if not len(self._excluded_ids):
            return traits
        return replace(traits, repeats=True, needs_steps=True)

    def draw(self, sampler: Any, epoch: int, positions: Int64s) -> Int64s:
        """Return the record ids at these positions of an epoch, int64[positions] both.

        They are `sampler._permutation(epoch, positions)`, a shuffle of all records, in which each
        record that is excluded at its training step is replaced by another record of the epoch: if
        2 is excluded, the order 4 0 2 1 3 may become 4 0 3 1 3. Replacements are found by rejection
        sampling.
        """
        ids: Int64s = sampler._permutation(epoch, positions)
        if not len(self._excluded_ids):
            return ids
        steps, batch_size = sampler._steps_at(epoch, positions), sampler._batch_size
        key = derive(self._key, epoch)
        # The indices, in `ids`, of the records that still need a replacement.
        pending = np.flatnonzero(self._is_excluded(ids, steps))
        # Each excluded record has a number, from 0 on. In attempt t, record number i tries the
        # entry i + t * stride of a random permutation of the epoch's positions. So records try
        # different positions, and a record tries all positions before any a second time.
        numbers = self._numbers[np.searchsorted(self._excluded_ids, ids[pending])]
        attempt = 0
        while len(pending):
            shift = attempt * self._stride % self._num_records
            new_positions = permute(self._num_records, key, (numbers + shift) % self._num_records)
            replacements = sampler._permutation(epoch, new_positions)
            is_valid = ~self._is_excluded(replacements, steps[pending])
            # A record of the same batch would be twice in it. After many attempts it is valid, too:
            # a batch that has nearly all records leaves no other choice.
            if attempt < _ATTEMPTS_OUTSIDE_BATCH:
                is_valid &= new_positions // batch_size != positions[pending] // batch_size
            ids[pending[is_valid]] = replacements[is_valid]
            pending, numbers, attempt = pending[~is_valid], numbers[~is_valid], attempt + 1
        return ids

    def _is_excluded(self, ids: Int64s, steps: Int64s) -> NDArray[np.bool_]:
        """Return whether each record is excluded at its training step, bool[ids].

        Record `_excluded_ids[i]` (they are sorted) is excluded from step `_first_steps[i]` on.
        """
        # The only excluded id that may be equal to each id.
        index = np.searchsorted(self._excluded_ids, ids).clip(max=len(self._excluded_ids) - 1)
        is_same_record = self._excluded_ids[index] == ids
        excluded: NDArray[np.bool_] = is_same_record & (self._first_steps[index] <= steps)
        return excluded
