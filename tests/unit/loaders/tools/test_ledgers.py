"""What ledgers say: which records a step had, which steps had a record, where two runs differ."""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import Call, Refused, check_refused

from twinfeed import (
    BatchSampler,
    BatchStream,
    DatasetSource,
    ExactOnceBatchSampler,
    Feed,
    Index,
    Ledger,
    LoaderError,
    MixtureSampler,
    NumpyLoader,
    PKBatchSampler,
    RandomSampler,
    StateMismatchError,
    WeightedSampler,
    diff,
    open_index,
    pack,
    when,
    who,
)
from twinfeed.loaders.loop.ledger import POSITION

SAMPLER = BatchSampler(RandomSampler(10, seed=0), batch_size=4)  # three steps an epoch
LABELS = np.repeat([0, 1, 2, 3, 4], [3, 3, 3, 4, 4])


def pk(**options: object) -> PKBatchSampler:
    every = {"p": 2, "k": 1, "seed": 0, "batches_per_epoch": 5, **options}
    return PKBatchSampler(LABELS, **every)  # type: ignore[arg-type]


def write(path: Path, sampler: BatchStream, *ranges: tuple[int, int]) -> Path:
    """A ledger of ranges of steps, each the first step and the number of steps."""
    with Ledger(path, sampler) as ledger:
        for start, steps in ranges:
            ledger.delivered(start, steps)
    return path


def packed(folder: Path, *, change: int | None = None, **options: object) -> Index:
    records = [
        {"word": b"changed" if n == change else b"%d" % n, "label": n % 2} for n in range(10)
    ]
    return pack(records, folder, **options)["data"]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:the state and the source share no digest")
def test_who_returns_rank_slice_or_global_batch(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / "ledger.jsonl", SAMPLER.shard(rank, 2), (0, 5))
    for stream in (
        SAMPLER,
        SAMPLER.shard(1, 2),
        Feed(DatasetSource({"x": np.arange(10)}), SAMPLER),
    ):
        (whole,) = who(tmp_path / "ledger.jsonl", stream, 4)
        slices = [who(tmp_path / "ledger.jsonl", stream, 4, rank=rank)[0] for rank in range(2)]
        assert whole.ids.tolist() == SAMPLER.batch(1, 1).tolist()
        assert np.concatenate([request.ids for request in slices]).tolist() == whole.ids.tolist()
        seeds = np.concatenate([request.seeds for request in slices if request.seeds is not None])
        assert seeds.tolist() == SAMPLER.seeds(1, 1).tolist()


def test_who_lists_a_repeated_step_twice_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", SAMPLER, (0, 5), (3, 4))
    assert [len(who(path, SAMPLER, step)) for step in range(7)] == [1, 1, 1, 2, 2, 1, 1]
    ran = [0, 1, 2, 3, 4, 3, 4, 5, 6]
    for record in range(10):
        steps = [step for step in ran if record in SAMPLER.batch(*divmod(step, 3))]
        assert when(path, SAMPLER, record) == steps


