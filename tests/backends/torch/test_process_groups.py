"""torch's own sampler as any rank of any number of ranks, in one process: no false alarm."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import mark_long
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from twinfeed.testing import audit

SIZES = [range(first, min(first + 43, 301)) for first in range(0, 301, 43)]


@pytest.mark.parametrize("world_size", mark_long(range(1, 9), but_every=4, first=1))
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sizes", mark_long(SIZES, but_every=7), ids=str)
def test_no_false_alarm_over_distributed_sampler(
    sizes: range, drop_last: bool, world_size: int
) -> None:
    for n in sizes:

        def make(rank: int, world_size: int, seed: int = 0, n: int = n) -> Any:
            return DistributedSampler(range(n), world_size, rank, seed=seed, drop_last=drop_last)

        report = audit(make, num_records=n, expect="training", world_size=world_size)
        assert report.ok, report


def shuffled(workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        range(40), batch_size=4, shuffle=True, num_workers=workers, generator=generator
    )


@pytest.mark.parametrize(
    ("make", "finding"),
    [
        pytest.param(shuffled, None, marks=pytest.mark.long),
        (lambda: torch.randperm(40), None),
        (lambda: torch.arange(40).view(10, 4), None),
        (lambda: [(torch.arange(20), torch.arange(20, 40))], None),
        (lambda: [torch.zeros(2, dtype=torch.long, device="meta")], "an item has no ids: TypeE"),
        (lambda: [{"id": torch.arange(40)}], "an item has no ids: dict"),
        (lambda: [torch.rand(4)], "an item has no ids: Tensor"),
    ],
)
def test_tensors_are_ids(make: Callable[..., Any], finding: str | None) -> None:
    report = audit(make, num_records=40, expect="evaluation")
    assert report.ok == (finding is None), report
    assert finding is None or finding in report.findings[0]


def test_the_global_state_of_torch_decides_the_order_of_random_sampler() -> None:
    before = torch.get_rng_state()
    report = audit(lambda: RandomSampler(range(40)), num_records=40)
    texts = [answer.text for answer in report.answers if answer.question == "random"]
    assert texts == [
        "the global random state decides the order: pass a seed, or a generator",
        "draws from the global state of torch",
    ]
    assert torch.equal(before, torch.get_rng_state())


def test_a_sampler_that_asks_torch_for_its_rank_runs_as_each() -> None:
    """Nothing of it is left afterwards."""
    hook = sys.excepthook

    def make(seed: int = 0) -> Any:
        if dist.is_initialized():
            return DataLoader(range(40), batch_size=4, sampler=DistributedSampler(range(40)))
        return DataLoader(range(40), batch_size=4, shuffle=True)

    report = audit(make, num_records=40, expect="training", world_size=(1, 2, 4))
    coverage = [answer.text for answer in report.answers if answer.question == "coverage"]
    assert [text.partition(":")[0] for text in coverage] == ["1 rank", "2 ranks", "4 ranks"]
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_sampler_that_needs_a_process_group_has_one_for_one_rank_too() -> None:
    """Without a guard. A collective of one rank gives what it got."""

    def make(epoch: int) -> list[int]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, epoch)
        generator = torch.Generator().manual_seed(values[0])
        return torch.randperm(40, generator=generator)[dist.get_rank() :: len(values)].tolist()  # type: ignore[no-any-return]

    report = audit(make, num_records=40, expect="training")
    assert report.ok, report
    assert "pass processes=True" in report.not_asked["2 ranks"]
    assert not dist.is_initialized()
