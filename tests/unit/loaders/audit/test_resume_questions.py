"""Public faults, in re-written form: found before their fix, and not after it.

Most are of resuming. Each class has the shape of one project's code, and `fixed` is its fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from twinfeed.testing import Audit, audit

N, BATCH = 103, 8


def order_of(*key: int) -> list[int]:
    return np.random.default_rng(key).permutation(N).tolist()


class CountsSinceIter:
    """KempnerForge#57 and #58: a second resume within an epoch forgets the batches of the first."""

    def __init__(self, fixed: bool) -> None:
        self.fixed, self.epoch, self.yielded, self.skip = fixed, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(0, N, BATCH))

    def __iter__(self) -> Iterator[list[int]]:
        first, self.skip = self.skip, 0
        if self.fixed:
            first = self.yielded
        self.yielded = first if self.fixed else 0
        order = order_of(0, self.epoch)
        for batch in range(first, len(self)):
            self.yielded += 1
            yield order[batch * BATCH : (batch + 1) * BATCH]
        self.yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["yielded"]
        if self.fixed:
            self.yielded = state["yielded"]


def second_resume(fixed: bool) -> Audit:
    return audit(lambda: CountsSinceIter(fixed), num_records=N, expect="training")


class Prepared:
    """lerobot#4692: the last batch is padded from the first ones, which a resumed run has not."""

    def __init__(self, fixed: bool, rank: int, world_size: int, start: int) -> None:
        self.fixed, self.rank, self.world_size = fixed, rank, world_size
        self.epoch, self.start = divmod(start, len(self))

    def __len__(self) -> int:
        return len(range(0, N, BATCH * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        order, global_batch = order_of(self.epoch), BATCH * self.world_size
        first = self.start
        if not self.fixed:
            order, first = order[first * global_batch :], 0
        order = [*order, *order[: -len(order) % global_batch]]
        place = self.rank * BATCH
        for start in range(first * global_batch, len(order), global_batch):
            yield order[start + place : start + place + BATCH]
        self.epoch, self.start = self.epoch + 1, 0


def padded_resume(fixed: bool) -> Audit:
    def make(rank: int, world_size: int, start: int = 0) -> Prepared:
        return Prepared(fixed, rank, world_size, start)

    return audit(make, num_records=N, expect="training", world_size=2)


def seeds_of_ranks(fixed: bool) -> Audit:
    """LongLive#71: each rank seeds the shuffle by itself, and ranks draw the same records."""

    def make(rank: int, world_size: int, epoch: int, seed: int = 0) -> list[int]:
        return order_of(seed if fixed else seed + rank, epoch)[rank::world_size]

    return audit(make, num_records=N, expect="training")


class Selector:
    """Trinity-RFT#593: it shuffles for the next epoch before it counts the last batch of this."""

    def __init__(self, fixed: bool, seed: int) -> None:
        self.fixed, self.seed, self.index, self.order = fixed, seed, 0, order_of(seed, 0)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, N, BATCH):
            batch = self.order[start : start + BATCH]
            if self.fixed:
                self.index += len(batch)
            if start + BATCH >= N:
                self.order = order_of(self.seed, self.index // N)
            if not self.fixed:
                self.index += len(batch)
            yield batch


def lagging_epoch(fixed: bool) -> Audit:
    return audit(lambda seed=0: Selector(fixed, seed), num_records=N, expect="training")


def first_epoch_of_all_seeds(fixed: bool) -> Audit:
    """DINOv3's epoch sampler multiplies the seed by the epoch."""

    def make(epoch: int, seed: int = 0) -> list[int]:
        return order_of(seed, epoch) if fixed else order_of(seed * epoch)

    return audit(make, num_records=N, expect="training")


def last_records_never(fixed: bool) -> Audit:
    """ms-swift shuffles the first n // world * world records alone."""

    def make(rank: int, world_size: int, epoch: int) -> list[int]:
        even = N - N % world_size
        order = [n for n in order_of(epoch) if fixed or n < even]
        return order[rank:even:world_size]

    return audit(make, num_records=N, expect="training", world_size=(2, 4))


def skipped_shares(fixed: bool) -> Audit:
    """DINOv3's sharded sampler restarts from the first order, however many epochs were had."""

    class Endless:
        def __init__(self, rank: int, world_size: int, start: int) -> None:
            self.share, self.start = range(rank, N, world_size), start

        def __iter__(self) -> Iterator[int]:
            epoch, position = divmod(self.start, len(self.share))
            epoch = epoch if fixed else 0
            while True:
                order = np.random.default_rng(epoch).permutation(self.share)
                yield from order[position:].tolist()
                epoch, position = epoch + 1, 0

    def make(rank: int, world_size: int, start: int = 0) -> Endless:
        return Endless(rank, world_size, start)

    return audit(make, num_records=N, expect="infinite", world_size=(1, 4))


def length_of_another_epoch(fixed: bool) -> Audit:
    """CLIP-ReID and torchreid: `len` is an estimate, and fewer ids come."""

    class Estimated(list[int]):
        def __len__(self) -> int:
            return N if fixed else N + 8

    return audit(lambda epoch: Estimated(order_of(epoch)), num_records=N, expect="training")


@pytest.mark.parametrize(
    ("case", "finding"),
    [
        (second_resume, "after 4 and 4: the rest, from id 0 on"),
        (padded_resume, "start: "),
        (seeds_of_ranks, "coverage: 2 ranks: epoch"),
        (lagging_epoch, "epochs: 0 and 1 have the same order"),
        (first_epoch_of_all_seeds, "seeds: 0 to 3 all give the same epoch 0"),
        (last_records_never, "1 records never came in 3 epochs, such as [102]: the same"),
        (skipped_shares, "start: "),
        (length_of_another_epoch, "len: 1 rank: 111, and [103, 103, 103] came"),
    ],
)
def test_public_faults_are_found_before_their_fix_alone(
    case: Callable[[bool], Audit], finding: str
) -> None:
    before, after = case(False), case(True)
    assert any(finding in found for found in before.findings), before
    assert after.ok, after


class Stateful:
    """A sampler whose state is a position; `fault` is found in what comes after a resumed epoch."""

    def __init__(self, fault: str) -> None:
        self.fault, self.epoch, self.position, self.loaded = fault, 0, 0, False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.position = 0
        self.loaded = False
        for number in order_of(self.epoch)[self.position :]:
            self.position += 1
            yield number
        if self.fault != "the end":  # verl#7401: a run that is resumed there skips an epoch
            self.position = 0
        if self.fault == "skips again":  # open-instruct#681
            self.loaded, self.position = self.first > 0, self.first

    first = 0

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fault == "refused":
            raise ValueError("no state is good enough")
        self.first = self.position = state["position"]
        self.loaded = True


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        ("", None),
        ("the end", "epoch 0, after 103: the next epoch, from id 0 on, is [], not"),
        ("skips again", "epoch 0, after 1: the next epoch, from id 0 on, is"),
    ],
)
def test_what_comes_after_the_end_of_a_resumed_epoch(fault: str, finding: str | None) -> None:
    report = audit(lambda: Stateful(fault), num_records=N, epochs=2)
    assert report.ok == (finding is None), report
    assert finding is None or finding in report.findings[0]


def test_a_state_that_is_refused_is_a_fact() -> None:
    report = audit(lambda: Stateful("refused"), num_records=N)
    assert report.ok
    assert any("no state is good enough" in answer.text for answer in report.answers)
