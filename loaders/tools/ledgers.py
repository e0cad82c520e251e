"""Queries on ledgers: the records of a step, the steps of a record, the first difference of runs.

A ledger is a file with the ranges of steps that a loop has received; see `Ledger`. `who` and `when`
draw the batches of these steps again, and `diff` compares what the batches depend on.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from itertools import accumulate, chain, pairwise
from pathlib import Path
from struct import error as struct_error
from typing import Any, NamedTuple

import numpy as np

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.building.sources import PathLike
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.loop.ledger import (
    LEDGER_VERSION,
    LINE_START,
    POSITION,
    path_of_rank,
    position_path,
    sampler_of,
)
from twinfeed.loaders.loop.record_state import check_records, record_state
from twinfeed.loaders.reading.prefetch.schedule import STEPS, Schedule, of_all_ranks
from twinfeed.loaders.support.checks import check_bounds
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.regular import read_file
from twinfeed.samplers import BatchStream, StateMismatchError, validate
from twinfeed.samplers.state import first_step, flattened

# What reading or checking the JSON of a damaged line may raise.
_DAMAGED_LINE_ERRORS = LookupError, AttributeError, TypeError, ValueError, RecursionError


class StepRange(NamedTuple):
    """Consecutive steps that a loop received, from `start` to before `stop`, over all epochs.

    `run` is the latest line that describes the run: the state of the sampler, the index and the
    ranks. `ended` is False if the process was killed, or still runs.
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
    step that was run again after a rollback is there twice. If it had other batches then, as after
    an exclusion, the feed draws the batch of one time, and a warning says that there is another.

    Args:
        ledger: the path that the loader was given.
        feed: the feed of the run, of any rank; or its sampler, if there was no feed.
        step: counted over all epochs, like `loader.global_step` before the batch.
        rank: return the samples of this rank, by its own ledger. Default: those of the global
            batch, by the ledger of rank 0.

    Returns:
        for each time, the ids, records, views and seeds.

    Raises:
        StateMismatchError: the feed is another one, or its index has changed.
        IndexError: no loop received this step.
        LoaderError: the file is damaged or is not a ledger.

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
    requests, mismatches = [], []
    for steps in ranges:
        if steps.start <= step < steps.stop:
            try:
                sampler = _sampler_of(steps, feed, step, rank)
            except StateMismatchError as error:
                mismatches.append(error)
                continue
            requests.append(Request.of(sampler, *divmod(step, len(sampler))))
    if mismatches and not requests:
        raise mismatches[0]
    if mismatches:
        warnings.warn(
            f"step {step} ran {len(requests) + len(mismatches)} times, before and after a "
            f"rollback, and this feed has the batches of {len(requests)}: {mismatches[0]}",
            stacklevel=2,
        )
    if not requests:
        last = max((steps.stop - 1 for steps in ranges if steps.start < steps.stop), default=None)
        last_step = "it has no steps" if last is None else f"the last is {last}"
        all_ended = all(steps.ended for steps in ranges)
        at_least = "" if all_ended else " at least, as a process was killed or still runs"
        raise IndexError(f"{os.fspath(ledger)} has no step {step}: {last_step}{at_least}")
    return requests


def when(
    ledger: PathLike, feed: Feed | BatchStream, record: int, /, *, rank: int | None = None
) -> list[int]:
    """Return the steps whose batch had a record, counted over all epochs, in the order they ran.

    All batches of the run are drawn again, at some millions of ids a second. A step that was run
    again after a rollback is in the list twice. If the feed has other batches than a step had
    before the rollback, as after an exclusion, a warning says that this time is left out.

    Args:
        ledger: the path that the loader was given.
        feed: the feed of the run, of any rank; or its sampler, if there was no feed.
        record: the id of the record.
        rank: search in the batches of this rank only. Default: in the global batches.

    Raises:
        StateMismatchError: the feed is another one, or its index has changed.
        LoaderError: the file is damaged or is not a ledger.

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
    steps_with_record: list[int] = []
    ranges = read_ledger(ledger, rank or 0)
    # The lowest step at which a later range starts: [5, 7, LIMIT] for ranges from 0, 5 and 7.
    starts = [*(steps.start for steps in ranges[1:]), validate.LIMIT]
    later_starts = [*accumulate(reversed(starts), min)][::-1]
    for steps, later_start in zip(ranges, later_starts, strict=False):
        # A rollback has undone the steps from there on. Before, the sampler must give the batches
        # of the run; after that, up to `stop`.
        undone = min(steps.stop, later_start)
        sampler = _sampler_of(steps, feed, undone - 1, rank)
        states = steps.run["state"], {"fingerprint": sampler.fingerprint}
        difference = _difference(*states, max(steps.start, undone))
        stop = steps.stop if difference is None else min(steps.stop, difference.global_step)
        if stop < steps.stop:
            warnings.warn(
                f"steps {stop} to {steps.stop - 1} of before a rollback are left out, as this feed "
                f"has other batches there: {difference}",
                stacklevel=2,
            )
        schedule = Schedule(sampler)
        for start in range(steps.start, stop, STEPS):  # many steps are drawn in one call
            records, step_of_record = schedule.records(start, min(start + STEPS, stop))
            steps_with_record += np.unique(step_of_record[records == record]).tolist()
    return steps_with_record


def diff(first: PathLike, second: PathLike, /) -> LedgerDifference | None:
    """Return the first step at which two runs had different batches; None if all are the same.

    The batches are not drawn again. A ledger says what they depend on, such as the seed and the
    records, and this is compared. Framework, trainer, file format and number of ranks make no
    difference. If a step was run again after a rollback, the last time counts.

    Args:
        first: the ledger of a run.
        second: the ledger of another run.

    Raises:
        LoaderError: a file is damaged or is not a ledger.

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
    # Each ledger is a list of `StepRange`s: consecutive steps of the run, with the same sampler.
    ranges = [read_ledger(first), read_ledger(second)]
    # Compare once for each interval in which no range of either ledger starts or stops. If one has
    # the steps 0 to 9, and the other 0 to 5, the edges are 0, 6, 10: the intervals [0, 6), [6, 10).
    edges = {edge for steps in chain(*ranges) for edge in (steps.start, steps.stop)}
    for start, stop in pairwise(sorted(edges)):
        in_first, in_second = (_last_range(of_ledger, start) for of_ledger in ranges)
        if in_first is not None and in_second is not None:
            difference = _difference(in_first.run["state"], in_second.run["state"], start)
            # A difference from step `stop` on belongs to a later interval.
            if difference is not None and difference.global_step < stop:
                return difference
        elif in_first is not None or in_second is not None:
            only_ledger = os.fspath(second if in_first is None else first)
            return LedgerDifference(start, f"only {only_ledger} has it")
    return None


