"""Every sampler in the loaders of torch and torchdata: the ids of NumpyLoader."""

import copy
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from support.cases import mark_long
from support.refusals import Call, Refused, check_refused
from support.sampler_cases import CASES
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.loaders import Feed, NumpyLoader
from twinfeed.loaders.torch import TorchSampler
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    StateMismatchError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
STARTS = [(0, None), (2, "fork")]
SLOW = [pytest.param(2, how, marks=pytest.mark.long) for how in ("forkserver", "spawn")]
SMALL = [(name, make) for name, make in CASES if 0 < make().num_records < 1000]
LABELS = np.arange(96) % 8


class Numbers(Dataset[int]):
    """Record number n is n."""

    def __init__(self, records: int = 96) -> None:
        self.records = records

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, number: int) -> int:
        return int(number)


def ids_of(sampler: BatchStream, epochs: int = 2) -> list[list[int]]:
    """Return the ids that a NumpyLoader gives."""
    loader = NumpyLoader(Feed({"x": np.zeros(sampler.num_records)}, sampler))
    return [batch["id"].tolist() for _ in range(epochs) for batch in loader]


def received(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("make", [make for _, make in SMALL], ids=[name for name, _ in SMALL])
def test_every_batch_sampler_gives_its_ids_or_is_refused(make: Callable[[], BatchStream]) -> None:
    sampler = TorchSampler(make())
    loader = DataLoader(Numbers(make().num_records), batch_sampler=sampler)
    if make().traits.padded or make().traits.num_ids is not None:
        with pytest.raises(TypeError, match="not record ids"):
            received(loader)
        return
    assert all(type(batch) is list and type(batch[0]) is int for batch in sampler)
    sampler.set_epoch(0)
    assert [ids for _ in range(2) for ids in received(loader)] == ids_of(make())


@pytest.mark.parametrize(("workers", "how"), [*STARTS, *SLOW])
@pytest.mark.parametrize("wrapped", [False, True])
def test_workers_of_any_start_method_give_equal_batches(
    wrapped: bool, workers: int, how: str | None
) -> None:
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": how}
    wrap: Any = TorchSampler if wrapped else lambda sampler: sampler
    order, p_by_k = RandomSampler(Numbers(), seed=3), PKBatchSampler(LABELS, p=3, k=2, seed=3)
    for loader, expected in (
        (
            DataLoader(Numbers(), batch_size=12, sampler=wrap(order), **options),
            BatchSampler(order, batch_size=12),
        ),
        (DataLoader(Numbers(), batch_sampler=wrap(p_by_k), **options), p_by_k),
    ):
        assert [ids for _ in range(2) for ids in received(loader)] == ids_of(copy.copy(expected))


@pytest.mark.parametrize(
    ("batches", "workers", "how"),
    mark_long([(batches, *start) for batches in (False, True) for start in STARTS], but_every=3),
)
def test_stateful_dataloaders_resume_at_every_step(
    batches: bool, workers: int, how: str | None
) -> None:
    def sampler() -> TorchSampler:
        order = RandomSampler(Numbers(), seed=3)
        return TorchSampler(BatchSampler(order, batch_size=16) if batches else order)

    def loader() -> StatefulDataLoader[Any]:
        part: Any = {"batch_sampler": sampler()} if batches else {"batch_size": 16}
        part |= {} if batches else {"sampler": sampler()}
        options = {"num_workers": workers, "multiprocessing_context": how}
        return StatefulDataLoader(Numbers(), **part, **options)

    whole = ids_of(BatchSampler(RandomSampler(96, seed=3), batch_size=16), epochs=3)
    for stop in range(1, 7) if not workers else (1, 4, 6):
        first = loader()
        running = iter(first)
        assert [next(running).tolist() for _ in range(stop)] == whole[:stop]
        state = copy.deepcopy(first.state_dict())
        later = loader()
        later.load_state_dict(state)
        rest = received(later)
        assert stop + len(rest) in (6, 12)  # after the last batch comes the next epoch
        assert rest + received(later) == whole[stop : stop + len(rest) + 6]


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, TorchSampler])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"batch_size": 8, "drop_last": True}])
def test_torch_does_not_make_batches_of_batches(wrap: Any, kind: Any, options: Any) -> None:
    """Over arrays they would have another shape, without a word."""
    sampler = wrap(PKBatchSampler(LABELS, p=4, k=2, seed=0))
    with pytest.raises(TypeError, match=r"batches of the batches of PK.*batch_sampler="):
        next(iter(kind(torch.arange(96), sampler=sampler, **options)))


