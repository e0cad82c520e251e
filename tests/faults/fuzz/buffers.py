"""The target of the fuzzer that is code: functions and sources that return a buffer again."""

from __future__ import annotations

import random
from typing import Any

from faults.fuzz.mutations import Corpus
from support.reused_buffers import MOST, ROLES, check_rows, feed_of

from twinfeed.loaders import NumpyLoader
from twinfeed.samplers import BatchSampler, RandomSampler, ReuseSampler, SequentialSampler


def buffer(_: Corpus, draw: random.Random) -> None:
    """Keep all batches of a feed: the right rows, or an error, which new arrays never are."""
    length, size = draw.randint(1, MOST), draw.randint(1, MOST)
    order: Any = draw.choice(
        (RandomSampler(length, seed=draw.randrange(99)), SequentialSampler(length))
    )
    if size <= length and draw.random() < 0.3:
        order = ReuseSampler(length, reuse=2, live=size, seed=draw.randrange(99))
    sampler = BatchSampler(order, batch_size=size)
    role, count = draw.choice(ROLES), draw.randrange(4)
    feed = feed_of(role, sampler, count, draw.choice(("array", "list")))
    try:
        with NumpyLoader(feed, threads=draw.choice((0, 2)), prefetch=draw.choice((0, 2))) as loader:
            check_rows(role, list(loader), feed)
    except ValueError as error:
        if not count or "the same buffer again" not in str(error):
            raise AssertionError from error