def read_ledger(ledger: PathLike, rank: int = 0, /) -> list[StepRange]:
    """Return the ranges of consecutive steps in a rank's ledger, in the order they ran.

    A line with the event "begin" starts a range, and describes the run if it is the first of a
    process. A line "end" ends the range. "change" changes the sampler from a step on. A range that
    has no "end" line is open: its process was killed, or still runs. The position file beside the
    ledger then has the last step. A range whose position is lost has no steps.

    Raises:
        LoaderError: the file is damaged or is not a ledger.
    """
    path = path_of_rank(ledger, rank)
    # Read before the ledger, whose last range may end between the two reads.
    range_offset, next_step = _read_position(path)
    ranges: list[StepRange] = []
    run: dict[str, Any] = {}  # the latest line that describes the run
    offset = 0  # of the line
    open_offset = -1  # of the "begin" line of the last range, while it is open; else -1
    *lines, incomplete = read_file(path, LIMITS.ledger_bytes).split(b"\n")
    if not lines and not LINE_START.startswith(incomplete[: len(LINE_START)]):
        lines = [incomplete]  # of some other file: raise the error below
    for line_number, line in enumerate(lines, 1):
        try:
            entry = _parse_line(line)
            step = validate.integer("step", entry["step"], minimum=0)
            if entry["event"] == "begin":
                run = entry if "state" in entry else run
                run["state"]  # raises KeyError if no line so far describes the run
                ranges.append(StepRange(step, step, run, ended=False))
                open_offset = offset
            elif entry["event"] == "change":
                run = _with_changed_fingerprint(run, entry["fields"])
                if open_offset >= 0:
                    # The changed sampler gives the same batches for the range's earlier steps.
                    ranges[-1] = ranges[-1]._replace(run=run)
            elif entry["event"] == "end" and open_offset >= 0:
                ranges[-1] = ranges[-1]._replace(stop=step, ended="killed" not in entry)
                open_offset = -1
        except _DAMAGED_LINE_ERRORS as error:
            raise LoaderError(
                f"line {line_number} is not a ledger line of version {LEDGER_VERSION}: {error}",
                path=path,
                advice="give the ledger that a loader has written",
            ) from None
        offset += len(line) + 1
    if range_offset == open_offset >= 0:  # the position is of the open range
        ranges[-1] = ranges[-1]._replace(stop=max(ranges[-1].start, next_step))
    return ranges