class Repeated:
    """A sampler without an end, as hosts have around a batch sampler; it has a `sampler`, too."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


class Shards(torch.utils.data.BatchSampler):
    """A class of a host that derives from torch's, and iterates over a batch sampler by itself."""

    def __iter__(self) -> Any:
        return iter(self.sampler)


def test_other_code_iterates_over_batch_samplers() -> None:
    def sampler() -> PKBatchSampler:
        return PKBatchSampler(LABELS, p=3, k=2, seed=3)

    rows, whole = torch.arange(96), ids_of(sampler())
    hosts: list[Any] = [Repeated(sampler()), Shards(sampler(), 1, False)]  # type: ignore[arg-type]
    for host in hosts:
        assert received(islice(DataLoader(rows, batch_sampler=host), 16)) == whole[:16]
    assert received(DataLoader(rows, sampler=sampler(), batch_size=None)) == whole[:16]


def test_state_of_rank_loads_at_any_world_size() -> None:
    order = RandomSampler(96, seed=3)
    ranks = [TorchSampler(order.shard(rank, 2)) for rank in range(2)]
    ids = [iter(rank) for rank in ranks]
    for _ in range(9):
        drawn = [next(rank) for rank in ids]
    state = json.loads(json.dumps(ranks[0].state_dict()))
    assert drawn == order.ids(0, [16, 17]).tolist()
    for rank in range(3):
        later = TorchSampler(order.shard(rank, 3))
        later.load_state_dict(state)
        assert list(later) == order.ids(0, np.arange(18 + rank, 96, 3)).tolist()
    with pytest.raises(StateMismatchError):
        TorchSampler(RandomSampler(96, seed=4)).load_state_dict(state)


def test_accelerate_splits_batches_and_keeps_sampler() -> None:
    """Two ranks get whole batches in turn; a torch RandomSampler would get another seed."""
    sampler = PKBatchSampler(LABELS, p=3, k=2, seed=3, batches_per_epoch=8)
    parts = [
        prepare_data_loader(
            DataLoader(Numbers(), batch_sampler=TorchSampler(sampler)),
            num_processes=2,
            process_index=rank,
            put_on_device=False,
        )
        for rank in range(2)
    ]
    whole = ids_of(PKBatchSampler(LABELS, p=3, k=2, seed=3, batches_per_epoch=8), epochs=1)
    for rank, part in enumerate(parts):
        part.set_epoch(0)
        sampler.set_epoch(0)
        assert received(part) == whole[rank::2]


def test_torch_sampler_is_no_class_that_trainers_replace() -> None:
    sampler = TorchSampler(RandomSampler(8, seed=0))
    assert isinstance(sampler, torch.utils.data.Sampler)
    replaced = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
    assert not isinstance(sampler, (*replaced, torch.utils.data.BatchSampler))
    assert len(sampler) == 8
    assert not hasattr(sampler, "batch_size")
    assert sampler.sampler is sampler
    assert [(sampler.epoch, len(list(sampler))) for _ in range(2)] == [(0, 8), (1, 8)]
    batches = TorchSampler(BatchSampler(RandomSampler(8, seed=0), batch_size=4))
    assert (len(batches), batches.batch_size, batches.drop_last) == (2, 4, True)


REFUSED: Refused = [
    (lambda _: TorchSampler(torch.utils.data.SequentialSampler(range(3))), TypeError, "Sequential"),
    (lambda _: TorchSampler(Numbers()), TypeError, "got a Numbers"),
    (lambda _: TorchSampler(8), TypeError, "twinfeed.samplers, got an int"),
    (lambda _: TorchSampler(TorchSampler(RandomSampler(8, seed=0))), TypeError, "TorchSampler"),
    (
        lambda _: TorchSampler(ExactOnceBatchSampler(8, batch_size=4).shard(0, 2)).drop_last,
        TypeError,
        "already is rank 0",
    ),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_torch_sampler_refuses_bad_arguments(
    tmp_path: Any, call: Call, kind: type[Exception], word: str
) -> None:
    check_refused(tmp_path, call, kind, word)
