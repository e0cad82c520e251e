"""A function of the batch: the same result in every loader, and what it may not return."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import noted, received
from support.cases import mark_long
from support.servers import RangeServer
from support.transforms import decoded, in_place, mixed, trimmed

from twinfeed.loaders import DecodeError, Feed, Index, NumpyLoader, Pad, Ragged, open_index, pack
from twinfeed.loaders.grain import as_map_dataset
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.loaders.torch import RecordDataset, TorchLoader
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 22


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Records of a byte string and a number, whose labels say how long their lists are."""
    samples = [{"word": b"w%d" % n, "label": n % 5} for n in range(N)]
    return pack(samples, tmp_path_factory.mktemp("batch"))["data"]


def ragged(sample: dict[str, Any]) -> dict[str, Any]:
    return decoded(sample) | {"list": np.arange(int(sample["word"][1:]) % 4)}


def stored(sample: dict[str, Any]) -> dict[str, Any]:
    return {"word": sample["word"]}


def by_hand(feed: Feed, epoch: int) -> Iterator[dict[str, Any]]:
    """The batches by their definition: rows without padding, the function, and then padding."""
    assert feed.batch_transform is not None
    plain = Feed(feed.index, feed.sampler, decode=feed.decode, collate=feed.collate)
    for step in range(len(plain)):
        batch = plain[epoch, step]
        held = batch["id"] >= 0
        kept = {
            name: value[held] if isinstance(value, np.ndarray) else value[: held.sum()]
            for name, value in batch.items()
            if name != "mask"
        }
        seed = feed.sampler.batch_seed(epoch, step)
        made = feed.batch_transform(kept, seed) if held.any() else kept
        whole: dict[str, Any] = {"id": batch["id"]}
        for name in ("x", "word", "label", "other", "n"):
            rows = made.get(name, np.zeros((0,), {"other": "i8", "n": "f4"}.get(name)))
            if name == "n" and not held.any():
                rows = np.zeros((0, 3), np.float32)
            if isinstance(rows, list):
                whole[name] = rows + [b"w0"] * int((~held).sum())
            else:
                whole[name] = np.zeros((len(held), *rows.shape[1:]), rows.dtype)
                whole[name][held] = rows
        yield whole | ({"mask": held} if feed.sampler.traits.padded else {})


STREAMS: dict[str, Callable[[Index], BatchStream]] = {
    "random": lambda index: BatchSampler(RandomSampler(N, seed=3), batch_size=4),
    "P×K": lambda index: PKBatchSampler(index.labels, p=3, k=2, seed=3),
    "padded": lambda index: ExactOnceBatchSampler(N, batch_size=5, last_batch="pad"),
    "a rank": lambda index: ExactOnceBatchSampler(N, batch_size=8, last_batch="pad").shard(3, 4),
    "a rank without rows": lambda index: ExactOnceBatchSampler(N, batch_size=21).shard(2, 3),
}
HERE: list[Callable[[Feed], Any]] = [NumpyLoader, TorchLoader, TensorFlowLoader]
LOADERS = [*HERE, lambda feed: TorchLoader(feed, num_workers=2)]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    one, other = noted(one), noted(other)
    assert one == other


@pytest.mark.parametrize("name", mark_long(STREAMS, but_every=4))
def test_batch_transform_results_are_equal_in_every_loader(index: Index, name: str) -> None:
    feed = Feed(index, STREAMS[name](index), decode=decoded, batch_transform=mixed)
    wanted = [noted(batch) for epoch in (0, 1) for batch in by_hand(feed, epoch)]
    evaluation = feed.sampler.evaluation
    for make in LOADERS:
        with make(feed) as loader:
            found = received(loader)
            assert found == wanted[: len(feed)]
            again = received(loader)
            assert again == (wanted[: len(feed)] if evaluation else wanted[len(feed) :])
    assert [noted(feed[0, step]) for step in range(len(feed))] == wanted[: len(feed)]
    dataset = as_map_dataset(feed, epochs=2)
    assert [noted(dataset[n]) for n in range(len(dataset))] == wanted


