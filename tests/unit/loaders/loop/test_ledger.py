"""The ledger of a loader: what it writes, when, and what it refuses to write to."""

import copy
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT
from support.programs import PYTHON
from support.refusals import Call, Refused, check_refused

from twinfeed import (
    BatchSampler,
    DatasetSource,
    ExactOnceBatchSampler,
    Feed,
    Ledger,
    LoaderError,
    NumpyLoader,
    PKBatchSampler,
    RandomSampler,
    Selector,
    diff,
    when,
    who,
)

SAMPLER = BatchSampler(RandomSampler(10, seed=0), batch_size=4)  # three steps an epoch
SOURCE = DatasetSource({"x": np.arange(10)}, digest="0 to 9")
FEED = Feed(SOURCE, SAMPLER)


def events(path: Path) -> list[tuple[str, int]]:
    """The events of a ledger and their steps."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["event"], line["step"]) for line in lines]


def position(path: Path) -> tuple[int, ...]:
    return struct.unpack("<qq", Path(f"{path}.position").read_bytes())


@pytest.mark.filterwarnings("ignore:set_epoch starts epoch 0 again")
def test_ledger_writes_lines_only_where_ranges_begin_or_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    loader = NumpyLoader(FEED, ledger=path)
    assert events(path) == []
    for _ in range(3):
        for _ in loader:
            pass
    assert events(path) == [("begin", 0)]  # and no line for a batch, a pass or an epoch
    assert position(path) == (0, 9)
    state = loader.state_at(1, 1)
    loader.load_state_dict(state)
    assert len(list(loader)) == 2
    loader.set_epoch(0)
    next(iter(loader))
    loader.close()
    rolled_back = [("load", 4), ("begin", 4), ("end", 6), ("begin", 0), ("end", 1)]
    assert events(path) == [("begin", 0), ("end", 9), *rolled_back]
    assert position(path) == (-1, 0)


def test_ledger_line_has_rank_world_size_and_state(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    loader = NumpyLoader(FEED.shard(1, 2), ledger=path)
    with loader:
        next(iter(loader))
    line = json.loads((tmp_path / "ledger.rank1.jsonl").read_text().splitlines()[0])
    assert not path.exists()
    assert (line["ledger"], line["rank"], line["world_size"]) == (1, 1, 2)
    assert line["state"] == loader.state_at(0, 0)


def test_evaluation_pass_is_one_range(tmp_path: Path) -> None:
    feed = Feed(FEED.index, ExactOnceBatchSampler(10, batch_size=4))
    with NumpyLoader(feed, ledger=tmp_path / "ledger.jsonl") as loader:
        for _ in range(2):
            assert len(list(loader)) == 3
    whole = [("begin", 0), ("end", 3)]
    assert events(tmp_path / "ledger.jsonl") == whole * 2
    assert len(who(tmp_path / "ledger.jsonl", feed, 2)) == 2


def test_ledger_of_a_million_steps_is_below_100_kilobytes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, SAMPLER) as ledger:
        for step in range(0, 1_000_000, 10_000):
            ledger.delivered(step, 10_000)  # as many epochs as there may be
        ledger.loaded(5)
    assert path.stat().st_size + Path(f"{path}.position").stat().st_size < 1000


def test_ledger_may_be_called_by_hand_with_any_integer(tmp_path: Path) -> None:
    """With the integers of any library; what is no step is refused, and nothing is written."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, SAMPLER) as ledger:
        with pytest.raises(TypeError, match="global_step must be an integer, got None"):
            ledger.delivered(None)  # type: ignore[arg-type]
        for step in (np.int64(4), np.array(5), 6):
            ledger.delivered(step)  # type: ignore[arg-type]
        for wrong, kind in [(-1, ValueError), ("7", TypeError), (9.0, TypeError)]:
            for call in (
                ledger.delivered,
                ledger.loaded,
                lambda step: ledger.changed(
                    BatchSampler(RandomSampler(10, seed=1), batch_size=4), step
                ),
            ):
                with pytest.raises(kind, match="global_step"):
                    call(wrong)  # type: ignore[arg-type]
            with pytest.raises(kind, match="steps"):
                ledger.delivered(7, wrong)  # type: ignore[arg-type]
        ledger.changed(SAMPLER, np.int64(6))  # type: ignore[arg-type]
        ledger.loaded(np.int64(3))  # type: ignore[arg-type]
    assert events(path) == [("begin", 4), ("change", 6), ("end", 7), ("load", 3)]


