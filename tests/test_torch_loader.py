"""The loader in one process: what it yields, what its state counts, and how it resumes."""

import gc
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from batches import expected, noted, received, take
from running import started_threads
from torch.utils.data import DataLoader
from torch_help import OPTIONS, RECORDS, lengths, pack_words

from twinfeed.loaders import DecodeError, FieldSpec, Index, StateMismatchError
from twinfeed.loaders.torch import RequestSampler, TorchLoader
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ViewSampler,
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return pack_words(tmp_path_factory.mktemp("words"))


def random() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=5)


WAYS = [
    {"prefetch": 0, "threads": 0},
    {"prefetch": 0, "threads": 3},
    {"prefetch": 1, "threads": 0},
    {"prefetch": 3, "threads": 2, "readahead": 2},
    {},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_gives_the_stream(index: Index, way: dict[str, Any]) -> None:
    with TorchLoader(index, random(), **OPTIONS, **way) as loader:
        batches = [batch for _ in range(2) for batch in received(loader)]
    assert batches == expected(index, random(), epochs=(0, 1), **OPTIONS)
    assert started_threads() == []


def test_arrays_arrive_as_tensors_and_bytes_as_lists(index: Index) -> None:
    batch = next(iter(TorchLoader(index, random())))
    assert isinstance(batch["id"], torch.Tensor)
    assert isinstance(batch["label"], torch.Tensor)
    assert isinstance(batch["word"], list)
    assert all(isinstance(word, bytes) for word in batch["word"])


def counted(sample: dict[str, Any]) -> dict[str, Any]:
    return {"numbers": np.arange(len(sample["word"]) % 5, dtype=np.float32)}


@pytest.mark.parametrize("how", ["pad", "ragged"])
def test_lists_of_different_lengths(index: Index, how: Any) -> None:
    loader = TorchLoader(index, random(), decode=counted, collate=how)
    assert received(loader) == expected(index, random(), decode=counted, collate=how)
    batch = next(iter(loader))
    assert isinstance(batch["numbers"], torch.Tensor)
    assert batch["numbers"].is_nested == (how == "ragged")


def counted_often(sample: dict[str, Any]) -> dict[str, Any]:
    return {f"numbers{n}": np.zeros(len(sample["word"]) % 5, np.int8) for n in range(50)}


def test_ragged_fields_have_lengths_of_their_own(index: Index) -> None:
    """Made in threads that take turns often, torch takes the lengths of two for the same."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sampler = BatchSampler(SequentialSampler(len(index)), batch_size=1)
        options: Any = {"decode": counted_often, "collate": "ragged", "threads": 8, "prefetch": 8}
        with TorchLoader(index, sampler, **options) as loader:
            batches = [batch for _ in range(10) for batch in loader]
    finally:
        sys.setswitchinterval(before)
    made = [value for batch in batches for value in batch.values() if value.is_nested]
    assert len({str(tensor.shape[1]) for tensor in made}) == len(made) == 12_000
    assert [batch["numbers0"]._max_seqlen for batch in batches[:6]] == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_cursor_that_the_loop_moves_stays_there(index: Index, way: dict[str, Any]) -> None:
    sampler = random()
    with TorchLoader(index, sampler, **way) as loader:
        for step, _ in enumerate(loader):
            if step == 1:
                sampler.set_epoch(3)
        assert (sampler.epoch, sampler.step) == (3, 0)
        assert received(loader) == received(TorchLoader(index, at_epoch(3)))


def at_epoch(epoch: int) -> BatchStream:
    sampler = random()
    sampler.set_epoch(epoch)
    return sampler


def tensor_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tensor": torch.full((2, 3), float(sample["length"]))}


def test_a_transform_may_return_tensors(index: Index) -> None:
    loader = TorchLoader(index, random(), decode=lengths, transform=tensor_of)
    batch = next(iter(loader))
    assert batch["tensor"].dtype == torch.float32
    assert batch["tensor"][:, 1, 2].tolist() == batch["id"].tolist()


@pytest.mark.parametrize("how", ["stack", "ragged"])
def test_a_rank_without_records_gets_empty_tensors(index: Index, how: Any) -> None:
    ranks = [ExactOnceBatchSampler(RECORDS, batch_size=23).shard(rank, 2) for rank in range(2)]
    sampler = next(rank for rank in ranks if len(rank.batch(0, 1)) == 0)
    full, empty = TorchLoader(index, sampler, **OPTIONS, collate=how)
    assert list(empty) == list(full)
    for name, value in empty.items():
        assert value.shape[0] == 0
        assert value.dtype == full[name].dtype
        if not value.is_nested:
            assert value.shape[1:] == full[name].shape[1:]


def test_padding_has_a_mask(index: Index) -> None:
    sampler = ExactOnceBatchSampler(RECORDS, batch_size=7, final="pad")
    last = list(TorchLoader(index, sampler, decode=lengths))[-1]
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
    with TorchLoader(index, random(), **OPTIONS, **way) as loader:
        assert list(take(loader, after)) == whole[:after]
        states = [loader.state_dict() for _ in range(3)]
    assert states[0] == states[1] == states[2]
    with TorchLoader(index, random(), **OPTIONS, **way) as fresh:
        for _ in range(2):  # restored twice, and saved again before a step
            fresh.load_state_dict(states[0])
            assert fresh.state_dict() == states[0]
            rest = received(fresh)
            assert rest == (whole[after:5] if after < 5 else whole[5:])


def test_the_state_counts_what_the_loop_received(index: Index) -> None:
    loader = TorchLoader(index, random(), prefetch=4)
    for step, _ in enumerate(loader, 1):
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == divmod(step, 5)
        assert (loader.epoch, loader.step) == divmod(step, 5)


def test_a_state_saved_in_mid_pass_three_times_in_a_row(index: Index) -> None:
    whole = expected(index, random(), **OPTIONS)
    loader, states = TorchLoader(index, random(), **OPTIONS), []
    for batch in loader:
        states.append(loader.state_dict())
        if len(states) == 3:
            break
        assert noted(batch) == whole[len(states) - 1]
    for step, state in enumerate(states, 1):
        loader.load_state_dict(state)
        assert received(loader) == whole[step:]


def test_after_a_break_the_next_pass_goes_on(index: Index) -> None:
    loader = TorchLoader(index, random(), **OPTIONS)
    got = list(take(loader, 2)) + received(loader) + received(loader)
    assert got == expected(index, random(), epochs=(0, 1), **OPTIONS)


ENDED = "ended before its last batch, by another pass.*leave the loop first"


def test_a_new_pass_takes_over_from_a_live_one(index: Index) -> None:
    loader = TorchLoader(index, random())
    first = iter(loader)
    ids = next(first)["id"].tolist()
    for batch in loader:
        ids += batch["id"].tolist()
    assert sorted(ids) == list(range(RECORDS))
    with pytest.raises(RuntimeError, match=ENDED):
        next(first)
    assert (loader.epoch, loader.step) == (1, 0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("how", ["peek", "set_epoch", "load_state_dict"])
def test_a_loop_whose_pass_was_ended_says_so(index: Index, way: dict[str, Any], how: str) -> None:
    """It would look like the end of the epoch, with records missing."""
    with TorchLoader(index, random(), **OPTIONS, **way) as loader:
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


def test_the_next_epoch_may_be_set_at_the_last_batch(index: Index) -> None:
    loader = TorchLoader(index, random(), **OPTIONS)
    for step, _ in enumerate(loader):
        if step == 4:
            loader.set_epoch(1)
    assert (loader.epoch, loader.step) == (1, 0)


def test_set_epoch_starts_an_epoch_again_but_keeps_a_restored_step(index: Index) -> None:
    whole = expected(index, random(), **OPTIONS)
    loader = TorchLoader(index, random(), **OPTIONS)
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


def test_the_callers_own_sampler_is_the_cursor(index: Index) -> None:
    """What users of torch write: they keep the sampler, and set its epoch."""
    sampler = random()
    loader = TorchLoader(index, sampler, **OPTIONS)
    assert received(loader) == expected(index, random(), **OPTIONS)
    assert (sampler.epoch, sampler.step) == (1, 0)
    sampler.set_epoch(4)
    assert received(loader) == expected(index, random(), epochs=(4,), **OPTIONS)
    for _ in take(loader, 2):
        assert (sampler.epoch, sampler.step) == (5, 0)
    gc.collect()
    assert (sampler.epoch, sampler.step) == (5, 2)


def test_a_state_of_other_data_is_refused(index: Index) -> None:
    other = BatchSampler(RandomSampler(RECORDS, seed=6), batch_size=5)
    state = TorchLoader(index, other).state_dict()
    with pytest.raises(StateMismatchError, match=r"seed.*6.*5"):
        TorchLoader(index, random()).load_state_dict(state)


@pytest.mark.parametrize("sampler", [
    random(), ExactOnceBatchSampler(RECORDS, batch_size=5, final="pad"),
    PKBatchSampler(np.arange(RECORDS) % 4, p=4, k=2, seed=1),
], ids=["random", "exact once", "P x K"])  # fmt: skip
def test_ranks_may_change_on_resume(index: Index, sampler: BatchStream) -> None:
    """Two ranks, then one, then four: the concatenated slices stay one stream."""
    whole = expected(index, sampler, epochs=(0, 1), **OPTIONS)
    state: dict[str, Any] = sampler.state_dict()
    got = []
    for world_size, steps in ((2, 2), (1, 1), (4, len(sampler))):
        ranks = [TorchLoader(index, sampler.shard(rank, world_size), **OPTIONS)
                 for rank in range(world_size)]  # fmt: skip
        for loader in ranks:
            loader.load_state_dict(state)
        passes = [iter(loader) for loader in ranks]
        for _ in range(min(steps, len(sampler) - len(got))):
            slices = [next(one) for one in passes]
            got.append(noted({name: _joined(slices, name) for name in slices[0]}))
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert got == whole[: len(got)]
    assert len(got) == len(sampler)


def _joined(slices: list[dict[str, Any]], name: str) -> Any:
    return torch.cat([one[name] for one in slices])


# Reuse


@pytest.mark.parametrize("threads", [0, 2])
def test_a_reused_record_is_decoded_once(index: Index, threads: int) -> None:
    """Once an epoch, but for those live at both its ends; reading the spec disturbs nothing."""
    calls = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(sample["word"]))
        return lengths(sample)

    def sampler() -> BatchSampler:
        return BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=2), batch_size=4)

    counts = []
    for spec in ({"length": FieldSpec((), np.dtype(np.int32))}, None):
        calls.clear()
        with TorchLoader(index, sampler(), decode=decode, spec=spec, threads=threads) as loader:
            cache = loader.feed.cache
            assert cache is not None
            for epoch in range(3):
                before = cache.decodes
                assert received(loader) == expected(index, sampler(), (epoch,), decode=lengths)
                assert RECORDS <= cache.decodes - before <= RECORDS + 8 - 1
                assert cache.peak <= 8
            assert len(calls) == cache.decodes + (spec is None)
            counts.append(cache.decodes)
    assert counts[0] == counts[1]


def test_workers_are_refused_where_decoded_images_are_reused(index: Index) -> None:
    sampler = BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=2), batch_size=4)
    with pytest.raises(ValueError, match="needs num_workers=0"):
        TorchLoader(index, sampler, num_workers=1)


# Ends


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_exception_in_decode_names_the_record_and_ends_the_pass(
    index: Index, way: dict[str, Any]
) -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if len(sample["word"]) == 11:
            raise RuntimeError("eleven")
        return lengths(sample)

    sampler = ExactOnceBatchSampler(RECORDS, batch_size=5)
    loader = TorchLoader(index, sampler, decode=decode, **way)
    got = []
    with pytest.raises(DecodeError, match=r"record 11 .*tfrecord.*eleven"):
        got.extend(loader)
    assert len(got) == 2
    assert loader.step == 2
    assert started_threads() == []


def test_close_ends_the_pass_and_another_may_follow(index: Index) -> None:
    with TorchLoader(index, random(), **OPTIONS) as loader:
        running = iter(loader)
        next(running)
        assert started_threads() != []
    assert started_threads() == []
    with pytest.raises(RuntimeError, match=ENDED):
        list(running)
    assert received(loader) == expected(index, random(), **OPTIONS)[1:]


def test_a_break_leaves_no_thread(index: Index) -> None:
    for _ in TorchLoader(index, random(), **OPTIONS):
        break
    gc.collect()
    assert started_threads() == []


def test_what_is_no_batch_sampler_is_refused(index: Index) -> None:
    order: Any = RandomSampler(RECORDS, seed=0)
    for make in (lambda: TorchLoader(index, order), lambda: RequestSampler(order)):
        with pytest.raises(TypeError, match=r"got a RandomSampler: BatchSampler\(order"):
            make()
    with pytest.raises(TypeError, match=r"RandomSampler is an order.*DataLoader\(batch_sampler="):
        list(DataLoader(list(range(RECORDS)), sampler=order))


def test_it_pickles(index: Index) -> None:
    """Trainers that start their processes anew send the loader along."""
    loader = TorchLoader(index, random(), **OPTIONS)
    list(take(loader, 2))
    copy = pickle.loads(pickle.dumps(loader))
    assert received(copy) == received(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch must be at least 0, got -1"),
        ({"readahead": -1}, "readahead must be at least 0, got -1"),
        ({"threads": -1}, "threads must be at least 0, got -1"),
        ({"prefetch": 0, "num_workers": 2}, "prefetch=0 needs num_workers=0, got num_workers=2"),
        ({"num_workers": -1}, "num_workers"),
        ({"persistent_workers": True}, "persistent_workers"),
        ({"collate": "concat"}, "collate must be one of"),
    ],
)
def test_options_that_contradict_are_refused(
    index: Index, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TorchLoader(index, random(), **options)


def test_a_record_is_decoded_once_for_a_batch_and_transformed_for_each_view(
    index: Index,
) -> None:
    """Captions are joined by sample id; the image of two of them is one decoding."""
    decoded: list[int] = []
    told: list[tuple[int, int]] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        decoded.append(len(sample["word"]))
        return lengths(sample)

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        told.append((sample["record"], sample["view"]))
        return {"length": sample["length"], "caption": sample["caption"]}

    pairs = SequentialSampler(3 * RECORDS)
    views = ViewSampler(pairs, np.full(RECORDS, 3), per_epoch="all", seed=0)
    sampler = BatchSampler(views, batch_size=6)
    spec = {"length": FieldSpec((), np.dtype("i4")), "caption": FieldSpec((), np.dtype("i8"))}
    side = {"caption": np.arange(3 * RECORDS) * 10}
    batch = next(
        iter(
            TorchLoader(
                index, sampler, decode=decode, transform=transform, side=side, spec=spec, prefetch=0
            )
        )
    )
    assert batch["length"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["caption"].tolist() == [0, 10, 20, 30, 40, 50]
    assert sorted(decoded) == [0, 1]
    assert told == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