def twice(loader: Any) -> list[dict[str, Any]]:
    """Two epochs of a loader."""
    with loader:
        return received(loader) + received(loader)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_batch_transform_runs_in_workers_over_remote_shards(
    index: Index, tmp_path: Path, method: str
) -> None:
    sampler = BatchSampler(RandomSampler(N, seed=3), batch_size=4)
    options: dict[str, Any] = {"decode": decoded, "batch_transform": in_place}
    local = Feed(index, sampler, **options)
    workers: Any = {"num_workers": 2, "multiprocessing_context": method}
    with RangeServer(index.path.parent) as server:
        feed = Feed(open_index(f"{server.url}/{index.path.name}"), sampler, **options)
        found = twice(TorchLoader(feed, **workers, persistent_workers=True, device="cpu"))
    assert found == [noted(batch) for epoch in (0, 1) for batch in by_hand(local, epoch)]


def test_batch_transform_in_place_does_not_change_cached_images(index: Index) -> None:
    sampler = BatchSampler(ReuseSampler(N, reuse=3, live=8, seed=3), batch_size=4)
    feed = Feed(index, sampler, decode=decoded, batch_transform=in_place)
    wanted = [noted(batch) for epoch in (0, 1) for batch in by_hand(feed, epoch)]
    for make in HERE:
        assert twice(make(feed)) == wanted
        assert twice(make(feed, threads=3)) == wanted


def test_tensorflow_loader_runs_batch_transform(index: Index) -> None:
    feed = Feed(
        index,
        BatchSampler(SequentialSampler(N), batch_size=5),
        batch_transform=lambda batch, seed: {"word": batch["word"][::-1], "seed": batch["id"] * 2},
    )
    with NumpyLoader(feed) as plain:
        wanted = received(plain)
    with TensorFlowLoader(feed) as loader:
        assert received(loader) == wanted


def test_batch_seed_is_golden_and_equal_on_every_rank() -> None:
    stream = BatchSampler(RandomSampler(N, seed=3), batch_size=4)
    seeds = [stream.batch_seed(epoch, step) for epoch in (0, 1) for step in range(6)]
    assert len(set(seeds)) == 12
    assert seeds[:2] == [8277128745890849535, 14689726967476148405]
    assert stream.shard(1, 2).batch_seed(1, 2) == stream.batch_seed(1, 2)
    assert not set(seeds) & set(stream.seeds(0, 0).tolist())
    with pytest.raises(IndexError):
        stream.batch_seed(0, 6)