def test_who_accepts_a_schedule_that_changes_later(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", pk(), (0, 9))
    later = pk(k={0: 1, 7: 2})
    assert who(path, later, 6)[0].ids.tolist() == pk().batch(1, 1).tolist()
    with pytest.raises(StateMismatchError, match="k from step 7: the state has 'nothing'"):
        who(path, later, 7)


def test_ledger_of_another_index_is_refused(tmp_path: Path) -> None:
    """Rebuilt with a changed record, in another order, or in another container; not a copy."""
    index = packed(tmp_path / "data")
    feed = Feed(index, SAMPLER)
    ledger = tmp_path / "ledger.jsonl"
    with NumpyLoader(feed, ledger=ledger) as loader:
        next(iter(loader))
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    copied = Feed(open_index(tmp_path / "copy" / "data.index"), SAMPLER)
    assert who(ledger, copied, 0)[0].ids.tolist() == SAMPLER.batch(0, 0).tolist()
    for number, other in enumerate(
        (
            packed(tmp_path / "changed", change=9),
            packed(tmp_path / "moved", seed=1),
            packed(tmp_path / "tar", container="tar"),
        )
    ):
        for call in (lambda f: who(ledger, f, 0), lambda f: when(ledger, f, 0)):
            with pytest.raises(StateMismatchError, match="give the index that the run had"):
                call(Feed(other, SAMPLER))
        second = tmp_path / f"{number}.jsonl"
        with NumpyLoader(Feed(other, SAMPLER), ledger=second) as loader:
            next(iter(loader))
        # Another container of the same records makes no difference for `diff`.
        assert (diff(ledger, second) is None) == (number == 2)


def test_step_that_ran_again_with_other_batches_is_found_by_either_feed(tmp_path: Path) -> None:
    """As after a rollback, and an exclusion from step 4: a warning names the time left out."""
    before, after = (
        BatchSampler(RandomSampler(30, seed=0, exclude=exclude), batch_size=4)
        for exclude in (None, {4: [1, 2, 3, 17]})
    )
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, before) as ledger:
        ledger.delivered(0, 7)
        ledger.loaded(2)
        ledger.delivered(2, 2)
        ledger.changed(after, 4)
        ledger.delivered(4, 6)
    for sampler in (before, after):
        for step in (1, 2, 3):
            ids = [request.ids.tolist() for request in who(path, sampler, step)]
            assert ids == [sampler.batch(0, step).tolist()] * (1 if step == 1 else 2)
        for step in (4, 5, 6):
            with pytest.warns(UserWarning, match=f"step {step} ran 2 times.*of 1: (?s:.)*exclude"):
                (request,) = who(path, sampler, step)
            assert request.ids.tolist() == sampler.batch(0, step).tolist()
    assert who(path, after, 9)[0].ids.tolist() == after.batch(1, 1).tolist()
    steps = [0, 1, 2, 3, *range(2, 10)]  # without the steps 4 to 6 of the first time
    batches = [after.batch(*divmod(step, 8)) for step in steps]
    for record in range(30):
        with pytest.warns(UserWarning, match="steps 4 to 6 of before a rollback.*exclude"):
            found = when(path, after, record)
        assert found == [s for s, ids in zip(steps, batches, strict=True) if record in ids]
    for call in (lambda: who(path, before, 7), lambda: when(path, before, 0)):
        with pytest.raises(StateMismatchError, match="exclude from step 4"):
            call()
    with Ledger(path, after) as ledger:
        ledger.delivered(0, 1)  # which undoes all steps
    with pytest.warns(UserWarning, match="steps 4 to 6 of before a rollback"):
        when(path, after, 0)


def test_records_that_cannot_be_compared_are_a_warning(tmp_path: Path) -> None:
    """Without a digest, nobody knows whether two sources have the same records."""
    for number in range(2):
        feed = Feed(DatasetSource({"x": np.arange(10) + number}), SAMPLER)
        with NumpyLoader(feed, ledger=tmp_path / f"{number}.jsonl") as loader:
            next(iter(loader))
    with pytest.warns(UserWarning, match="the ledgers share no digest: only the numbers"):
        assert diff(tmp_path / "0.jsonl", tmp_path / "1.jsonl") is None
    for call in (who, when):
        with pytest.warns(UserWarning, match="share no digest: only the number of records"):
            call(tmp_path / "0.jsonl", feed, 0)


