"""A record that must not come again: from a training step on, another comes in its place."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.batch_stream import BatchStream
from twinfeed.samplers.orders import Sampler
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.stream import Stream
from twinfeed.samplers.traits import check_independent_of_steps
from twinfeed.samplers.types import Int64s

_Stream = TypeVar("_Stream", bound=Sampler | BatchStream)

_CALL = "replaced(sampler, {step: {bad: good}})"


@validate.show_call(_CALL)
def replaced(
    sampler: _Stream,
    schedule: Mapping[int, Mapping[int, SupportsIndex | Sequence[SupportsIndex] | ArrayLike]],
    /,
) -> _Stream:
    """Return a copy of a sampler with other ids in the place of some, from training steps on.

    For a record that must not come again in a run that goes on, such as a damaged image. All other
    ids stay as they are, and a replacement holds at all steps after its own. A state that was saved
    before the step can be loaded. A state that was saved after it can be loaded only by a sampler
    with the same replacement.

    A record may come twice in an epoch then, and in a batch if no other good id is left. To leave
    records out from the start, take `SubsetSampler`, or `records=`.

    Args:
        sampler: one of all ranks: any but an evaluation, or one that reuses records. A sampler of
            ids is then for a `DataLoader(sampler=…)`; a `BatchSampler` is replaced itself.
        schedule: `{training step: {bad: good}}`. Training steps are `epoch * len + step`, from 0
            on: the batch that `who` and the logs call step 15 is step 14. A step of a sampler of
            ids is one id. The ids are those that the sampler gives. If a good is a list of ids, the
            first that is not in the batch already is taken, or else the first of all.

    Returns:
        The copy, at the first step of epoch 0.

    Raises:
        ValueError: ids that the sampler never gives, or a good id that is replaced itself, or of
            another class, group, data set or cost than the bad one.
        TypeError: no sampler, or one whose ids depend on training steps: a batch sampler has these.

    Record 4 is replaced from step 2 on, which is the first of epoch 1:

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> batches = BatchSampler(RandomSampler(5, seed=0), batch_size=3)
    >>> list(batches), list(batches)
    ([[4, 0, 2], [1, 3]], [[4, 3, 1], [2, 0]])
    >>> batches = replaced(batches, {2: {4: [3, 0]}})
    >>> list(batches), list(batches)
    ([[4, 0, 2], [1, 3]], [[0, 3, 1], [2, 0]])
    """
    _check_replaceable(sampler)
    stream = copy.copy(sampler)
    replacements = Replacements(sampler, schedule)
    traits = replace(sampler.traits, repeats=True, needs_records=True)
    # Set through `vars`: a user's sampler may be a frozen dataclass.
    vars(stream).update(traits=traits, _replacements=replacements, _own_cursor=None)
    vars(stream)["_fingerprint"] = {}  # `fingerprint` adds the replacements
    if not stream.traits.needs_records:
        owner, advice = type(sampler).__name__, "set it in __init__, for replaced() to change it"
        raise TypeError(f"{owner}.traits must not be a property: {advice}")
    return stream


def _check_replaceable(sampler: Any) -> None:
    """Raise an error for a sampler whose ids must not be replaced."""
    if not isinstance(sampler, (Sampler, BatchStream)):
        found = validate.a_type(sampler)
        raise TypeError(f"sampler must be one of twinfeed.samplers, got {found}: write {_CALL}")
    check_independent_of_steps(sampler)
    problems = {
        "gives every record once: records= leaves some out": sampler.evaluation,
        "reuses records, of which some are kept": sampler.traits.max_cached is not None,
        "is of one rank: call shard on what replaced() returns": sampler.sharded,
        "has replacements already: give one schedule of all": sampler._replacements is not None,
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ValueError(f"ids cannot be replaced, as {sampler!r} {problem}")


class Replacements:
    """The good ids that come in the place of bad ones, from each training step on."""

    def __init__(self, sampler: Stream, schedule: Any) -> None:
        if not isinstance(schedule, Mapping) or not schedule:
            raise TypeError(f"the schedule must be {{step: {{bad: good}}}}, got {schedule!r}")
        if "0" not in map(str, schedule):
            schedule = {0: {}, **schedule}
        check = partial(_checked_entry, num_ids=sampler.num_ids)
        entries = StepSchedule.parse("replaced", schedule, check)
        #: What a state compares.
        self.parameters = {field: e for field, e in entries.parameters("replaced").items() if e}
        # For each bad id, the steps from which on it has other good ids: [(step, good ids)].
        self._history: dict[int, list[tuple[float, list[int]]]] = {}
        for start, entry in zip(entries.starts, entries.values, strict=True):
            for bad, *goods in entry:
                self._history.setdefault(bad, []).append((start, goods))
        self._bad = np.array(sorted(self._history), np.int64)
        self._check_goods(sampler)

    def _check_goods(self, sampler: Stream) -> None:
        """Raise ValueError unless good ids are drawn, stay, and are of the kind of the bad ones."""
        pairs, chained = [], []
        for bad, history in self._history.items():
            for (_, goods), (stop, _) in pairwise([*history, (inf, [])]):
                pairs += [(bad, good) for good in goods]
                # A good id is bad from its own first step on, which may be after the last use.
                chained += [self._history.get(good, [(inf, [])])[0][0] < stop for good in goods]
        _refuse(pairs, "is replaced itself", chained)
        bad_ids, good_ids = np.array(pairs, np.int64).reshape(-1, 2).T
        are_drawn = sampler._are_drawn(np.concatenate([good_ids, bad_ids]))
        _refuse(pairs, "never comes", ~are_drawn[: len(pairs)])
        for bad in bad_ids[~are_drawn[len(pairs) :]].tolist():
            raise ValueError(f"id {bad} never comes, so nothing can come in its place")
        is_alike = sampler._are_alike(bad_ids, good_ids)
        _refuse(pairs, "is of another class, group, data set or cost", ~is_alike)

    def apply(
        self, stream: BatchStream, first_step: int, batches: list[Int64s], lows: Int64s
    ) -> None:
        """Replace bad ids in this rank's slices of the batches, which start at `lows` of the global
        ones.
        """
        for i in [i for i, ids in enumerate(batches) if np.isin(ids, self._bad).any()]:
            ids = batches[i]
            if stream.sharded:
                whole = copy.copy(stream)
                whole.rank, whole.world_size, whole._replacements = 0, 1, None
                ids = whole.batch(*divmod(first_step + i, len(stream)))
            for k in np.flatnonzero(np.isin(ids, self._bad)):
                ids[k] = self._good(int(ids[k]), first_step + i, ids)
            batches[i][:] = ids[lows[i] : lows[i] + len(batches[i])]

    def at(self, steps: Int64s, ids: Int64s) -> Int64s:
        """Return the ids that a sampler of ids gives in the place of these: one at each step."""
        ids = ids.copy()  # those drawn may be a table that is kept
        for i in np.flatnonzero(np.isin(ids, self._bad)):
            ids[i] = self._good(int(ids[i]), int(steps[i]))
        return ids

    def _good(self, bad: int, step: int, batch: Int64s | tuple[()] = ()) -> int:
        """Return the id in the place of a bad one of a batch, which is itself before its step."""
        entries = [(0, [bad]), *self._history[bad]]
        goods = [goods for start, goods in entries if start <= step][-1]
        return next((good for good in goods if good not in batch), goods[0])


def _checked_entry(entry: Any, *, num_ids: int) -> list[list[int]]:
    """Return `{bad: good}` as sorted lists `[bad, good, …]` of ids."""
    if not isinstance(entry, Mapping):
        raise TypeError(f"each step must have {{bad: good}}, got {entry!r}: write {_CALL}")
    rows = []
    for bad, good in entry.items():
        ids = [validate.json_key(bad), *(good if validate.is_list(good) else [good])]
        if len(ids) == 1:
            raise ValueError(f"id {bad} must have an id in its place, got {good!r}")
        check = partial(validate.integer, "an id of replaced()", minimum=0, below=num_ids)
        rows.append([*map(check, ids)])
    if len({bad for bad, *_ in rows}) < len(rows):
        raise ValueError(f"an id of replaced() comes twice in {entry!r}")
    return sorted(rows)


def _refuse(pairs: list[tuple[int, int]], problem: str, is_found: Iterable[Any]) -> None:
    """Raise ValueError for the first pair (bad, good) whose good id has the problem."""
    for (bad, good), found in zip(pairs, is_found, strict=True):
        if found:
            raise ValueError(f"id {good} must not come in the place of {bad}: id {good} {problem}")
