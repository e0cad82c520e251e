"""Which records made a step, which steps had a record, where two feeds differ; what is refused."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused
from support.shards import write_tar

from twinfeed import (
    BatchSampler,
    BatchStream,
    DatasetSource,
    ExactOnceBatchSampler,
    Feed,
    Index,
    MixtureSampler,
    NumpyLoader,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    StateMismatchError,
    SubsetSampler,
    WeightedSampler,
    build_index,
    diff,
    pack,
    replaced,
    when,
    who,
)

SAMPLER = BatchSampler(RandomSampler(10, seed=0), batch_size=4)  # three steps an epoch
SOURCE = DatasetSource({"x": np.arange(10)}, digest="0 to 9")
OTHER = DatasetSource({"x": np.arange(10)}, digest="other")
FEED = Feed(SOURCE, SAMPLER)
LABELS = np.repeat([0, 1, 2, 3, 4], [3, 3, 3, 4, 4])
HEAD = "steps count as loader.global_step in the loop, from 1"


def pk(**options: object) -> PKBatchSampler:
    every = {"p": 2, "k": 1, "seed": 0, "batches_per_epoch": 5, **options}
    return PKBatchSampler(LABELS, **every)  # type: ignore[arg-type]


def feed_of(sampler: BatchStream) -> Feed:
    records = np.arange(sampler.num_records)
    return Feed(DatasetSource({"x": records}, digest=f"{len(records)}"), sampler)


def packed(folder: Path, *, change: int | None = None, **options: Any) -> Index:
    words = [b"changed" if n == change else b"%d" % n for n in range(10)]
    records = [{"__key__": f"k{n}", "word": word, "label": n % 2} for n, word in enumerate(words)]
    return pack(records, folder, **options)["data"]


def test_answers_print_their_fingerprint_and_how_steps_count(tmp_path: Path) -> None:
    feed = Feed(packed(tmp_path, container="tar"), FEED.sampler)
    answers = who(feed, 5), when(feed, 3, until=5), diff(feed, feed)
    (fingerprint,) = {answer.fingerprint[:16] for answer in answers}
    for answer in answers:
        assert str(answer).splitlines()[0] == f"fingerprint {answer.fingerprint}; {HEAD}"
        assert fingerprint in repr(answer)
    lines = str(who(feed, 5)).splitlines()
    assert lines[1] == "step 5 (feed[1, 1])"
    record = int(SAMPLER.batch(1, 1)[0])
    where = f"data-00000-of-00001.tar, number {record}, key 'k{record}'"
    assert lines[2] == f"  id {record}: record {record} ({where}), label {record % 2}"
    assert len(lines) == 2 + 4
    other = Feed(feed.index, BatchSampler(RandomSampler(10, seed=1), batch_size=4))
    assert who(other, 5).fingerprint != fingerprint


def test_padding_is_no_line_and_terminal_obeys_no_key(tmp_path: Path) -> None:
    order = SequentialSampler(5)
    index = pack([{"__key__": f"\x1b[2J{n}", "x": b""} for n in range(5)], tmp_path)["data"]
    feed = Feed(index, BatchSampler(order, batch_size=4, last_batch="pad"))
    request = who(feed, 2).request
    assert request.records.tolist() == [4]
    assert request.mask is not None
    assert request.mask.tolist() == [True, False, False, False]
    *_, title, line = str(who(feed, 2)).split("\n")
    assert title == "step 2 (feed[0, 1])"
    assert "\x1b" not in line
    assert when(feed, -0, until=2).steps == [1]


def test_who_of_ranks_is_the_global_batch_in_parts() -> None:
    whole = who(FEED, 5).request
    parts = [who(FEED, 5, rank=rank, world_size=3) for rank in range(3)]
    assert whole.ids.tolist() == SAMPLER.batch(1, 1).tolist()
    assert np.concatenate([part.request.ids for part in parts]).tolist() == whole.ids.tolist()
    assert str(parts[2]).splitlines()[1] == "step 5 (feed[1, 1]), rank 2 of 3"


def test_state_must_be_of_the_feed_up_to_its_position() -> None:
    """A later change of the schedule is none of its business; a later step is said to be later."""
    before, after = feed_of(pk()), feed_of(pk(k={0: 1, 7: 2}))
    state = json.loads(json.dumps(NumpyLoader(before).state_at(1, 2)))  # before step 8 of the loop
    assert str(who(after, 7, state=state)).splitlines()[1] == "step 7 (feed[1, 1])"
    later = "step 8 (feed[1, 2]), which is after the position of the state"
    assert str(who(after, 8, state=state)).splitlines()[1] == later
    with pytest.raises(StateMismatchError, match="k from step 7"):
        who(before, 7, state=NumpyLoader(after).state_at(1, 3))


def test_when_takes_numbers_of_any_source_and_keys_of_index(tmp_path: Path) -> None:
    index = packed(tmp_path)
    for source in ({"x": np.arange(10)}, SOURCE, index):
        feed = Feed(source, SAMPLER)
        for record in range(10):
            steps = [n + 1 for n in range(7) if record in SAMPLER.batch(*divmod(n, 3))]
            for until in (1, 3, 7):
                found = when(feed, np.int32(record), until=until)  # type: ignore[arg-type]
                assert found.steps == [step for step in steps if step <= until]
    assert when(feed, "k7", until=7).steps == when(feed, 7, until=7).steps
    described = index.describe(7)
    assert str(when(feed, "k7", until=7)).splitlines()[1].startswith(f"{described}: ")
    without_3 = BatchSampler(SubsetSampler(np.delete(np.arange(10), 3), of=10), batch_size=4)
    assert when(Feed(index, without_3), 3, until=50).steps == []


def test_key_of_several_records_means_all(tmp_path: Path) -> None:
    """Two shards may have the same key."""
    shards = [
        write_tar(tmp_path / f"{n}.tar", [("same", {"x": b"x"}), (n, {"x": b"y"})]) for n in "ab"
    ]
    index = build_index(shards, tmp_path / "index")
    found = when(Feed(index, BatchSampler(SequentialSampler(4), batch_size=1)), "same", until=4)
    assert found.steps == [1, 3]
    assert re.search("record 0 .*, record 2 .*: 2 steps", str(found))


def test_diff_of_containers_and_copies_is_none(tmp_path: Path) -> None:
    feeds = [
        Feed(packed(tmp_path / container, container=container), SAMPLER)
        for container in ("tfrecord", "tar")
    ]
    found = diff(*feeds)
    assert (found.ok, found.step, found.findings) == (True, None, [])
    assert str(found).endswith("\nthe same records in every step")


@pytest.mark.filterwarnings("ignore:the feeds share no digest")
def test_diff_of_evaluation_without_records_is_the_first_step() -> None:
    empty, some = (
        Feed({"x": np.arange(n)}, ExactOnceBatchSampler(n, batch_size=2)) for n in (0, 3)
    )
    assert (diff(empty, some).step, diff(some, empty).step) == (1, 1)


def test_diff_names_records_that_changed(tmp_path: Path) -> None:
    feeds = [Feed(packed(tmp_path / f"{n}", change=n), SAMPLER) for n in (3, 4)]
    found = diff(*feeds)
    assert (found.ok, found.step) == (False, 1)
    assert [finding.partition(" is ")[0] for finding in found.findings] == [
        "index: records.fields.word"
    ]


def test_diff_warns_if_records_cannot_be_compared() -> None:
    """Without a digest, nobody knows whether two sources have the same records."""
    feeds = [Feed({"x": np.arange(10) + n}, SAMPLER) for n in range(2)]
    with pytest.warns(UserWarning, match="share no digest of the records: only their number"):
        assert diff(*feeds).ok
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert diff(feeds[0], feeds[0].with_sampler(SAMPLER)).ok
    with pytest.warns(UserWarning, match="the source share no digest"):
        who(feeds[0], 1, state=NumpyLoader(feeds[1]).state_dict())


@pytest.mark.parametrize(
    ("sampler", "step", "finding"),
    [
        (BatchSampler(RandomSampler(10, seed=3), batch_size=4), 1, "seed: seed is 0 and 3"),
        (BatchSampler(RandomSampler(10, seed=0), batch_size=5), 1, "batch_size is 4 and 5"),
        (BatchSampler(RandomSampler(9, seed=0), batch_size=4), 1, "index: records.count is 10"),
        (ExactOnceBatchSampler(10, batch_size=4), 1, "sampler: sampler is 'BatchSampler' and"),
        (BatchSampler(SequentialSampler(10), batch_size=4), 1, "is 'RandomSampler' and 'Seq"),
    ],
)
def test_diff_finds_the_first_step_and_the_kind_of_reason(
    sampler: BatchStream, step: int, finding: str
) -> None:
    """Also of feeds whose epochs differ in length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = diff(FEED, Feed({"x": np.arange(sampler.num_records)}, sampler))
    assert found.step == step
    assert any(finding in each for each in found.findings)


