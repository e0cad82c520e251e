"""The twin law: the same ids, bytes and arrays in a plain loop, in torch and in TensorFlow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import DecodeImage, Feed, ImageFolder, Index, Reader, pack, request_of
from twinfeed.loaders.tensorflow import make_dataset
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
)

Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Index]:
    """Sixty small images of six classes, in both containers."""
    from PIL import Image

    root = tmp_path_factory.mktemp("twin")
    for number in range(60):
        path = root / "images" / f"class{number % 6}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 5), number, np.uint8)).save(path)
    source = ImageFolder(root / "images")
    return {
        container: pack(source, root / container, container=container, seed=1)["data"]
        for container in ("tfrecord", "tar")
    }


def samplers(index: Index) -> dict[str, BatchStream]:
    n = len(index)
    return {
        "random": BatchSampler(RandomSampler(n, seed=3), batch_size=16),
        "exact once": ExactOnceBatchSampler(n, batch_size=16),
        "exact once, padded": ExactOnceBatchSampler(n, batch_size=16, final="pad"),
        "exact once, rank 2 of 7": ExactOnceBatchSampler(n, batch_size=16).shard(2, 7),
        "P x K": PKBatchSampler(index.labels, p=4, k={0: 2, 7: 3}, batches_per_epoch=5, seed=3),
    }


def both(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the encoded bytes beside the decoded image."""
    return DecodeImage(mode="L")(sample) | {"encoded": sample["image"]}


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation that draws from the sample's seed."""
    random = np.random.default_rng(sample["seed"])
    return sample | {"image": sample["image"] + random.random(dtype=np.float32)}


def noted(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as plain Python, with the dtypes of its arrays."""
    arrays = {name: np.asarray(value) for name, value in batch.items() if name != "encoded"}
    plain = {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}
    return plain | {"encoded": list(batch["encoded"])}


def plain(index: Index, sampler: BatchStream, **options: Any) -> Iterator[dict[str, Any]]:
    feed = Feed(index, sampler, **options)
    for epoch in range(2):
        for step in range(len(sampler)):
            yield noted(feed(request_of(sampler, epoch=epoch, step=step)))


def torch(
    index: Index, sampler: BatchStream, workers: int = 0, **options: Any
) -> Iterator[dict[str, Any]]:
    with TorchLoader(index, sampler, num_workers=workers, **options) as loader:
        for _ in range(2):
            for batch in loader:
                yield noted(batch)


def tensorflow(index: Index, sampler: BatchStream, **options: Any) -> Iterator[dict[str, Any]]:
    for batch in make_dataset(index, sampler, **options).repeat(2):
        yield noted({name: value.numpy() for name, value in batch.items()})


@pytest.mark.parametrize("container", ["tfrecord", "tar"])
@pytest.mark.parametrize(
    "name", ["random", "exact once", "exact once, padded", "exact once, rank 2 of 7", "P x K"]
)
def test_every_way_gives_the_same(packed: dict[str, Index], container: str, name: str) -> None:
    index = packed[container]

    def sampler() -> BatchStream:
        return samplers(index)[name]

    options = {"decode": both, "transform": brighter}
    expected = list(plain(packed["tfrecord"], sampler(), **options))
    assert len(expected) == 2 * len(sampler())
    assert list(torch(index, sampler(), **options)) == expected
    assert list(tensorflow(index, sampler(), **options)) == expected


def test_workers_make_no_difference(packed: dict[str, Index]) -> None:
    index = packed["tar"]
    options = {"decode": both, "transform": brighter}
    expected = list(plain(index, samplers(index)["P x K"], **options))
    given = torch(index, samplers(index)["P x K"], 2, multiprocessing_context="spawn", **options)
    assert list(given) == expected


def test_both_containers_hold_the_files_own_bytes(packed: dict[str, Index]) -> None:
    for index in packed.values():
        with Reader(index) as reader:
            stored = set(reader.read(np.arange(60), ["image"])["image"])
        folder = Path(index.root).parent / "images"
        assert stored == {path.read_bytes() for path in folder.rglob("*.png")}
