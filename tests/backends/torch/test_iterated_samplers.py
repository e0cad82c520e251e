"""Samplers in the place of torch's own: DataLoader, StatefulDataLoader and Subset."""

from __future__ import annotations

import copy
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from support.cases import mark_long
from torch.utils.data import DataLoader, Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.samplers import IdSequence, RandomSampler, Sampler, SequentialSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

RECORDS = 1003


class Numbers(Dataset[int]):
    """Record number n is n, for a Python int alone."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, number: int) -> int:
        assert type(number) is int
        return number


def sampler() -> Sampler:
    return RandomSampler(Numbers(), seed=5)


def order(epoch: int) -> list[int]:
    ids: list[int] = sampler().ids(epoch, np.arange(RECORDS)).tolist()
    return ids


def received(batches: Any) -> list[int]:
    return list(chain.from_iterable(batch.tolist() for batch in batches))


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_gives_consecutive_epochs(workers: int) -> None:
    loader = DataLoader(Numbers(), batch_size=10, sampler=sampler(), num_workers=workers)
    assert [received(loader) for _ in range(3)] == [order(epoch) for epoch in range(3)]


@pytest.mark.parametrize(
    ("workers", "stop"),
    [
        *((0, stop) for stop in (0, 1, 57, 101)),
        *mark_long([(2, 57), (2, 0), (2, 1), (2, 101)], but_every=4),
    ],
)
def test_stateful_dataloader_resumes_after_received_batches(workers: int, stop: int) -> None:
    """Its workers have drawn ahead; sampler and iterator are both loaded."""

    def loader() -> StatefulDataLoader[int]:
        options = {"batch_size": 10, "sampler": sampler(), "num_workers": workers}
        return StatefulDataLoader(Numbers(), **options)

    first = loader()
    running = iter(first)
    seen = received(islice(running, stop))
    state = copy.deepcopy(first.state_dict())
    resumed = loader()
    resumed.load_state_dict(state)
    rest, after = received(resumed), received(resumed)
    epochs = [*order(0), *order(1), *order(2)]
    assert seen + rest + after == epochs[: len(seen + rest + after)]
    assert len(seen + rest) % RECORDS == 0


def test_rank_dataloaders_share_global_batch_as_a_set() -> None:
    """Step s of W ranks holds the positions from sWb to (s + 1)Wb."""
    ranks = [sampler().shard(rank, 3, uneven="drop") for rank in range(3)]
    loaders = [DataLoader(Numbers(), batch_size=8, sampler=rank) for rank in ranks]
    assert [len(loader) for loader in loaders] == [42] * 3
    for step, batches in enumerate(zip(*loaders, strict=True)):
        assert set(received(batches)) == set(order(0)[: RECORDS - 1][24 * step : 24 * (step + 1)])


def test_subset_of_id_sequence_has_all_epochs() -> None:
    ids = IdSequence(sampler(), epochs=2)
    for workers in (0, 2):
        loader = DataLoader(Subset(Numbers(), ids[990:]), batch_size=16, num_workers=workers)
        assert received(loader) == [*order(0), *order(1)][990:]


def test_sequential_sampler_may_be_peeked_without_warning(recwarn: Any) -> None:
    """An order that is the same in every epoch needs no epoch to be named."""
    loader = DataLoader(Numbers(), batch_size=10, sampler=SequentialSampler(Numbers()))
    for _ in range(4):
        next(iter(loader))
    assert not recwarn.list


def test_hugging_face_dataset_selects_ids_of_sequence() -> None:
    import datasets

    data = datasets.Dataset.from_dict({"number": list(range(RECORDS))})
    ids = IdSequence(sampler(), epochs=2)
    assert list(data.select(ids)["number"]) == [*order(0), *order(1)]
    assert list(data.select(ids[RECORDS : RECORDS + 9])["number"]) == order(1)[:9]