def _with_changed_fingerprint(run: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run after some fields of its sampler's fingerprint have changed.

    The fingerprint is all options that the batches depend on, by name: the entry `fingerprint` in
    `run["state"]`. `fields` are the new values of those that have changed during the run, and None
    for those that were removed.
    """
    state = run["state"]
    kept = {name: value for name, value in state["fingerprint"].items() if name not in fields}
    added = {name: value for name, value in fields.items() if value is not None}
    return {**run, "state": {**state, "fingerprint": kept | added}}


def _read_position(path: Path) -> tuple[int, int]:
    """Return what the position file beside a ledger says about the last range of steps.

    A ledger has a "begin" and an "end" line for each range of consecutive steps that a loop
    received. If the process was killed, or still runs, the last range has no "end" line yet.

    Returns:
        The offset of the "begin" line of this range in the ledger, and the step after its last
        batch. The offset is -1 if there is no such range, or no position file.
    """
    try:
        return POSITION.unpack(read_file(position_path(path), POSITION.size))
    except (FileNotFoundError, struct_error):  # the ledger was copied without it, or it is empty
        return -1, 0


def _parse_line(line: bytes) -> dict[str, Any]:
    """Return the values of a line of a ledger, after checking that all of them can be used.

    Raises one of the exceptions in `_DAMAGED_LINE_ERRORS`, such as KeyError or TypeError, if a
    value is missing or has a wrong type.
    """
    entry: dict[str, Any] = json.loads(line)
    validate.choice("version of the ledger", entry["ledger"], (LEDGER_VERSION,))
    validate.choice("event", entry["event"], ("begin", "end", "load", "change"))
    # `flattened` turns nested dicts into (name, value) pairs. Here it only checks that `fields` is
    # a dict that is not nested too deep: it raises an error otherwise.
    dict(flattened(entry.get("fields", {})))
    if "state" in entry:
        state = entry["state"]
        for nested in (state["fingerprint"], state.get("records", {})):
            dict(flattened(nested))
        validate.integer("rank", entry["rank"], minimum=0)
        validate.integer("world_size", entry["world_size"], minimum=1)
        entry["index"]  # raises KeyError if it is missing
    return entry


def _sampler_of(
    steps: StepRange, feed: Feed | BatchStream, step: int, rank: int | None
) -> BatchStream:
    """Return a sampler that draws the batches of an earlier run again, to find their records.

    The run has written a ledger, with the state of its sampler. The user gives a feed, which should
    be the same as in the run: check this.

    Args:
        steps: a range of steps from the ledger, with the description of the run (`steps.run`).
        feed: the user's feed, or only its batch sampler.
        step: the batches up to this step must be the same. It is counted over all epochs.
        rank: the rank of the run whose batches are drawn, or None for the batches of all ranks.

    Raises:
        StateMismatchError: the feed has other records than the run had, or its sampler draws other
            batches, at `step` or before.
    """
    # The user's sampler may be sharded for a rank: take the one for the batches of all ranks.
    sampler = of_all_ranks(sampler_of(feed))
    epoch, next_step = divmod(step + 1, max(1, len(sampler)))
    state, index = steps.run["state"], steps.run["index"]
    # `position_of` checks whether the sampler could load a state: it raises StateMismatchError if
    # the sampler of the run drew other batches before this position. Its result is not needed.
    try:
        sampler.position_of({**state, "epoch": epoch, "step": next_step})
    except StateMismatchError as error:
        error.add_note("'the state' is the ledger's: give the feed of the run, with its schedule")
        raise
    if isinstance(feed, Feed):
        feed_index = getattr(feed.index, "fingerprint", index)
        if index not in (None, feed_index):
            raise StateMismatchError(
                f"the index of the run has the fingerprint {index}, {feed.index!r} has "
                f"{feed_index}: give the index that the run had"
            )
        check_records(state.get("records"), record_state(feed.index), feed.index)
    return sampler if rank is None else sampler.shard(rank, steps.run["world_size"])


def _last_range(ranges: list[StepRange], step: int) -> StepRange | None:
    """Return the range of steps in which a step ran last; None if it was undone by a rollback.

    If steps 0 to 9 ran, and then 5 to 6 from a state of step 5, step 8 is undone.
    """
    last = next((steps for steps in reversed(ranges) if steps.start <= step), None)
    return last if last is not None and step < last.stop else None


def _difference(
    first: Mapping[str, Any], second: Mapping[str, Any], start: int
) -> LedgerDifference | None:
    """Return the first step from `start` on at which the batches of two runs differ, and why.

    Return None if they do not differ. `first` and `second` are the states of the runs' samplers, as
    the ledgers have them. For example, a sampler has k=4 in both runs, and the second run changes k
    to 8 at step 340. The states have the fingerprints {"k": 4} and {"k": 4, "k from step 340": 8},
    and the result is step 340, because "k from step 340 is None and 8".
    """
    # What the batches depend on: the options of the samplers, nested ones as "order.seed"; and the
    # records, as a digest (a hash of all values) for each field.
    streams = [dict(flattened(state["fingerprint"])) for state in (first, second)]
    records = [dict(flattened(state.get("records", {}))) for state in (first, second)]
    values = {name: [stream.get(name) for stream in streams] for name in streams[0] | streams[1]}
    # The runs may have read the same records from two formats, such as tar and TFRecord, of which
    # one has more fields. So only fields that both have are compared.
    shared = records[0].keys() & records[1]
    values |= {name: [digests[name] for digests in records] for name in sorted(shared)}
    # {"k from step 340": [None, 8]}
    differing = {name: pair for name, pair in values.items() if pair[0] != pair[1]}
    if not differing:
        if shared == {"count"}:
            warnings.warn(
                "the ledgers share no digest: only the numbers of records were compared",
                stacklevel=3,
            )
        return None
    step = min(map(first_step, differing))  # 340; for a name without a step, it would be 0
    reason = ", ".join(f"{name} is {pair[0]!r} and {pair[1]!r}" for name, pair in differing.items())
    return LedgerDifference(max(start, step), reason)
