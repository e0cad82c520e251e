"""`audit` finds each fault of a sampler that has one, and none in the same sampler without it."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from twinfeed import BatchSampler, ExactOnceBatchSampler, PKBatchSampler, RandomSampler
from twinfeed.loaders.audit import processes
from twinfeed.testing import Audit, audit

N = 60
LABELS = np.arange(N) % 6


class Numbers:
    """A right sampler of a rank, in the shape of torch's; `fault` names its only fault."""

    def __init__(self, fault: str, rank: int, world_size: int, seed: int) -> None:
        self.fault, self.rank, self.world_size, self.seed = fault, rank, world_size, seed
        self.epoch = self.position = 0

    def set_epoch(self, epoch: int) -> None:
        if self.fault != "set_epoch":
            self.epoch = epoch

    def order(self) -> list[int]:
        key = [self.seed, self.epoch]
        if self.fault == "seed":
            key = [self.seed * self.epoch]
        if self.fault == "ranks overlap":
            key.append(self.rank)
        order = np.random.default_rng(key).permutation(N)
        if self.fault == "global state":
            order = np.random.permutation(N)
        if self.fault == "resets the global state":
            np.random.seed(3)
        if self.fault == "repeats":
            order[5:8] = order[4]
        if self.fault == "never":
            order = order[order != 7]
        if self.fault == "range":
            order[3] = N
        if self.fault == "unmixed":
            order = np.concatenate([np.sort(order[:30]) for _ in range(1)] + [np.sort(order[30:])])
            order = np.sort(order) ^ (order & 1)
        order = order[self.rank :: self.world_size]
        return (order[:-9] if self.fault == "uneven" and self.rank else order).tolist()

    def __len__(self) -> int:
        if self.fault == "len raises":
            raise RuntimeError("no length yet")
        return len(self.order()) + (self.fault == "len")

    def __iter__(self) -> Iterator[int]:
        order, first, self.position = self.order(), self.position, 0
        for position in range(first, len(order)):
            self.position = position + 1
            yield order[position]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        position = 0 if self.fault == "no position" else self.position
        return {"epoch": self.epoch, "position": position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        if self.fault == "skips":
            self.position += 1
        if self.fault == "skips in later epochs" and self.epoch and self.position:
            self.position -= 1


def audit_of(fault: str, **options: Any) -> Audit:
    def make(rank: int, world_size: int, seed: int = 0) -> Numbers:
        return Numbers(fault, rank, world_size, seed)

    return audit(make, **{"num_records": N, "batch_size": 6, "expect": "training", **options})


def test_a_right_sampler_has_no_fault() -> None:
    report = audit_of("", world_size=(1, 2, 4))
    assert report.ok, report
    assert report.findings == []
    assert {"ranks", "coverage", "seeds", "state"} <= {answer.question for answer in report.answers}
    assert set(report.not_asked) == {"hangs", "start", "workers", "classes"}
    assert str(report).startswith("make (expect='training'): no faults\n")


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("len", "len: 1 rank: 61, and [60, 60, 60] came"),
        ("len raises", "len: 1 rank: raises RuntimeError: no length yet"),
        ("range", "ids: 1 rank: 60 is not in [0, 60)"),
        ("repeats", "coverage: 1 rank: epoch 0: 3 too many"),
        ("never", "never: 1 rank: 1 records never came in 3 epochs, such as [7]: the same are"),
        ("ranks overlap", "coverage: 2 ranks: epoch 0: "),
        ("uneven", "ranks: 2 ranks: [5, 4] batches in epoch 0: a collective"),
        ("set_epoch", "epochs: all have the same order, although set_epoch is called"),
        ("seed", "seeds: 0 to 3 all give the same epoch 0"),
        ("unmixed", "mixing: records move"),
        ("skips", "state: "),
        ("skips in later epochs", "epoch 1, after"),
    ],
)
def test_each_fault_is_found(fault: str, finding: str) -> None:
    """The sampler without its fault has none: the test above."""
    report = audit_of(fault)
    assert not report.ok
    assert any(finding in found for found in report.findings), report
    assert "! " in str(report)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("global state", "the global random state of each rank decides its order"),
        ("global state", "draws from the global state of numpy"),
        ("resets the global state", "sets the global state of numpy to a fixed value"),
        ("no position", "the state has no position"),
    ],
)
def test_facts_are_no_faults(fault: str, text: str) -> None:
    report = audit_of(fault, expect=None)
    assert any(text in answer.text and answer.mark == "-" for answer in report.answers), report


