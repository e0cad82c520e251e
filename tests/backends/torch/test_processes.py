"""What torch knows of processes."""

import pytest
import torch.distributed

from twinfeed.loaders.torch import _processes
from twinfeed.samplers.processes import num_processes


def test_the_ranks_of_a_process_group_count_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (_processes.world_size(), num_processes()) == (1, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert (_processes.world_size(), num_processes()) == (3, 3)
