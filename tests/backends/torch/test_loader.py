"""The loader in one process: what it yields, what its state counts, and how it resumes."""

import gc
import pickle
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import expected, noted, received, take
from support.threads import started_threads
from support.torch_feeds import OPTIONS, RECORDS, lengths
from torch.utils.data import DataLoader

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    Feed,
    FieldSpec,
    Index,
    NumpyLoader,
    pack,
)
from twinfeed.loaders.torch import RecordDataset, RequestSampler, TorchLoader, as_tensors
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ViewSampler,
)


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


WAYS = [
    {"prefetch": 0, "threads": 0},
    {"prefetch": 0, "threads": 3},
    {"prefetch": 1, "threads": 0},
    {"prefetch": 3, "threads": 2},
    {},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_batches_equal_stream_for_all_options(index: Index, way: dict[str, Any]) -> None:
    with TorchLoader(Feed(index, random(), **OPTIONS), **way) as loader:
        batches = [batch for _ in range(2) for batch in received(loader)]
    assert batches == expected(index, random(), epochs=(0, 1), **OPTIONS)
    assert started_threads() == []


def test_arrays_arrive_as_tensors_and_bytes_as_lists(index: Index) -> None:
    batch = next(iter(TorchLoader(Feed(index, random()))))
    assert isinstance(batch["id"], torch.Tensor)
    assert isinstance(batch["label"], torch.Tensor)
    assert isinstance(batch["word"], list)
    assert all(isinstance(word, bytes) for word in batch["word"])


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": np.arange(len(sample["word"]) % 5, dtype=np.float32)}


def often(sample: dict[str, Any]) -> dict[str, Any]:
    length = len(sample["word"])
    return {"numbers": np.full(length + 1, length)}


def test_ragged_tensors_lie_completely_on_device(index: Index) -> None:
    """On a device without values, which needs no GPU."""
    feed = Feed(index, random(), decode=often, collate="ragged")
    batch = next(iter(TorchLoader(feed, device="meta")))
    parts = [batch["id"], batch["numbers"].values(), batch["numbers"].offsets()]
    assert [part.device.type for part in parts] == ["meta"] * 3


@pytest.mark.parametrize("device", ["CPU:0", "/CPU:0", "cpu"])
def test_device_may_be_written_as_in_tensorflow(index: Index, device: str) -> None:
    batch = next(iter(TorchLoader(Feed(index, random()), device=device)))
    assert batch["id"].device.type == "cpu"


@pytest.mark.parametrize("how", ["pad", "ragged"])
def test_lists_are_padded_or_ragged(index: Index, how: Any) -> None:
    loader = TorchLoader(Feed(index, random(), decode=counted, collate=how))
    assert received(loader) == expected(index, random(), decode=counted, collate=how)
    batch = next(iter(loader))
    assert isinstance(batch["numbers"], torch.Tensor)
    assert batch["numbers"].is_nested == (how == "ragged")
    if how == "ragged":
        longest = int(batch["numbers"].offsets().diff().max())
        assert batch["numbers"].to_padded_tensor(0).shape[1] == longest


def counted_often(sample: dict[str, Any]) -> dict[str, Any]:
    return {f"numbers{n}": np.zeros(len(sample["word"]) % 5, np.int8) for n in range(50)}


def test_ragged_fields_made_in_threads_have_own_lengths(index: Index) -> None:
    """Made in threads that take turns often, torch takes the lengths of two for the same."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sampler = BatchSampler(SequentialSampler(len(index)), batch_size=1)
        feed = Feed(index, sampler, decode=counted_often, collate="ragged")
        with TorchLoader(feed, threads=8, prefetch=8) as loader:
            batches = [batch for _ in range(10) for batch in loader]
    finally:
        sys.setswitchinterval(before)
    made = [value for batch in batches for value in batch.values() if value.is_nested]
    assert len({str(tensor.shape[1]) for tensor in made}) == len(made) == 12_000
    assert [batch["numbers0"]._max_seqlen for batch in batches[:6]] == [0, 1, 2, 3, 4, 0]


def tensor_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tensor": torch.full((2, 3), float(sample["length"]))}


def test_a_transform_may_return_tensors(index: Index) -> None:
    loader = TorchLoader(Feed(index, random(), decode=lengths, transform=tensor_of))
    batch = next(iter(loader))
    assert batch["tensor"].dtype == torch.float32
    assert batch["tensor"][:, 1, 2].tolist() == batch["id"].tolist()


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"num_workers": 1}], ids=str)
def test_ragged_fields_in_inference_mode(index: Index, options: dict[str, Any]) -> None:
    """As in Lightning's `validate`; a thread that runs ahead is not in this mode."""
    feed = Feed(index, ExactOnceBatchSampler(RECORDS, batch_size=5), decode=often, collate="ragged")
    with torch.inference_mode(), TorchLoader(feed, **options) as loader:
        rows = [row.tolist() for batch in loader for row in batch["numbers"].unbind()]
    assert rows == [[number] * (number + 1) for number in range(RECORDS)]


def test_request_sampler_serves_dataloader_without_batching(index: Index) -> None:
    """torch's own idiom where the dataset makes the batches."""
    sampler = BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)
    feed = Feed(index, sampler)
    loader: Any = DataLoader(
        RecordDataset(feed),
        sampler=RequestSampler(feed),  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=as_tensors,
    )
    assert received(loader) == expected(index, sampler)


