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
    """A restart of a rank, after some items of an epoch: `stops` has the steps where it stopped."""

    rank: int
    world_size: int
    epoch: int
    stops: tuple[int, ...]

    def __str__(self) -> str:
        after = " and ".join(map(str, self.stops))
        of_rank = f"rank {self.rank} of {self.world_size}, " if self.world_size > 1 else ""
        return f"{of_rank}epoch {self.epoch}, after {after}"


# Restarts a sampler, and returns the rest of the epoch, and the next one.
Restart = Callable[[Evidence, Trial, list[Pass]], list[Int64s]]


def ask_start(evidence: Evidence) -> Iterator[Answer]:
    """Whether `start` gives the rest of the stream."""
    if "start" not in evidence.maker.takes:
        raise NotAskedError("make takes no start")
    _need_repeatable(evidence)
    yield from _compare(evidence, _by_start, twice=False)


def ask_state(evidence: Evidence) -> Iterator[Answer]:
    """Whether `state_dict` and `load_state_dict` give the rest of the stream."""
    _need_repeatable(evidence)
    maker = evidence.maker
    with maker.running("state_dict", 0, evidence.world_size):
        sampler = maker.build(rank=0, world_size=evidence.world_size, epoch=0)
        if not (method_of(sampler, "state_dict") and method_of(sampler, "load_state_dict")):
            raise NotAskedError("there is no state_dict")
    try:
        yield from _compare(evidence, _by_state, twice=True)
    except StoppedError as error:
        yield note(str(error))


def _need_repeatable(evidence: Evidence) -> None:
    evidence.need_one_process()
    if not evidence.is_repeatable:
        raise NotAskedError("two samplers that are built alike differ")


def _compare(evidence: Evidence, restart: Restart, *, twice: bool) -> Iterator[Answer]:
    """Try restarts, and compare each with the stream that went on."""
    wrong: list[tuple[int, str]] = []
    tried = anew = 0
    for rank, world_size in _ranks(evidence):
        for epoch in range(1 if evidence.endless else min(2, evidence.promises.epochs)):
            known = evidence.maker.passes(range(epoch + 2), rank, world_size)
            for stops in _stops(evidence, known[epoch], world_size, twice=twice):
                trial = Trial(rank, world_size, epoch, stops)
                remaining = known[epoch].after(sum(stops))
                expected = [remaining, *(later.ids for later in known[epoch + 1 :])]
                found = restart(evidence, trial, known)
                tried += 1
                difference = _difference(trial, found, expected, evidence)
                if difference is not None:
                    wrong.append(difference)
                    anew += not _differ(found[0], known[epoch].ids, evidence)
    if tried == 0:
        raise NotAskedError("an epoch has too few items")
    if not wrong:
        yield holds(f"{tried} of {tried} right")
    elif anew == len(wrong):
        yield note("the state has no position, and the epoch starts anew: let make take start")
    else:
        yield note(f"{len(wrong)} of {tried} wrong; {min(wrong, key=itemgetter(0))[1]}", fault=True)


def _ranks(evidence: Evidence) -> list[tuple[int, int]]:
    """Return the first and the last rank of the largest world that runs in this process."""
    world_size = evidence.world_size if evidence.promises.processes else max(evidence.streams)
    return [(rank, world_size) for rank in sorted({0, world_size - 1})]


