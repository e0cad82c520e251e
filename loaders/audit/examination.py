"""Run an audit: draw the streams, then ask each question of the table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from numpy.typing import ArrayLike

from twinfeed.loaders.audit import repeat_questions as repeats
from twinfeed.loaders.audit import resume_questions as resuming
from twinfeed.loaders.audit import stream_questions as streams
from twinfeed.loaders.audit.declared import Declared, Expectation
from twinfeed.loaders.audit.drawing import Maker, StoppedError, TimeOverError, parameters_of
from twinfeed.loaders.audit.isolation import has_alarm
from twinfeed.loaders.audit.processes import call_in_child
from twinfeed.loaders.audit.report import Answer, Audit
from twinfeed.loaders.audit.worlds import World, draw_worlds
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.samplers.validate import counted

# What questions need, and the reason why they are not asked without it.
NEEDS: dict[str, tuple[str, Callable[[World], object]]] = {
    "one rank": ("add 1 to world_size", lambda w: w.size == 1),
    "ranks": ("there is one rank, or no end", lambda w: w.size > 1 and not w.endless),
    "seed": ("make takes no seed", lambda w: "seed" in w.maker.takes),
    "start": ("make takes no start", lambda w: "start" in w.maker.takes),
    "workers": ("make takes no workers", lambda w: "workers" in w.maker.takes),
    "pass": ("make takes the epoch", lambda w: "epoch" not in w.maker.takes),
    "set_epoch": ("there is no set_epoch", lambda w: "set_epoch" in w.first.methods),
    "state": ("there is no state_dict", lambda w: len(w.first.methods - {"set_epoch"}) == 2),
    "epochs": ("one epoch was drawn", lambda w: len(w.passes) > 1),
    "order": ("all is in stored order", lambda w: not w.is_stored_order),
    "orders": ("all epochs are equal", lambda w: len({drawn.key for drawn in w.passes}) > 1),
    "repeats": ("two samplers that are built alike differ", lambda w: w.is_repeatable),
    "labels": ("no labels were passed", lambda w: w.declared.labels is not None),
    "classes": ("ids have no labels", lambda w: 0 <= w.ids.max(initial=-1) < w.num_records),
    "batches": ("single ids come, and no batch_size was passed", lambda w: w.in_batches),
    "50 records": ("an epoch has fewer than 50 records", lambda w: w.counts[0].sum() >= 50),
    "shuffle": ("no uniform shuffle is promised", lambda w: not w.expects("pk", "evaluation")),
}

# Each question, of which numbers of ranks it is asked, and its needs. Those of "least" and "most"
# draw again, in this process.
QUESTIONS: dict[str, tuple[Callable[[World], streams.Answers], str, str]] = {
    "gives": (streams.ask_kind, "first", ""),
    "ids": (streams.ask_ids, "all", ""),
    "len": (streams.ask_length, "all", ""),
    "ranks": (streams.ask_ranks, "all", "ranks"),
    "coverage": (streams.ask_coverage, "all", ""),
    "never": (streams.ask_never, "all", "epochs"),
    "built twice": (repeats.ask_built_twice, "least", ""),
    "random": (repeats.ask_random, "least", ""),
    "epochs": (repeats.ask_epochs, "least", "epochs"),
    "set_epoch": (repeats.ask_set_epoch, "least", "pass, set_epoch, repeats, order, orders"),
    "seeds": (repeats.ask_seeds, "least", "seed, order"),
    "start": (resuming.ask_start, "most", "start, repeats"),
    "state": (resuming.ask_state, "most", "state, repeats"),
    "workers": (repeats.ask_workers, "least", "workers"),
    "classes": (streams.ask_classes, "all", "labels, batches, classes"),
    "mixing": (streams.ask_mixing, "first", "one rank, 50 records, order, shuffle"),
    "cost": (repeats.ask_cost, "least", ""),
}


def audit(
    make: Callable[..., Any],
    /,
    *,
    num_records: SupportsIndex | None = None,
    labels: ArrayLike | None = None,
    world_size: SupportsIndex | Sequence[SupportsIndex] = (1, 2),
    epochs: SupportsIndex = 3,
    batch_size: SupportsIndex | None = None,
    expect: Expectation | None = None,
    ids: Callable[[Any], Any] | None = None,
    processes: bool = False,
    max_seconds: float = 60.0,
) -> Audit:
    """Examine a sampler of any library: what it draws, and where it contradicts itself.

    `make` builds a new sampler, batch sampler, loader of ids or generator. The names of its
    parameters say what can be asked: any of `rank`, `world_size`, `epoch`, `seed`, `start` and
    `workers`. `start` is how many items, ids or batches, this rank has had: in the epoch if `make`
    takes an epoch, else in the run. `set_epoch` and `state_dict` are found on the object, its
    `sampler`, `batch_sampler`, the sampler of this, and its `dataset`.

    A fault is what contradicts `len`, the other ranks, a resumed run or a seed, and what
    contradicts `expect`. Without `expect`, missing and repeated records are facts.

    A `make` of an imported module runs in a new process, which is ended if it hangs. Any other runs
    in this process, which is interrupted by signals, and global random states are put back. Ranks
    run in one process: the environment and `torch.distributed` name the rank, and collectives
    raise.

    Args:
        make: a function that builds a sampler.
        num_records: the number of records; by default that of the labels, or the highest id + 1.
        labels: the label of each record, to count the classes of batches.
        world_size: the numbers of ranks to try.
        epochs: how many epochs are compared.
        batch_size: ids of a batch of one rank, if `make` gives single ids.
        expect: what is promised. "training": each record once an epoch, with padding or a dropped
            tail of less than a step. "evaluation": exactly once. "pk": batches of as many classes,
            with as many records each. "with replacement". "infinite": passes do not end.
        ids: takes an item and returns its ids, if an item holds more than ids.
        processes: whether ranks are processes, joined by gloo, for samplers with collectives.
            `make` must then be at the top level of a module.
        max_seconds: the seconds for all of it. Questions that remain are then not asked.

    Returns:
        The answers. `print` shows them, and `assert report.ok, report` is a test.

    Raises:
        TypeError: `make` needs another parameter, or is no function.
        ValueError: numbers that do not agree, or an unknown `expect`.

    >>> from twinfeed import RandomSampler
    >>> report = audit(lambda seed=0: RandomSampler(100, seed=seed), expect="training")
    >>> report.ok
    True
    """
    parameters_of(make)
    declared = Declared(
        num_records, labels, world_size, epochs, batch_size, expect, ids, processes, max_seconds
    )
    try:
        report = call_in_child(_examine, (make, declared), declared.max_seconds)
        return report or _examine(make, declared, in_child=False)
    except StoppedError as error:
        return Audit(_name(make), expect, (Answer("draws", str(error), "!"),), {})


def _examine(make: Callable[..., Any], declared: Declared, in_child: bool = True) -> Audit:
    """Draw, and return the answers to all questions."""
    not_asked, answers = dict[str, str](), list[Answer]()
    if not in_child:
        hangs = "code in C" if has_alarm() else "all, as no signal comes here"
        not_asked["hangs"] = f"{hangs}: make is no function of an imported module"
    worlds = draw_worlds(Maker(make, declared), declared, not_asked)
    in_process = [world for world in worlds if world.in_process]
    groups = {"all": worlds, "first": worlds[:1], "least": in_process[:1], "most": in_process[-1:]}
    shown = sys.stderr.isatty()
    for name in progress_bar(QUESTIONS, "audit", "question", shown, len(QUESTIONS)):
        ask, group, needs = QUESTIONS[name]
        reason = "" if groups[group] else "ranks run in processes: add 1 to world_size"
        for world in groups[group]:
            ranks = f"{counted(world.size, 'rank')}: " if group == "all" else ""
            reasons = (NEEDS[need] for need in needs.split(", ") if need)
            reason = next((text for text, is_so in reasons if not is_so(world)), "")
            try:  # one by one: what is said before an error stays
                for mark, text in () if reason else ask(world):
                    answers.append(Answer(name, f"{ranks}{text}", mark))
            except TimeOverError as error:
                reason = str(error)
            except StoppedError as error:
                answers.append(Answer(name, str(error), "!"))
        not_asked |= {name: reason} if reason else {}
    return Audit(_name(make), declared.expect, tuple(answers), not_asked)


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)
