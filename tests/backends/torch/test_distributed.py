"""Processes started by torchrun get warnings."""

from pathlib import Path

from support import PROGRAMS
from support.programs import run


def test_two_ranks_are_told_of_one_stream_and_share_out_the_last_batch(tmp_path: Path) -> None:
    out = run(PROGRAMS / "two_ranks.py", "--data", str(tmp_path), ranks=2)
    assert out.count("of 2: as it must be") == 2