@pytest.mark.parametrize("how", ["stack", "ragged"])
def test_rank_without_records_gets_empty_tensors(index: Index, how: Any) -> None:
    ranks = [ExactOnceBatchSampler(RECORDS, batch_size=23).shard(rank, 2) for rank in range(2)]
    sampler = next(rank for rank in ranks if len(rank.batch(0, 1)) == 0)
    full, empty = TorchLoader(Feed(index, sampler, **OPTIONS, collate=how))
    assert list(empty) == list(full)
    for name, value in empty.items():
        assert value.shape[0] == 0
        assert value.dtype == full[name].dtype
        if not value.is_nested:
            assert value.shape[1:] == full[name].shape[1:]


def test_padding_has_a_mask(index: Index) -> None:
    sampler = ExactOnceBatchSampler(RECORDS, batch_size=7, last_batch="pad")
    last = list(TorchLoader(Feed(index, sampler, decode=lengths)))[-1]
    assert last["mask"].tolist() == [True] * 3 + [False] * 4
    assert last["mask"].dtype == torch.bool
    assert last["id"].tolist() == [21, 22, 23, -1, -1, -1, -1]
    assert last["length"].tolist() == [21, 22, 23, 0, 0, 0, 0]


# State and resume


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("after", range(6))
def test_a_fresh_loader_resumes_at_any_step(index: Index, way: dict[str, Any], after: int) -> None:
    """Step 5 is the epoch's end, which is the start of the next."""
    whole = expected(index, random(), epochs=(0, 1), **OPTIONS)
    with TorchLoader(Feed(index, random(), **OPTIONS), **way) as loader:
        assert list(take(loader, after)) == whole[:after]
        states = [loader.state_dict() for _ in range(3)]
    assert states[0] == states[1] == states[2]
    with TorchLoader(Feed(index, random(), **OPTIONS), **way) as fresh:
        for _ in range(2):  # restored twice, and saved again before a step
            fresh.load_state_dict(states[0])
            assert fresh.state_dict() == states[0]
            rest = received(fresh)
            assert rest == (whole[after:5] if after < 5 else whole[5:])


def test_batches_are_made_while_the_loop_computes(index: Index) -> None:
    decoded = []

    def decode(sample: dict[str, Any]) -> np.int64:
        decoded.append(sample)
        return lengths(sample)

    with TorchLoader(Feed(index, random(), decode=decode), prefetch=2, threads=0) as loader:
        batches = iter(loader)
        next(batches)
        deadline = time.monotonic() + 60
        while len(decoded) < 3 * 5 and time.monotonic() < deadline:  # records of three batches
            time.sleep(0.01)
    assert len(decoded) >= 3 * 5


