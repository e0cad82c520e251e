"""Batches on a GPU: each with its own number, so that a race is a wrong number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_feeds import RECORDS, pack_words

from twinfeed.loaders import Feed, Index
from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import recipe_of
from twinfeed.loaders.torch import TorchLoader
from twinfeed.loaders.torch._copier import CudaCopier
from twinfeed.loaders.torch.dataset import as_unjoined_tensors
from twinfeed.samplers import BatchSampler, SequentialSampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

STEPS, ROW = 60, 1 << 18  # a batch of 8 rows is 8 MiB
SIZE = 1 << 20  # floats of one tensor, whose sum is exact
TICKS = 40_000_000  # of the device's clock: some 20 ms, longer than the loader takes for a batch


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"), 8 * STEPS)


def stamped(sample: dict[str, Any]) -> dict[str, Any]:
    """Fill a row with the number of its batch."""
    return {"row": np.full(ROW, sample["id"] // 8, np.float32)}


def loader(index: Index, **options: Any) -> TorchLoader:
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=8)
    return TorchLoader(Feed(index, sampler, transform=stamped), **options)


WAYS = [
    {"prefetch": 1},
    {"prefetch": 4},
    {"prefetch": 2, "threads": 4},
    {"prefetch": 2, "num_workers": 2, "multiprocessing_context": "spawn"},
    {"prefetch": 0},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("own_stream", [False, True])
def test_slow_step_reads_its_own_batch(index: Index, way: dict[str, Any], own_stream: bool) -> None:
    """Batches are dropped at once, so that their memory is wanted while the step still reads it."""
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), loader(index, **way) as batches:
        for step, batch in enumerate(batches):
            torch.cuda._sleep(TICKS)
            wrong += (batch["row"] != step).sum()
            del batch
    torch.cuda.synchronize()
    assert wrong.item() == 0


def test_tensors_are_copied_to_device_and_strings_stay(index: Index) -> None:
    batch = next(
        iter(TorchLoader(Feed(index, BatchSampler(SequentialSampler(len(index)), batch_size=8))))
    )
    assert batch["id"].device == torch.device("cuda", torch.cuda.current_device())
    assert isinstance(batch["word"], list)


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": np.arange(len(sample["word"]) % 5, dtype=np.float32)}


def test_jagged_tensors_are_copied_to_device(index: Index) -> None:
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=8)
    batch = next(iter(TorchLoader(Feed(index, sampler, decode=counted, collate="ragged"))))
    assert batch["numbers"].device.type == "cuda"
    rows = [row.tolist() for row in batch["numbers"].unbind()]
    assert rows == [list(range(number % 5)) for number in range(8)]


def test_step_waits_for_late_copy() -> None:
    copier = CudaCopier(torch.device("cuda"))
    prepared = copier.prepare({"x": torch.ones(SIZE)})
    with torch.cuda.stream(copier.stream):
        stale = torch.full((SIZE,), -1.0, device="cuda")
    address = stale.data_ptr()
    del stale  # its memory is the copying stream's again
    torch.ones(SIZE, device="cuda").sum()  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.stream(copier.stream):
        torch.cuda._sleep(TICKS)
    got = copier.receive(copier.send(prepared))["x"]
    assert got.data_ptr() == address  # else the test shows nothing
    assert got.sum().item() == SIZE


def test_memory_in_use_by_step_is_not_reused_by_later_copy() -> None:
    copier = CudaCopier(torch.device("cuda"))
    sources = [copier.prepare({"x": torch.full((SIZE,), float(number))}) for number in range(8)]
    torch.ones(SIZE, device="cuda").sum()
    torch.cuda.synchronize()
    sums = []
    for source in sources:
        batch = copier.receive(copier.send(source))
        torch.cuda._sleep(TICKS)
        sums.append(batch["x"].sum())
        del batch
    assert [one.item() / SIZE for one in sums] == list(range(8))


def test_dropped_source_tensor_is_copied_completely() -> None:
    copier = CudaCopier(torch.device("cuda"))
    with torch.cuda.stream(copier.stream):
        torch.cuda._sleep(TICKS)
    got = []
    for number in range(8):
        prepared = copier.prepare({"x": torch.full((SIZE,), float(number))})
        assert prepared["x"].is_pinned()
        got.append(copier.receive(copier.send(prepared))["x"])
        del prepared  # the next one would have its memory
    assert [one.sum().item() / SIZE for one in got] == list(range(8))


def test_dropped_pinned_batch_is_copied_completely() -> None:
    copier = CudaCopier(torch.device("cuda"))
    with torch.cuda.stream(copier.stream):
        torch.cuda._sleep(TICKS)
    got = []
    for number in range(8):
        array = copier.empty((SIZE,), np.dtype(np.float32))
        array[:] = number
        prepared = copier.prepare({"x": torch.from_numpy(array)})
        assert prepared["x"].data_ptr() == array.ctypes.data  # it was pinned
        got.append(copier.receive(copier.send(prepared))["x"])
        del array, prepared  # the next one would have its memory
    assert [one.sum().item() / SIZE for one in got] == list(range(8))


@pytest.mark.parametrize("how", ["stack", "pad", "ragged"])
def test_batches_are_collated_into_pinned_memory(index: Index, how: Any) -> None:
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=8)
    copier = CudaCopier(torch.device("cuda"))
    feed = Feed(index, sampler, transform=stamped, collate=how)
    batch = Batcher(recipe_of(feed), empty=copier.empty)(next(feed.requests()))
    parts = as_unjoined_tensors(batch)
    row = parts["row"].values if how == "ragged" else parts["row"]
    assert row.is_pinned()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.arange(6, dtype=torch.float64).view(2, 3),
        torch.arange(6).view(2, 3).T,
        torch.ones(4, 3, 2, dtype=torch.float16).to(memory_format=torch.contiguous_format)[::2],
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.empty(0, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_prepared_tensor_is_pinned_and_equal(tensor: torch.Tensor) -> None:
    prepared = CudaCopier(torch.device("cuda")).prepare({"x": tensor})["x"]
    assert prepared.is_pinned() or not tensor.numel()
    assert prepared.dtype == tensor.dtype
    assert torch.equal(prepared, tensor)


def test_passes_share_one_copy_stream() -> None:
    first, second = CudaCopier(torch.device("cuda")), CudaCopier(torch.device("cuda:0"))
    assert first.device == second.device
    assert first.stream == second.stream


def test_loader_on_device_resumes_at_saved_step(tmp_path: Path) -> None:
    words = pack_words(tmp_path)
    sampler = BatchSampler(SequentialSampler(RECORDS), batch_size=5)
    first = TorchLoader(Feed(words, sampler), prefetch=4)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = first.state_dict()
    again = TorchLoader(Feed(words, BatchSampler(SequentialSampler(RECORDS), batch_size=5)))
    again.load_state_dict(state)
    assert next(iter(again))["id"].tolist() == list(range(10, 15))