def test_what_is_not_declared_is_a_fact() -> None:
    """The same stream is a fault only if the promise is declared."""
    for fault in ("repeats", "never", "unmixed"):
        assert audit_of(fault, expect=None, world_size=1).ok
    assert audit_of("repeats", expect="with replacement", world_size=1).ok
    assert not audit_of("", expect="infinite").ok


def test_without_labels_or_sizes_the_highest_id_counts() -> None:
    assert audit(lambda: range(7)).ok
    assert not audit(lambda: range(1, 7), expect="evaluation").ok


@pytest.mark.parametrize(
    ("fault", "finding"),
    [("", None), ("p", "7 of 8 batches hold 3 classes of 4"), ("k", "hold 3 classes of 4; 0")],
)
def test_classes_of_batches(fault: str, finding: str | None) -> None:
    def make(epoch: int) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng(epoch)
        classes = [rng.permutation(6)[:3] for _ in range(8)]
        batches = [
            np.concatenate([rng.permutation(np.flatnonzero(c == LABELS))[:4] for c in drawn])
            for drawn in classes
        ]
        if fault == "p":
            batches[3] = batches[3][:8]
        if fault == "k":
            batches[3][0] = np.flatnonzero(~np.isin(LABELS, LABELS[batches[3]]))[0]
        return batches

    report = audit(make, labels=LABELS, expect="pk", epochs=1)
    assert report.ok == (finding is None), report
    assert finding is None or finding in report.findings[0]


def test_records_that_come_twice_are_needless_if_the_class_has_enough() -> None:
    labels = [0] * 4 + [1] * 2
    batches = [[0, 0, 1, 2, 4, 5, 4, 5], [0, 1, 2, 3, 4, 5, 4, 5]]
    report = audit(lambda: batches, labels=labels, epochs=1)
    assert any("2 hold a record twice, 1 of them needlessly" in a.text for a in report.answers)


@pytest.mark.parametrize("fault", [False, True])
def test_workers(fault: bool) -> None:
    def make(workers: int = 0) -> list[int]:
        order = np.random.default_rng(1).permutation(N).tolist()
        return [*order[::2], *order[::2]] if fault and workers == 2 else order

    assert audit(make, num_records=N).ok != fault


@pytest.mark.parametrize("fault", [False, True])
def test_start_of_the_run_and_of_the_epoch(fault: bool) -> None:
    def of_epoch(epoch: int, start: int = 0) -> list[int]:
        return np.random.default_rng(epoch).permutation(N).tolist()[start + (fault and start > 9) :]

    class OfRun:
        def __init__(self, start: int) -> None:
            self.epoch, self.start = divmod(start, N)
            if fault:
                self.epoch = 0

        def __iter__(self) -> Iterator[int]:
            yield from of_epoch(self.epoch)[self.start :]
            self.epoch, self.start = self.epoch + 1, 0

    for make in (of_epoch, lambda start=0: OfRun(start)):
        report = audit(make, num_records=N, expect="training")
        assert report.ok != fault, report
        assert any(answer.question == "start" for answer in report.answers)


def test_a_seed_that_is_taken_by_a_modulus_is_a_fact() -> None:
    report = audit(lambda seed=0: np.random.default_rng(seed % 2).permutation(N).tolist())
    assert ("seeds", "some of 0 to 3 give the same epoch 0", "-") in report.answers


def test_parameters_need_no_defaults_and_seconds_no_end() -> None:
    def make(rank: int, world_size: int, epoch: int, seed: int, start: int, workers: int) -> Any:
        order = np.random.default_rng((seed, epoch, 0 * workers)).permutation(N)
        return order[rank::world_size][start:].tolist()

    report = audit(make, num_records=N, expect="training", max_seconds=float("inf"))
    assert report.ok, report
    assert {"seeds", "start", "workers"} <= {answer.question for answer in report.answers}