def test_diff_ignores_world_size_kills_and_rollbacks(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.jsonl", SAMPLER, (0, 9))
    parts = tmp_path / "parts.jsonl"
    for world, ranges in [(4, [(0, 5)]), (1, [(3, 2), (5, 1)]), (2, [(6, 3)])]:
        write(parts, SAMPLER.shard(0, world), *ranges)
    assert diff(whole, parts) is None
    assert diff(parts, whole) is None
    assert diff(parts, parts) is None


@pytest.mark.parametrize(
    ("ranges", "sampler", "step", "reason"),
    [
        ([(0, 7)], SAMPLER, 7, "only .*first.jsonl has it"),
        ([(0, 12)], SAMPLER, 9, "only .*second.jsonl has it"),
        ([(0, 4), (5, 4)], SAMPLER, 4, "only .*first.jsonl has it"),
        ([(0, 9), (2, 1)], SAMPLER, 3, "only .*first.jsonl has it"),
        ([(0, 9)], BatchSampler(RandomSampler(10, seed=3), batch_size=4), 0, "seed is 0 and 3"),
        ([(0, 9)], ExactOnceBatchSampler(10, batch_size=4), 0, "sampler is 'BatchSampler' and"),
    ],
)
def test_diff_finds_the_first_step_that_differs(
    ranges: list[tuple[int, int]], sampler: BatchStream, step: int, reason: str, tmp_path: Path
) -> None:
    first = write(tmp_path / "first.jsonl", SAMPLER, (0, 9))
    difference = diff(first, write(tmp_path / "second.jsonl", sampler, *ranges))
    assert difference is not None
    assert difference.global_step == step
    assert re.search(reason, difference.reason)


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 2}}, None),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 2, 20: 3}}, None),  # after the last step
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 2, 7: 3}}, 7),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 4: 2}}, 3),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 1, 3: 3}}, 3),
        ({"k": {0: 1, 3: 2}}, {"k": {0: 2, 3: 1}}, 0),
        ({"k": 1, "p": {0: 2, 8: 4}}, {"k": {0: 1, 6: 2}, "p": 2}, 6),
        ({"k": {0: 1, 3: 2}, "small": "drop"}, {"k": {0: 1, 4: 2}, "small": "drop"}, 3),
        # K of 4 would leave out all classes but the last, from the first step on.
        (
            {"k": {0: 2, 3: 3}, "small": "drop", "seed": 1},
            {"k": {0: 2, 3: 4}, "small": "drop", "seed": 1},
            0,
        ),
    ],
)
def test_diff_finds_the_first_schedule_change_that_differs(
    first: dict[str, object], second: dict[str, object], step: int | None, tmp_path: Path
) -> None:
    """As the batches themselves say."""
    streams = pk(**first), pk(**second)
    one, two = (write(tmp_path / f"{n}.jsonl", stream, (0, 10)) for n, stream in enumerate(streams))
    batches = [[stream.batch(*divmod(s, 5)).tolist() for s in range(10)] for stream in streams]
    drawn = [s for s in range(10) if batches[0][s] != batches[1][s]]
    assert drawn[:1] == ([] if step is None else [step])
    difference = diff(one, two)
    assert (difference and difference.global_step) == step


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        (lambda exclude: RandomSampler(30, seed=0, exclude=exclude), {2: [1]}, {2: [1], 7: [4]}),
        (
            lambda weights: WeightedSampler(weights, seed=0, num_samples=30),
            {0: [1, 2, 3]},
            {0: [1, 2, 3], 7: [3, 2, 1]},
        ),
        (
            lambda weights: MixtureSampler(
                [RandomSampler(9, seed=n) for n in range(len(weights[0]))],
                weights=weights,
                num_samples=30,
                seed=0,
            ),
            {0: [2, 1], 4: [1, 1]},
            {0: [2, 1, 0], 4: [1, 1, 0], 7: [1, 1, 1]},
        ),
    ],
)
def test_diff_step_is_where_changed_schedule_takes_effect(
    make: Any, first: Any, second: Any, tmp_path: Path
) -> None:
    """And the steps before it are drawn by both samplers."""
    streams = [BatchSampler(make(changes), batch_size=4) for changes in (first, second)]
    one, two = (write(tmp_path / f"{n}.jsonl", stream, (0, 12)) for n, stream in enumerate(streams))
    difference = diff(one, two)
    assert difference is not None
    assert difference.global_step == 7
    assert "from step 7" in difference.reason
    assert who(one, streams[1], 6)[0].ids.tolist() == streams[0].batch(0, 6).tolist()
    with pytest.raises(StateMismatchError, match="from step 7"):
        who(one, streams[1], 7)


BEGIN = {
    "ledger": 1,
    "event": "begin",
    "time": "2026-11-26T01:19:00+00:00",
    "step": 0,
    "twinfeed": "0.1.0",
    "rank": 0,
    "world_size": 1,
    "index": None,
    "state": SAMPLER.state_at(0, 0),
}
END = {"ledger": 1, "event": "end", "time": "2026-11-26T01:19:00+00:00", "step": 5}


def lines(*entries: object) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def test_ledger_of_version_1_is_read(tmp_path: Path) -> None:
    """Every byte of it, as the first version of the library writes it."""
    path = tmp_path / "ledger.jsonl"
    again = {**BEGIN, "step": 3}
    del again["state"]
    killed = {**END, "step": 6, "killed": True}
    path.write_bytes(lines(BEGIN, END, {**END, "event": "load", "step": 3}, again, killed, again))
    begin = len(path.read_bytes()) - len(lines(again))
    (tmp_path / "ledger.jsonl.position").write_bytes(struct.pack("<qq", begin, 8))
    assert [len(who(path, SAMPLER, step)) for step in range(8)] == [1, 1, 1, 3, 3, 2, 1, 1]


