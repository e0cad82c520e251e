"""Processes of torch: the ranks that torch knows of, and what torchrun starts gets warnings."""

from pathlib import Path

import pytest
import torch.distributed
from support import PROGRAMS
from support.programs import run

from twinfeed.samplers.processes import num_processes


def test_world_size_is_read_from_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a program that has samplers and torch, but no loader of this library."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert num_processes() == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert num_processes() == 3


def test_two_ranks_warn_of_one_stream_and_share_last_batch(tmp_path: Path) -> None:
    out = run(PROGRAMS / "two_ranks.py", "--data", str(tmp_path), ranks=2)
    assert out.count("of 2: as it must be") == 2
