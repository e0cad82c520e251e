"""Two processes started by torchrun give one process's metrics."""

from pathlib import Path

from launching import run_example


def test_two_ranks_evaluate_like_one(tmp_path: Path) -> None:
    one = run_example("ddp_evaluation.py", tmp_path)
    assert one.startswith("1 processes: 761 records, each once; loss ")
    two = run_example("ddp_evaluation.py", tmp_path, ranks=2)
    assert two.partition(": ")[2] == one.partition(": ")[2]
