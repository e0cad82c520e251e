"""What an epoch of a feed will request from its store, known before anything is read."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict, deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.ahead.chunks import chunk_bytes
from twinfeed.loaders.ahead.fetcher import Requester
from twinfeed.loaders.ahead.planner import LIMIT, Planner
from twinfeed.loaders.ahead.ranges import EXTENT, Extents, gap_of
from twinfeed.loaders.ahead.schedule import Schedule
from twinfeed.loaders.ahead.spans import Spans, most_open
from twinfeed.loaders.ahead.uses import Kept, every
from twinfeed.loaders.feed.shuffling import block_of
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.sizes import large, record_bytes
from twinfeed.loaders.making.batcher import stored_fields
from twinfeed.loaders.making.feed import Feed, index_of
from twinfeed.loaders.packing import SHARD_BYTES
from twinfeed.loaders.remote.cache import DiskCache
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Int64s
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
        read_bytes: the bytes of these ranges. A disk cache of remote shards reads whole chunks, and
            requests and bytes are then of a first epoch.
        used_bytes: the bytes of the fields that batches take.
        held_bytes: the memory needed so that nothing is read twice: for the open blocks, and for
            what is read ahead. It is page cache, or with `remote` the process's own.
        cache_bytes: the size of a disk cache of remote shards.
        cache_hits: the fraction of the bytes of an epoch without a cache that the cache holds in a
            second epoch.
        exact: whether whole epochs were drawn. Otherwise requests and bytes are estimated from a
            part, and `cache_hits` is a lower bound.
        advice: what to change if the store can never be fast.
        shards: how many shards there are.
        shard_bytes: the median of their sizes. 0 for loose files.
        verdict: what is good, if there is no advice.
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
    cache_bytes: int = 0
    cache_hits: float = 0.0
    exact: bool = True
    advice: tuple[str, ...] = ()
    shards: int = 0
    shard_bytes: int = 0
    verdict: str = ""
    remote: bool = False

    @property
    def amplification(self) -> float:
        """Bytes read for each byte used."""
        return self.read_bytes / max(1, self.used_bytes)

    def __str__(self) -> str:
        """Return the plan as lines of text."""
        about, least = ("", "") if self.exact else ("about ", "at least ")
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
        if self.cache_bytes:
            lines.append(
                f"  cache      {_bytes(self.cache_bytes)} would hold {least}{self.cache_hits:.0%} "
                f"of a second epoch"
            )
        lines += [f"  verdict    {self.verdict}"] * (self.verdict != "")
        return "\n".join([*lines, *(f"  advice     {one}" for one in self.advice)])


def plan(feed: Feed, /, *, cache_bytes: int = 0, readahead: int | None = None) -> Plan:
    """Say what an epoch of `feed` will request from the store of its shards. Nothing is read.

    Up to half a million samples of the stream are drawn. A longer epoch is estimated from these,
    and the plan says so.

    Args:
        feed: what is planned.
        cache_bytes: the size of a `DiskCache` of remote shards. Default: the index's own cache, if
            it has a cache. The plan says how much of a second epoch the cache holds.
        readahead: that of the loader.

    Raises:
        ValueError: `cache_bytes` for local shards.

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
      verdict    good: all the data fit in memory, so shards of any size and any order will do
    """
    index = index_of(feed, "plan")
    cache_bytes = validate.integer("cache_bytes", cache_bytes, minimum=0)
    if cache_bytes and not index.remote:
        raise ValueError(
            "cache_bytes is the size of a disk cache of shards at a URL, and these shards are "
            "local: open the index with root=, their URL"
        )
    sampler = feed.sampler
    steps = min(len(sampler), max(1, _MOST // max(1, sampler.batch_size)))
    exact = steps == len(sampler)
    fields = stored_fields(feed)
    each = record_bytes(index, fields)
    schedule = Schedule(sampler)
    samples, most_open = _opened(schedule, steps, each)
    share = 1.0 if exact else len(sampler) / max(1, steps)
    if index.remote and index.cache is not None:
        cache_bytes = cache_bytes or index.cache.bytes
    limit = LIMIT if readahead is None else validate.integer("readahead", readahead, minimum=0)
    _, requests, read = _asked(feed, schedule, fields, 0, steps, limit)
    used = int(share * each * samples / sampler.traits.uses)
    stored = max(int(each * len(index)), int(index.shards["bytes"].sum()))
    record = stored / max(1, len(index))
    # A block is read with what lies between its fields, if that is short.
    whole = record / each if each and record - each <= gap_of(index) else 1.0
    held = min(stored, read, int(whole * most_open) + limit)
    if not index.remote and not large(index):  # pages stay in memory once they were read
        read = min(read, stored)
    hits = 0.0
    if cache_bytes:
        size = chunk_bytes(record, DiskCache("", bytes=cache_bytes))
        missed, runs, later = _missed(feed, schedule, fields, steps, size, cache_bytes)
        hits = max(0.0, 1 - share * later / max(1, read))
        read, requests = int(share * missed), int(share * runs)
    facts = Plan(
        batches=len(sampler),
        samples=int(share * samples),
        requests=requests,
        read_bytes=read,
        used_bytes=used,
        held_bytes=held,
        cache_bytes=cache_bytes,
        cache_hits=hits,
        exact=exact,
        shards=0 if index.container == "files" else len(index.shards),
        shard_bytes=int(np.median(index.shards["bytes"])),
        remote=index.remote,
    )
    advice = tuple(_advice(feed, facts))
    return replace(facts, advice=advice, verdict="" if advice else _verdict(feed, facts))


def _missed(
    feed: Feed, schedule: Schedule, fields: list[str], steps: int, size: int, cache_bytes: int
) -> tuple[float, int, float]:
    """Return how many bytes a disk cache brings in an epoch, in chunks of `size` bytes at most, by
    how many requests, and how many bytes it brings in the epoch after.
    """
    index, mean = index_of(feed, "plan"), float(size)
    if index.container != "files":  # the last chunk of a shard has fewer bytes
        lengths = index.shards["bytes"]
        mean = float(lengths.sum() / max(1, (-(-lengths // size)).sum()))

    def asked(epoch: int) -> Int64s:
        # Batch by batch: several batches together would have more neighbours than each batch has.
        return _chunks(_asked(feed, schedule, fields, epoch, steps, 1)[0], size)

    chunks = asked(0)
    later = chunks if schedule.sampler.evaluation else asked(1)
    missed = ~_hits(np.concatenate([chunks, later]), int(cache_bytes / mean))
    now, then = missed[: len(chunks)], missed[len(chunks) :]
    return mean * now.sum(), _runs(chunks, now), mean * then.sum()


def _opened(schedule: Schedule, steps: int, each: float) -> tuple[int, float]:
    """Return how many samples the first steps have, and the most bytes that are open at once."""
    sampler, drawn = schedule.sampler, schedule.batches(0, 0, steps)
    samples = sum(int(np.count_nonzero(ids >= 0)) for ids in drawn)
    if not sampler.traits.reads_blocks and sampler.traits.max_cached is None:
        return samples, each * max(map(len, drawn), default=0)
    spans = Spans(schedule, 0)
    entered = spans.entered(steps)
    last: dict[int, deque[int]] = defaultdict(deque)
    for span, step in spans.left(steps):
        last[span].append(step)
    for one in entered:
        last[one.first].append(steps)  # of spans that are not left yet
    closed = np.array([last[one.first].popleft() for one in entered], np.int64)
    first, stop, opened = np.array(entered, np.int64).reshape(-1, 3).T
    return samples, most_open(opened, closed + 1, each * (stop - first))


def _asked(
    feed: Feed, schedule: Schedule, fields: list[str], epoch: int, steps: int, limit: int
) -> tuple[Extents, int, int]:
    """Return the ranges that an epoch requests, how many there are, and their bytes."""
    index, total = index_of(feed, "plan"), len(feed.sampler)
    asking = _Asking(index)
    if not fields:
        return np.zeros(0, EXTENT), 0, 0
    planner = Planner(asking, fields, schedule, epoch, 0, limit=limit or LIMIT)
    first = epoch * total
    middle, part = first, 0
    for step in range(steps):
        planner.reached(step)
        if 2 * step < steps < total:
            middle, part = planner.next, len(asking.asked)
    extents = [np.zeros(0, EXTENT), *asking.asked]
    before, rest = np.concatenate(extents[: part + 1]), np.concatenate(extents)
    # The steps still to come are estimated from the second half of the steps looked at.
    share = (first + total - middle) / max(1, min(planner.next, first + total) - middle)
    requests = len(before) + share * (len(rest) - len(before))
    read = _length(before) + share * (_length(rest) - _length(before))
    return rest, round(requests), round(read)


class _Asking(Requester):
    """Keep the ranges that a planner requests."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.asked: list[Extents] = []

    def ahead(self, extents: Extents, /) -> None:
        """Keep the ranges."""
        self.asked.append(extents)


