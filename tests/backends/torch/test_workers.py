"""Worker processes and torch's own loaders: every way of starting them gives the same stream."""

import copy
import gc
import multiprocessing
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import expected, noted, received, take
from support.own_source import Words
from support.torch_feeds import OPTIONS, RECORDS, lengths, noisy, plain
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from twinfeed.loaders import (
    ByRecord,
    DecodeError,
    Feed,
    Index,
    LoaderError,
    Reader,
    Seeded,
    WorkerDiedError,
)
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    SubsetSampler,
    ViewSampler,
)

# Four workers are more than this machine may have processors; torchdata calls what torch retired.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Torch's iterators that failed are garbage in cycles, and wait five seconds for their workers:
    in the test that made them, not in a thread of the next test.
    """
    yield
    gc.collect()


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


# Each pair of values of two options comes at least once; all of them would be 96.
PAIRWISE: list[Any] = [
    {"num_workers": 0},
    {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": 1},
    {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    *(
        pytest.param(options, marks=pytest.mark.long)
        for options in (
            {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
            {
                "num_workers": 4,
                "multiprocessing_context": "fork",
                "prefetch_factor": 4,
                "timeout": 60,
            },
            {"num_workers": 2, "multiprocessing_context": "forkserver", "prefetch_factor": 4},
        )
    ),
]


@pytest.mark.parametrize("options", PAIRWISE, ids=str)
def test_plain_dataloader_gives_stream(index: Index, options: dict[str, Any]) -> None:
    loader = plain(index, random(), **options)
    assert len(loader) == 5
    got = [batch for _ in range(2) for batch in received(loader)]
    assert got == expected(index, random(), epochs=(0, 1), **OPTIONS)


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_of_exactly_len_batches_get_every_epoch(index: Index, workers: int) -> None:
    """It never asks for the batch after the last one, which once began epoch 0 for ever."""
    loader = plain(index, random(), num_workers=workers)
    got = [noted(batch) for batch in islice(loader, len(loader))]
    got += [noted(batch) for _, batch in zip(range(5), loader, strict=False)]
    got += received(loader)
    assert got == expected(index, random(), epochs=(0, 1, 2), **OPTIONS)


def test_spawned_worker_gives_stream(index: Index) -> None:
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    with TorchLoader(Feed(index, random(), **OPTIONS), **options) as loader:
        assert received(loader) == expected(index, random(), **OPTIONS)


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_an_open_connection_is_refused_to_workers_that_are_spawned(tmp_path: Path) -> None:
    source: Any = Words()
    source.connection = sqlite3.connect(tmp_path / "words.db")
    feed = Feed(source, random())
    with (
        TorchLoader(feed, num_workers=1, multiprocessing_context="spawn") as loader,
        pytest.raises(LoaderError, match=r"cannot pickle 'sqlite3.Connection'(.|\n)*own-records"),
    ):
        next(iter(loader))
    source.connection.close()


def test_threads_and_readahead_in_worker_give_stream(index: Index) -> None:
    feed = Feed(index, random(), **OPTIONS)
    with TorchLoader(feed, num_workers=1, threads=2, readahead=1000) as loader:
        assert received(loader) == expected(index, random(), **OPTIONS)


def threaded(sample: dict[str, Any]) -> dict[str, Any]:
    return {**noisy(sample), "thread": threading.get_native_id()}


def test_worker_forked_after_threads_has_own_threads(index: Index) -> None:
    """The dataset has had threads and files in this process when it is forked. The worker keeps
    threads of its own.
    """
    feed = Feed(index, random(), decode=lengths, transform=threaded)
    dataset = RecordDataset(feed, threads=2)
    for workers in (0, 1):
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=RequestSampler(feed),  # type: ignore[arg-type]
            collate_fn=as_tensors,  # type: ignore[arg-type]
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            timeout=30 if workers else 0,
        )
        batches = list(loader)
        assert len({number for batch in batches for number in batch.pop("thread").tolist()}) <= 2
        assert received(batches) == expected(index, random(), **OPTIONS)


@pytest.mark.filterwarnings("ignore:.*pin_memory")  # torch's own, from some version on
def test_pin_memory_works_without_device(index: Index) -> None:
    loader = plain(index, random(), pin_memory=True)
    if torch.cuda.is_available():
        assert all(batch["id"].is_pinned() for batch in loader)
        return
    assert received(loader) == expected(index, random(), **OPTIONS)


# torchdata


@pytest.mark.parametrize(
    ("workers", "steps"),
    [(0, (1, 4, 5, 6)), (2, (4, 5)), pytest.param(2, (1, 6), marks=pytest.mark.long)],
)
def test_stateful_dataloader_resumes_at_any_step(
    index: Index, workers: int, steps: tuple[int, ...]
) -> None:
    def loader() -> Any:
        feed = Feed(index, random(), **OPTIONS)
        return StatefulDataLoader(
            RecordDataset(feed),
            batch_sampler=RequestSampler(feed),
            collate_fn=as_tensors,
            num_workers=workers,
        )

    whole = expected(index, random(), epochs=(0, 1), **OPTIONS)
    first, states = loader(), []
    for batch, right in zip(first, whole, strict=False):
        assert noted(batch) == right
        states.append(copy.deepcopy(first.state_dict()))
    states.append(copy.deepcopy(first.state_dict()))  # after the pass has ended
    assert received(first) == whole[5:]
    for step in steps:
        fresh = loader()
        fresh.load_state_dict(states[step - 1])
        got = received(fresh) or received(fresh)
        assert got == (whole[step:5] if step < 5 else whole[5:])


def test_pass_over_requests_after_break_restarts_epoch(index: Index) -> None:
    loader = plain(index, random())
    whole = expected(index, random(), epochs=(0, 1), **OPTIONS)
    assert list(take(loader, 2)) == whole[:2]
    assert received(loader) == whole[:5]
    assert received(loader) == whole[5:]


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_over_requests_gives_every_record_after_peek(index: Index, workers: int) -> None:
    sampler = ExactOnceBatchSampler(RECORDS, batch_size=5)
    loader = plain(index, sampler, num_workers=workers)
    whole = expected(index, sampler, **OPTIONS)
    for _ in range(3):
        assert list(take(loader, 2)) == whole[:2]
        assert received(loader) == whole


def test_set_epoch_keeps_short_epoch_from_being_skipped_by_workers(index: Index) -> None:
    """Torch draws `prefetch_factor * num_workers` batches when an iterator is made."""
    loader = plain(index, random(), num_workers=2, prefetch_factor=3)
    epochs = []
    for epoch in range(3):
        iter(loader)  # a look, as Keras does
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        epochs += received(loader)
    assert epochs == expected(index, random(), epochs=(0, 1, 2), **OPTIONS)


# Plain ids, and datasets of the user's own


@pytest.mark.parametrize("workers", [0, 2])
def test_record_dataset_works_with_shuffle_of_dataloader(index: Index, workers: int) -> None:
    dataset = RecordDataset(Feed(index, random(), decode=lengths))
    assert len(dataset) == RECORDS
    assert dataset[7] == {"id": 7, "label": 3, "length": 7}
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=5, shuffle=True, num_workers=workers)
    ids = []
    for batch in loader:
        assert batch["length"].tolist() == batch["id"].tolist()
        assert batch["label"].tolist() == [number % 4 for number in batch["id"].tolist()]
        ids += batch["id"].tolist()
    assert sorted(ids) == list(range(RECORDS))


def test_record_dataset_iteration_ends(index: Index) -> None:
    dataset = RecordDataset(Feed(index, random()))
    assert [sample["id"] for sample in dataset] == list(range(RECORDS))


def test_seeds_of_record_dataset_samples_come_from_torch(index: Index) -> None:
    """A warning says so once: the ids of `batch_sampler=feed.sampler` are those of the stream."""
    feed = Feed(index, random(), **OPTIONS)
    dataset = RecordDataset(feed)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=r"torch's random.*batch_sampler=RequestSampler\(feed\)"):
        first = [dataset[4]["noisy"].tolist()]
    first += [dataset[4]["noisy"].tolist()]
    assert first[0] != first[1]
    bare: DataLoader[Any] = DataLoader(RecordDataset(feed), batch_sampler=feed.sampler)
    with pytest.warns(UserWarning, match="RequestSampler"):
        next(iter(bare))
    torch.manual_seed(3)
    assert [dataset[4]["noisy"].tolist() for _ in range(2)] == first


def test_request_sampler_resumes_from_state_of_torch_loader(index: Index) -> None:
    """The rest of the epoch, exactly, in a DataLoader of one's own."""
    feed = Feed(index, random(), **OPTIONS)
    with TorchLoader(feed, device="cpu", num_workers=2) as loader:
        passed = iter(loader)
        assert len(list(take(passed, 2))) == 2
        state = loader.state_dict()
        rest = [batch["id"].tolist() for batch in passed]
    requests = RequestSampler(feed)
    requests.load_state_dict(state)
    own: DataLoader[Any] = DataLoader(
        RecordDataset(feed), batch_sampler=requests, collate_fn=as_tensors, num_workers=2
    )
    assert [batch["id"].tolist() for batch in own] == rest
    assert len(rest) == 3


