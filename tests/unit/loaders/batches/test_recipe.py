"""What a recipe says of arrays: shared ones are read-only, all others are transform's own."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.batches import made
from support.feeds import WORDS, batch_of, request_of

from twinfeed.loaders import (
    DecodeError,
    DecodeImage,
    Feed,
    Index,
    NumpyLoader,
    pack,
)
from twinfeed.loaders.batches.feed import recipe_of
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    ReuseSampler,
    SequentialSampler,
    ViewSampler,
    WeightedSampler,
)


def array(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.full(3, float(len(sample["word"])))}


def in_place(sample: dict[str, Any]) -> dict[str, Any]:
    sample["x"] += 1
    return {"x": sample["x"]}


@pytest.mark.parametrize("threads", [0, 3])
def test_transform_may_write_to_unshared_arrays(
    index: Index, sampler: ExactOnceBatchSampler, threads: int
) -> None:
    feed = Feed(index, sampler, decode=array, transform=in_place)
    assert not recipe_of(feed).shares_arrays
    assert batch_of(feed, request_of(3, 2, 1), threads)["x"][:, 0].tolist() == [4, 3, 3]


def shared_feed(index: Index, kind: str, transform: Any, **options: Any) -> Feed:
    """A feed whose samples share what was decoded."""
    orders: dict[str, Any] = {
        "reuse": ReuseSampler(6, reuse=3, live=4, seed=0),
        "views": ViewSampler(SequentialSampler(12), [2] * 6, per_epoch="all", seed=0),
        "repeats": WeightedSampler([1] * 6, seed=0),
    }
    sampler = BatchSampler(orders[kind], batch_size=2)
    return Feed(index, sampler, decode=array, transform=transform, **options)


@pytest.mark.usefixtures("readahead")
@pytest.mark.parametrize("kind", ["reuse", "views", "repeats"])
def test_arrays_shared_by_samples_are_read_only(index: Index, kind: str) -> None:
    """Whatever a batch happens to hold."""
    with pytest.raises(DecodeError, match=r"read-only.*as in image\.copy\(\)"):
        next(made(shared_feed(index, kind, in_place)))
    flags = []

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        flags.append(sample["x"].flags.writeable)
        return {"x": sample["x"] + 1}

    feed = shared_feed(index, kind, look)
    assert feed.spec
    flags.clear()
    for batch in made(feed):
        right = [len(WORDS[record]) + 1 for record in feed.sampler.records(batch["id"])]
        assert batch["x"][:, 0].tolist() == right
    assert not any(flags)


@pytest.mark.usefixtures("readahead")
def test_shared_objects_other_than_arrays_are_copied(index: Index) -> None:
    def lists(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": [float(len(sample["word"]))]}

    def grow(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"][0] += 1
        return {"x": sample["x"]}

    sampler = BatchSampler(ReuseSampler(6, reuse=3, live=4, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=lists, transform=grow)
    for batch in made(feed):
        right = [len(WORDS[record]) + 1 for record in sampler.records(batch["id"])]
        assert batch["x"][:, 0].tolist() == right


@pytest.mark.usefixtures("readahead")
def test_crops_of_cached_image_are_views(index: Index) -> None:
    def large(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.zeros((100, 100, 3), np.uint8)}

    kept = []  # so that no address is given out twice

    def crop(sample: dict[str, Any]) -> dict[str, Any]:
        kept.append(sample["x"])
        return {"x": sample["x"][:4, :4]}

    sampler = BatchSampler(ReuseSampler(6, reuse=4, live=6, seed=0), batch_size=2)
    feed = Feed(index, sampler, decode=large, transform=crop)
    assert feed.spec
    kept.clear()
    list(made(feed))
    addresses = {array.__array_interface__["data"][0] for array in kept}
    assert len(kept) == 6 * 4
    assert len(addresses) <= 6 + 5  # those live at both ends of the epoch are decoded twice


def test_read_only_results_of_decode_are_made_writable(
    tmp_path: Path,
) -> None:
    """Pillow's images, and arrays over the bytes that were read."""
    image = np.full((4, 4, 3), 7, np.uint8)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    images = pack([{"x": file.getvalue(), "raw": bytes(8)}] * 2, tmp_path)["data"]
    sampler = ExactOnceBatchSampler(2, batch_size=2)
    decodes: list[Any] = [
        DecodeImage("x"),
        DecodeImage("x", size=(3, 3)),
        lambda sample: {"x": np.frombuffer(sample["raw"], np.float32)},
    ]
    for decode in decodes:
        batch = batch_of(Feed(images, sampler, decode=decode, transform=in_place), request_of(0, 1))
        assert (batch["x"] == batch["x"].flat[0]).all()
        assert batch["x"].flat[0] in (8, 1)


def test_trial_passes_fresh_samples_to_a_writing_transform(tmp_path: Path) -> None:
    """The trial calls a transform often, each time with the sample as decode gave it."""

    def brighter(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"] += 1
        return {"x": sample["x"].copy()}

    index = pack([{"word": b"to"}, {"word": b"be"}], tmp_path)["data"]
    feed = Feed(
        index,
        BatchSampler(SequentialSampler(2), batch_size=2),
        decode=lambda sample: {"x": np.zeros(2)},
        transform=brighter,
    )
    assert [batch["x"].tolist() for batch in NumpyLoader(feed)] == [[[1, 1], [1, 1]]]
