"""Samplers alone in torch's own DataLoader, and in the trainers that take a DataLoader."""

import copy
from itertools import islice
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    ViewSampler,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Numbers(Dataset[int]):
    """Record number n is n."""

    def __getitem__(self, number: int) -> int:
        return int(number)

    def __len__(self) -> int:
        return 761


def random() -> BatchStream:
    """Return a stream of twelve steps, more than two workers draw ahead."""
    return BatchSampler(RandomSampler(761, seed=5), batch_size=64)


def evaluation() -> BatchStream:
    """Return the classic case: a prime number of records."""
    return ExactOnceBatchSampler(761, batch_size=64)


def loader(sampler: BatchStream, workers: int) -> DataLoader[Any]:
    """Return a plain DataLoader."""
    return DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)


def lists(batches: Any) -> list[list[int]]:
    """Return batches as lists."""
    return [batch.tolist() for batch in batches]


def epochs(*numbers: int) -> list[list[int]]:
    """Return the batches of some epochs of the random stream."""
    return [ids for epoch in numbers for ids in lists(random().batches(epoch, 0, 12))]


@WORKERS
def test_evaluation_gives_every_record_after_peeks(workers: int) -> None:
    """Whoever peeked, and however often: each pass is whole."""
    dataloader = loader(evaluation(), workers)
    next(iter(dataloader))
    list(islice(dataloader, 2))
    for _ in range(2):
        assert [n for batch in lists(dataloader) for n in batch] == list(range(761))


@pytest.mark.parametrize(
    "sampler",
    [
        ExactOnceBatchSampler(10, batch_size=4, last_batch="pad"),
        BatchSampler(
            ViewSampler(RandomSampler(6, seed=0), [2] * 6, per_epoch="one", seed=0), batch_size=4
        ),
        BatchSampler(
            ViewSampler(RandomSampler(2, seed=0), [0, 2], per_epoch="all", seed=0), batch_size=2
        ),
        BatchSampler(ReuseSampler(6, reuse=2, live=4, seed=0), batch_size=4),
    ],
)
def test_sampler_of_view_ids_is_refused_in_dataloader(sampler: BatchStream) -> None:
    for one in (sampler, sampler.shard(0, 2)):
        with pytest.raises(TypeError, match=r"not record ids.*\n.*RequestSampler\(feed\)"):
            next(iter(loader(one, 0)))


@WORKERS
def test_peek_skips_no_batch_of_training(workers: int) -> None:
    """The first pass after it is the whole first epoch, the second one the next."""
    dataloader = loader(random(), workers)
    next(iter(dataloader))
    assert lists(dataloader) + lists(dataloader) == epochs(0, 1)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_loops_of_exactly_len_batches_get_every_epoch(workers: int) -> None:
    """They never draw a batch after the last."""
    dataloader = loader(random(), workers)
    got = lists(islice(dataloader, len(dataloader)))
    got += lists(batch for _, batch in zip(range(12), dataloader, strict=False))
    assert got + lists(dataloader) == epochs(0, 1, 2)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_set_epoch_after_iter_changes_next_pass(workers: int) -> None:
    """Workers draw as the iterator is made: this changes the next pass, not the running pass. A
    warning says so, as state_dict of a StatefulDataLoader makes an iterator too.
    """
    sampler = random()
    dataloader = loader(sampler, workers)
    running = iter(dataloader)
    first = [next(running).tolist()]
    sampler.set_epoch(0)
    sampler.set_epoch(4)
    with pytest.warns(UserWarning, match="an iteration over epoch 0 goes on, and the position is"):
        assert first + lists(running) == epochs(0)
    assert lists(dataloader) + lists(dataloader) == epochs(4, 5)


def test_workers_draw_whole_short_epoch_before_first_batch() -> None:
    """What no sampler can know: then the epoch must be named before each pass."""
    sampler = BatchSampler(RandomSampler(6, seed=0), batch_size=2)
    dataloader = loader(sampler, workers=2)
    looked_at = iter(dataloader)
    assert (sampler.epoch, sampler.step) == (1, 0)
    del looked_at
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert lists(dataloader) == lists(sampler.batches(epoch, 0, 3))


@pytest.mark.parametrize(
    ("saved", "workers"),
    [
        *((saved, 0) for saved in (1, 5, 11, 12, 13)),
        (12, 2),
        *(pytest.param(saved, 2, marks=pytest.mark.long) for saved in (1, 5, 11, 13)),
    ],
)
def test_stateful_dataloader_resumes_batch_sampler(saved: int, workers: int) -> None:
    """In an epoch, and at its end, where torchdata begins a pass that it throws away."""

    def stateful() -> Any:
        return StatefulDataLoader(Numbers(), batch_sampler=random(), num_workers=workers)

    first, got = stateful(), []
    for batch in first:
        got.append(batch.tolist())
        if len(got) == saved:
            break
    while len(got) < saved:
        got += lists(islice(first, saved - len(got)))
    state = copy.deepcopy(first.state_dict())
    again = stateful()
    again.load_state_dict(state)
    rest = lists(again) or lists(again)
    rest += lists(again)
    assert got + rest[: 36 - saved] == epochs(0, 1, 2)[: saved + len(rest[: 36 - saved])]
    assert len(rest) >= 12


def test_accelerate_splits_full_batches_and_refuses_uneven_samplers() -> None:
    """It would skip the batches of one rank, and repeat or lose records of an uneven epoch."""
    given: Any = {"num_processes": 2, "process_index": 1, "put_on_device": False}
    full = PKBatchSampler(np.arange(761) % 9, p=4, k=2, seed=0)
    prepared = prepare_data_loader(loader(full.shard(0, 1), 0), **given)
    assert lists(prepared) == lists(full.batches(0, 0, len(full)))[1::2]
    with pytest.raises(TypeError, match=r"already is rank 1 of 2.*without shard"):
        prepare_data_loader(loader(full.shard(1, 2), 0), **given)
    for uneven in (random(), evaluation(), ExactOnceBatchSampler(760, batch_size=10)):
        with pytest.raises(TypeError, match=r"lose or repeat records.*sampler\.shard\(rank"):
            prepare_data_loader(loader(uneven, 0), **given)