def test_endless_streams_are_dealt_into_epochs() -> None:
    """Rank r of W gives the ids r, r + W, …: each window of `num_records` is an epoch."""

    def make(rank: int, world_size: int, start: int = 0, seed: int = 0) -> Iterator[int]:
        for number in itertools.count(rank + start * world_size, world_size):
            yield int(np.random.default_rng([seed, number // N]).permutation(N)[number % N])

    report = audit(make, num_records=N, expect="infinite", world_size=(1, 4))
    assert report.ok, report
    assert any(
        answer[1:] == ("4 ranks: each record once in each epoch", " ") for answer in report.answers
    )
    assert not audit(make, num_records=N, expect="evaluation", world_size=1).ok
    assert "pass num_records=" in audit(itertools.count).findings[0]


def shuffled_by(state: Callable[[], Any]) -> Callable[[], list[int]]:
    def make() -> list[int]:
        state()
        return [*range(N)]

    return make


def test_global_random_states_are_as_before() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    for draw in (random.random, np.random.rand):
        report = audit(shuffled_by(draw), num_records=N)
        assert any("draws from the global state of" in answer.text for answer in report.answers)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())


def test_the_environment_and_timers_are_as_before() -> None:
    environment, hook = dict(os.environ), sys.excepthook
    handler = signal.getsignal(signal.SIGALRM)

    def make(rank: int, world_size: int) -> list[int]:
        if world_size > 1:
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(world_size))
        os.environ["LEFTOVER"] = "1"
        return [*range(N)][rank::world_size]

    signal.setitimer(signal.ITIMER_REAL, 1000, 500)
    try:
        assert audit(make, num_records=N).ok
        delay, interval = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert 900 < delay <= 1000
    assert interval == 500
    assert (dict(os.environ), sys.excepthook) == (environment, hook)
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("traces", [False, True])
def test_memory_is_traced_as_before(traces: bool) -> None:
    if traces:
        tracemalloc.start()
    try:
        report = audit(lambda: np.arange(10**5).tolist())
        assert tracemalloc.is_tracing() == traces
    finally:
        tracemalloc.stop()
    (cost,) = [answer.text for answer in report.answers if answer.question == "cost"]
    assert float(cost.split(" MB")[0].split()[-1]) > 3  # 10^5 integers and a list of them


def hang_in_make() -> list[int]:
    time.sleep(1000)
    return []


def hang_in_next() -> Iterator[int]:
    yield from range(5)
    time.sleep(1000)


def hang_in_a_loop() -> Iterator[int]:
    while True:
        pass
    yield 1


def hang_and_catch() -> Iterator[int]:
    while True:
        try:
            time.sleep(1000)
        except Exception:
            yield 1


@pytest.mark.parametrize("make", [hang_in_make, hang_in_next, hang_in_a_loop, hang_and_catch])
def test_what_hangs_is_ended(make: Callable[[], Any]) -> None:
    report = audit(make, num_records=N, max_seconds=0.2)
    assert "items came, then the 0.2 s were over" in report.findings[0]
    if make is hang_in_next:
        assert "epoch 0: 5 items came" in report.findings[0]


def hang_in_code_in_c() -> int:
    """No signal interrupts `sum`, and SIGTERM has a handler in Python."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    return sum(itertools.repeat(0))


def end_the_process() -> None:
    os._exit(3)


def test_code_in_c_that_hangs_is_ended_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.1)
    assert audit(hang_in_code_in_c, max_seconds=0.1).findings == ["draws: the process hangs"]
    report = audit(end_the_process)
    assert report.findings == ["draws: the process: a worker process ended with exit code 3"]


def test_a_function_of_no_module_runs_in_this_process() -> None:
    """Outside the main thread nothing ends it, and the report says so."""
    found: list[Audit] = []
    for make in (hang_in_next, lambda: range(N)):
        thread = threading.Thread(
            target=lambda make=make: found.append(audit(make, num_records=N, max_seconds=2.0))
        )
        thread.start()
        thread.join()
    assert "5 items came" in found[0].findings[0]
    assert found[1].ok
    reason = "make is no function of an imported module"
    assert found[1].not_asked["hangs"] == f"all, as no signal comes here: {reason}"
    assert audit(lambda: range(N)).not_asked["hangs"] == f"code in C: {reason}"


def raises_on_rank_1(rank: int, world_size: int) -> range:
    if rank == 1:
        raise ValueError("rank 1 is unhappy")
    return range(N)


class ByItem:
    def __getitem__(self, position: int) -> int:
        if position >= N:
            raise IndexError
        return position


@pytest.mark.parametrize(
    ("make", "finding"),
    [
        (raises_on_rank_1, "rank 1 of 2, make: ValueError: rank 1 is unhappy"),
        (lambda: None, "make returned None, which cannot be iterated"),
        (lambda: [float(n) for n in range(N)], "an item has no ids: float 0.0; pass ids="),
        (lambda: [f"key{n}" for n in range(N)], "an item has no ids: str key0"),
        (lambda: [{"id": n} for n in range(N)], "an item has no ids: dict"),
        (lambda: [True] * N, "an item has no ids: bool True"),
        (lambda: [1, [2, 3]], "item 1 is a batch, and those before are not"),
        (lambda: [[1], 2], "item 1 is one id, and those before are not"),
        (lambda: [2**70], "an item has no ids: int 1180591620717411303424"),
        (lambda: itertools.repeat([]), "empty batches came in a row"),
        (lambda: [-3, *range(1, N)], "-3 is not in [0, 60)"),
        (lambda: [(n, 224) for n in range(N)], "224 is not in [0, 60): pass ids="),
        (lambda: [99, 98] * N, "99 is not in [0, 60)"),
        (lambda: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_careless_samplers(make: Callable[..., Any], finding: str) -> None:
    report = audit(make, num_records=N)
    assert any(finding in found for found in report.findings), report


@pytest.mark.parametrize(
    "make",
    [
        lambda: [[[0, 1], [2, 3]], *([n] for n in range(4, N))],
        lambda: [(n, n + 1) for n in range(0, N, 2)],
        lambda: np.arange(N, dtype=np.uint64),
        lambda: np.arange(N, dtype=np.int32).reshape(6, 10),
        lambda: (n for n in range(N)),
        lambda: [[], [*range(N)], []],
        ByItem,
        lambda: map(int, range(N)),
    ],
)
def test_ids_come_in_many_shapes(make: Callable[..., Any]) -> None:
    report = audit(make, num_records=N, expect="evaluation")
    assert report.ok, report


def test_ids_without_labels_are_no_classes() -> None:
    for batches, labels in (([[0, 99]], [0, 1]), ([[]], []), ([[0], [-1]], [0])):
        report = audit(lambda batches=batches: batches, labels=labels, expect="pk", epochs=1)
        assert ("classes" in report.not_asked) == (labels != [0]), report


def test_errors_are_one_line() -> None:
    def make() -> Any:
        raise RuntimeError("first line\nsecond line")

    assert audit(make).findings == ["draws: make: RuntimeError: first line second line"]


def test_one_epoch_and_many_records_are_enough() -> None:
    for options in ({"epochs": 1}, {"num_records": 3_000_000, "epochs": 2}):
        report = audit_of("", **{"world_size": 1, **options, "expect": None})
        assert report.ok, report


def test_ids_of_items_that_hold_more() -> None:
    report = audit(
        lambda: [(n, 224) for n in range(N)], num_records=N, expect="evaluation", ids=lambda i: i[0]
    )
    assert report.ok, report


def test_a_sampler_that_is_not_deterministic_is_a_fact() -> None:
    report = audit(lambda: np.random.default_rng().permutation(N), num_records=N)
    assert report.ok
    assert any(answer.question == "built twice" and answer.mark == "-" for answer in report.answers)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: audit(lambda image: []),
            TypeError,
            "no other names than rank, .* argument: 'image'",
        ),
        (
            lambda: audit([1, 2]),
            TypeError,
            "must be a function that builds a sampler, .*: \\[1, 2\\] is not",
        ),
        (lambda: audit(list, expect="fun"), ValueError, "expect must be one of"),
        (lambda: audit(list, expect="pk"), ValueError, "pass labels="),
        (lambda: audit(list, labels=[0, 1], num_records=3), ValueError, "for 3 records, got 2"),
        (lambda: audit(list, world_size=0), ValueError, "world_size must be"),
        (lambda: audit(list, world_size=()), ValueError, "must have a number of ranks"),
        (lambda: audit(list, epochs=0), ValueError, "epochs must be"),
        (lambda: audit(list, batch_size=0), ValueError, "batch_size must be"),
        (lambda: audit(list, max_seconds=0), ValueError, "max_seconds must be above 0"),
        (lambda: audit(list, ids=3), TypeError, "ids must be a function"),
        (lambda: audit(list, processes="no"), TypeError, "processes"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_our_own_samplers_have_no_fault() -> None:
    def pk(rank: int, world_size: int, seed: int = 0) -> Any:
        return PKBatchSampler(LABELS, p=4, k=2, seed=seed).shard(rank, world_size)

    def shuffled(rank: int, world_size: int, seed: int = 0) -> Any:
        sampler = BatchSampler(RandomSampler(N, seed=seed), batch_size=8)
        return sampler.shard(rank, world_size)

    def evaluation(rank: int, world_size: int) -> Any:
        return ExactOnceBatchSampler(N, batch_size=7).shard(rank, world_size)

    for make, expect in ((pk, "pk"), (shuffled, "training"), (evaluation, "evaluation")):
        report = audit(make, labels=LABELS, expect=expect, world_size=(1, 2))
        assert report.ok, report
        assert any(a.question == "state" and a.mark == " " for a in report.answers), report
