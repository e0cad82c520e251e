"""What ledgers say: which records a step had, which steps had a record, and where two runs differ.

`who`, `when` and `diff` draw the batches again, or compare what they depend on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import chain, pairwise
from pathlib import Path
from struct import error as struct_error
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.building.sources import PathLike
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.loop.ledger import (
    LEDGER_VERSION,
    POSITION,
    path_of_rank,
    position_path,
    sampler_of,
)
from twinfeed.loaders.loop.record_state import check_records, record_state
from twinfeed.loaders.making.feed import Feed
from twinfeed.loaders.reading.prefetch.schedule import STEPS, Schedule
from twinfeed.loaders.support.checks import check_bounds
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers import BatchStream, StateMismatchError, validate
from twinfeed.samplers.state import first_step, flattened

_DAMAGES = LookupError, AttributeError, TypeError, ValueError, RecursionError


class StepRange(NamedTuple):
    """Consecutive steps that a loop received, from `start` to before `stop`, over all epochs.

    `run` is the line that says what was run: the state of the stream, the index and the ranks.
    `ended` is False if the process was killed, or still runs.
    """

    start: int
    stop: int
    run: Mapping[str, Any]
    ended: bool


class LedgerDifference(NamedTuple):
    """The first step at which two ledgers differ, counted over all epochs, and how they differ.

    >>> print(LedgerDifference(340, "only a/ledger.jsonl has it"))
    step 340: only a/ledger.jsonl has it
    """

    global_step: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.global_step}: {self.reason}"


def who(
    ledger: PathLike, feed: Feed | BatchStream, step: int, /, *, rank: int | None = None
) -> list[Request]:
    """Return the samples of a step, once for each time that a loop received the step.

    The samples are drawn again by the feed, whose sampler and index must be those of the run. A
    step that was run again after a rollback is there twice.

    Args:
        ledger: the path that the loader was given.
        feed: that of the run, of any rank. If there is no feed, the sampler.
        step: counted over all epochs, as `loader.global_step` before the batch.
        rank: gives the batch of this rank, by its own ledger. Default: the global batch, by the
            ledger of rank 0.

    Returns:
        for each time, the ids, records, views and seeds.

    Raises:
        StateMismatchError: the feed is another one, or its index has changed.
        IndexError: no loop received this step.
        LoaderError: the file is damaged or is no ledger.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, NumpyLoader, RandomSampler, pack, who
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, BatchSampler(RandomSampler(3, seed=0), batch_size=2))
    >>> ledger = f"{mkdtemp()}/ledger.jsonl"
    >>> with NumpyLoader(feed, ledger=ledger) as loader:
    ...     received = [batch["id"].tolist() for batch in loader]
    >>> [request.ids.tolist() for request in who(ledger, feed, 1)] == received[1:]
    True
    """
    step = validate.integer("step", step, minimum=0)
    ranges = read_ledger(ledger, rank or 0)
    requests = []
    for steps in ranges:
        if steps.start <= step < steps.stop:
            sampler = _sampler_of(steps, feed, step, rank)
            requests.append(Request.of(sampler, *divmod(step, len(sampler))))
    if not requests:
        last = max((steps.stop - 1 for steps in ranges), default=None)
        all_ended = all(steps.ended for steps in ranges)
        least = "" if all_ended else " at least, as a process was killed or still runs"
        raise IndexError(f"{os.fspath(ledger)} has no step {step}: the last is {last}{least}")
    return requests


def when(
    ledger: PathLike, feed: Feed | BatchStream, record: int, /, *, rank: int | None = None
) -> list[int]:
    """Return the steps whose batch had a record, counted over all epochs, in the order they ran.

    The whole run is drawn again, some millions of ids a second. A step that was run again after a
    rollback is there twice.

    Args:
        ledger: the path that the loader was given.
        feed: that of the run, of any rank. If there is no feed, the sampler.
        record: the id of the record.
        rank: asks for the batches of this rank. Default: the global batches.

    Raises:
        StateMismatchError: the feed is another one, or its index has changed.
        LoaderError: the file is damaged or is no ledger.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, NumpyLoader, SequentialSampler, pack, when
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, BatchSampler(SequentialSampler(3), batch_size=2))
    >>> ledger = f"{mkdtemp()}/ledger.jsonl"
    >>> with NumpyLoader(feed, ledger=ledger) as loader:
    ...     for epoch in range(2):
    ...         for batch in loader:
    ...             pass
    >>> when(ledger, feed, 2)
    [1, 3]
    """
    record = validate.as_int("record", record)
    check_bounds(record, record, sampler_of(feed).num_records, "record")
    found: list[int] = []
    for steps in read_ledger(ledger, rank or 0):
        schedule = Schedule(_sampler_of(steps, feed, steps.stop - 1, rank))
        for start in range(steps.start, steps.stop, STEPS):
            records, step_of = schedule.records(start, min(start + STEPS, steps.stop))
            found += np.unique(step_of[records == record]).tolist()
    return found


def diff(first: PathLike, second: PathLike, /) -> LedgerDifference | None:
    """Return the first step at which two runs had other records; None if all are the same.

    Neither records nor samplers are needed. Framework, trainer, container and number of ranks make
    no difference. Of a step that was run again after a rollback, the last time counts.

    Args:
        first: the ledger of a run.
        second: the ledger of another run.

    Raises:
        LoaderError: a file is damaged or is no ledger.

    >>> from tempfile import mkdtemp
    >>> from twinfeed import BatchSampler, Ledger, RandomSampler, diff
    >>> folder = mkdtemp()
    >>> for seed in range(2):
    ...     sampler = BatchSampler(RandomSampler(8, seed=seed), batch_size=4)
    ...     with Ledger(f"{folder}/{seed}.jsonl", sampler) as ledger:
    ...         ledger.delivered(0)
    >>> print(diff(f"{folder}/0.jsonl", f"{folder}/1.jsonl"))
    step 0: seed is 0 and 1, order.seed is 0 and 1
    >>> diff(f"{folder}/0.jsonl", f"{folder}/0.jsonl") is None
    True
    """
    ranges = [read_ledger(first), read_ledger(second)]
    edges = {edge for steps in chain(*ranges) for edge in (steps.start, steps.stop)}
    for start, stop in pairwise(sorted(edges)):
        in_first, in_second = (_last_range(of_ledger, start) for of_ledger in ranges)
        if in_first is not None and in_second is not None:
            difference = _difference(in_first.run["state"], in_second.run["state"], start)
            if difference is not None and difference.global_step < stop:
                return difference
        elif in_first is not None or in_second is not None:
            only = os.fspath(second if in_first is None else first)
            return LedgerDifference(start, f"only {only} has it")
    return None


def read_ledger(ledger: PathLike, rank: int = 0, /) -> list[StepRange]:
    """Return the ranges of steps in a rank's ledger, in the order they ran.

    Raises:
        LoaderError: the file is damaged or is no ledger.
    """
    path = path_of_rank(ledger, rank)
    position = _read_position(path)  # before the ledger: the range may end between both
    ranges: list[StepRange] = []
    run: dict[str, Any] = {}
    running: StepRange | None = None
    offset = range_offset = 0
    *lines, _torn = read_file(path, LIMITS.ledger_bytes).split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            entry = _parse_line(line)
            step = validate.integer("step", entry["step"], minimum=0)
            if entry["event"] == "begin":
                run = entry if "state" in entry else run
                run["state"]  # KeyError: no line before says what was run
                running = StepRange(step, step, run, ended=False)
                range_offset = offset
            elif entry["event"] == "change":
                run = _changed(run, entry["fields"])
                running = running and running._replace(run=run)  # with the same steps before
            elif entry["event"] == "end" and running is not None:
                ranges.append(running._replace(stop=step, ended="killed" not in entry))
                running = None
        except _DAMAGES as error:
            raise LoaderError(
                f"line {number} is no line of a ledger of version {LEDGER_VERSION}: {error}",
                path=path,
                advice="give the ledger that a loader has written",
            ) from None
        offset += len(line) + 1
    if running is not None and position[0] == range_offset:
        ranges.append(running._replace(stop=position[1]))
    return [steps for steps in ranges if steps.start < steps.stop]


def _changed(run: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of a run with other fields of its fingerprint; None removes a field."""
    state = run["state"]
    kept = {name: value for name, value in state["fingerprint"].items() if name not in fields}
    added = {name: value for name, value in fields.items() if value is not None}
    return {**run, "state": {**state, "fingerprint": kept | added}}


