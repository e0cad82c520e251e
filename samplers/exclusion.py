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

_ATTEMPTS_OUTSIDE_BATCH = 64  # to find a replacement that is in another batch


class Exclusion:
    """Replace records of a permutation of `n` records, from the training steps of `exclude` on.

    The i-th excluded record is replaced by the record at the i-th entry of a keyed permutation of
    the epoch's positions. If that record is excluded too, or is in the same batch, entry
    `i + stride` is next, and so on. So the replacements of an epoch differ from each other as long
    as no entry comes for two records, and later exclusions change no earlier replacement.
    """

    def __init__(self, exclude: Mapping[int, ArrayLike] | None, n: int, seed: int) -> None:
        self._num_records, self._key = n, root_key(seed, "exclude")
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
        all_ids = np.concatenate(schedule.values)
        self._excluded_ids, self._numbers = np.unique(all_ids, return_index=True)
        self._first_steps = steps[self._numbers]  # from which on each record is excluded
        if 2 * len(self._excluded_ids) > n:
            raise ValueError(
                f"exclude must leave half of the records, got {len(self._excluded_ids)} of {n}: to "
                f"draw from few records, take SubsetSampler"
            )
        self._stride = next(s for s in count(n * 3 // 8 + 1) if gcd(s, n) == 1)
        excludes = bool(len(self._excluded_ids))
        self.traits = SamplerTraits(repeats=excludes, needs_steps=excludes)

    def _check_ids(self, ids: ArrayLike) -> Int64s:
        return validate.sorted_record_ids(ids, self._num_records, name="exclude")

    def draw(
        self,
        permutation: Callable[[int, Int64s], Int64s],
        epoch: int,
        positions: Int64s,
        batch_size: int,
        num_steps: int,
    ) -> Int64s:
        """Return the record ids at these positions of an epoch, int64[positions] both.

        They are `permutation(epoch, positions)`, a shuffle of all records, in which each record
        that is excluded at its training step is replaced by another record of the epoch: if 2 is
        excluded, the order 4 0 2 1 3 may become 4 0 3 1 3. Replacements are found by rejection
        sampling. An epoch has `num_steps` batches of `batch_size` records.
        """
        ids = permutation(epoch, positions)
        if not len(self._excluded_ids):
            return ids
        batch = positions // batch_size
        steps = epoch * num_steps + batch
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
            replacements = permutation(epoch, new_positions)
            is_valid = ~self._is_excluded(replacements, steps[pending])
            # A record of the same batch would be twice in it. After many attempts it is valid, too:
            # a batch that has nearly all records leaves no other choice.
            if attempt < _ATTEMPTS_OUTSIDE_BATCH:
                is_valid &= new_positions // batch_size != batch[pending]
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