def _stops(
    evidence: Evidence, known: Pass, world_size: int, *, twice: bool
) -> list[tuple[int, ...]]:
    """Return the numbers of items after which to stop: one, or two for a second restart."""
    items, third = len(known), len(known) // 3
    if evidence.endless:  # also after what this rank, and all ranks, call an epoch
        all_ranks = round(items * evidence.num_records / max(1, len(known.ids)))
        own = round(all_ranks / world_size)
        steps = {1, own // 2, own, own + 1, all_ranks, all_ranks + 1}
    else:
        steps = {1, items // 2, items - 1}
        if evidence.ignores_global_state and "epoch" not in evidence.maker.takes:
            steps.add(items)
    stops: list[tuple[int, ...]] = [
        (step,) for step in sorted(steps) if 0 < step < items + (not evidence.endless)
    ]
    return [*stops, (third, third)] if twice and third else stops


def _differ(found: Int64s, expected: Int64s, evidence: Evidence) -> bool:
    """Return whether streams differ; of endless ones, as much as both have is compared."""
    if evidence.endless:
        shorter = min(len(found), len(expected))
        found, expected = found[:shorter], expected[:shorter]
    return not np.array_equal(found, expected)


def _difference(
    trial: Trial, found: list[Int64s], expected: list[Int64s], evidence: Evidence
) -> tuple[int, str] | None:
    """Return the first difference of a restart: its position, and a phrase; or None."""
    for number, (came, wanted) in enumerate(zip(found, expected, strict=False)):
        if _differ(came, wanted, evidence):
            shorter = min(len(came), len(wanted))
            at = int(np.append(came[:shorter] != wanted[:shorter], True).argmax())
            part = "the rest" if number == 0 else "the next epoch"
            ids, right_ids = (array[at : at + 3].tolist() for array in (came, wanted))
            return at, f"{trial}: {part}, from id {at} on, is {ids}, not {right_ids}"
    return None


def _by_start(evidence: Evidence, trial: Trial, known: list[Pass]) -> list[Int64s]:
    """Restart by `start`: items of the epoch if make takes the epoch, else of the run."""
    earlier = 0 if "epoch" in evidence.maker.takes else sum(map(len, known[: trial.epoch]))
    passes = evidence.maker.passes(
        _resumed_epochs(evidence, trial, known),
        trial.rank,
        trial.world_size,
        salt=_OTHER_SALT,
        start=earlier + trial.stops[0],
    )
    return _after_end(trial, known, [drawn.ids for drawn in passes])


def _by_state(evidence: Evidence, trial: Trial, known: list[Pass]) -> list[Int64s]:
    """Restart by the state that a sampler has after its stops, in a new one each time."""
    maker, state, epochs = evidence.maker, b"", _resumed_epochs(evidence, trial, known)
    rank, world_size, epoch, stops = trial
    for stop in stops:
        salt = _OTHER_SALT if state else 0
        with maker.running(f"state_dict of epoch {epoch}", rank, world_size, salt=salt):
            sampler = _restored(maker, trial, state, epoch)
            items = iter(sampler)  # alive while the state is taken, as within a loop
            deque(islice(items, stop + _is_at_end(trial, known)), maxlen=0)
            state = pickle.dumps(method_of(sampler, "state_dict")())  # type: ignore[misc]
    with maker.running(f"load_state_dict, {trial}", rank, world_size, salt=_OTHER_SALT):
        sampler = _restored(maker, trial, state, epochs[0])
        found: list[Int64s] = []
        for drawn_epoch in epochs:
            if drawn_epoch > epoch:  # a training loop then names the epoch that starts
                maker.set_epoch(sampler, drawn_epoch)
            found.append(maker.read(sampler).ids)
    return _after_end(trial, known, found)


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


def _is_at_end(trial: Trial, known: list[Pass]) -> bool:
    return sum(trial.stops) == len(known[trial.epoch])


def _resumed_epochs(evidence: Evidence, trial: Trial, known: list[Pass]) -> range:
    """Return the epochs to draw: at an epoch's end the next one.

    Elsewhere it is the epoch, and the next one, unless global random states have a part in it.
    """
    if _is_at_end(trial, known):
        return range(trial.epoch + 1, trial.epoch + 2)
    goes_on = evidence.ignores_global_state and "epoch" not in evidence.maker.takes
    return range(trial.epoch, trial.epoch + 1 + goes_on)


def _after_end(trial: Trial, known: list[Pass], found: list[Int64s]) -> list[Int64s]:
    """Return what came as the rest of the epoch, empty at its end, and the next epochs."""
    return [np.empty(0, np.int64), *found] if _is_at_end(trial, known) else found
