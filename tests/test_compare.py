"""The comparison finds nothing where there is nothing, and says what differs where it does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import Index, LoaderError, compare, pack
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, RandomSampler


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    samples = [{"word": b"x" * number, "label": number % 3} for number in range(20)]
    return pack(samples, tmp_path_factory.mktemp("words"))["data"]


def measure(sample: dict[str, Any]) -> dict[str, Any]:
    length = len(sample["word"])
    return {"size": np.float32(length), "ones": np.ones(length), "word": sample["word"]}


def a_bit_off(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "size": batch["size"] + 0.5 * (batch["size"] > 9)}


@pytest.mark.frameworks
def test_the_frameworks_receive_the_same(index: Index) -> None:
    sampler = BatchSampler(RandomSampler(20, seed=1), batch_size=6)
    found = compare(
        index,
        sampler,
        backends=["plain", "torch", "tensorflow"],
        batches=6,
        decode=measure,
        collate={"ones": "ragged"},
    )
    assert found.equal, str(found)
    assert [run.records for run in found.runs] == [20 + 6 + 6] * 3
    assert all(run.rate > 0 and run.first > 0 and run.memory > 1 << 20 for run in found.runs)
    assert "word: the same" in str(found)


@pytest.mark.frameworks
def test_a_difference_is_found_and_measured(index: Index) -> None:
    sampler = ExactOnceBatchSampler(20, batch_size=5)
    maps = {"torch": a_bit_off}
    found = compare(
        index,
        sampler,
        backends=["plain", "torch"],
        decode=measure,
        maps=maps,
        collate={"ones": "pad"},
    )
    assert not found.equal
    assert (found.differing, found.worst) == ({"size": 2}, {"size": 0.5})
    assert "size: differs in 2 of 4 batches, by 0.5 at most" in str(found)


@pytest.mark.parametrize("backends", [["torch"], ["torch", "jax"]])
def test_other_backends_are_refused(index: Index, backends: list[str]) -> None:
    with pytest.raises(ValueError, match="at least two of plain, torch, tensorflow, got"):
        compare(index, ExactOnceBatchSampler(20, batch_size=5), backends=backends)


def test_callables_that_another_process_cannot_have_are_refused(index: Index) -> None:
    sampler = ExactOnceBatchSampler(20, batch_size=5)
    with pytest.raises(LoaderError, match="define the functions that you pass in a module"):
        compare(index, sampler, backends=["plain", "plain"], decode=lambda sample: sample)
    code = f"""if True:
        from twinfeed.loaders import compare, open_index
        from twinfeed.samplers import ExactOnceBatchSampler
        def decode(sample):
            return sample
        index = open_index({str(index.path)!r})
        compare(index, ExactOnceBatchSampler(20, batch_size=5), decode=decode)
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "WorkerDiedError: a backend's process ended" in done.stderr
    assert "what to do: define the functions that you pass in a module" in done.stderr


def test_what_a_backend_raises_is_raised(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="made for 19 records"):
        compare(index, ExactOnceBatchSampler(19, batch_size=5), backends=["plain", "torch"])