def test_diff_draws_to_the_first_batch_that_differs() -> None:
    """The smaller last batch of one epoch; and never, if other samplers draw the same."""
    drop = BatchSampler(SequentialSampler(10), batch_size=4, last_batch="drop")
    keep = BatchSampler(SequentialSampler(10), batch_size=4)
    assert diff(Feed(SOURCE, drop), Feed(SOURCE, keep)).step == 3
    found = diff(Feed(SOURCE, keep), Feed(SOURCE, ExactOnceBatchSampler(10, batch_size=4)))
    assert (found.ok, found.step) == (False, None)
    assert "the same records in the steps up to 6, but\n  sampler: " in str(found)


@pytest.mark.parametrize("record", range(10))
def test_diff_finds_a_record_that_comes_late_after_a_change(record: int) -> None:
    """From the middle of an epoch, up to two epochs on."""
    others = [other for other in range(10) if other != record]
    after = replaced(SAMPLER, {4: {record: others[:5]}})
    differ = [n for n in range(4, 12) if record in SAMPLER.batch(*divmod(n, 3))]
    assert diff(FEED, Feed(SOURCE, after)).step == differ[0] + 1


@pytest.mark.parametrize(
    ("first", "second", "number"),
    [
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 2}}, None),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 2, 50: 3}}, 50),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 2, 7: 3}}, 7),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 4: 2}}, 3),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 3}}, 3),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 2, 3: 1}}, 0),
        ({"k": 1, "p": {0: 2, 8: 4}}, {"k": {0: 1, 6: 2}, "p": 2}, 6),
        # K of 4 leaves out all classes but two, from the first step on: that of both is the same.
        ({"k": {0: 2, 3: 3}, "small": "drop"}, {"k": {0: 2, 3: 4}, "small": "drop"}, 1),
    ],
)
def test_diff_finds_the_first_change_of_a_schedule(
    first: dict[str, object], second: dict[str, object], number: int | None
) -> None:
    """As the batches themselves say."""
    streams = pk(**first), pk(**second)
    found = diff(*map(feed_of, streams))
    drawn = [
        n
        for n in range(60)
        if streams[0].batch(*divmod(n, 5)).tolist() != streams[1].batch(*divmod(n, 5)).tolist()
    ]
    assert drawn[:1] == ([] if number is None else [number])
    assert found.step == (None if number is None else number + 1)
    assert number in (None, 0, 1) or any(each.startswith("schedule: k") for each in found.findings)


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (
            lambda weights: WeightedSampler(weights, seed=0, num_samples=30),
            {0: [1, 2, 3]},
            {0: [1, 2, 3], 7: [3, 2, 1]},
        ),
        (
            lambda weights: MixtureSampler(
                [RandomSampler(9, seed=n) for n in range(3)],
                weights=weights,
                num_samples=30,
                seed=0,
            ),
            {0: [2, 1, 0], 4: [1, 1, 0]},
            {0: [2, 1, 0], 4: [1, 1, 0], 7: [1, 1, 1]},
        ),
    ],
    ids=["weighted", "mixture"],
)
def test_diff_step_is_where_changed_weights_take_effect(make: Any, first: Any, second: Any) -> None:
    streams = [BatchSampler(make(weights), batch_size=4) for weights in (first, second)]
    drawn = [n for n in range(20) if not np.array_equal(*(s.batch(*divmod(n, 8)) for s in streams))]
    found = diff(*map(feed_of, streams))
    assert found.step == drawn[0] + 1 >= 8
    assert all(re.search("(weights|orders) from step 7", each) for each in found.findings)


