"""`plan`: predict what an epoch of a feed will request from its store, without reading anything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinfeed.loaders.batches.feed import Feed, index_of
from twinfeed.loaders.feed.arguments import stored_fields
from twinfeed.loaders.index.sizes import exceeds_memory, record_bytes
from twinfeed.loaders.reading.prefetch.read_plan import LIMIT, Fetch, ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.samplers import validate
from twinfeed.samplers.validate import counted

# The most samples that are drawn. A longer epoch is estimated from their second half.
_MAX_SAMPLES = 1 << 19


@dataclass(frozen=True)
class Plan:
    """The requests and bytes that an epoch of a feed needs. `plan` returns a `Plan`.

    Attributes:
        batches: batches of an epoch.
        samples: ids of an epoch, without padding.
        requests: ranges requested in an epoch.
        read_bytes: the bytes of these ranges. A disk cache of remote shards reads whole chunks.
        used_bytes: the bytes of the fields that batches take.
        exact: whether the whole epoch was drawn. Otherwise requests and bytes are estimated from a
            part.
        shards: how many shards there are.
        shard_bytes: the median of their sizes. 0 for loose files.

    >>> Plan(1, 10, 2, 500, 400).amplification
    1.25
    """

    batches: int
    samples: int
    requests: int
    read_bytes: int
    used_bytes: int
    exact: bool = True
    shards: int = 0
    shard_bytes: int = 0

    @property
    def amplification(self) -> float:
        """Bytes read for each byte used."""
        return self.read_bytes / max(1, self.used_bytes)

    def __str__(self) -> str:
        """Return the plan as lines of text."""
        about, mean = "" if self.exact else "about ", self.read_bytes / max(1, self.requests)
        read, used = _format_bytes(self.read_bytes), _format_bytes(self.used_bytes)
        times = f"{self.amplification:.2f}"
        shards = f"  shards     {self.shards:,}, {_format_bytes(self.shard_bytes)} each (median)\n"
        return (
            f"an epoch of {counted(self.batches, 'batch')}, {counted(self.samples, 'sample')}\n"
            f"{shards if self.shards else ''}"
            f"  requests   {about}{self.requests:,}, {_format_bytes(mean)} each\n"
            f"  read       {about}{read}, {times} times the {used} that batches use"
        )


def plan(feed: Feed, /, *, readahead: int | None = None) -> Plan:
    """Say what an epoch of `feed` will request from the store of its shards. Nothing is read.

    Up to half a million samples of the stream are drawn. A longer epoch is estimated from these,
    and the plan says so.

    Args:
        feed: what is planned.
        readahead: the same as for the loader.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"x": bytes(1000)} for _ in range(90)], mkdtemp())["data"]
    >>> print(plan(Feed(index, BatchSampler(SequentialSampler(90), batch_size=30))))
    an epoch of 3 batches, 90 samples
      shards     1, 93 kB each (median)
      requests   2, 46 kB each
      read       93 kB, 1.03 times the 90 kB that batches use
    """
    index, sampler = index_of(feed, "plan"), feed.sampler
    fields = stored_fields(index, feed.fields)
    limit = LIMIT if readahead is None else validate.integer("readahead", readahead, minimum=0)
    steps = min(len(sampler), max(1, _MAX_SAMPLES // max(1, sampler.batch_size)))
    schedule = Schedule(sampler)
    used_per_record = record_bytes(index, fields)
    samples = sum(int(np.count_nonzero(ids >= 0)) for ids in schedule.batches(0, 0, steps))
    share = len(sampler) / max(1, steps)
    reads = ReadPlan(index, fields, schedule, 0, limit=limit or LIMIT)
    requests, read = _count_requests(reads, steps)
    if not index.remote and not exceeds_memory(index):  # pages stay in memory once they were read
        read = min(read, max(int(used_per_record * len(index)), int(index.shards["bytes"].sum())))
    return Plan(
        batches=len(sampler),
        samples=int(share * samples),
        requests=requests,
        read_bytes=read,
        used_bytes=int(share * used_per_record * samples / sampler.traits.uses),
        exact=steps == len(sampler),
        shards=0 if index.container == "files" else len(index.shards),
        shard_bytes=int(np.median(index.shards["bytes"])),
    )


def _count_requests(reads: ReadPlan, steps: int) -> tuple[int, int]:
    """Return the number of byte ranges that an epoch fetches, and their bytes.

    Of 1000 steps with 80 ranges in the first 50, and 60 in the next 50: 80 + 60 * 950 / 50 = 1220.
    """
    epoch_steps = len(reads.schedule.sampler)
    # Each array of counts has two items: the number of ranges, and their bytes. In the example,
    # `counts[0]` becomes 140, `counts_at_middle[0]` 80, and `middle` 50. If the whole epoch is
    # counted, the last two stay 0, so that nothing is estimated.
    counts, counts_at_middle, middle = np.zeros(2), np.zeros(2), 0
    for step in range(steps if reads.fields else 0):
        for event in reads.next_events(step):
            if isinstance(event, Fetch):
                ranges = event.ranges
                counts += len(ranges), (ranges["stop"] - ranges["start"]).sum()
        if 2 * step < steps < epoch_steps:  # in steps 0 to 49; the last values stay
            # `reads` may fetch several steps at once. The ranges of all steps before
            # `reads.next_step` are counted by now.
            counts_at_middle, middle = counts.copy(), reads.next_step
    counted_steps = min(reads.next_step, epoch_steps)  # 100
    scale = (epoch_steps - middle) / max(1, counted_steps - middle)  # 950 / 50
    requests, read_bytes = counts_at_middle + scale * (counts - counts_at_middle)
    return round(requests), round(read_bytes)


def _format_bytes(number: float) -> str:
    """Return a number of bytes as text: "1.5 MB", "20 kB", "7 bytes"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.{0 if number >= 10 * size else 1}f} {unit}"
    return f"{number:.0f} bytes"
