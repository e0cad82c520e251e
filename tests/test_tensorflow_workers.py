"""`tf.distribute` over devices and over processes: whole classes of P x K, and records once."""

import json
from pathlib import Path
from typing import Any

import pytest
from launching import run


@pytest.mark.parametrize("workers", [0, 2])
def test_distribute(tmp_path: Path, workers: int) -> None:
    """P x K by whole classes, and 761 records exactly once, over two replicas."""
    script = Path(__file__).parent / "tensorflow_workers.py"
    shown = run(script, "--out", str(tmp_path), "--workers", str(workers))
    results: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("worker-*.json"))
    ]
    assert len(results) == max(1, workers)
    assert shown.count("accuracy over all 761") == len(results)
    for batches in zip(*(result["labels"] for result in results), strict=True):
        replicas = [labels for parts in batches for labels in parts]
        classes = [labels[::4] for labels in replicas]
        assert [sorted(part * 4) for part in classes] == [sorted(labels) for labels in replicas]
        assert len({label for part in classes for label in part}) == 6
    evaluated = [record for result in results for record in result["evaluated"]]
    assert sorted(evaluated) == list(range(761))
    assert len({result["accuracy"] for result in results}) == 1