def test_after_a_break_the_next_pass_goes_on(index: Index) -> None:
    loader = TorchLoader(Feed(index, random(), **OPTIONS))
    got = list(take(loader, 2)) + received(loader) + received(loader)
    assert got == expected(index, random(), epochs=(0, 1), **OPTIONS)


ENDED = "ended before its last batch, by another pass.*give each loop a loader"


def test_new_pass_continues_and_ends_running_pass(index: Index) -> None:
    loader = TorchLoader(Feed(index, random()))
    first = iter(loader)
    ids = next(first)["id"].tolist()
    for batch in loader:
        ids += batch["id"].tolist()
    assert sorted(ids) == list(range(RECORDS))
    with pytest.raises(RuntimeError, match=ENDED):
        next(first)
    assert (loader.epoch, loader.step) == (1, 0)


# Naming an epoch again, or the next epoch too early, is meant here.
meant = pytest.mark.filterwarnings(
    "ignore:set_epoch starts epoch . again", "ignore:.*were skipped, as set_epoch"
)


@meant
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("how", ["peek", "set_epoch", "load_state_dict"])
def test_ended_pass_raises_in_its_loop(index: Index, way: dict[str, Any], how: str) -> None:
    """It would look like the end of the epoch, with records missing."""
    with TorchLoader(Feed(index, random(), **OPTIONS), **way) as loader:
        state = loader.state_dict()
        running = iter(loader)
        next(running)
        if how == "peek":
            next(iter(loader))
        elif how == "set_epoch":
            loader.set_epoch(0)
        else:
            loader.load_state_dict(state)
        with pytest.raises(RuntimeError, match=ENDED):
            next(running)
        loader.load_state_dict(state)
        assert received(loader) == expected(index, random(), **OPTIONS)


def test_set_epoch_at_last_batch_is_taken(index: Index) -> None:
    loader = TorchLoader(Feed(index, random(), **OPTIONS))
    for step, _ in enumerate(loader):
        if step == 4:
            loader.set_epoch(1)
    assert (loader.epoch, loader.step) == (1, 0)


@meant
def test_set_epoch_restarts_epoch_but_keeps_restored_step(index: Index) -> None:
    whole = expected(index, random(), **OPTIONS)
    loader = TorchLoader(Feed(index, random(), **OPTIONS))
    list(take(loader, 2))
    state = loader.state_dict()
    loader.set_epoch(0)
    assert received(loader) == whole
    loader.load_state_dict(state)
    list(take(loader, 1))
    for step in (2, 3):  # a state of where a pass was broken off, too
        state["step"] = step
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert received(loader) == whole[step:]
        loader.load_state_dict(state)
        list(take(loader, 1))
    loader.set_epoch(7)
    assert received(loader) == expected(index, random(), epochs=(7,), **OPTIONS)


def test_loader_and_sampler_positions_are_independent(index: Index) -> None:
    sampler = random()
    next(iter(sampler))
    sampler.set_epoch(4)
    before = sampler.state_dict()
    loader = TorchLoader(Feed(index, sampler, **OPTIONS))
    assert received(loader) == expected(index, random(), **OPTIONS)
    assert sampler.state_dict() == before
    assert received(loader) == expected(index, random(), epochs=(1,), **OPTIONS)


def test_two_loaders_share_one_feed(index: Index) -> None:
    feed = Feed(index, random(), **OPTIONS)
    pairs = zip(TorchLoader(feed), TorchLoader(feed), strict=True)
    both = [(noted(one), noted(other)) for one, other in pairs]
    whole = expected(index, random(), **OPTIONS)
    assert both == list(zip(whole, whole, strict=True))


def test_loops_of_exactly_len_batches_get_every_epoch(index: Index) -> None:
    """They never draw the extra batch that would show that an epoch is over."""
    loader = TorchLoader(Feed(index, random(), **OPTIONS))
    got = []
    for epoch in range(3):
        if epoch == 1:
            got += [noted(batch) for batch in islice(loader, len(loader))]
        else:
            got += [noted(batch) for _, batch in zip(range(len(loader)), loader, strict=False)]
    assert got == expected(index, random(), epochs=(0, 1, 2), **OPTIONS)


