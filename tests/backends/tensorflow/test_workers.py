"""`tf.distribute` over devices and over processes: whole classes of P x K, and records once."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import PROGRAMS
from support.programs import run


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_distribute(tmp_path: Path, workers: int) -> None:
    """P x K by whole classes, and 761 records exactly once, over two replicas."""
    script = PROGRAMS / "tensorflow_workers.py"
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


def test_cluster_trains_on_each_record_once_or_is_refused(tmp_path: Path) -> None:
    """Two real processes, and `experimental_distribute_dataset`, as `fit` calls it."""
    run(PROGRAMS / "tensorflow_cluster.py", "--out", str(tmp_path))
    one, other = (json.loads((tmp_path / f"worker-{n}.json").read_text()) for n in range(2))
    for mine, theirs in zip(one["training"]["ids"], other["training"]["ids"], strict=True):
        assert len(mine) == len(theirs) == 4
    trained = [n for found in (one, other) for ids in found["training"]["ids"] for n in ids]
    assert sorted(trained) == list(range(80))
    for found in (one, other):
        assert found["training"]["warned"] == []
        assert "would divide the batches of rank 1 of 2 again" in found["rank"]["error"]
        assert "would divide classes" in found["classes"]["error"]
        assert "distribute_datasets_from_function(loader.dataset_for)" in found["classes"]["error"]
        assert found["rank"]["ids"] == found["classes"]["ids"] == []
        (said,) = found["evaluation"]["warned"]
        assert "each of 2 processes gets a part of each batch" in said
        (said,) = found["own files"]["warned"]
        assert "each of 2 processes gets batches of its own" in said
        assert sum(map(len, found["own files"]["ids"])) == 80
        assert list(map(len, found["loop"]["ids"])) == [4] * 10
        (said,) = found["tracked all"]["warned"]
        assert "there are 2 ranks, and each gets every batch" in said
        assert sum(map(len, found["tracked all"]["ids"])) == 80
    for how in ("tracked cut", "tracked by rank"):
        both = (one[how]["ids"], other[how]["ids"])
        assert sorted(n for ids in both for batch in ids for n in batch) == list(range(80))
        assert one[how]["warned"] == other[how]["warned"] == []