def _length(extents: Extents) -> int:
    return int((extents["stop"] - extents["start"]).sum())


def _chunks(asked: Extents, size: int) -> Int64s:
    """Return the chunks of `size` bytes in which ranges lie, in order."""
    first, stop = asked["start"] // size, -(-asked["stop"] // size)
    # No two files share a number, and the last of a file has no neighbour in the next.
    shift = asked["file"].astype(np.int64) * (stop.max(initial=1) + 1)
    return every(shift + first, shift + stop - 1)


def _runs(chunks: Int64s, missed: npt.NDArray[np.bool_]) -> int:
    """Return how many requests fetch the missing chunks: neighbours come together."""
    follows = missed[1:] & missed[:-1] & (np.diff(chunks) == 1)
    return int(missed.sum() - follows.sum())


def _hits(units: Int64s, places: int) -> npt.NDArray[np.bool_]:
    """Return which units are in a cache of so many units when they are used."""
    upcoming = _next_uses(units).tolist()
    kept = Kept()
    cached = np.zeros(len(units), bool)
    for place, (unit, coming) in enumerate(zip(units.tolist(), upcoming, strict=True)):
        cached[place] = kept.next.pop(unit, None) is not None
        if coming < len(units):
            kept.hold(unit, coming)
        if len(kept.next) > places:
            kept.furthest(-1)
    return cached