def test_batch_transform_takes_and_returns_ragged(index: Index) -> None:
    def function(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        values, lengths = batch["list"]
        strings = np.array([b"a", b"b"] * len(lengths), object)
        return {
            "list": Ragged(values * 2, lengths),
            "strings": Ragged(strings, np.full(len(lengths), 2)),
            "word": batch["word"],
        }

    for sampler, loaders in (
        (BatchSampler(RandomSampler(N, seed=3), batch_size=4), HERE),
        (ExactOnceBatchSampler(N, batch_size=5, last_batch="pad"), LOADERS),
    ):
        how = {"list": "ragged"}
        feed = Feed(index, sampler, decode=ragged, collate=how, batch_transform=function)
        plain = [
            batch["list"] for batch in NumpyLoader(Feed(index, sampler, decode=ragged, collate=how))
        ]
        found = []
        for make in loaders:
            with make(feed) as loader:
                found.append(received(loader))
        assert all(one == found[0] for one in found)
        for batch, before in zip(NumpyLoader(feed), plain, strict=True):
            assert np.array_equal(batch["list"].values, before.values * 2)
            assert np.array_equal(batch["list"].lengths, before.lengths)


def test_ragged_lengths_are_checked_in_every_batch(index: Index) -> None:
    def function(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"x": Ragged(np.arange(8 + (7 in batch["id"])), np.full(4, 2, np.uint8))}

    sampler = BatchSampler(SequentialSampler(N), batch_size=4)
    with NumpyLoader(Feed(index, sampler, batch_transform=function)) as loader:
        assert next(iter(loader))["x"].lengths.tolist() == [2] * 4
        with pytest.raises(DecodeError, match=r"epoch 0, step 1: .*9 values"):
            list(loader)


def test_ragged_values_may_be_lists_and_start_empty(index: Index) -> None:
    """Strings keep their last zero bytes, which an array of numpy would drop."""

    def function(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        numbers = [0, *range(1, len(batch["id"]))]
        words = [b"%d\0" % n for n in numbers for _ in range(n)]
        return {"words": Ragged(words, numbers), "numbers": Ragged([*map(len, words)], numbers)}  # type: ignore[arg-type]

    sampler = BatchSampler(SequentialSampler(N), batch_size=4)
    for make in HERE:
        with make(Feed(index, sampler, batch_transform=function)) as loader:
            received(loader)
    first = Feed(index, sampler, batch_transform=function)[0, 0]
    assert first["words"].values.tolist() == [b"1\0", *[b"2\0"] * 2, *[b"3\0"] * 3]
    assert first["numbers"].values.tolist() == [2] * 6


def test_batch_transform_may_return_any_array_type(index: Index) -> None:
    fixed = np.arange(4)
    fixed.flags.writeable = False

    def function(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        return {
            "back": batch["x"][::-1, ::-1],
            "tensor": torch.from_numpy(batch["x"]) + 1,
            "fixed": fixed[: len(batch["id"])],
            "list": [[1, 2]] * len(batch["id"]),
        }

    sampler = BatchSampler(RandomSampler(N, seed=3), batch_size=4, last_batch="drop")
    feed = Feed(index, sampler, decode=decoded, batch_transform=function)
    found = []
    for make in HERE:
        with make(feed) as loader:
            found.append(received(loader))
    assert all(one == found[0] for one in found)


def test_batch_spec_declares_dimensions_that_vary(index: Index) -> None:
    sampler = BatchSampler(SequentialSampler(N), batch_size=3)
    feed = Feed(index, sampler, batch_transform=trimmed)
    spec = {"tokens": ((None,), "int64")}
    says = r"epoch 0, step 1: .*'tokens' has shape \(5,\).*\n.*batch_spec=, with None"
    with pytest.raises(DecodeError, match=says):
        list(NumpyLoader(feed))
    feed = Feed(index, sampler, batch_transform=trimmed, batch_spec=spec)
    for make in HERE:
        with make(feed) as loader:
            assert [batch["tokens"].shape[1] for batch in loader] == [3, 5, 4, 5, 5, 3, 5, 2]
    assert TensorFlowLoader(feed).dataset.element_spec["tokens"].shape == (None, None)


def test_batch_transform_accepts_lengths_padded_by_collate(index: Index) -> None:
    def same(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        return batch

    sampler = BatchSampler(SequentialSampler(N), batch_size=3)
    options: dict[str, Any] = {"decode": ragged, "collate": {"list": "pad"}}
    with NumpyLoader(Feed(index, sampler, **options)) as loader:
        wanted = received(loader)
    feed = Feed(index, sampler, **options, batch_transform=same)
    for make in HERE:
        with make(feed) as loader:
            assert received(loader) == wanted


def shaky(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"x": batch["x"] * random.random()}


def failing(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    return {"x": batch["image"]}


def writing(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    batch["id"][:] = 0
    return batch


def lengths(*lengths: Any, dtype: Any = None) -> Any:
    """A function of 8 values for 4 rows of these lengths."""
    return lambda batch, seed: {"x": Ragged(np.arange(8), np.array(lengths, dtype))}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a random state": (shaky, ValueError, "one batch and one seed: draw from .*seed"),
    "an error": (failing, DecodeError, r"0, step 0: KeyError\('image'\)\n.*: correct the function"),
    "no dict": (lambda b, s: (b["x"], b["label"]), DecodeError, "dict of fields, got a tuple"),
    "one number": (lambda b, s: {"n": 0.5}, DecodeError, "'n' must have a row for each of 4"),
    "too few rows": (lambda b, s: {"x": b["x"][1:]}, DecodeError, "'x' must have a row for each"),
    "too few strings": (lambda b, s: {"w": b["word"][1:]}, DecodeError, "'w' must have a row"),
    "a dict within": (lambda b, s: {"x": {"y": b["x"]}}, DecodeError, "a batch cannot hold"),
    "other ids": (lambda b, s: {"id": b["id"] + 1}, DecodeError, "changed 'id': give"),
    "ids written to": (writing, DecodeError, "read-only"),
    **{
        name: (
            function,
            DecodeError,
            "'x' holds a Ragged of 8 values with the lengths .* whose sum",
        )
        for name, function in {
            "lengths of too few values": lengths(2, 2, 2, 1),
            "lengths of too many values": lengths(2, 2, 2, 3),
            "a negative length": lengths(4, -2, 3, 3),
            "lengths that are no integers": lengths(2.0, 2.0, 2.0, 2.0),
            "truth values": lengths(*[True] * 4),
            "lengths of two axes": lengths([2, 2], [2, 2]),
            "lengths whose sum wraps": lengths(8, 2**63, 2**63, 0, dtype=np.uint64),
            "strings as lengths": lengths("2", "2", "2", "2"),
        }.items()
    },
    "too few lengths": (lengths(4, 4), DecodeError, "'x' must have a row for each of 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_batch_transform_result_is_refused(index: Index, name: str) -> None:
    function, error, message = REFUSED[name]
    sampler = BatchSampler(RandomSampler(N, seed=3), batch_size=4)
    for make in HERE:
        feed = Feed(index, sampler, decode=decoded, batch_transform=function)
        with pytest.raises(error, match=message), make(feed) as loader:
            next(iter(loader))


def test_later_batches_must_match_the_first(index: Index) -> None:
    sampler = BatchSampler(SequentialSampler(N), batch_size=11)
    changes = {"y": "y", "dtype": "x"}
    for what, field in changes.items():

        def function(batch: dict[str, Any], seed: int, what: str = what) -> dict[str, Any]:
            later = batch["id"][0] > 0
            made = {"x": batch["x"].astype("f8") if later and what == "dtype" else batch["x"]}
            return made | ({"y": batch["x"]} if later and what == "y" else {})

        feed = Feed(index, sampler, decode=decoded, batch_transform=function)
        with pytest.raises(DecodeError, match=f"epoch 0, step 1: .*'{field}'"):
            list(NumpyLoader(feed))


def test_record_dataset_refuses_batch_transform(index: Index) -> None:
    padded = ExactOnceBatchSampler(N, batch_size=5, last_batch="pad")
    dataset = RecordDataset(Feed(index, padded, batch_transform=lambda b, s: b))
    with pytest.raises(ValueError, match=r"whole batches.*RequestSampler"):
        dataset[3]


def test_state_of_another_world_size_warns(index: Index, tmp_path: Path) -> None:
    sampler = BatchSampler(RandomSampler(N, seed=3), batch_size=4)
    feed = Feed(index, sampler, decode=decoded, batch_transform=mixed)
    state = NumpyLoader(feed).state_dict()
    NumpyLoader(feed).load_state_dict(state)
    with pytest.warns(UserWarning, match="world size 1, and this loader has 2: batch_transform"):
        NumpyLoader(feed.shard(0, 2)).load_state_dict(state)
    plain = NumpyLoader(Feed(index, sampler, decode=decoded)).state_dict()
    assert "ranks" not in plain
    NumpyLoader(feed).load_state_dict(plain)


def test_pad_value_is_equal_in_every_loader(index: Index) -> None:
    sampler = ExactOnceBatchSampler(N, batch_size=5, last_batch="pad")
    feed = Feed(index, sampler, decode=ragged, collate={"list": Pad(value=-1, multiple=4)})
    found = []
    for make in HERE:
        with make(feed) as loader:
            found.append(received(loader))
    assert all(one == found[0] for one in found)
    first = feed[0, 0]
    assert first["list"].tolist() == [[0, 1, 2, -1][:n] + [-1] * (4 - n) for n in (0, 1, 2, 3, 0)]
    for pad, message in (
        (Pad(multiple=0), "multiple of Pad must be at least 1"),
        (Pad(value=0.5), "'Pad of list' holds float64 0.5 where int64 is expected"),
    ):
        with pytest.raises(ValueError, match=message):
            Feed(index, sampler, decode=ragged, collate={"list": pad})[0, 0]


def test_each_rank_tries_batch_transform_on_same_rows(index: Index) -> None:
    """Else ranks could disagree on the shapes and dtypes of the fields."""
    sampler, seen = BatchSampler(RandomSampler(N, seed=3), batch_size=4), []

    def function(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        seen.append(batch["id"].tolist())
        return batch

    first, last = sampler.batch(0, 0).tolist(), sampler.batch(0, len(sampler) - 1).tolist()
    for rank, own in ((0, first[:2]), (1, first[2:])):
        seen.clear()
        assert (
            Feed(index, sampler.shard(rank, 2), batch_transform=function)[0, 0]["id"][0] == own[0]
        )
        assert seen == [first[:2]] * 3 + [last[-2:], own]
