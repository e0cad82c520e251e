"""Processes started by torchrun give one process's metrics, and are told of what goes wrong."""

from pathlib import Path

from launching import run, run_example


def test_any_number_of_ranks_evaluates_like_one(tmp_path: Path) -> None:
    one = run_example("ddp_evaluation.py", tmp_path)
    assert one.startswith("1 processes: 761 records, each once; loss ")
    three = run_example("ddp_evaluation.py", tmp_path, ranks=3)  # which divide no batch
    assert three.partition(": ")[2] == one.partition(": ")[2]


def test_two_ranks_are_told_of_one_stream_and_share_out_the_last_batch(tmp_path: Path) -> None:
    out = run(Path(__file__).parent / "two_ranks.py", "--data", str(tmp_path), ranks=2)
    assert out.count("of 2: as it must be") == 2