def _next_uses(units: Int64s) -> Int64s:
    """Return the next place of each unit; `len(units)` where the unit does not come again."""
    order = np.argsort(units, kind="stable")
    upcoming = np.full(len(units), len(units))
    again = units[order][1:] == units[order][:-1]
    upcoming[order[:-1][again]] = order[1:][again]
    return upcoming


def _advice(feed: Feed, facts: Plan) -> list[str]:
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


def _verdict(feed: Feed, facts: Plan) -> str:
    """Say what is good if there is nothing to change."""
    index, total = index_of(feed, "plan"), facts.used_bytes
    size = facts.read_bytes / max(1, facts.requests)
    if not index.remote and not large(index):
        shards = "" if index.container == "files" else "shards of any size and "
        return f"good: all the data fit in memory, so {shards}any order will do"
    if facts.requests <= 1 or size >= (_SMALL_REMOTE if index.remote else _SMALL):
        return f"good: requests of {_bytes(size)} are long enough to be fast"
    if facts.cache_hits > 0.99:
        return "good from the second epoch on: the cache holds all the data"
    later = "; a disk cache makes later epochs fast" if index.remote else ""
    return (
        f"requests of {_bytes(size)} are small, but an epoch uses {_bytes(total)} alone, so shards "
        f"of any size will do{later}"
    )


def _bytes(number: float) -> str:
    """Write a number of bytes for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f} {unit}"
    return f"{number:.0f} bytes"
