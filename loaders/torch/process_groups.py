"""Process groups of torch.distributed, to run samplers as ranks: pretended, or of processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist


@contextmanager
def pretended_group(rank: int, world_size: int) -> Iterator[None]:
    """Let `torch.distributed` say that this is a rank of `world_size`; collectives raise."""
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # torch wraps it again for each group
    try:
        # Private: of torch's own tests, and the only group without processes.
        from torch._C._distributed_c10d import FakeProcessGroup
        from torch.testing._internal.distributed.fake_pg import FakeStore

        new_options: Any = FakeProcessGroup.Options
        options = new_options()
        options.error_on_collective = world_size > 1
    except (ImportError, AttributeError):
        yield
        return
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size, pg_options=options
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook


def join_group(path: str, rank: int, world_size: int, seconds: float) -> None:
    """Join a process group of gloo, whose processes meet at a file."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        timeout=timedelta(seconds=seconds),
        rank=rank,
        world_size=world_size,
    )