def test_schedule_change_writes_only_differing_fields(tmp_path: Path) -> None:
    """So many changes take little. Before the first batch, the line of the range has it all."""

    def stream(k: dict[int, int]) -> PKBatchSampler:
        return PKBatchSampler([0, 0, 0, 1, 1, 1], p=2, k=k, seed=0, batches_per_epoch=5)

    path, k = tmp_path / "ledger.jsonl", {0: 1, 9_000: 2}
    with Ledger(path, stream({0: 1})) as ledger:
        ledger.changed(stream(k), 0)
        ledger.delivered(0, 5)
        k = {0: 1, 8: 2}
        ledger.changed(stream(k), 8)
        for step in range(10, 1000, 10):
            k[step] = 1 + step // 10 % 3
            ledger.changed(stream(k), step)
            ledger.delivered(step - 5, 10)
    assert events(path)[:3] == [("begin", 0), ("change", 8), ("change", 10)]
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written[0]["state"]["fingerprint"]["k from step 9000"] == 2
    assert written[1]["fields"] == {"k from step 9000": None, "k from step 8": 2}
    assert written[2]["fields"] == {}  # K is 2 already
    assert written[3]["fields"] == {"k from step 20": 3}
    assert path.stat().st_size < 160 * len(written) + 1000
    for step in (3, 8, 9, 500, 994):
        assert (
            who(path, stream(k), step)[0].ids.tolist() == stream(k).batch(*divmod(step, 5)).tolist()
        )
    assert when(path, stream(k), 5)[-1] <= 994
    assert diff(path, path) is None


def test_selector_writes_a_ledger(tmp_path: Path) -> None:
    sampler = PKBatchSampler.of_classes(3, p=2, k=1, seed=0, batches_per_epoch=3)
    path = tmp_path / "ledger.jsonl"
    with Selector(sampler, 3, ledger=path) as selector:
        numbers = [numbers.tolist() for numbers in selector]
    drawn = [who(path, sampler, step)[0].ids for step in range(3)]
    assert [sampler.group_of(ids).tolist() for ids in drawn] == numbers
    assert when(path, sampler, 2) == [step for step in range(3) if 2 in drawn[step]]


def test_loaders_may_take_turns_with_one_ledger(tmp_path: Path) -> None:
    """Also when both take turns: each says anew what its records depend on."""
    path = tmp_path / "ledger.jsonl"
    other = BatchSampler(RandomSampler(10, seed=1), batch_size=4)
    first, second = Ledger(path, SAMPLER), Ledger(path, other)
    for step, ledger in enumerate((first, second, first)):
        with ledger:
            ledger.delivered(step)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seeds = [line["state"]["fingerprint"]["seed"] for line in lines if line["event"] == "begin"]
    assert seeds == [0, 1, 0]


def test_copies_pickles_and_forked_children_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    loader = NumpyLoader(FEED, ledger=path, prefetch=0)
    next(iter(loader))
    before = path.read_bytes(), position(path)
    for twin in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        for _ in twin:
            pass
        twin.close()
    child = os.fork()
    if not child:
        try:
            for _ in loader:
                pass
            loader.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (path.read_bytes(), position(path)) == before
    for _ in loader:
        pass
    assert position(path) == (0, 3)


def test_surviving_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The lock of a killed process is free, although its workers may live a little longer."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, SAMPLER)
    ledger.delivered(0)
    ending, started = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(started[1], b"x")
        os.read(ending[0], 1)
        os._exit(0)
    os.read(started[0], 1)
    os.close(ledger._ledger_fd)  # as the parent's death does
    ledger._ledger_fd = -1
    with Ledger(path, SAMPLER) as later:
        later.delivered(1)
    os.write(ending[1], b"x")
    os.waitpid(child, 0)


def test_two_open_loaders_cannot_share_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first, second = NumpyLoader(FEED, ledger=path), NumpyLoader(FEED, ledger=path)
    next(iter(first))
    with pytest.raises(LoaderError, match="another loader writes this ledger"):
        next(iter(second))
    first.close()
    next(iter(second))
    second.close()


def test_ledger_of_killed_process_is_completed(tmp_path: Path) -> None:
    """The range that the process was in gets its end, and a torn line is removed."""
    path = tmp_path / "ledger.jsonl"
    run_and_kill(path, "ledger.delivered(0, 5)")
    whole = path.read_bytes()
    assert len(who(path, SAMPLER, 4)) == 1
    with pytest.raises(IndexError, match="no step 5: the last is 4 at least"):
        who(path, SAMPLER, 5)
    path.write_bytes(whole + b'{"ledger": 1, "event": "lo' + bytes(2_000_000))
    assert len(who(path, SAMPLER, 4)) == 1
    with Ledger(path, SAMPLER) as ledger:
        ledger.delivered(3)
    assert events(path) == [("begin", 0), ("end", 5), ("begin", 3), ("end", 4)]
    assert [len(who(path, SAMPLER, step)) for step in range(5)] == [1, 1, 1, 2, 1]


def test_stale_position_file_adds_no_steps(tmp_path: Path) -> None:
    """It may be older than the ledger, of another range, or zeros."""
    path = tmp_path / "ledger.jsonl"
    run_and_kill(path, "ledger.delivered(0, 5); ledger.delivered(3, 1)")
    begin, stop = position(path)
    assert stop == 4
    for stale, steps in [((0, 5), 5), ((0, 0), 5), ((-1, 0), 5), ((begin, 3), 5), ((begin, 4), 6)]:
        Path(f"{path}.position").write_bytes(struct.pack("<qq", *stale))
        found = sum(len(who(path, SAMPLER, step)) for step in range(5))
        assert found == steps, stale
    Path(f"{path}.position").unlink()
    assert len(who(path, SAMPLER, 3)) == 1
    Path(f"{path}.position").write_bytes(struct.pack("<qq", begin, -5))
    with Ledger(path, SAMPLER) as ledger:  # which knows no more of the last range
        ledger.delivered(3)
    with pytest.raises(IndexError, match="the last is 4 at least"):
        who(path, SAMPLER, 5)


