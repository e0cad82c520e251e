"""Questions of resuming: by `start`, and by `state_dict`."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.audit.evidence import Evidence
from twinfeed.loaders.audit.maker import Maker, method_of
from twinfeed.loaders.audit.report import Answer, holds, note
from twinfeed.loaders.audit.streams import NotAskedError, Pass, StoppedError
from twinfeed.samplers.types import Int64s

_OTHER_SALT = 7  # of the global random states after a restart


class Trial(NamedTuple):
    """A restart of a rank in an epoch, after some items: `stops` are the steps where it stopped.

    `known` are the passes of a run that went on, from epoch 0 on. `expected` is what comes after
    the restart, by epoch: the rest of this one, unless it has ended, and the next one.
    """

    rank: int
    world_size: int
    epoch: int
    stops: tuple[int, ...]
    known: list[Pass]
    expected: dict[int, Int64s]

    def __str__(self) -> str:
        after = " and ".join(map(str, self.stops))
        of_rank = f"rank {self.rank} of {self.world_size}, " if self.world_size > 1 else ""
        return f"{of_rank}epoch {self.epoch}, after {after}"


# Restarts a sampler, and returns the ids of each expected epoch.
Restart = Callable[[Maker, Trial], list[Int64s]]


def ask_start(evidence: Evidence) -> Iterator[Answer]:
    """Whether `start` gives the rest of the stream."""
    if "start" not in evidence.maker.takes:
        raise NotAskedError("make takes no start")
    yield _compare(evidence, _by_start, twice=False)


def ask_state(evidence: Evidence) -> Iterator[Answer]:
    """Whether `state_dict` and `load_state_dict` give the rest of the stream."""
    if not evidence.has("state_dict", "load_state_dict"):
        raise NotAskedError("there is no state_dict")
    try:
        yield _compare(evidence, _by_state, twice=True)
    except StoppedError as error:
        yield note(str(error))


def _compare(evidence: Evidence, restart: Restart, *, twice: bool) -> Answer:
    """Try restarts, and compare each with the stream that went on."""
    if not evidence.is_repeatable:
        raise NotAskedError("two samplers that are built alike differ")
    wrong: list[tuple[int, str]] = []
    tried = anew = 0
    for trial in _trials(evidence, twice=twice):
        found = restart(evidence.maker, trial)
        difference = _difference(trial, found, endless=evidence.endless)
        tried += 1
        if difference is not None:
            wrong.append(difference)
            anew += _first_difference(found[0], trial.known[trial.epoch].ids, evidence.endless) < 0
    if tried == 0:
        raise NotAskedError("an epoch has too few items")
    if not wrong:
        return holds(f"{tried} of {tried} right")
    if anew == len(wrong):
        return note("the state has no position, and the epoch starts anew: let make take start")
    text = min(wrong, key=itemgetter(0))[1]
    return note(f"{len(wrong)} of {tried} wrong; {text}", fault=True)


def _trials(evidence: Evidence, *, twice: bool) -> Iterator[Trial]:
    """Yield restarts of the first and the last rank of the largest world, in two epochs.

    The next epoch is compared, too, unless global random states have a part in it.
    """
    world_size = max(1 if evidence.promises.processes else size for size in evidence.streams)
    goes_on = evidence.ignores_global_state and "epoch" not in evidence.maker.takes
    for rank in sorted({0, world_size - 1}):
        for epoch in range(1 if evidence.endless else min(2, evidence.promises.epochs)):
            known = evidence.maker.passes(range(epoch + 2), rank, world_size)
            for stops in _stops(evidence, known[epoch], world_size, twice=twice):
                is_end = sum(stops) == len(known[epoch])
                expected = {} if is_end else {epoch: known[epoch].after(sum(stops))}
                if goes_on and not evidence.endless:
                    expected[epoch + 1] = known[epoch + 1].ids
                if expected:
                    yield Trial(rank, world_size, epoch, stops, known, expected)


def _stops(
    evidence: Evidence, known: Pass, world_size: int, *, twice: bool
) -> list[tuple[int, ...]]:
    """Return the numbers of items after which to stop: one, or two for a second restart."""
    items, third = len(known), len(known) // 3
    steps = {1, items // 2, items - 1, items}
    if evidence.endless:  # also after what this rank, and all ranks, call an epoch
        all_ranks = round(items * evidence.num_records / max(1, len(known.ids)))
        own = round(all_ranks / world_size)
        steps = {1, own // 2, own, own + 1, all_ranks, all_ranks + 1} - {items}
    stops: list[tuple[int, ...]] = [(step,) for step in sorted(steps) if 0 < step <= items]
    return [*stops, (third, third)] if twice and third else stops


def _first_difference(found: Int64s, expected: Int64s, endless: bool) -> int:
    """Return the first position at which ids differ, or -1.

    Of endless streams, as much as both have is compared.
    """
    shorter = min(len(found), len(expected))
    ends = not endless and len(found) != len(expected)
    unequal = np.append(found[:shorter] != expected[:shorter], ends)
    return int(unequal.argmax()) if unequal.any() else -1


def _difference(trial: Trial, found: list[Int64s], *, endless: bool) -> tuple[int, str] | None:
    """Return the first difference of a restart: its position, and a phrase; or None."""
    for came, (epoch, wanted) in zip(found, trial.expected.items(), strict=True):
        at = _first_difference(came, wanted, endless)
        if at >= 0:
            part = "the rest" if epoch == trial.epoch else "the next epoch"
            ids, right_ids = (array[at : at + 3].tolist() for array in (came, wanted))
            return at, f"{trial}: {part}, from id {at} on, is {ids}, not {right_ids}"
    return None


def _by_start(maker: Maker, trial: Trial) -> list[Int64s]:
    """Restart by `start`: items of the epoch if make takes the epoch, else of the run."""
    earlier = 0 if "epoch" in maker.takes else sum(map(len, trial.known[: trial.epoch]))
    ranks, start = (trial.rank, trial.world_size), earlier + trial.stops[0]
    passes = maker.passes(trial.expected, *ranks, salt=_OTHER_SALT, start=start)
    return [drawn.ids for drawn in passes]


def _by_state(maker: Maker, trial: Trial) -> list[Int64s]:
    """Restart by the state that a sampler has after its stops, in a new one each time."""
    rank, world_size, epoch, stops, known, expected = trial
    is_end, state = sum(stops) == len(known[epoch]), b""
    for stop in stops:
        salt = _OTHER_SALT if state else 0
        with maker.running(f"state_dict of epoch {epoch}", rank, world_size, salt=salt):
            sampler = _restored(maker, trial, state, epoch)
            items = iter(sampler)  # alive while the state is taken, as within a loop
            deque(islice(items, stop + is_end), maxlen=0)
            state = pickle.dumps(method_of(sampler, "state_dict")())  # type: ignore[misc]
    with maker.running(f"load_state_dict, {trial}", rank, world_size, salt=_OTHER_SALT):
        sampler = _restored(maker, trial, state, min(expected))
        found: list[Int64s] = []
        for drawn_epoch in expected:
            if drawn_epoch > epoch:  # a training loop then names the epoch that starts
                maker.set_epoch(sampler, drawn_epoch)
            found.append(maker.read(sampler).ids)
        return found


def _restored(maker: Maker, trial: Trial, state: bytes, epoch: int) -> Any:
    """Return a new sampler at its epoch, with a state, or after the epochs before."""
    sampler = maker.build(rank=trial.rank, world_size=trial.world_size, epoch=epoch)
    for earlier in range(0 if state or "epoch" in maker.takes else epoch):
        maker.set_epoch(sampler, earlier)
        maker.read(sampler)
    maker.set_epoch(sampler, epoch)
    if state:
        method_of(sampler, "load_state_dict")(pickle.loads(state))  # type: ignore[misc]
    return sampler
