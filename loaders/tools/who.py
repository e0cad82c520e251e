"""`who` made a step, `when` a record came, and the `diff` of two feeds.

A stream is a function of its feed, so a run needs no log of ids: the batches are drawn again. Steps
are counted as `loader.global_step` says inside the loop. There the loader is at the next batch, so
the first batch, `feed[0, 0]`, is step 1. A loader that evaluates goes back to step 0 with the last
batch of an epoch, so this batch is step 0 of epoch 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinfeed.loaders.batches.feed import Feed, require_feed
from twinfeed.loaders.errors import printable
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.manifest import json_digest
from twinfeed.loaders.loop.record_state import check_records, record_state
from twinfeed.loaders.reading.prefetch.schedule import STEPS, Request, Schedule
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.checks import check_bounds
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.state import first_step, flattened
from twinfeed.samplers.validate import counted
from twinfeed.samplers.verdict import Verdict

_RECORDS = "records."  # how the names of fields begin that identify the records


@dataclass(frozen=True)
class Answer:
    """The base of what `who`, `when` and `diff` return: prints the fingerprint and lines.

    Attributes:
        fingerprint: a short hash of all that the batches of a feed depend on; of `diff`, two.
        lines: the text below the first line.
    """

    fingerprint: str
    lines: list[str] = field(repr=False)

    def __str__(self) -> str:
        head = f"fingerprint {self.fingerprint}; steps count as loader.global_step in the loop"
        return "\n".join(map(printable, [f"{head}, from 1", *self.lines]))


@dataclass(frozen=True)
class StepRecords(Answer):
    """The samples of a step. `print` shows the records, and `who` returns it.

    Attributes:
        request: the `epoch` and `step` of the batch, and its `ids`, `records`, `views` and `seeds`.

    >>> import numpy as np
    >>> from twinfeed import BatchSampler, Feed, SequentialSampler, who
    >>> feed = Feed({"x": np.arange(3)}, BatchSampler(SequentialSampler(3), batch_size=2))
    >>> who(feed, 2).lines
    ['step 2 (feed[0, 1])', '  id 2: record 2 of a dict']
    """

    request: Request


@dataclass(frozen=True)
class RecordSteps(Answer):
    """The steps whose batch has a record. `print` shows them, and `when` returns it.

    Attributes:
        steps: the steps, in order.

    >>> RecordSteps("3a789aeeffd472bb", [], [2, 4]).steps
    [2, 4]
    """

    steps: list[int]


@dataclass(frozen=True)
class FeedDifference(Answer, Verdict):
    """The first step at which two feeds have other records. `diff` returns it.

    Attributes:
        step: the first step that differs; None if two epochs of batches are the same.
        findings: what the batches depend on, and differs: seed, sampler, schedule or index.

    >>> print(FeedDifference("3a and 3b", ["step 1 differs"], 1, ["seed: seed is 0 and 1"]))
    fingerprint 3a and 3b; steps count as loader.global_step in the loop, from 1
    step 1 differs
    """

    step: int | None
    findings: list[str]


def who(
    feed: Feed,
    step: int,
    *,
    rank: int | None = None,
    world_size: int = 1,
    state: Mapping[str, Any] | None = None,
) -> StepRecords:
    """Return the records of a step. The batch is drawn again, and nothing is read.

    Args:
        feed: the feed of the run, of all ranks. If the run has changed a schedule, give the feed of
            the final schedule. A run that went back and took another way is two feeds.
        step: as `loader.global_step` says inside the loop: 1 while it has the first batch.
        rank: return the samples of this rank. Default: those of the global batch.
        world_size: the number of ranks, with `rank`.
        state: a state of the run, to be sure that the feed is the run's.

    Returns:
        An object that prints a line for each record. Its `request` has the `epoch` and `step` of
        the batch, as in `feed[epoch, step]`, and the `ids`, `records`, `views` and `seeds`.

    Raises:
        StateMismatchError: the state is of another feed.
        IndexError: there is no such step.
        ValueError: the step is below 1, the feed is one rank's, or there is no such rank.

    >>> import numpy as np
    >>> from twinfeed import BatchSampler, Feed, NumpyLoader, SequentialSampler, who
    >>> feed = Feed({"x": np.arange(3)}, BatchSampler(SequentialSampler(3), batch_size=2))
    >>> loader = NumpyLoader(feed)
    >>> for batch in loader:
    ...     print(loader.global_step, batch["id"], who(feed, loader.global_step).request.records)
    1 [0 1] [0 1]
    2 [2] [2]
    """
    fingerprint, sampler = _fingerprint(_fields(feed)), feed.sampler
    step = validate.integer("step", step, minimum=0 if sampler.evaluation else 1)
    position, title = _position(sampler, step), f"step {_text(sampler, step)}"
    if state is not None:
        if sampler.position_of(state) <= position:
            title += ", which is after the position of the state"
        check_records(state.get("records"), record_state(feed.index), feed.index)
    if rank is not None:
        sampler = sampler.shard(rank, world_size)
        title += f", rank {rank} of {world_size}"
    elif world_size != 1:
        raise ValueError("world_size= needs rank=: the global batch is the same for any number")
    request = Request.of(sampler, *position)
    pairs = zip(request.ids.tolist(), request.records.tolist(), strict=True)
    lines = [f"  id {n}: {_describe(feed.index, record)}" for n, record in pairs]
    return StepRecords(fingerprint, [title, *lines], request)


def when(feed: Feed, record: int | str, *, until: int) -> RecordSteps:
    """Return the steps up to `until` whose batch has a record, counted as `who` counts them.

    All batches up to this step are drawn, at some millions of ids a second. Of an evaluation, only
    one epoch is drawn.

    Args:
        feed: the feed of the run, of all ranks.
        record: the id of the record; or its key, if the feed has an index. If several records have
            the key, all of them count.
        until: the last step to look at, such as `loader.global_step`.

    Returns:
        An object that prints a line for each of its `steps`.

    Raises:
        IndexError: there is no such record.
        KeyError: no record has the key.

    >>> import numpy as np
    >>> from twinfeed import BatchSampler, Feed, SequentialSampler, when
    >>> feed = Feed({"x": np.arange(3)}, BatchSampler(SequentialSampler(3), batch_size=2))
    >>> when(feed, 2, until=5).steps
    [2, 4]
    """
    fingerprint, sampler = _fingerprint(_fields(feed)), feed.sampler
    records = records_of(feed.index, record)
    stop = validate.integer("until", until, minimum=1)
    stop = min(stop, len(sampler)) if sampler.evaluation else stop
    schedule, steps = Schedule(sampler), list[int]()
    for first in range(0, stop, STEPS):  # the numbers of batches, from 0
        drawn, drawn_in = schedule.records(first, min(first + STEPS, stop))
        steps += (np.unique(drawn_in[np.isin(drawn, records)]) + 1).tolist()
    if sampler.evaluation:
        steps = [step % len(sampler) for step in steps]
    title = f"{', '.join(map(feed.index.describe, records))}: {counted(len(steps), 'step')}"
    lines = [f"  step {_text(sampler, step)}" for step in steps]
    return RecordSteps(fingerprint, [f"{title} up to step {stop}", *lines], steps)


def diff(first: Feed, second: Feed, /) -> FeedDifference:
    """Return the first step at which two feeds have other records, and why.

    Nothing is read. What the batches depend on is compared, by name. If the samplers differ, two
    epochs of batches are drawn, from the first step at which they may differ. The format of the
    shards makes no difference. Functions such as `decode` are not compared.

    Returns:
        An object with the `step`, or None, and the `findings`: each begins with seed, sampler,
        schedule, or index (the records).

    Raises:
        TypeError: an argument is no feed.
        ValueError: a feed is one rank's.

    >>> import numpy as np
    >>> from twinfeed import BatchSampler, DatasetSource, Feed, SequentialSampler, diff
    >>> source = DatasetSource({"x": np.arange(8)}, digest="0 to 7")
    >>> feeds = [Feed(source, BatchSampler(SequentialSampler(8), batch_size=n)) for n in (2, 4)]
    >>> found = diff(*feeds)
    >>> found.step, found.findings[0]
    (1, 'sampler: batch_size is 2 and 4')
    """
    fields = _fields(first), _fields(second)
    shared = fields[0].keys() & fields[1]
    # A digest that only one feed has says nothing: another container holds other fields.
    names = sorted(n for n in fields[0] | fields[1] if n in shared or not n.startswith(_RECORDS))
    if len([n for n in names if n.startswith(_RECORDS)]) == 1 and first.index is not second.index:
        text = "the feeds share no digest of the records: only their number was compared"
        warnings.warn(text, stacklevel=2)
    values = {name: (fields[0].get(name), fields[1].get(name)) for name in names}
    differing = [name for name in names if values[name][0] != values[name][1]]
    findings = [f"{_kind(n)}: {n} is {values[n][0]!r} and {values[n][1]!r}" for n in differing]
    start = min(map(first_step, differing), default=0)
    # Two epochs, since one from its middle on may lack a record that a later one has.
    stop = start + 2 * max(len(first), len(second)) if differing else start
    differ = (n for n in range(start, stop) if _samples(first, n) != _samples(second, n))
    step = next((n + 1 for n in differ), None)
    step = 1 if any(_kind(name) == "index" for name in differing) else step
    same = "the same records in " + (f"the steps up to {stop}, but" if findings else "every step")
    lines = [same if step is None else f"step {step} differs", *map("  {}".format, findings)]
    return FeedDifference(" and ".join(map(_fingerprint, fields)), lines, step, findings)


def records_of(source: Source, name: int | str, /) -> list[int]:
    """Return the ids of the records that a number or a key names."""
    if not isinstance(name, str):
        number = validate.as_int("record", name)
        check_bounds(number, number, len(source), "record")
        return [number]
    if not isinstance(source, Index):
        raise TypeError(f"the key {name!r} needs an index, and not {validate.a_type(source)}")
    keys = source.keys()
    records = [number for number, key in enumerate(keys) if key == name]
    if not records:
        examples = ", ".join(map(repr, keys[:3]))
        raise KeyError(f"no record has the key {name!r}: give a key, such as {examples}")
    return records


def _fields(feed: Feed) -> dict[str, Any]:
    """Return all that the records of a feed's batches depend on, by name."""
    sampler = require_feed(feed).sampler
    if sampler.world_size > 1:
        raise ValueError(f"give the feed of all ranks, without shard, got {feed!r}")
    return dict(flattened({**sampler.fingerprint, "records": record_state(feed.index)}))