def _read_position(path: Path) -> tuple[int, int]:
    """Return where the line of the running range begins, and its last step plus 1."""
    try:
        return POSITION.unpack(read_file(position_path(path), POSITION.size))
    except (FileNotFoundError, struct_error):
        return -1, 0  # the range has no batch, or the file was not copied


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the values of a line; raise an error of `_DAMAGES` if they are not a ledger's."""
    entry: dict[str, Any] = json.loads(line)
    validate.choice("its version", entry["ledger"], (LEDGER_VERSION,))
    dict(flattened(entry.get("fields", {})))  # raises if it is no mapping, or too deep
    if "state" in entry:
        state = entry["state"]
        for nested in (state["fingerprint"], state.get("records", {})):
            dict(flattened(nested))
        validate.integer("rank", entry["rank"], minimum=0)
        validate.integer("world_size", entry["world_size"], minimum=1)
        entry["index"]
    return entry


def _sampler_of(
    steps: StepRange, feed: Feed | BatchStream, step: int, rank: int | None
) -> BatchStream:
    """Return the sampler of a range, of all ranks or of one, if the feed is that of the run.

    Raises:
        StateMismatchError: the feed gives other records, or has others before the end of `step`.
    """
    sampler = Schedule(sampler_of(feed)).all_ranks.sampler
    epoch, next_step = divmod(step + 1, max(1, len(sampler)))
    state, index = steps.run["state"], steps.run["index"]
    sampler.position_of({**state, "epoch": epoch, "step": next_step})
    if isinstance(feed, Feed):
        found = getattr(feed.index, "fingerprint", index)
        if index not in (None, found):
            raise StateMismatchError(
                f"the index of the run has the fingerprint {index}, {feed.index!r} has {found}: "
                f"give the index that the run had"
            )
        check_records(state.get("records"), record_state(feed.index), feed.index)
    return sampler if rank is None else sampler.shard(rank, steps.run["world_size"])


def _last_range(ranges: list[StepRange], step: int) -> StepRange | None:
    """Return the range that a step ran in last; None if a rollback has undone it."""
    last = next((steps for steps in reversed(ranges) if steps.start <= step), None)
    return last if last is not None and step < last.stop else None


def _difference(
    first: Mapping[str, Any], second: Mapping[str, Any], start: int
) -> LedgerDifference | None:
    """Return the first step, from `start` on, at which two states draw other records."""
    streams = [dict(flattened(state["fingerprint"])) for state in (first, second)]
    records = [dict(flattened(state.get("records", {}))) for state in (first, second)]
    values = {name: [stream.get(name) for stream in streams] for name in streams[0] | streams[1]}
    shared = records[0].keys() & records[1]  # another container may have other names
    values |= {name: [digests[name] for digests in records] for name in sorted(shared)}
    differing = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    if not differing:
        return None
    step = min(map(first_step, differing))
    reason = ", ".join(f"{name} is {pair[0]!r} and {pair[1]!r}" for name, pair in differing.items())
    return LedgerDifference(max(start, step), reason)