NOBODY = Feed({"x": np.arange(0)}, ExactOnceBatchSampler(0, batch_size=4))


def _who(step: Any, feed: Any = FEED, **options: Any) -> Call:
    return lambda _: who(feed, step, **options)


def _when(record: Any, until: Any = 5, feed: Any = FEED) -> Call:
    return lambda _: when(feed, record, until=until)


REFUSED: Refused = [
    (_who(0), ValueError, "step must be at least 1, got 0"),
    (_who(-1), ValueError, "step must be at least 1, got -1"),
    (_who(-1, Feed(SOURCE, ExactOnceBatchSampler(10, batch_size=4))), ValueError, "at least 0"),
    (_who(True), TypeError, "step must be"),
    (_who(5.0), TypeError, "step must be"),
    (_who("5"), TypeError, "step must be"),
    (_who(None), TypeError, "step must be"),
    (_who(10**30), ValueError, "step must be below"),
    (_who(1 << 61), IndexError, "epoch must be in"),
    (_who(1, NOBODY), IndexError, "an epoch has 0 steps"),
    (_who(1, rank=-1), ValueError, "rank"),
    (_who(1, rank=1), ValueError, "rank"),
    (_who(1, rank=True, world_size=2), TypeError, "rank"),
    (_who(1, rank=0, world_size=0), ValueError, "world_size"),
    (_who(1, world_size=2), ValueError, "world_size= needs rank="),
    (_who(1, FEED.shard(0, 2)), ValueError, "give the feed of all ranks, without shard"),
    (_who(1, SAMPLER), TypeError, "feed must be Feed"),
    (_who(1, NumpyLoader(FEED)), TypeError, "feed must be Feed.*NumpyLoader"),
    (_who(1, "train.py:feed"), TypeError, "feed must be Feed"),
    (_who(1, None), TypeError, "feed must be Feed"),
    (_who(1, state=feed_of(pk()).sampler.state_at(0, 1)), StateMismatchError, "another stream"),
    (
        _who(1, state=NumpyLoader(Feed(OTHER, SAMPLER)).state_dict()),
        StateMismatchError,
        "saved with other records",
    ),
    (_who(1, state={"loader": {}}), StateMismatchError, "the state must be what"),
    (_who(1, state={}), StateMismatchError, "the state must be what"),
    (_who(1, state="state.json"), StateMismatchError, "what state_dict gave"),
    (_who(1, state=[]), StateMismatchError, "what state_dict gave"),
    (_when(10), IndexError, r"record must lie in \[0, 10\), got 10"),
    (_when(-1), IndexError, r"record must lie in \[0, 10\), got -1"),
    (_when(True), TypeError, "record must be"),
    (_when(3.0), TypeError, "record must be"),
    (_when([3]), TypeError, "record must be"),
    (_when(None), TypeError, "record must be"),
    (_when(10**30), IndexError, "record must lie"),
    (_when("k3"), TypeError, "'k3' needs an index"),
    (_when(0, 5, NOBODY), IndexError, "record must lie"),
    (_when(3, 0), ValueError, "until must be at least 1"),
    (_when(3, True), TypeError, "until must be"),
    (_when(3, None), TypeError, "until must be"),
    (_when(3, 5, SAMPLER), TypeError, "feed must be Feed"),
    (lambda _: diff(FEED, SAMPLER), TypeError, "feed must be Feed"),  # type: ignore[arg-type]
    (lambda _: diff("a", "b"), TypeError, "feed must be Feed"),  # type: ignore[arg-type]
    (lambda _: diff(FEED, FEED.shard(1, 2)), ValueError, "give the feed of all ranks"),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_bad_arguments_are_refused(
    call: Call, kind: type[Exception], word: str, tmp_path: Path
) -> None:
    check_refused(tmp_path, call, kind, word)


def test_unknown_key_is_refused_with_keys(tmp_path: Path) -> None:
    feed = Feed(packed(tmp_path), SAMPLER)
    for key in ("3", "", "k10"):
        with pytest.raises(KeyError, match=re.escape(f"{key!r}: give a key, such as 'k0', 'k1'")):
            when(feed, key, until=5)