def _fingerprint(fields: Mapping[str, Any]) -> str:
    """Return a short hash of the fields, which two feeds of the same stream and records share."""
    return json_digest(fields)[:16]


def _position(sampler: BatchStream, step: int) -> tuple[int, int]:
    """Return the (epoch, step) of the batch that a loop has while `global_step` is `step`."""
    steps = max(1, len(sampler))
    return (step if sampler.evaluation else step - 1) // steps, (step - 1) % steps


def _text(sampler: BatchStream, step: int) -> str:
    """Return a step as text, with the batch that it has: "9 (feed[0, 8])"."""
    return f"{step} (feed{[*_position(sampler, step)]})"


def _kind(name: str) -> str:
    """Return what a field of a fingerprint belongs to."""
    if name.startswith(_RECORDS):
        return "index"
    return "schedule" if first_step(name) else "seed" if name.endswith("seed") else "sampler"


def _samples(feed: Feed, number: int) -> tuple[list[int], list[int]]:
    """Return the records and the views of a batch by its number, which counts epochs on from 0."""
    if not len(feed):
        return [], []
    request = Request.of(feed.sampler, *divmod(number, len(feed)), seeds=False)
    return request.records.tolist(), request.views.tolist()


def _describe(source: Source, record: int) -> str:
    """Describe a record in one line: its shard and number, its key, its label."""
    label = source.columns.get("label")
    return source.describe(record) + ("" if label is None else f", label {label[record]}")
