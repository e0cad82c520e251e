"""What `twinfeed.testing` says of samplers and sources that break a law."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.own_source import Words

from twinfeed.loaders import Feed
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    SamplerTraits,
    SequentialSampler,
    ShardShuffleSampler,
)
from twinfeed.testing import check_feed, check_sampler, check_source


class Fair(RandomSampler):
    """A sampler that keeps every law; the classes below break one each."""


class Counts(Fair):
    calls = 0

    def draw(self, epoch: int, positions: Any) -> Any:
        self.calls += 1
        return super().draw(epoch + self.calls, positions)


class Global(Fair):
    def draw(self, epoch: int, positions: Any) -> Any:
        np.random.seed(epoch)
        return np.random.permutation(len(self))[positions]


class ByBatch(Fair):
    def draw(self, epoch: int, positions: Any) -> Any:
        return np.sort(super().draw(epoch, positions))


class Unpickled(Fair):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "parameters": {}}


class Repeats(Fair):
    def draw(self, epoch: int, positions: Any) -> Any:
        return super().draw(epoch, positions // 2)


class Keeps(ReuseSampler):
    def __init__(self) -> None:
        super().__init__(12, reuse=3, live=12, seed=0)
        self.traits = replace(self.traits, max_cached=4)


class Part(Fair):
    traits = SamplerTraits(record_ids=np.arange(3))


class Blocks(Fair):
    traits = SamplerTraits(reads_blocks=True)


class Spans(Fair):
    traits = SamplerTraits(reads_blocks=True)

    def spans(self, records: Any, epoch: Any = None) -> Any:
        return records, records + 2


class Records(Fair):
    traits = SamplerTraits(num_ids=12)

    def records(self, ids: Any) -> Any:
        return ids + 1


class Undeclared(Fair):
    def records(self, ids: Any) -> Any:
        return 11 - ids


class Unsized(Fair):
    num_records = property(lambda self: 0, lambda self, number: None)


class Narrow(Fair):
    def records(self, ids: Any) -> Any:
        return ids.astype(np.int32)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Counts, "differs when it is drawn again, alone"),
        (Global, "changes the global random state of numpy"),
        (ByBatch, "differs when it is drawn again, alone"),
        (Unpickled, "a pickled copy has another fingerprint"),
        (Repeats, "a record repeats, and repeats is False"),
        (Part, "a record is drawn that record_ids lacks"),
        (Blocks, "reads_blocks is True, and spans says the opposite"),
        (Spans, "more records than there are"),
        (Records, r"records gave \[12\], num_records=12"),
        (Undeclared, "ids are no record ids, and num_ids is not declared"),
        (Unsized, "num_records is 0"),
        (Narrow, r"records must give int64\[4\], got int32"),
    ],
)
def test_check_sampler_names_the_law_that_is_broken(broken: type, words: str) -> None:
    check_sampler(Fair(12, seed=0))
    with pytest.raises(AssertionError, match=words):
        check_sampler(broken(12, seed=0))


def test_check_sampler_names_undeclared_traits() -> None:
    check_sampler(ReuseSampler(12, reuse=3, live=4, seed=0))
    with pytest.raises(AssertionError, match="more than max_cached=4 records"):
        check_sampler(Keeps())


def test_blocks_of_one_record_are_no_blocks() -> None:
    for lengths in ([1], [1, 0, 1]):
        check_sampler(ShardShuffleSampler(lengths, block=5, window=2, seed=0))


def test_check_sampler_accepts_a_batch_sampler() -> None:
    check_sampler(BatchSampler(Fair(12, seed=0), batch_size=5, last_batch="pad"))
    with pytest.raises(AssertionError, match="a record repeats"):
        check_sampler(BatchSampler(Repeats(12, seed=0), batch_size=2))


class Moody(Words):
    """Give a wrong record if `odd` says so."""

    def odd(self, ids: Any) -> bool:
        return False

    def read(self, ids: Any, fields: Any) -> Any:
        found = super().read(ids, fields)
        if self.odd(ids):
            found = {name: [b"odd", *values[1:]] for name, values in found.items()}
        return found


class Ordered(Moody):
    def odd(self, ids: Any) -> bool:
        return bool(len(ids) > 1 and ids[0] > ids[-1])


class Single(Moody):
    def odd(self, ids: Any) -> bool:
        return len(ids) == 1


class Twice(Moody):
    def odd(self, ids: Any) -> bool:
        return len(np.unique(ids)) < len(ids)


class Copied(Moody):
    copied = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "copied": True})

    def odd(self, ids: Any) -> bool:
        return self.copied


class Chatty(Words):
    def describe(self, record: int) -> str:
        return "one\ntwo"


class Stale(Words):
    fresh = True
    buffer = np.zeros(16)

    def read(self, ids: Any, fields: Any) -> Any:
        return dict.fromkeys(fields, self.buffer[: len(ids)])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Stale, "fresh is True, and read gives the memory of 'word' twice"),
        (Ordered, "other values in another order"),
        (Single, "other values alone"),
        (Twice, "other values twice in one batch"),
        (Copied, "other values in a pickled copy"),
        (Chatty, r"describe\(0\) must be one line"),
    ],
)
def test_check_source_names_the_law_that_is_broken(broken: type, words: str) -> None:
    check_source(Words())
    with pytest.raises(AssertionError, match=words):
        check_source(broken())


def test_check_source_names_a_source_unsafe_for_threads() -> None:
    """A reader that puts what it is asked for into itself gives another thread's records."""
    barrier = threading.Barrier(2)

    class Shared(Words):
        def __reduce__(self) -> Any:
            return Words, ()

        def read(self, ids: Any, fields: Any) -> Any:
            self.ids = ids
            if threading.current_thread() is not threading.main_thread():
                try:
                    barrier.wait(0.05)
                except threading.BrokenBarrierError:
                    barrier.reset()
            return super().read(np.resize(self.ids, len(ids)), fields)

    with pytest.raises(AssertionError, match="other values in several threads"):
        check_source(Shared())


