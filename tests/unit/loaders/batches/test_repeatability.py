"""Functions and sources that return memory of an earlier result: refused if this changes it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reused_buffers import ROLES, check_rows, feed_of

from twinfeed.loaders import DatasetSource, DecodeError, Feed, NumpyLoader, pack
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ViewSampler,
)
from twinfeed.testing import check_feed

TOLD = r"returned the same buffer again: a later call changed the field '[xy]'.*buffer\.copy\(\)"


def stream(size: int = 4, length: int = 12) -> BatchStream:
    return BatchSampler(RandomSampler(length, seed=0), batch_size=size)


def consumed(feed: Feed, make: Any = NumpyLoader, **options: Any) -> list[Any]:
    with make(feed, **options) as loader:
        return list(loader)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", ["array", "list"])
def test_buffer_returned_twice_is_refused(role: str, kind: str) -> None:
    """Fault 108: all rows of a batch would be those of the last call."""
    for size, count in ((4, 1), (1, 1), (4, 2), (4, 3), (12, 1)):
        for options in ({}, {"prefetch": 2, "threads": 2}):
            with pytest.raises(ValueError, match=TOLD):
                consumed(feed_of(role, stream(size), count, kind), **options)
    for threads in (0, 2):
        feed = feed_of(role, stream(), 0, kind)
        check_rows(role, consumed(feed, prefetch=2, threads=threads), feed)
    reuse = BatchSampler(ReuseSampler(12, reuse=3, live=4, seed=0), batch_size=1)
    with pytest.raises(ValueError, match=TOLD):
        consumed(feed_of(role, reuse, 1, kind))


@pytest.mark.parametrize("kind", ["array", "list"])
@pytest.mark.parametrize("role", ["decode", "transform", "seed"])
def test_rotating_buffers_are_refused_or_found_by_check_feed(role: str, kind: str) -> None:
    """The trial finds as many buffers as it has results; a batch needs more."""
    for count in (5, 8):
        with pytest.raises(ValueError, match=TOLD):
            consumed(feed_of(role, stream(12), count, kind))
    with pytest.raises((AssertionError, ValueError), match=rf"field '[xy]' differs|{TOLD}"):
        check_feed(feed_of(role, stream(12), 11, kind))
    feed = feed_of(role, stream(12), 40, kind)
    check_rows(role, consumed(feed), feed)
    check_feed(feed)


@pytest.mark.parametrize("kind", ["one a length", "later"])
@pytest.mark.parametrize("role", ["decode", "transform"])
def test_buffer_per_length_and_late_buffer_are_found(role: str, kind: str) -> None:
    buffers, calls = [np.zeros(length) for length in range(12)], iter(range(1000))

    def fill(sample: dict[str, Any]) -> dict[str, Any]:
        number = sample["n"]
        late = kind == "later" and next(calls) < 15
        out = np.zeros(3) if late else buffers[number % 3 + 1 if kind == "one a length" else 3]
        out[:] = number
        return {"x": out}

    numbers = DatasetSource({"n": np.arange(36)})
    feed: Any = Feed(numbers, stream(6, 36), collate="pad", **{role: fill})  # type: ignore[arg-type]
    told = r"differs|returned the same buffer again"
    with pytest.raises((AssertionError, ValueError), match=told):
        check_feed(feed)


@pytest.mark.frameworks
@pytest.mark.parametrize("role", ROLES)
def test_repeated_buffer_is_refused_in_every_framework(role: str) -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader
    from twinfeed.loaders.torch import TorchLoader

    for kind in ("array", "tensor"):
        for make in (TorchLoader, TensorFlowLoader, NumpyLoader):
            with pytest.raises(ValueError, match=TOLD):
                consumed(feed_of(role, stream(), 1, kind), make)
        with pytest.raises(ValueError, match=TOLD):
            consumed(feed_of(role, stream(), 1, kind), TorchLoader, num_workers=2)
    feed = feed_of(role, stream(), 0)
    if role != "ragged":
        check_rows(role, consumed(feed, TorchLoader), feed)


def test_repeated_buffer_is_found_with_a_single_record() -> None:
    for role in ("seed", "batch_transform"):
        feed = feed_of(role, stream(1, 1), 0)
        check_rows(role, consumed(feed), feed)
    with pytest.raises(ValueError, match=TOLD):
        consumed(feed_of("seed", stream(1, 1), 1))
    feed = feed_of("decode", stream(1, 1), 1)  # there is no other result to change it
    check_rows("decode", consumed(feed), feed)


def test_constant_and_memoized_results_are_accepted() -> None:
    constant, known, same = np.ones(3), dict[int, Any](), dict[str, Any]()

    def kept(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": known.setdefault(sample["n"], np.full(2, sample["n"])), "y": constant[:2]}

    def refilled(sample: dict[str, Any]) -> dict[str, Any]:
        same.update(kept(sample))  # one dict, with other arrays each time
        return same

    def of_batch(batch: dict[str, Any], seed: int) -> dict[str, Any]:
        return {"x": batch["n"], "y": constant[: len(batch["id"])]}

    for options in (
        {"decode": kept},
        {"transform": kept},
        {"decode": refilled},
        {"transform": refilled},
        {"batch_transform": of_batch},
    ):
        feed: Any = Feed(DatasetSource({"n": np.arange(12)}), stream(3), **options)  # type: ignore[arg-type]
        found = consumed(feed, threads=2)
        check_rows("decode", found, feed)
        assert all((batch["y"] == 1).all() for batch in found)
    data = DatasetSource({"n": np.arange(12)})
    order = ViewSampler(SequentialSampler(24), np.full(12, 2), per_epoch="all", seed=0)
    for role in ("decode", "transform"):
        views = BatchSampler(order, batch_size=8)
        feed = Feed(data, views, **{role: kept})  # type: ignore[arg-type]
        check_rows("decode", consumed(feed), feed)


def test_random_function_with_one_buffer_is_refused_as_random() -> None:
    """It was compared with itself."""
    buffer = np.zeros(2)

    def draw(sample: dict[str, Any]) -> dict[str, Any]:
        buffer[:] = np.random.random()
        return {"x": buffer}

    for role in ("decode", "transform"):
        feed: Any = Feed(DatasetSource({"n": np.arange(12)}), stream(), **{role: draw})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{role} returned different results"):
            consumed(feed)


def test_labels_in_one_reused_buffer_are_copied() -> None:
    class Labelled:
        label = np.zeros((), np.int64)

        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> dict[str, Any]:
            self.label[...] = number
            return {"label": self.label}

    assert DatasetSource(Labelled(), label="label").columns["label"].tolist() == [0, 1, 2, 3, 4]


def test_undecodable_other_record_fails_in_its_own_batch(tmp_path: Path) -> None:
    index = pack([{"word": b"1"}, {"word": b"one"}], tmp_path)["data"]
    sampler = BatchSampler(SequentialSampler(2), batch_size=1)
    feed = Feed(index, sampler, decode=lambda sample: {"x": int(sample["word"])})
    assert feed[0, 0]["x"].tolist() == [1]
    with pytest.raises(DecodeError, match="record 1"):
        feed[0, 1]