@pytest.mark.parametrize(
    "sampler",
    [
        PKBatchSampler(
            np.arange(RECORDS) % 4, p=2, k=2, seed=0, records=range(12), batches_per_epoch=2
        ),
        ExactOnceBatchSampler(RECORDS, batch_size=5, records=range(12)),
        BatchSampler(SubsetSampler(range(12), of=RECORDS), batch_size=5),
        BatchSampler(
            ViewSampler(
                SubsetSampler(range(12), of=RECORDS), [2] * RECORDS, per_epoch="one", seed=0
            ),
            batch_size=5,
        ),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_records_left_out_by_sampler_warn(index: Index, sampler: BatchStream) -> None:
    """`shuffle=True` of a DataLoader would give a training the records of its validation."""
    dataset = RecordDataset(Feed(index, sampler))
    assert [dataset[number]["id"] for number in range(12)] == list(range(12))
    with pytest.warns(UserWarning, match=r"leaves records out .*=RequestSampler\(feed\)"):
        list(DataLoader(dataset, batch_size=5, shuffle=True))
    dataset[23]  # warned already


@pytest.mark.parametrize("number", [0, 5, 23])
def test_record_between_those_of_sampler_counts_as_left_out(index: Index, number: int) -> None:
    some = ExactOnceBatchSampler(RECORDS, batch_size=2, records=[3, 9])
    with pytest.warns(UserWarning, match="leaves records out"):
        RecordDataset(Feed(index, some))[number]


def test_record_dataset_samples_have_side_table_rows(index: Index) -> None:
    texts = [f"text {n}" for n in range(RECORDS)]
    side = {"weight": np.arange(RECORDS) / 2, "text": texts}
    sample = RecordDataset(Feed(index, random(), side=side))[5]
    assert (sample["weight"], sample["text"]) == (2.5, "text 5")
    order = ViewSampler(SequentialSampler(RECORDS), [2] * RECORDS, per_epoch="one", seed=0)
    views = BatchSampler(order, batch_size=4)
    assert RecordDataset(Feed(index, views, side={"text": ByRecord(texts)}))[5]["text"] == "text 5"


class Squares(Dataset[int]):
    """A dataset of the user's own."""

    def __getitem__(self, number: int) -> int:
        return int(number) ** 2

    def __len__(self) -> int:
        return RECORDS


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [random(), PKBatchSampler(np.arange(RECORDS) % 4, p=2, k=3, seed=0).shard(1, 2)],
    ids=["random", "P x K, rank 1 of 2"],
)
def test_batch_sampler_drives_dataloader_of_own_dataset(sampler: Any, workers: int) -> None:
    loader: DataLoader[Any] = DataLoader(Squares(), batch_sampler=sampler, num_workers=workers)
    sampler.set_epoch(3)
    got = [batch.tolist() for batch in loader]
    assert got == [(ids**2).tolist() for ids in sampler.batches(3, 0, len(sampler))]


# Errors


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    if len(sample["word"]) == 11:
        raise RuntimeError("eleven")
    return lengths(sample)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_error_is_raised_unchanged_and_workers_end(index: Index, persistent: bool) -> None:
    """torch gives an error's whole traceback as its message, and waits 5 s for each worker."""
    before = set(multiprocessing.active_children())
    options = {"num_workers": 2, "persistent_workers": persistent}
    loader = TorchLoader(Feed(index, random(), decode=fail), **options)
    with pytest.raises(DecodeError, match=r"^record 11 .*RuntimeError\('eleven'\)\n") as caught:
        list(loader)
    assert "in fail\n" in str(caught.value.__cause__)
    assert loader.step == next(step for step in range(5) if 11 in random().batch(0, step))
    loader.close()
    del loader, caught
    workers = set(multiprocessing.active_children()) - before
    deadline = time.monotonic() + 60
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(worker.is_alive() for worker in workers)


def first_dies(sample: dict[str, Any]) -> np.int64:
    """Kill worker 0, once worker 1 takes its time to end."""
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.id == 1:
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os._exit(0)))
    elif worker is not None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return lengths(sample)