STREAM = BatchSampler(RandomSampler(12, seed=0), batch_size=5)
LENGTHS = {"x": [np.arange(n % 3) for n in range(12)], "y": np.arange(12)}


def test_check_feed_passes_feeds_of_every_kind() -> None:
    def of_batch(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"x": batch["x"], "seed_": np.full(len(batch["y"]), seed % 7)}

    padded = ExactOnceBatchSampler(12, batch_size=5, last_batch="pad")
    reused = BatchSampler(ReuseSampler(12, reuse=2, live=4, seed=0), batch_size=4)
    feeds = [
        Feed(LENGTHS, STREAM, collate={"x": "ragged"}, batch_transform=of_batch),
        Feed(LENGTHS, padded, collate={"x": "pad"}),
        Feed({"x": [["a", "b"]] * 12}, STREAM, collate="ragged"),
        Feed(LENGTHS, reused, decode=dict, transform=lambda s: {"y": s["y"] + s["seed32"] % 3}),
    ]
    for feed in feeds:
        check_feed(feed)


def test_check_feed_finds_what_the_first_sample_does_not_show() -> None:
    calls = iter(range(10**6))

    def late(sample: dict[str, Any]) -> dict[str, Any]:
        return {"y": sample["y"] + (next(calls) if next(calls) > 25 else 0)}

    def of_batch(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"y": batch["y"] + (next(calls) if batch["y"][0] > 5 else 0)}

    for functions, word in (
        ({"transform": late}, r"record \d+ of a dict: field 'y' differs alone and in a batch"),
        ({"batch_transform": of_batch}, "batch_transform returned another 'y' for step"),
    ):
        order = BatchSampler(SequentialSampler(12), batch_size=6)
        feed: Any = Feed({"y": np.arange(12)}, order, **functions)  # type: ignore[arg-type]
        with pytest.raises((AssertionError, ValueError), match=word):
            check_feed(feed)
    with pytest.raises(TypeError, match="feed must be Feed"):
        check_feed(STREAM)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        check_feed(feed, samples=0)