def evaluation() -> BatchStream:
    return ExactOnceBatchSampler(RECORDS, batch_size=5)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_evaluation_gives_every_record_after_peek(index: Index, way: dict[str, Any]) -> None:
    loader = TorchLoader(Feed(index, evaluation(), **OPTIONS), **way)
    whole = expected(index, evaluation(), **OPTIONS)
    for _ in range(2):
        next(iter(loader))
        assert (loader.epoch, loader.step) == (0, 0)
        assert received(loader) == whole
        for step, _ in enumerate(loader, 1):
            if step == 3:
                assert loader.step == 3
                break
        gc.collect()
        assert (loader.epoch, loader.step) == (0, 0)


def test_resumed_evaluation_gives_remainder_once(index: Index) -> None:
    whole = expected(index, evaluation(), **OPTIONS)
    loader = TorchLoader(Feed(index, evaluation(), **OPTIONS))
    running = iter(loader)
    next(running), next(running)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert received(loader) == whole[2:]
    assert received(loader) == whole
    loader.set_epoch(3)
    assert received(loader) == expected(index, evaluation(), epochs=(3,), **OPTIONS)
    assert loader.epoch == 3


def test_nothing_is_read_before_the_first_next(index: Index) -> None:
    read = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        read.append(1)
        return lengths(sample)

    loader = TorchLoader(Feed(index, random(), decode=decode))
    passing = iter(loader)
    assert read == []
    loader.set_epoch(2)  # as Lightning does: first the iterator, then the epoch
    got = [noted(batch) for batch in passing]
    assert got == expected(index, random(), epochs=(2,), decode=lengths)


@meant
def test_last_set_epoch_after_load_counts(index: Index) -> None:
    """Lightning names epoch 0 first, and then the epoch that it resumes."""
    loader = TorchLoader(Feed(index, random(), **OPTIONS))
    loader.set_epoch(1)
    list(take(loader, 3))
    state = loader.state_dict()
    fresh = TorchLoader(Feed(index, random(), **OPTIONS))
    fresh.load_state_dict(state)
    fresh.set_epoch(0)
    assert (fresh.epoch, fresh.step) == (0, 0)
    fresh.set_epoch(1)
    assert (fresh.epoch, fresh.step) == (1, 3)
    assert received(fresh) == expected(index, random(), epochs=(1,), **OPTIONS)[3:]
    fresh.set_epoch(1)
    assert (fresh.epoch, fresh.step) == (1, 0)


# Reuse


@pytest.mark.parametrize("threads", [0, 2])
def test_reused_record_is_decoded_once(index: Index, threads: int) -> None:
    """Once an epoch, but for those live at both its ends."""
    calls = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(sample["word"]))
        return lengths(sample)

    def sampler() -> BatchSampler:
        return BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=2), batch_size=4)

    with TorchLoader(Feed(index, sampler(), decode=decode), threads=threads) as loader:
        assert loader.feed.spec
        calls.clear()
        for epoch in range(3):
            assert received(loader) == expected(index, sampler(), (epoch,), decode=lengths)
        ahead = 4 * (loader.prefetch + 1) + threads + 4  # images of the next epoch
        assert 3 * RECORDS <= len(calls) <= 3 * (RECORDS + 8 - 1) + ahead


# Ends


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_decode_error_names_record_and_ends_pass(index: Index, way: dict[str, Any]) -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if len(sample["word"]) == 11:
            raise RuntimeError("eleven")
        return lengths(sample)

    sampler = BatchSampler(SequentialSampler(RECORDS), batch_size=5)
    loader = TorchLoader(Feed(index, sampler, decode=decode), **way)
    got = []
    with pytest.raises(DecodeError, match=r"record 11 .*tfrecord.*eleven"):
        got.extend(loader)
    assert len(got) == 2
    assert loader.step == 2
    assert started_threads() == []