DAMAGED = {
    "torn in the middle": lines(BEGIN)[:50] + b"\n" + lines(END),
    "binary": bytes(range(256)) * 10 + b"\n",
    "not UTF-8": b'{"ledger": 1, "event": "\xff"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "deep state": lines(BEGIN).replace(
        b'"seed": 0', b'"seed": ' + b'{"a":' * 9000 + b"0" + b"}" * 9000
    ),
    "a number": b"3\n",
    "a list": b"[]\n",
    "no event": lines({"ledger": 1, "step": 0}),
    "no step": lines({"ledger": 1, "event": "begin"}),
    "a step below 0": lines({**BEGIN, "step": -1}),
    "a step of no number": lines({**BEGIN, "step": "3"}),
    "a step of true": lines({**BEGIN, "step": True}),
    "a huge step": lines({**BEGIN, "step": 10**30}),
    "a long number": b'{"ledger": 1, "step": ' + b"9" * 5000 + b"}\n",
    "a state of no dict": lines({**BEGIN, "state": []}),
    "a fingerprint of no dict": lines({**BEGIN, "state": {"fingerprint": 3}}),
    "records of no dict": lines({**BEGIN, "state": {**SAMPLER.state_at(0, 0), "records": 3}}),
    "a rank of no number": lines({**BEGIN, "rank": None}),
    "no world": lines({**BEGIN, "world_size": 0}),
    "another event": lines({**END, "event": "END"}),
    "another version": lines({**BEGIN, "ledger": 2}),
    "a change of nothing": lines({**END, "event": "change"}),
    "fields of no dict": lines({**END, "event": "change", "fields": [3]}),
    "deep fields": lines({**END, "event": "change", "fields": {"a": 0}}).replace(
        b'"a": 0', b'"a": ' + b'{"a":' * 9000 + b"0" + b"}" * 9000
    ),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_ledger_is_an_error_that_names_the_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(lines(BEGIN, END) + content + lines(END))
    for call in (
        lambda: who(path, SAMPLER, 0),
        lambda: when(path, SAMPLER, 0),
        lambda: diff(path, path),
    ):
        with pytest.raises(LoaderError, match=r"(?s)line 3 is not a ledger line.*ledger\.jsonl"):
            call()


def test_ledger_without_a_state_in_line_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(lines({"ledger": 1, "event": "begin", "step": 0}, END))
    with pytest.raises(LoaderError, match="line 1 is not a ledger line of version 1: 'state'"):
        who(path, SAMPLER, 0)


def test_other_file_without_a_line_is_no_empty_ledger(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    for content in (b"notes", bytes(100), POSITION.pack(0, 5), b'{"ledger": 2, "event": "begin"'):
        path.write_bytes(content)
        with pytest.raises(LoaderError, match="line 1 is not a ledger line of version 1"):
            diff(path, path)
    for torn in (b"", b'{"led', b'{"ledger": 1, "event": "beg'):
        path.write_bytes(torn)
        with pytest.raises(IndexError, match=r"notes has no step 0: it has no steps$"):
            who(path, SAMPLER, 0)


def test_damaged_position_file_adds_no_steps(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(lines(BEGIN, END, BEGIN))
    begin = len(lines(BEGIN, END))
    for content in (b"", b"short", struct.pack("<qq", begin, -5), struct.pack("<qq", 10**18, 7)):
        (tmp_path / "ledger.jsonl.position").write_bytes(content)
        assert [len(who(path, SAMPLER, step)) for step in range(5)] == [1] * 5, content
        with pytest.raises(IndexError, match="no step 5: the last is 4 at least"):
            who(path, SAMPLER, 5)
    (tmp_path / "ledger.jsonl.position").write_bytes(bytes(1000))
    with pytest.raises(LoaderError, match=r"(?s)too many bytes.*ledger\.jsonl\.position"):
        who(path, SAMPLER, 0)


def test_huge_ledger_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LoaderError, match="too many bytes"):
        who(path, SAMPLER, 0)


def _who(step: int, stream: object = SAMPLER, **options: object) -> Call:
    return lambda world: who(world / "ledger.jsonl", stream, step, **options)  # type: ignore[arg-type]


REFUSED: Refused = [
    (_who(5), IndexError, "ledger.jsonl has no step 5: the last is 4$"),
    (_who(-1), ValueError, "step must be at least 0"),
    (_who(0, rank=-1), ValueError, "rank must be at least 0"),
    (_who(0, rank=1), FileNotFoundError, "ledger.rank1.jsonl"),
    (_who(0, "train"), TypeError, "a Feed or a batch sampler, got a str"),
    (_who(0, pk()), StateMismatchError, "the state is of another stream"),
    (lambda world: who(world / "none.jsonl", SAMPLER, 0), FileNotFoundError, "none.jsonl"),
    (lambda world: who(world, SAMPLER, 0), LoaderError, "a folder"),
    (lambda world: who("s3://bucket/a.jsonl", SAMPLER, 0), ValueError, "URL"),
    (lambda world: when(world / "ledger.jsonl", SAMPLER, 10), IndexError, "record .*10"),
    (lambda world: diff(world / "ledger.jsonl", world / "none"), FileNotFoundError, "none"),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_ledger_tools_refuse_bad_arguments(
    call: Call, kind: type[Exception], word: str, tmp_path: Path
) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(lines(BEGIN, END))
    check_refused(tmp_path, call, kind, word)
