"""Questions of resuming: by `start`, and by `state_dict`."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.audit.drawing import DrawnPass, StoppedError, method_of
from twinfeed.loaders.audit.stream_questions import Answers
from twinfeed.loaders.audit.worlds import World
from twinfeed.samplers.types import Int64s

_OTHER_SALT = 7  # of the global random states after a restart, as in a new process


class Trial(NamedTuple):
    """A restart of a rank in an epoch, after the items of `stops`; the passes of a run that went
    on; and what is expected, by epoch: the rest of this one, unless it has ended, and the next one.
    """

    name: str
    rank: int
    epoch: int
    stops: tuple[int, ...]
    known: list[DrawnPass]
    expected: dict[int, Int64s]


# Restarts, and returns the ids of each expected epoch.
Restart = Callable[[World, Trial], list[Int64s]]


def ask_start(world: World) -> Answers:
    """Whether `start` gives the rest of the stream."""
    yield from _compare(world, _by_start, twice=False)


def ask_state(world: World) -> Answers:
    """Whether `state_dict` and `load_state_dict` give the rest of the stream."""
    try:
        yield from _compare(world, _by_state, twice=True)
    except StoppedError as error:
        yield "-", str(error)


def _compare(world: World, restart: Restart, *, twice: bool) -> Answers:
    """Try restarts, and compare each with the stream that went on."""
    wrong, anew, trials = list[tuple[int, str]](), 0, [*_trials(world, twice=twice)]
    for trial in trials:
        found = restart(world, trial)
        for came, (epoch, wanted) in zip(found, trial.expected.items(), strict=True):
            at = _first_difference(came, wanted, world.endless)
            if at >= 0:
                what = "the rest" if epoch == trial.epoch else "the next epoch"
                ids, right = came[at : at + 3].tolist(), wanted[at : at + 3].tolist()
                text = f"{trial.name}: {what}, from id {at} on, is {ids}, not {right}"
                wrong.append((at, text))
                anew += _first_difference(found[0], trial.known[trial.epoch].ids, world.endless) < 0
                break
    if not wrong:
        yield " ", f"{len(trials)} of {len(trials)} right"
    elif anew == len(wrong):
        yield "-", "the state has no position, and the epoch starts anew: let make take start"
    else:
        yield "!", f"{len(wrong)} of {len(trials)} wrong; {min(wrong, key=itemgetter(0))[1]}"


def _trials(world: World, *, twice: bool) -> Iterator[Trial]:
    """Yield restarts of the first and the last rank, in two epochs; the next epoch is compared too,
    unless global random states have a part in it.
    """
    goes_on = world.ignores_global_state and "epoch" not in world.maker.takes
    for rank in sorted({0, world.size - 1}):
        known = world.streams[rank].passes
        of_rank = f"rank {rank} of {world.size}, " if world.size > 1 else ""
        for epoch, drawn in enumerate(known[:2]):
            items = end = own = len(drawn)
            if world.endless:
                items = round(end * world.num_records / max(1, len(drawn.ids)))
                own = round(items / world.size)
            steps = {1, own // 2, own - 1, own, own + 1, items, items + 1}
            stops: list[tuple[int, ...]] = [
                (step,) for step in sorted(steps) if 0 < step < end + (not world.endless)
            ]
            if twice and end >= 3:
                stops.append((end // 3, end // 3))
            for at in stops:
                name = f"{of_rank}epoch {epoch}, after {' and '.join(map(str, at))}"
                expected = {} if sum(at) == end else {epoch: drawn.after(sum(at))}
                if goes_on and epoch + 1 < len(known):
                    expected[epoch + 1] = known[epoch + 1].ids
                if expected:
                    yield Trial(name, rank, epoch, at, known, expected)


def _first_difference(found: Int64s, expected: Int64s, endless: bool) -> int:
    """Return the first position at which ids differ, or -1; endless ones, in what both have."""
    shorter = min(len(found), len(expected))
    ends = not endless and len(found) != len(expected)
    unequal = np.append(found[:shorter] != expected[:shorter], ends)
    return int(unequal.argmax()) if unequal.any() else -1


def _by_start(world: World, trial: Trial) -> list[Int64s]:
    """Restart by `start`: items of the epoch if make takes the epoch, else of the run."""
    earlier = 0 if "epoch" in world.maker.takes else sum(map(len, trial.known[: trial.epoch]))
    start, rank = earlier + trial.stops[0], (trial.rank, world.size)
    stream = world.maker.draw(trial.expected, *rank, salt=_OTHER_SALT, start=start)
    return [drawn.ids for drawn in stream.passes]


def _by_state(world: World, trial: Trial) -> list[Int64s]:
    """Restart by the state that a sampler has after its stops, in a new one each time."""
    maker, rank, state = world.maker, (trial.rank, world.size), b""
    is_end = sum(trial.stops) == len(trial.known[trial.epoch])
    for stop in trial.stops:
        salt = _OTHER_SALT if state else 0
        with maker.running(f"state_dict of epoch {trial.epoch}", *rank, salt=salt):
            sampler = _restored(world, trial, state, trial.epoch)
            items = iter(sampler)  # alive while the state is taken, as within a loop
            deque(islice(items, stop + is_end), maxlen=0)
            state = pickle.dumps(method_of(sampler, "state_dict")())
    with maker.running(f"load_state_dict, {trial.name}", *rank, salt=_OTHER_SALT):
        sampler = _restored(world, trial, state, min(trial.expected))
        found: list[Int64s] = []
        for epoch in trial.expected:
            if epoch > trial.epoch:  # a training loop then names the epoch that starts
                maker.set_epoch(sampler, epoch)
            found.append(maker.read(sampler).ids)
        return found


def _restored(world: World, trial: Trial, state: bytes, epoch: int) -> Any:
    """Return a new sampler at its epoch, with a state, or after the epochs before."""
    maker = world.maker
    sampler = maker.build(rank=trial.rank, world_size=world.size, epoch=epoch)
    for earlier in range(0 if state or "epoch" in maker.takes else epoch):
        maker.set_epoch(sampler, earlier)
        maker.read(sampler)
    maker.set_epoch(sampler, epoch)
    if state:
        method_of(sampler, "load_state_dict")(pickle.loads(state))
    return sampler