def test_close_ends_the_pass_and_another_may_follow(index: Index) -> None:
    with TorchLoader(Feed(index, random(), **OPTIONS)) as loader:
        running = iter(loader)
        next(running)
        assert started_threads() != []
    assert started_threads() == []
    with pytest.raises(RuntimeError, match=ENDED):
        list(running)
    assert received(loader) == expected(index, random(), **OPTIONS)[1:]


def test_break_leaves_no_thread(index: Index) -> None:
    for _ in TorchLoader(Feed(index, random(), **OPTIONS)):
        break
    gc.collect()
    assert started_threads() == []


def test_loader_pickles_with_its_position(index: Index) -> None:
    """Trainers that start their processes anew send the loader along."""
    loader = TorchLoader(Feed(index, random(), **OPTIONS))
    list(take(loader, 2))
    copy = pickle.loads(pickle.dumps(loader))
    assert received(copy) == received(loader)


def test_record_is_decoded_once_and_transformed_for_each_view(
    index: Index,
) -> None:
    """Captions are joined by sample id; the image of two of them is one decoding."""
    decoded: list[int] = []
    seen: list[tuple[int, int]] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(len(sample["word"]))
        return lengths(sample)

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append((sample["record"], sample["view"]))
        return {"length": sample["length"], "caption": sample["caption"]}

    pairs = SequentialSampler(3 * RECORDS)
    views = ViewSampler(pairs, np.full(RECORDS, 3), per_epoch="all", seed=0)
    sampler = BatchSampler(views, batch_size=6)
    spec = {"length": FieldSpec((), np.dtype("i4")), "caption": FieldSpec((), np.dtype("i8"))}
    side = {"caption": np.arange(3 * RECORDS) * 10}
    feed = Feed(index, sampler, decode=decode, transform=transform, side=side, spec=spec)
    assert feed.spec
    decoded.clear()
    seen.clear()
    batch = next(iter(TorchLoader(feed, prefetch=0)))
    assert batch["length"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["caption"].tolist() == [0, 10, 20, 30, 40, 50]
    assert sorted(decoded) == [0, 1]
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}])
def test_report_measures_threads_and_workers(index: Index, options: dict[str, Any]) -> None:
    with TorchLoader(Feed(index, random(), **OPTIONS), **options) as loader:
        steps = len(list(loader))
        report = loader.report()
        assert report.batches == steps
        assert min(report.reading, report.collating, report.waiting) > 0


def test_request_sampler_starts_at_first_batch_of_iterated_sampler(index: Index) -> None:
    stream = BatchSampler(RandomSampler(len(index), seed=3), batch_size=5)
    feed = Feed(index, stream)
    first = next(iter(RequestSampler(feed))).ids.tolist()
    list(stream)
    assert stream.epoch == 1
    assert next(iter(RequestSampler(feed))).ids.tolist() == first
    assert next(iter(RequestSampler(Feed(index, stream)))).ids.tolist() == first


CHECKED: dict[str, Callable[..., Any]] = {
    "numpy": lambda feed: list(NumpyLoader(feed)),
    "torch": lambda feed: list(TorchLoader(feed)),
    "workers": lambda feed: list(TorchLoader(feed, num_workers=1)),
    "dataset": lambda feed: RecordDataset(feed)[5],
}


@pytest.mark.parametrize("name", CHECKED)
def test_damage_is_found_unless_checksums_are_off(tmp_path: Path, name: str) -> None:
    index = pack([{"word": b"%d" % number} for number in range(8)], tmp_path)["data"]
    row = index.table("word")[5]
    with (tmp_path / index.location(5)[0]).open("r+b") as shard:
        shard.seek(int(row["offset"]))
        shard.write(b"x")
    feed = Feed(index, ExactOnceBatchSampler(8, batch_size=4))
    index.checksums = False
    CHECKED[name](feed)
    index.checksums = True
    with pytest.raises(DataCorruptionError, match=r"number 5"):
        CHECKED[name](feed)
