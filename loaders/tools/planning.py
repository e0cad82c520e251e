"""What an epoch of a feed will request from its store, known before anything is read."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict, deque
from dataclasses import dataclass, replace

import numpy as np

from twinfeed.loaders.feed.config import stored_fields
from twinfeed.loaders.feed.shuffling import block_of
from twinfeed.loaders.index.sizes import large, record_bytes
from twinfeed.loaders.making.feed import Feed, index_of
from twinfeed.loaders.packing import SHARD_BYTES
from twinfeed.loaders.reading.prefetch.read_plan import LIMIT, Fetch, ReadPlan, gap_of
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.prefetch.spans import Spans, most_open, reads_spans
from twinfeed.loaders.support import system
from twinfeed.samplers import validate
from twinfeed.samplers.validate import counted

# Most samples that are drawn. A longer epoch is estimated from the second half of them.
_MOST = 1 << 19

# A request of fewer bytes takes longer to begin than to transfer: on a disk, and in a bucket.
_SMALL, _SMALL_REMOTE = 1 << 16, 1 << 20

# This many times the shards that are needed is too many, if shards are small too.
_MANY = 16

# `shuffled` makes short blocks of shards that have fewer bytes together.
_LITTLE = 1 << 29


@dataclass(frozen=True)
class Plan:
    """What an epoch of a feed requests from its store. `plan` returns a `Plan`.

    Attributes:
        batches: batches of an epoch.
        samples: ids of an epoch, without padding.
        requests: ranges requested in an epoch.
        read_bytes: the bytes of these ranges. A disk cache of remote shards reads whole pieces.
        used_bytes: the bytes of the fields that batches take.
        held_bytes: the memory needed so that nothing is read twice: for the open blocks, and for
            what is read ahead. It is page cache, or with `remote` the process's own.
        exact: whether the whole epoch was drawn. Otherwise requests and bytes are estimated from a
            part.
        findings: what to change, a sentence each, if the store can never be fast.
        shards: how many shards there are.
        shard_bytes: the median of their sizes. 0 for loose files.
        remote: whether the shards are at a URL.

    >>> Plan(1, 10, 2, 500, 400, 100).amplification
    1.25
    """

    batches: int
    samples: int
    requests: int
    read_bytes: int
    used_bytes: int
    held_bytes: int
    exact: bool = True
    findings: tuple[str, ...] = ()
    shards: int = 0
    shard_bytes: int = 0
    remote: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is nothing to change."""
        return not self.findings

    @property
    def amplification(self) -> float:
        """Bytes read for each byte used."""
        return self.read_bytes / max(1, self.used_bytes)

    def __str__(self) -> str:
        """Return the plan as lines of text."""
        about = "" if self.exact else "about "
        size = self.read_bytes / max(1, self.requests)
        between = ": a request also brings the headers, fields and records between"
        whose = "the process" if self.remote else "page cache"
        lines = [
            f"an epoch of {counted(self.batches, 'batch')}, {counted(self.samples, 'sample')}",
            f"  requests   {about}{self.requests:,}, {_bytes(size)} each",
            f"  read       {about}{_bytes(self.read_bytes)}, {self.amplification:.2f} times the "
            f"{_bytes(self.used_bytes)} that batches use{between * (self.amplification > 1.5)}",
            f"  memory     {_bytes(self.held_bytes)} of {whose}, so that nothing is read twice",
        ]
        if self.shards:
            lines.insert(
                1, f"  shards     {self.shards:,}, {_bytes(self.shard_bytes)} each (median)"
            )
        return "\n".join([*lines, *(f"  advice     {finding}" for finding in self.findings)])


