"""Samplers with collectives, whose ranks are processes; a rank that dies or hangs is named."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from twinfeed.testing import audit

pytestmark = pytest.mark.frameworks
N = 40


def agreed(rank: int, world_size: int) -> list[int]:
    """Rank 0 draws the order, and broadcasts it."""
    import torch
    import torch.distributed as dist

    order = torch.randperm(N, generator=torch.Generator().manual_seed(rank))
    if world_size > 1:
        dist.broadcast(order, src=0)
    return order[rank::world_size].tolist()  # type: ignore[no-any-return]


def dies(rank: int, world_size: int) -> list[int]:
    if rank == 1:
        os._exit(7)
    if world_size > 1:
        time.sleep(1000)
    return []


@pytest.mark.long
def test_collectives_run_in_processes_alone() -> None:
    report = audit(agreed, num_records=N, expect="training")
    assert "if it is a collective of torch.distributed, pass processes=True" in report.findings[0]
    report = audit(agreed, num_records=N, expect=None, processes=True)
    assert any(
        answer[:2] == ("coverage", "2 ranks: each record once in each epoch")
        for answer in report.answers
    ), report
    assert report.ok, report


def test_ranks_alone_leave_out_what_needs_one_process() -> None:
    report = audit(agreed, num_records=N, world_size=2, processes=True)
    assert "add 1 to world_size" in report.not_asked["random"]
    assert report.ok, report


def test_a_rank_that_dies_is_named() -> None:
    report = audit(dies, num_records=N, world_size=2, processes=True)
    assert "rank 1 of 2: a worker process ended with exit code 7" in report.findings[0]


def test_a_function_that_does_not_pickle_is_named() -> None:
    def make(rank: int, world_size: int) -> Any:
        return range(rank, N, world_size)

    report = audit(make, num_records=N, world_size=2, processes=True)
    assert "make must be at the top level of a module, to pickle" in report.findings[0]
