"""Questions of chance: global random states, epochs, seeds and workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from twinfeed.loaders.audit.evidence import Evidence, of_ranks
from twinfeed.loaders.audit.isolation import random_states
from twinfeed.loaders.audit.report import Answer, holds, note
from twinfeed.loaders.audit.streams import NotAskedError, Pass

_SEEDS = 4  # that are compared


def ask_built_twice(evidence: Evidence) -> Iterator[Answer]:
    """Whether two samplers that are built alike are equal."""
    unequal = note("gives other ids, with equal global random states")
    yield holds("equal") if evidence.is_repeatable else unequal


def ask_random(evidence: Evidence) -> Iterator[Answer]:
    """Whether global random states decide the order, are drawn from, or are reset."""
    if evidence.is_repeatable and not evidence.ignores_global_state:
        yield note("the global random state decides the order: pass a seed, or a generator")
    before, after = zip(*(_states_around_a_pass(evidence, salt) for salt in (1, 2)), strict=True)
    moved = [
        name
        for name in after[0]
        if any(old.get(name) != new.get(name) for old, new in zip(before, after, strict=True))
    ]
    reset = [name for name in moved if after[0][name] == after[1].get(name)]
    if reset:
        yield note(
            f"sets the global state of {' and '.join(reset)} to a fixed value: whatever else draws "
            "from it repeats itself"
        )
    elif moved:
        yield note(f"draws from the global state of {' and '.join(moved)}")
    elif evidence.ignores_global_state:
        yield holds("global random states are not used")
    yield from _ranks_of_other_states(evidence)


def _states_around_a_pass(
    evidence: Evidence, salt: int
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the global random states before a sampler is built, and after its first pass."""
    maker, world_size = evidence.maker, evidence.world_size
    evidence.need_one_process()
    with maker.running("global random states", 0, world_size, salt=salt):
        before = random_states()
        maker.read(maker.build(rank=0, world_size=world_size, epoch=0))
        return before, random_states()


def _ranks_of_other_states(evidence: Evidence) -> Iterator[Answer]:
    """Yield a note if ranks divide the records only while their global random states are equal."""
    world_size = max(evidence.streams)
    if world_size == 1 or evidence.promises.processes or evidence.ignores_global_state:
        return
    alike = evidence.streams[world_size]
    unlike = [
        [evidence.maker.passes([0], rank, world_size, salt=rank)[0].window(0, len(passes[0].ids))]
        for rank, passes in enumerate(alike)
    ]
    shared, shared_others = _shared(alike), _shared(unlike)
    if shared_others > shared + world_size * (evidence.promises.batch_size or 1):
        yield note(
            f"{of_ranks(world_size)} with other global states share {shared_others:,} records, and "
            f"with equal ones {shared:,}: seed all ranks alike"
        )


def _shared(ranks: list[list[Pass]]) -> int:
    """Return how many ids of the first epoch are repetitions."""
    ids = np.concatenate([passes[0].ids for passes in ranks])
    return len(ids) - len(np.unique(ids))


def ask_epochs(evidence: Evidence) -> Iterator[Answer]:
    """Whether epochs have orders of their own."""
    passes = evidence.passes
    if len(passes) < 2:
        raise NotAskedError("one epoch was drawn")
    if evidence.is_stored_order:
        yield note("all have the stored order")
    elif _are_equal(passes) and (
        evidence.endless or _are_equal(evidence.draw([*evidence.more_epochs()]))
    ):
        reason = "and there is no set_epoch"
        if "epoch" in evidence.maker.takes:
            reason = "although make takes the epoch"
        elif evidence.has("set_epoch"):
            reason = "although set_epoch is called"
        declared = evidence.expects("training", "pk", "infinite")
        yield note(
            f"all have the same order, {reason}",
            fault=declared or reason.startswith("although"),
        )
    elif twins := _equal_epochs(passes):
        bad = "seed" in evidence.maker.takes and all(
            _equal_epochs(evidence.draw([0, 1], seed=seed)) for seed in evidence.more_epochs()
        )
        yield note(f"{twins[0]} and {twins[1]} have the same order", fault=bad)
    else:
        yield holds("differ")