def plan(feed: Feed, /, *, readahead: int | None = None) -> Plan:
    """Say what an epoch of `feed` will request from the store of its shards. Nothing is read.

    Up to half a million samples of the stream are drawn. A longer epoch is estimated from these,
    and the plan says so.

    Args:
        feed: what is planned.
        readahead: that of the loader.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"x": bytes(1000)} for _ in range(90)], mkdtemp())["data"]
    >>> print(plan(Feed(index, BatchSampler(SequentialSampler(90), batch_size=30))))
    an epoch of 3 batches, 90 samples
      shards     1, 93 kB each (median)
      requests   2, 46 kB each
      read       93 kB, 1.03 times the 90 kB that batches use
      memory     93 kB of page cache, so that nothing is read twice
    """
    index, sampler, fields = index_of(feed, "plan"), feed.sampler, stored_fields(feed)
    limit = LIMIT if readahead is None else validate.integer("readahead", readahead, minimum=0)
    steps = min(len(sampler), max(1, _MOST // max(1, sampler.batch_size)))
    schedule = Schedule(sampler)
    each = record_bytes(index, fields)
    samples, most_open = _opened(schedule, steps, each)
    share = len(sampler) / max(1, steps)
    requests, read = _counted(ReadPlan(index, fields, schedule, 0, limit=limit or LIMIT), steps)
    stored = max(int(each * len(index)), int(index.shards["bytes"].sum()))
    record = stored / max(1, len(index))
    # A block is read with what lies between its fields, if that is short.
    whole = record / each if each and record - each <= gap_of(index) else 1.0
    held = min(stored, read, int(whole * most_open) + limit)
    if not index.remote and not large(index):  # pages stay in memory once they were read
        read = min(read, stored)
    facts = Plan(
        batches=len(sampler),
        samples=int(share * samples),
        requests=requests,
        read_bytes=read,
        used_bytes=int(share * each * samples / sampler.traits.uses),
        held_bytes=held,
        exact=steps == len(sampler),
        shards=0 if index.container == "files" else len(index.shards),
        shard_bytes=int(np.median(index.shards["bytes"])),
        remote=index.remote,
    )
    return replace(facts, findings=tuple(_findings(feed, facts)))


def _opened(schedule: Schedule, steps: int, each: float) -> tuple[int, float]:
    """Return how many samples the first steps have, and the most bytes that are open at once."""
    sampler, drawn = schedule.sampler, schedule.batches(0, 0, steps)
    samples = sum(int(np.count_nonzero(ids >= 0)) for ids in drawn)
    if not reads_spans(sampler):
        return samples, each * max(map(len, drawn), default=0)
    spans = Spans(schedule, 0)
    opened = spans.opened_before(steps)
    last: dict[int, deque[int]] = defaultdict(deque)
    for span, last_step in spans.closed_before(steps):
        last[span].append(last_step)
    for one in opened:
        last[one.first].append(steps)  # of spans that are still open
    closed = np.array([last[one.first].popleft() for one in opened], np.int64)
    first, stop, step = np.array(opened, np.int64).reshape(-1, 3).T
    return samples, most_open(step, closed + 1, each * (stop - first))


def _counted(reads: ReadPlan, steps: int) -> tuple[int, int]:
    """Return how many ranges the steps of an epoch fetch, and their bytes.

    The steps still to come are estimated from the second half of the steps looked at.
    """
    total = len(reads.schedule.sampler)
    counts, middle, before = np.zeros(2), 0, np.zeros(2)
    for step in range(steps if reads.fields else 0):
        for event in reads.until(step):
            if isinstance(event, Fetch):
                ranges = event.ranges
                counts += len(ranges), (ranges["stop"] - ranges["start"]).sum()
        if 2 * step < steps < total:
            middle, before = reads.next, counts.copy()
    share = (total - middle) / max(1, min(reads.next, total) - middle)
    requests, read = before + share * (counts - before)
    return round(requests), round(read)


def _findings(feed: Feed, facts: Plan) -> list[str]:
    """Say what to change if the store can never be fast."""
    index, sampler = index_of(feed, "plan"), feed.sampler
    remote, memory = index.remote, system.memory()
    size, total = facts.read_bytes / max(1, facts.requests), int(index.shards["bytes"].sum())
    small = _SMALL_REMOTE if remote else _SMALL
    fewer = max(1, math.ceil(total / SHARD_BYTES))
    advice = []
    if facts.shard_bytes < small and facts.shards >= _MANY * fewer:
        container = " --container tar" if index.container == "tar" else ""
        advice.append(
            f"no request is longer than a shard, and half of all shards are of "
            f"{_bytes(facts.shard_bytes)} or less: repack {facts.shards:,} shards to {fewer:,}, "
            f"twinfeed pack {shlex.quote(index.where)} FOLDER{container}"
        )
    elif facts.requests > 1 and size < small and (remote or large(index)):
        asked = min(facts.shard_bytes, int(block_of(index, len(index)) * record_bytes(index)))
        instead = f"take shuffled(index, seed=…), which asks for about {_bytes(asked)} at a time"
        if sampler.traits.reads_blocks:
            instead = "take blocks of about 4 MB, and shards of many blocks"
        if total >= _LITTLE or not (sampler.traits.reads_blocks or asked < 2 * size):
            advice.append(
                f"requests of {_bytes(size)} at random places take longer to begin than to "
                f"transfer, however many are under way: {instead}"
            )
    if sampler.world_size > 1 and facts.amplification > 1.5:
        advice.append(
            f"each of {sampler.world_size} ranks reads every block: take sections= that "
            f"{sampler.world_size} divides"
        )
    if 2 * facts.held_bytes > memory:
        advice.append(
            f"an epoch needs {_bytes(facts.held_bytes)} of memory, and this process may use "
            f"{_bytes(memory)}: take a smaller window"
        )
    return advice


def _bytes(number: float) -> str:
    """Write a number of bytes for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f} {unit}"
    return f"{number:.0f} bytes"