def run_and_kill(path: Path, work: str) -> None:
    """Do work with a ledger in a process that is killed then."""
    program = f"""
import os, signal
from twinfeed import BatchSampler, Ledger, RandomSampler
ledger = Ledger({str(path)!r}, BatchSampler(RandomSampler(10, seed=0), batch_size=4))
{work}
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False, timeout=300)


def test_exit_without_close_ends_the_range(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    program = (
        "from twinfeed import BatchSampler, Ledger, RandomSampler; "
        f"ledger = Ledger({str(path)!r}, BatchSampler(RandomSampler(10, seed=0), batch_size=4)); "
        "ledger.delivered(0); 1 / 0"
    )
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, check=False, timeout=300)
    assert b"ZeroDivisionError" in done.stderr
    assert events(path) == [("begin", 0), ("end", 1)]


def test_full_disk_ends_ledger_but_not_training(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    loader = NumpyLoader(FEED, ledger=path)
    next(iter(loader))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"ledger.jsonl: the ledger ends here, .*"):
            loader.load_state_dict(loader.state_at(0, 0))
        assert len(list(loader)) == 3
        loader.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size + 20  # a torn line
    assert len(who(path, FEED, 0)) == 1


WORLD: dict[str, Callable[[Path], Any]] = {
    "notes.txt": lambda path: path.write_text("notes"),
    "records.jsonl": lambda path: path.write_text('{"text": "a record"}\n'),
    "later.jsonl": lambda path: path.write_text('{"ledger": 2, "event": "begin"}\n'),
    "binary.jsonl": lambda path: path.write_bytes(bytes(1000)),
    "folder.jsonl": os.mkdir,
    "link.jsonl": lambda path: path.symlink_to("notes.txt"),
    "empty.jsonl": lambda path: path.write_bytes(b""),
    "empty.jsonl.position": lambda path: path.write_bytes(b"a key of somebody"),
}


def _open(name: str) -> Call:
    return lambda world: NumpyLoader(FEED, ledger=world / name)


REFUSED: Refused = [
    (_open("notes.txt"), LoaderError, "not a file of a ledger of version 1.*notes.txt"),
    (_open("records.jsonl"), LoaderError, "records.jsonl"),
    (_open("later.jsonl"), LoaderError, "of version 1"),
    (_open("binary.jsonl"), LoaderError, "binary.jsonl"),
    (_open("folder.jsonl"), IsADirectoryError, "folder.jsonl"),
    (_open("link.jsonl"), LoaderError, "link.jsonl"),
    (_open("empty.jsonl"), LoaderError, "empty.jsonl.position"),
    (_open("notes.txt/ledger.jsonl"), OSError, "notes.txt"),
    (lambda world: NumpyLoader(FEED, ledger="s3://bucket/run.jsonl"), ValueError, "is a URL"),
    (lambda world: NumpyLoader(FEED, ledger=3), TypeError, "int"),  # type: ignore[arg-type]
    (lambda world: Ledger("x.jsonl", FEED.index), TypeError, "a Feed or a batch sampler"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_file_that_is_no_ledger_is_refused_and_kept(
    call: Call, kind: type[Exception], word: str, tmp_path: Path
) -> None:
    for name, make in WORLD.items():
        make(tmp_path / name)
    check_refused(tmp_path, call, kind, word)


def test_special_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """Neither waits for somebody who writes to a FIFO, nor reads a device."""
    os.mkfifo(tmp_path / "fifo.jsonl")
    os.mkfifo(tmp_path / "piped.jsonl.position")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    for name, word in [("fifo", "a FIFO"), ("piped", "a FIFO"), ("device", "a device")]:
        path = tmp_path / f"{name}.jsonl"
        with pytest.raises(LoaderError, match=f"(?s)not a regular file.*{name}.*{word}"):
            Ledger(path, SAMPLER)
        with pytest.raises(LoaderError, match=f"(?s)not a regular file.*{name}.*{word}"):
            who(path, SAMPLER, 0)


def test_ledger_does_not_change_batches(tmp_path: Path) -> None:
    with_ledger = NumpyLoader(FEED, ledger=tmp_path / "ledger.jsonl")
    ids = [
        [batch["id"].tolist() for batch in loader] for loader in (with_ledger, NumpyLoader(FEED))
    ]
    assert ids[0] == ids[1]


def test_who_and_when_are_right_after_kills_and_rollbacks(tmp_path: Path) -> None:
    """`who` and `when` say what the loops of killed and resumed runs received."""
    program = ROOT / "tests" / "programs" / "ledger_kills.py"
    subprocess.run([PYTHON, program, tmp_path, "3"], check=True, timeout=300)