def _equal_epochs(passes: list[Pass]) -> tuple[int, int] | None:
    """Return the first two consecutive epochs that are equal."""
    for epoch, pair in enumerate(pairwise(passes)):
        if _are_equal([*pair]):
            return epoch, epoch + 1
    return None


def _are_equal(passes: list[Pass]) -> bool:
    return all(np.array_equal(passes[0].ids, drawn.ids) for drawn in passes)


def ask_set_epoch(evidence: Evidence) -> Iterator[Answer]:
    """Whether `set_epoch` alone decides which epoch comes."""
    if "epoch" in evidence.maker.takes:
        raise NotAskedError("make takes the epoch")
    if not evidence.has("set_epoch"):
        raise NotAskedError("there is no set_epoch")
    if evidence.is_stored_order or not evidence.is_repeatable:
        raise NotAskedError("the order does not depend on it")
    if _are_equal(evidence.passes):
        raise NotAskedError("all epochs are equal")
    first = evidence.passes[0].ids
    new = (evidence.draw([epoch])[0].ids for epoch in evidence.more_epochs() if epoch > 0)
    own = evidence.ignores_global_state
    if all(np.array_equal(first, ids[: len(first)]) for ids in new):
        yield note(
            "has no effect: epoch 1 of a new sampler is epoch 0 again",
            fault=own and (not evidence.endless or evidence.expects("training")),
        )
        return
    second = evidence.draw([1])[0].ids
    if own and not evidence.endless and not np.array_equal(second, evidence.passes[1].ids):
        yield note("epoch 1 of a new sampler is not that of one that ran epoch 0", fault=True)
    else:
        yield holds("has an effect")


def ask_seeds(evidence: Evidence) -> Iterator[Answer]:
    """Whether seeds have epochs of their own."""
    if "seed" not in evidence.maker.takes:
        raise NotAskedError("make takes no seed")
    if evidence.is_stored_order:
        raise NotAskedError("all is in stored order")
    epochs = [*range(evidence.promises.epochs)][:2]
    drawn = [[p.ids.tobytes() for p in evidence.draw(epochs, seed=seed)] for seed in range(_SEEDS)]
    for epoch, of_seeds in enumerate(zip(*drawn, strict=True)):
        if len({*of_seeds}) == 1 and _is_of_all_seeds(evidence, epoch):
            yield note(f"0 to {_SEEDS - 1} all give the same epoch {epoch}", fault=True)
            return
    if len(drawn[0]) > 1 and all(before[1] == after[0] for before, after in pairwise(drawn)):
        yield note("seed 0, epoch 1 is seed 1, epoch 0: runs share epochs")
    else:
        yield holds(f"0 to {_SEEDS - 1} have epochs of their own")


def _is_of_all_seeds(evidence: Evidence, epoch: int) -> bool:
    """Return whether an epoch is equal for so many seeds that it is no chance."""
    if evidence.endless:
        return True
    epochs = [*range(epoch + 1)]
    drawn = (evidence.draw(epochs, seed=seed)[-1].ids for seed in evidence.more_epochs())
    first = next(drawn)
    return all(np.array_equal(first, ids) for ids in drawn)


def ask_workers(evidence: Evidence) -> Iterator[Answer]:
    """Whether the number of workers changes which ids come."""
    if "workers" not in evidence.maker.takes:
        raise NotAskedError("make takes no workers")
    without, *with_workers = (evidence.draw([0], workers=workers)[0].ids for workers in range(3))
    for workers, ids in enumerate(with_workers, start=1):
        if not evidence.endless and not np.array_equal(np.sort(ids), np.sort(without)):
            text = f"{len(ids):,} ids with {workers}, {len(without):,} with 0, and other records"
            yield note(text, fault=True)
            return
    if all(np.array_equal(ids, without) for ids in with_workers):
        yield holds("0, 1 and 2 give the same")
    else:
        alike = "" if evidence.is_repeatable else ", as two samplers do that are built alike"
        yield note(f"1 or 2 give another order than 0{alike}")
