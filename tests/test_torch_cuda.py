"""Batches on a GPU: each with its own number, so that a race is a wrong number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_help import RECORDS, pack_words

from twinfeed.loaders import Index
from twinfeed.loaders.torch import TorchLoader
from twinfeed.loaders.torch.device import CudaCopier
from twinfeed.samplers import BatchSampler, SequentialSampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

STEPS, ROW = 200, 1 << 18  # a batch of 8 rows is 8 MiB


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"), 8 * STEPS)


def stamped(sample: dict[str, Any]) -> dict[str, Any]:
    """Fill a row with the number of its batch."""
    return {"row": np.full(ROW, sample["id"] // 8, np.float32)}


def loader(index: Index, **options: Any) -> TorchLoader:
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=8)
    return TorchLoader(index, sampler, transform=stamped, **options)


def slow_kernels() -> None:
    """Keep the computing stream so busy that a step runs long after it was called."""
    square = torch.ones(2048, 2048, device="cuda")
    for _ in range(4):
        square = square @ square / 2048


WAYS = [
    {"prefetch": 1},
    {"prefetch": 4},
    {"prefetch": 2, "threads": 4},
    {"prefetch": 2, "num_workers": 2, "multiprocessing_context": "spawn"},
    {"prefetch": 0},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("own_stream", [False, True])
def test_a_slow_step_reads_its_own_batch(
    index: Index, way: dict[str, Any], own_stream: bool
) -> None:
    """Batches are dropped at once, so that their memory is wanted while the step still reads it."""
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), loader(index, **way) as batches:
        for step, batch in enumerate(batches):
            slow_kernels()
            wrong += (batch["row"] != step).sum()
            del batch
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_tensors_go_to_the_device_and_strings_stay(index: Index) -> None:
    batch = next(
        iter(TorchLoader(index, BatchSampler(SequentialSampler(len(index)), batch_size=8)))
    )
    assert batch["id"].device == torch.device("cuda", torch.cuda.current_device())
    assert isinstance(batch["word"], list)


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": np.arange(len(sample["word"]) % 5, dtype=np.float32)}


def test_jagged_tensors_go_to_the_device(index: Index) -> None:
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=8)
    batch = next(iter(TorchLoader(index, sampler, decode=counted, collate="ragged")))
    assert batch["numbers"].device.type == "cuda"
    rows = [row.tolist() for row in batch["numbers"].unbind()]
    assert rows == [list(range(number % 5)) for number in range(8)]


def test_a_source_is_pinned_and_held_until_its_copy_is_done() -> None:
    copier = CudaCopier(torch.device("cuda"))
    prepared = copier.prepare({"x": torch.ones(1 << 24)})
    assert prepared["x"].is_pinned()
    sent = copier.send(prepared)
    assert copier._under_way[0][1] is prepared
    assert copier.receive(sent)["x"].sum().item() == 1 << 24
    copier.send(copier.prepare({"x": torch.ones(1)}))
    assert all(batch is not prepared for _, batch in copier._under_way)
    copier.close()
    assert not copier._under_way


def test_resume_on_the_device(tmp_path: Path) -> None:
    words = pack_words(tmp_path)
    sampler = BatchSampler(SequentialSampler(RECORDS), batch_size=5)
    first = TorchLoader(words, sampler, prefetch=4)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = first.state_dict()
    again = TorchLoader(words, BatchSampler(SequentialSampler(RECORDS), batch_size=5))
    again.load_state_dict(state)
    assert next(iter(again))["id"].tolist() == list(range(10, 15))
