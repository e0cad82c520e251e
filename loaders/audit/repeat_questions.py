"""Questions of draws that repeat: with other states, epochs, seeds and workers; and of cost."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import pairwise

import numpy as np

from twinfeed.loaders.audit.drawing import DrawnPass
from twinfeed.loaders.audit.stream_questions import Answers, fault_if
from twinfeed.loaders.audit.worlds import World


def ask_built_twice(world: World) -> Answers:
    """Whether two samplers that are built alike are equal."""
    unequal = "gives other ids, with equal global random states"
    yield (" ", "equal") if world.is_repeatable else ("-", unequal)


def ask_random(world: World) -> Answers:
    """Whether global random states decide the order, are drawn from, or are reset."""
    if world.is_repeatable and not world.ignores_global_state:
        order = "of each rank decides its" if "rank" in world.maker.takes else "decides the"
        yield "-", f"the global random state {order} order: pass a seed, or a generator"
    states = [stream.states for stream in world.again]
    after, after_changed = (after for _, after in states)
    moved = [name for name in after if any(old.get(name) != new[name] for old, new in states)]
    reset = [name for name in moved if after[name] == after_changed[name]]
    if reset:
        text = f"sets the global state of {' and '.join(reset)} to a fixed value"
        yield "-", f"{text}: whatever else draws from it repeats itself"
    elif moved:
        yield "-", f"draws from the global state of {' and '.join(moved)}"
    elif world.ignores_global_state:
        yield " ", "global random states are not used"


def _are_equal(passes: list[DrawnPass]) -> bool:
    return len({drawn.key for drawn in passes}) == 1


def _equal_epochs(passes: list[DrawnPass]) -> list[int]:
    """Return the epochs that are equal to the next one."""
    return [epoch for epoch, pair in enumerate(pairwise(passes)) if _are_equal([*pair])]


def ask_epochs(world: World) -> Answers:
    """Whether epochs have orders of their own."""
    takes, passes, more = world.maker.takes, world.passes, world.more_epochs
    if world.is_stored_order:
        yield "-", "all have the stored order"
    elif _are_equal(passes) and (world.endless or _are_equal(world.draw(more))):
        reason = "and there is no set_epoch"
        if "epoch" in takes or "set_epoch" in world.first.methods:
            how = "make takes the epoch" if "epoch" in takes else "set_epoch is called"
            reason = f"although {how}"
        is_fault = world.expects("training", "pk", "infinite") or "although" in reason
        yield fault_if(is_fault), f"all have the same order, {reason}"
    elif equal := _equal_epochs(passes):
        is_fault = "seed" in takes and all(
            _equal_epochs(world.draw(range(2), seed=seed)) for seed in more
        )
        yield fault_if(is_fault), f"{equal[0]} and {equal[0] + 1} have the same order"
    else:
        yield " ", "differ"


def ask_set_epoch(world: World) -> Answers:
    """Whether `set_epoch` alone decides which epoch comes."""
    first, own = world.passes[0].ids, world.ignores_global_state
    second = world.draw(range(1, 2))[0].ids
    if all(
        np.array_equal(first, world.draw(range(epoch, epoch + 1))[0].ids[: len(first)])
        for epoch in world.more_epochs[1:]
    ):
        is_fault = own and (not world.endless or world.expects("training"))
        yield fault_if(is_fault), "has no effect: epoch 1 of a new sampler is epoch 0 again"
    elif own and not world.endless and second.tobytes() != world.passes[1].key:
        yield "!", "epoch 1 of a new sampler is not that of one that ran epoch 0"
    else:
        yield " ", "has an effect"


def ask_seeds(world: World) -> Answers:
    """Whether seeds have epochs of their own."""
    epochs = range(min(2, world.declared.epochs))
    drawn = [[p.key for p in world.draw(epochs, seed=seed)] for seed in range(4)]
    for epoch, keys in enumerate(zip(*drawn, strict=True)):
        more = (world.draw(epochs, seed=seed)[epoch].key for seed in world.more_epochs)
        if {*keys} == {keys[0]} and (world.endless or all(key == keys[0] for key in more)):
            yield "!", f"0 to 3 all give the same epoch {epoch}"
            return
    if len(drawn[0]) > 1 and all(seed[1] == new[0] for seed, new in pairwise(drawn)):
        yield "-", "seed 0, epoch 1 is seed 1, epoch 0: runs share epochs"
    elif len({keys[0] for keys in drawn}) < len(drawn):
        yield "-", "some of 0 to 3 give the same epoch 0"
    else:
        yield " ", "0 to 3 have epochs of their own"


def ask_workers(world: World) -> Answers:
    """Whether the number of workers changes which ids come."""
    without, *drawn = (world.draw(range(1), workers=workers)[0].ids for workers in range(3))
    for workers, ids in enumerate(drawn, start=1):
        if not world.endless and not np.array_equal(np.sort(ids), np.sort(without)):
            yield "!", f"{len(ids):,} ids with {workers}, {len(without):,} with 0, other records"
            return
    if all(np.array_equal(ids, without) for ids in drawn):
        yield " ", "0, 1 and 2 give the same"
    else:
        alike = "" if world.is_repeatable else ", as two samplers do that are built alike"
        yield "-", f"1 or 2 give another order than 0{alike}"


def ask_cost(world: World) -> Answers:
    """Say what construction, the first item and 10^6 ids cost; each is measured once."""
    stream, was_tracing = world.again[0], tracemalloc.is_tracing()
    (first, seconds), count = stream.passes[0].seconds, max(1, len(stream.passes[0].ids))
    text = f"{1e3 * stream.seconds:.1f} ms to build, {1e3 * first:.1f} ms to the first, "
    text += f"{1e6 * seconds / count:.2g} s for 10^6 ids, "
    with world.maker.running("cost", 0, world.size):
        tracemalloc.start()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            sampler = world.maker.build(rank=0, world_size=world.size, epoch=0)
            next(iter(sampler), None)
            megabytes = (tracemalloc.get_traced_memory()[1] - before) / 1e6
        finally:
            if not was_tracing:  # the caller may trace, too
                tracemalloc.stop()
        text += f"{megabytes:.1f} MB of Python's memory to the first, "
        try:
            text += f"{len(pickle.dumps(sampler)):,} B pickled"
        except Exception as error:
            text += f"it does not pickle ({type(error).__name__})"
    yield "-", text
