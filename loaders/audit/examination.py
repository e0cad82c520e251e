"""Run an audit: draw the streams, then ask each question."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

from numpy.typing import ArrayLike

from twinfeed.loaders.audit import (
    chance_questions,
    cost_questions,
    mixing_questions,
    resume_questions,
    stream_questions,
)
from twinfeed.loaders.audit.evidence import Evidence
from twinfeed.loaders.audit.isolation import has_alarm
from twinfeed.loaders.audit.maker import Maker, TimeOverError, parameters_of
from twinfeed.loaders.audit.promises import Expectation, Promises
from twinfeed.loaders.audit.rank_processes import call_in_processes
from twinfeed.loaders.audit.report import Answer, Audit
from twinfeed.loaders.audit.streams import NotAskedError, StoppedError
from twinfeed.loaders.audit.worlds import draw_evidence
from twinfeed.loaders.support.progress import progress_bar

QUESTIONS: dict[str, Callable[[Evidence], Iterator[Answer]]] = {
    "gives": stream_questions.ask_kind,
    "ids": stream_questions.ask_ids,
    "len": stream_questions.ask_length,
    "ranks": stream_questions.ask_ranks,
    "coverage": stream_questions.ask_coverage,
    "never": stream_questions.ask_never,
    "built twice": chance_questions.ask_built_twice,
    "random": chance_questions.ask_random,
    "epochs": chance_questions.ask_epochs,
    "set_epoch": chance_questions.ask_set_epoch,
    "seeds": chance_questions.ask_seeds,
    "start": resume_questions.ask_start,
    "state": resume_questions.ask_state,
    "workers": chance_questions.ask_workers,
    "classes": mixing_questions.ask_classes,
    "mixing": mixing_questions.ask_mixing,
    "cost": cost_questions.ask_cost,
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

    Ranks run in this process: the environment and `torch.distributed` name the rank, and
    collectives raise. Global random states are put back.

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
    promises = Promises.checked(
        num_records, labels, world_size, epochs, batch_size, expect, ids, processes, max_seconds
    )
    if has_alarm() or not _does_pickle(make):
        return _examine(make, promises)
    try:
        (report,) = call_in_processes(_examine, [(make, promises)], promises.max_seconds)
    except StoppedError as error:
        return _stopped(make, promises, error)
    assert isinstance(report, Audit)
    return report


def _does_pickle(make: Callable[..., Any]) -> bool:
    """Return whether another process can have a function."""
    try:
        pickle.dumps(make)
    except Exception:
        return False
    return True


def _examine(make: Callable[..., Any], promises: Promises) -> Audit:
    """Draw, and return the answers to all questions."""
    maker = Maker(make, promises)
    not_asked = {} if has_alarm() else {"hangs": "no signals here, and make does not pickle"}
    answers: list[Answer] = []
    try:
        evidence = draw_evidence(maker, promises, not_asked)
    except StoppedError as error:
        return _stopped(make, promises, error)
    for question, ask in progress_bar(
        QUESTIONS.items(), "audit", "question", sys.stderr.isatty(), len(QUESTIONS)
    ):
        try:
            # One by one: what is said before an error stays.
            answers.extend(answer._replace(question=question) for answer in ask(evidence))
        except (NotAskedError, TimeOverError) as error:
            not_asked[question] = str(error)
        except StoppedError as error:
            answers.append(Answer(question, str(error), "!"))
    return Audit(_name(make), promises.expect, tuple(answers), not_asked)


def _stopped(make: Callable[..., Any], promises: Promises, error: StoppedError) -> Audit:
    """Return the audit of a sampler that could not be drawn from."""
    return Audit(_name(make), promises.expect, (Answer("draws", str(error), "!"),), {})


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", type(make).__name__)
