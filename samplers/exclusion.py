"""Records that are left out from a training step on, and the records that come in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.state import first_step
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Bools, Int64s
from twinfeed.samplers.validate import a_type

_ATTEMPTS_OUTSIDE_BATCH = 64  # to find a replacement that is in another batch


def excluded_ids(exclude: Mapping[int, ArrayLike] | None, n: int) -> dict[str, Int64s]:
    """Return `{name: record ids}` for the records that a user excludes, checked and sorted.

    `exclude` is `{training step: ids}`, and `n` is the number of records. The step becomes a part
    of the name: `{0: [5], 7: [4, 2]}` gives `{"exclude": [5], "exclude from step 7": [2, 4]}`.

    A sampler adds these to its parameters, which are saved in a state. A state can be loaded only
    if it has the same parameters. But a parameter "from step 7" is not compared if the state was
    saved before step 7, so a user may exclude more records during a training.
    """
    if exclude is not None and not isinstance(exclude, Mapping):
        raise TypeError(
            f"exclude must be {{training step: ids}}, got {a_type(exclude)}: to leave "
            f"records out from the start, give the ids of the remaining ones to SubsetSampler"
        )
    check = partial(validate.sorted_record_ids, num_records=n, name="exclude")
    schedule = StepSchedule.parse("exclude", {0: [], **(exclude or {})}, check)
    return {field: ids for field, ids in schedule.parameters("exclude").items() if len(ids)}


class Exclusion:
    """Replace records of a permutation of `n` records, from the training steps of `exclude` on.

    Replacements are taken from a list of candidates, a random permutation of all n records. The
    first excluded record takes candidate 0, the next takes candidate 1, and so on, in the order of
    their steps, and of their ids within a step. If candidate i is excluded too, or is in the same
    batch, candidate `i + stride` is tried, then `i + 2 * stride`, and so on, modulo n. So an
    exclusion at a later step changes no earlier replacement. Two records have the same replacement
    only if one of them reaches a candidate that the other one has taken.
    """

    def __init__(self, exclude: Mapping[int, ArrayLike] | None, n: int, seed: int) -> None:
        self._num_records, self._key = n, root_key(seed, "exclude")
        #: The excluded ids, as parameters of the sampler, which are compared with those of a state.
        self.parameters = excluded_ids(exclude, n)
        ids = [np.zeros(0, np.int64), *self.parameters.values()]
        # The ids, sorted, and the first candidate of each: its first index in the order of steps.
        self._excluded_ids, self._first = np.unique(np.concatenate(ids), return_index=True)
        starts = [0, *map(first_step, self.parameters)]
        # The training step from which on each record is excluded.
        self._first_steps = np.repeat(starts, [*map(len, ids)])[self._first]
        if 2 * len(self._excluded_ids) > n:
            raise ValueError(
                f"exclude must leave half of the records, got {len(self._excluded_ids)} of {n}: to "
                f"draw from few records, take SubsetSampler"
            )
        # Without a common divisor with n, the stride reaches all n candidates before it returns to
        # the first. It is far from 1, so that neighbours seldom reach the same candidates.
        self._stride = next(s for s in count(n * 3 // 8 + 1) if gcd(s, n) == 1)

    def declare(self, traits: SamplerTraits) -> SamplerTraits:
        """Return the traits of a sampler with these exclusions, from those without."""
        if not len(self._excluded_ids):
            return traits
        return replace(traits, repeats=True, needs_steps=True)

    def draw(self, sampler: Any, epoch: int, positions: Int64s) -> Int64s:
        """Return the record id at each of these positions of an epoch. Both are int64[n].

        The ids are those of `sampler._permutation`, a shuffle of all records. Each record that is
        excluded at its training step is replaced by another record of the epoch, which is then
        drawn twice: if record 2 is excluded, the shuffle 4 0 2 1 3 may become 4 0 3 1 3.
        """
        ids: Int64s = sampler._permutation(epoch, positions)
        if len(self._excluded_ids):
            steps = sampler._steps_at(epoch, positions)
            i = np.flatnonzero(self._is_excluded(ids, steps))
            ids[i] = self._replacements(sampler, epoch, ids[i], steps[i])
        return ids

    def _replacements(self, sampler: Any, epoch: int, ids: Int64s, steps: Int64s) -> Int64s:
        """Return a record in place of each of these excluded ids, found by rejection sampling.

        The excluded records are in the batches of these training steps. Candidates are records at
        random positions of the epoch. They are tried until one is neither excluded nor in the same
        batch.
        """
        out = np.empty_like(ids)
        pending = np.arange(len(out))  # the indices that still have no replacement
        # The number of the first candidate to try, another one for each excluded record. It is an
        # index in the ids of all steps, which may be more than n, since a step may repeat ids.
        number = self._first[np.searchsorted(self._excluded_ids, ids)] % self._num_records
        attempt = 0
        while len(pending):
            new_positions = permute(self._num_records, derive(self._key, epoch), number)
            candidates = sampler._permutation(epoch, new_positions)
            is_valid = ~self._is_excluded(candidates, steps[pending])
            # A record of the same batch would be twice in it. After many attempts it is valid, too:
            # a batch that has nearly all records leaves no other choice.
            if attempt < _ATTEMPTS_OUTSIDE_BATCH:
                is_valid &= sampler._steps_at(epoch, new_positions) != steps[pending]
            out[pending[is_valid]] = candidates[is_valid]
            # For the others try the candidate `_stride` further, modulo n. This reaches all n
            # candidates, and at least half of the records are not excluded: so the loop ends.
            pending = pending[~is_valid]
            number = (number[~is_valid] + self._stride) % self._num_records
            attempt += 1
        return out

    def _is_excluded(self, ids: Int64s, steps: Int64s) -> Bools:
        """Return whether each record is excluded at its training step, bool[ids].

        Record `_excluded_ids[i]` (they are sorted) is excluded from step `_first_steps[i]` on.
        """
        # Search each id in the sorted excluded ids: if it is one of them, it is at this index.
        index = np.searchsorted(self._excluded_ids, ids).clip(max=len(self._excluded_ids) - 1)
        is_same_record = self._excluded_ids[index] == ids
        excluded: Bools = is_same_record & (self._first_steps[index] <= steps)
        return excluded