def test_worker_death_ends_other_workers(index: Index) -> None:
    before = set(multiprocessing.active_children())
    loader = TorchLoader(Feed(index, random(), decode=first_dies), num_workers=2)
    with pytest.raises(WorkerDiedError, match="worker 0 of 2"):
        list(loader)
    assert set(multiprocessing.active_children()) == before


def in_main_thread(_: dict[str, Any]) -> dict[str, Any]:
    return {"here": threading.current_thread() is threading.main_thread()}


@pytest.mark.parametrize("workers", [0, 1])
def test_seeded_transform_runs_in_main_thread(index: Index, workers: int) -> None:
    feed = Feed(index, random(), transform=Seeded(in_main_thread))
    with TorchLoader(feed, num_workers=workers, threads=3) as loader:
        assert all(batch["here"].all() for batch in loader)


class StubbornError(Exception):
    """An error that does not come back from a pickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def test_worker_error_that_cannot_be_pickled_is_raised(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(self: Reader, *_: Any, **__: Any) -> None:
        raise StubbornError("no such bucket", "")

    with TorchLoader(Feed(index, random()), num_workers=1) as loader:
        assert loader.feed.spec
        monkeypatch.setattr(Reader, "read_values", stubborn)
        # Where tblib is imported, as by TensorFlow, every error comes back from a pickle.
        with pytest.raises((LoaderError, StubbornError), match=r"no such bucket$"):
            list(loader)


class KilledOnce:
    """Decode, except once: then be killed, as a flag says."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if len(sample["word"]) == 11 and self.flag.exists():
            self.flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return lengths(sample)


