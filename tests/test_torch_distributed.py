"""Two processes started by torchrun give one process's metrics."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_evaluation.py"


def run(command: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": "29517"}
    done = subprocess.run(
        [sys.executable, *command, str(EXAMPLE), "--data", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_evaluate_like_one(tmp_path: Path) -> None:
    one = run([], tmp_path)
    assert one.startswith("1 processes: 761 records, each once; loss ")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    two = run(launcher, tmp_path)
    assert two.partition(": ")[2] == one.partition(": ")[2]
