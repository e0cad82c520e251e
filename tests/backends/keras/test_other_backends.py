"""Keras on torch and JAX, in processes of their own: a backend is chosen before the import."""

import json
import os
import subprocess
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from support import PROGRAMS
from support.programs import PYTHON, QUIET
from support.torch_feeds import RECORDS, lengths, pack_words

from twinfeed.loaders import Feed, Index, pack
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"))


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


def loader(index: Index, sampler: BatchStream) -> TorchLoader:
    return TorchLoader(Feed(index, sampler, decode=lengths), device="cpu")


def epochs(*numbers: int) -> list[list[int]]:
    return [ids.tolist() for epoch in numbers for ids in random().batches(epoch, 0, 5)]


def test_keras_on_torch_fits_each_epoch_once_evaluates_and_resumes(tmp_path: Path) -> None:
    """Of a built model and of a model that fit builds from a batch, with workers or not."""
    done = subprocess.run(
        [PYTHON, str(PROGRAMS / "keras_on_torch.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | QUIET | {"KERAS_BACKEND": "torch"},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(said.values()) == [[3, 0], [3, 0]]


def test_abandoned_dataloader_pass_keeps_position(index: Index) -> None:
    one = loader(index, random())
    dataloader = one.dataloader(lambda batch: batch["id"].tolist())
    assert isinstance(dataloader, torch.utils.data.DataLoader)
    assert len(dataloader) == 5
    assert next(iter(dataloader)) == epochs(0)[0]
    assert (one.epoch, one.step) == (0, 0)
    assert list(dataloader) + list(dataloader) == epochs(0, 1)
    assert (one.epoch, one.step) == (2, 0)


def test_position_advances_only_at_last_batch_of_pass(index: Index) -> None:
    """Not the batch before, of which the loop may never ask for the next."""
    one = loader(index, random())
    for epoch in range(2):
        batches = iter(one.dataloader())
        for _ in range(4):
            next(batches)
            assert (one.epoch, one.step) == (epoch, 0)
        next(batches)
        assert (one.epoch, one.step) == (epoch + 1, 0)


def test_dataloader_starts_at_position_of_loader(index: Index) -> None:
    one = loader(index, random())
    received = [batch["id"].tolist() for batch in islice(one, 3)]
    dataloader = one.dataloader(lambda batch: batch["id"].tolist())
    assert received + list(dataloader) + list(dataloader) == epochs(0, 1)
    one.set_epoch(7)
    assert list(dataloader) == epochs(7)


def test_tracked_pass_starts_at_tracked_position(index: Index) -> None:
    one = loader(index, random())
    dataloader = one.dataloader(lambda batch: batch["id"].tolist())
    one.run.track_from(1, 2)
    assert list(dataloader) == epochs(1)[2:]
    assert one.run.started_at(1, 2)
    assert (one.epoch, one.step) == (0, 0)
    assert next(iter(dataloader)) == epochs(2)[0]
    one.run.advance_to(2, 1)
    one.run.stop_tracking()
    assert list(dataloader) == epochs(2)[1:]


def test_evaluation_dataloader_gives_every_record_in_each_pass(index: Index) -> None:
    one = loader(index, ExactOnceBatchSampler(RECORDS, batch_size=7))
    dataloader = one.dataloader(lambda batch: batch["id"].tolist())
    next(iter(dataloader))
    for _ in range(3):
        assert [number for ids in dataloader for number in ids] == list(range(RECORDS))


def test_third_pass_over_one_epoch_warns(index: Index) -> None:
    dataloader = loader(index, random()).dataloader()
    next(iter(dataloader)), next(iter(dataloader))
    with pytest.warns(UserWarning, match="begin epoch 0 for the third time"):
        next(iter(dataloader))


@pytest.mark.filterwarnings("ignore:set_epoch starts epoch 0 again")
def test_second_pass_ends_first_pass_with_error(index: Index) -> None:
    one = loader(index, random())
    for other in (lambda: next(iter(one)), lambda: one.set_epoch(0), one.close):
        first_pass = iter(one.dataloader())
        next(first_pass)
        other()
        with pytest.raises(RuntimeError, match="ended before its last batch"):
            next(first_pass)


def test_next_pass_may_start_at_last_batch(index: Index) -> None:
    """The pass before has nothing left to give, and ends as any other."""
    dataloader = loader(index, random()).dataloader(lambda batch: batch["id"].tolist())
    first_pass = iter(dataloader)
    assert [next(first_pass) for _ in range(5)] == epochs(0)
    other = iter(dataloader)
    assert next(other) == epochs(1)[0]
    assert list(first_pass) == []
    assert list(other) == epochs(1)[1:]


def test_dataloader_prepared_by_accelerate_is_refused(index: Index) -> None:
    """Accelerate's reads one batch ahead of the loop, which the loader would count."""
    one = loader(index, random())
    for made in (
        Accelerator(cpu=True).prepare(one.dataloader()),
        skip_first_batches(one.dataloader(), 2),
    ):
        with pytest.raises(TypeError, match="give the trainer the TorchLoader itself"):
            next(iter(made))
    assert not hasattr(one, "dataset")


BACKENDS = {
    "torch": ["torch", "tensorflow", "numpy"],
    "jax": ["torch", "tensorflow", "numpy", "jax"],
    "tensorflow": ["boxes", "torch"],
}


@pytest.mark.long
@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_killed_and_resumed_fit_equals_uninterrupted_fit(backend: str, tmp_path: Path) -> None:
    """Killed in the first epoch or in the second, whatever framework the loader is for.

    Started again after its end, the run trains nothing, and has the same model and history.
    The whole ones evaluate too, and try batches that are refused.
    """
    pack(({"part": np.float32(number / 20)} for number in range(20)), tmp_path)
    runs, ends = [], []
    for number, framework in enumerate(BACKENDS[backend]):
        whole = framework in ("torch", "tensorflow")
        killed = ("cut", 3 if number % 2 else 8, -9)
        names = [killed, ("cut", 0, 0), ("cut", 0, 0), *[("whole", 0, 0)] * whole]
        runs += [word for name, steps, _ in names for word in (framework, name, str(steps))]
        ends += [f"{framework} {name} {end}" for name, _, end in names]
    done = subprocess.run(
        [PYTHON, str(PROGRAMS / "keras_across.py"), str(tmp_path), *runs],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | QUIET | {"KERAS_BACKEND": backend},
    )
    lines = done.stdout.splitlines()
    results = [line for line in lines if line.startswith("[")]
    assert [line for line in lines if line not in results] == ends, done.stderr
    assert len({*results}) == 1