@pytest.mark.parametrize("persistent", [False, True])
def test_pass_after_worker_death_has_new_workers(
    index: Index, tmp_path: Path, persistent: bool
) -> None:
    (tmp_path / "flag").touch()
    options = {"num_workers": 2, "persistent_workers": persistent}
    decode = KilledOnce(tmp_path / "flag")
    with TorchLoader(Feed(index, random(), decode=decode), **options) as loader:
        got = []
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            got.extend(map(noted, loader))
        assert loader.step == len(got)
        got += received(loader)
    assert got == expected(index, random(), decode=lengths)


def test_reuse_cache_is_refused_in_worker(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch waits so many seconds for the worker of an iterator that failed.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)

    def sampler() -> BatchStream:
        return BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=2), batch_size=4)

    with pytest.raises(ValueError, match="needs num_workers=0"):
        list(plain(index, sampler(), num_workers=1))
    gc.collect()
    assert received(plain(index, sampler())) == expected(index, sampler(), **OPTIONS)


def test_workers_end_with_loader(index: Index) -> None:
    before = set(multiprocessing.active_children())
    with TorchLoader(Feed(index, random()), num_workers=2, persistent_workers=True) as loader:
        list(take(loader, 2))
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def test_fault_113_workers_end_with_last_reference_to_loader(index: Index) -> None:
    """Once a cycle kept them until a garbage collection, which took five seconds for each."""
    before = set(multiprocessing.active_children())
    loader = TorchLoader(Feed(index, random()), num_workers=2, persistent_workers=True)
    list(take(loader, 2))
    assert len(set(multiprocessing.active_children()) - before) == 2
    del loader
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("persistent", [False, True])
def test_close_ends_workers_of_live_iterator(index: Index, persistent: bool) -> None:
    before = set(multiprocessing.active_children())
    loader = TorchLoader(Feed(index, random()), num_workers=2, persistent_workers=persistent)
    held = iter(loader)
    next(held)
    assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    assert set(multiprocessing.active_children()) <= before
