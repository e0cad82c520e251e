"""The twin law: the same ids, bytes and arrays in every framework."""

import random
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import own_source
from support.batches import expected, received
from support.cases import mark_long
from support.own_source import LABELS, WORDS, Words
from support.plain import batches
from support.transforms import both, brighter

from twinfeed.loaders import (
    ByRecord,
    DatasetSource,
    DecodeImage,
    Feed,
    FieldSpec,
    FromFolder,
    Index,
    Loader,
    LoaderError,
    NumpyLoader,
    Reader,
    Seeded,
    build_index,
    pack,
)
from twinfeed.loaders.jax import JaxLoader
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ViewSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

OWN = {"decode": own_source.size, "transform": own_source.noisy}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Index]:
    """Sixty small images of six classes, in each container."""
    from PIL import Image

    root = tmp_path_factory.mktemp("twin")
    for number in range(60):
        path = root / "images" / f"class{number % 6}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 5), number, np.uint8)).save(path)
    source = root / "images"
    loose = build_index(root / "images", root / "files.index", label=FromFolder())
    return {"files": loose} | {
        container: pack(source, root / container, container=container, seed=1)["data"]
        for container in ("tfrecord", "tar")
    }


def samplers(index: Index) -> dict[str, BatchStream]:
    return {
        "random": BatchSampler(RandomSampler(len(index), seed=3), batch_size=16),
        "P x K": PKBatchSampler(index.labels, p=4, k={0: 2, 7: 3}, batches_per_epoch=5, seed=3),
    }


def noted(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as plain Python, with the dtypes of its arrays."""
    arrays = {name: np.asarray(value) for name, value in batch.items() if name != "encoded"}
    plain = {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}
    return plain | {"encoded": list(batch["encoded"])}


def plain(feed: Feed) -> Iterator[dict[str, Any]]:
    for epoch in range(2):
        yield from map(noted, batches(feed, 0 if feed.sampler.evaluation else epoch))


def carried(loader: Loader) -> Iterator[dict[str, Any]]:
    """Two epochs of a loader, whatever its framework."""
    with loader:
        for _ in range(2):
            for batch in loader:
                yield noted({name: _host(value) for name, value in batch.items()})


def _host(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value


def words(sample: dict[str, Any]) -> dict[str, Any]:
    """A text, and as many words as the image's brightness says."""
    number = int(DecodeImage(mode="L")(sample)["image"][0, 0])
    return {"text": f"nº {number}", "words": ["Wort", "où"][: number % 3] * 2}


def test_texts_are_str_where_backend_has_them(packed: dict[str, Index]) -> None:
    """Lists of texts too; in an empty rank batch as well. TensorFlow has bytes alone."""
    index = packed["tar"]
    sampler = ExactOnceBatchSampler(60, batch_size=59).shard(0, 2)
    spec = {"text": FieldSpec((), np.dtype(str)), "words": FieldSpec((None,), np.dtype(str))}
    feed = Feed(index, sampler, decode=words, collate={"words": "ragged"}, spec=spec)
    with Reader(index) as reader:
        stored = reader.read(np.arange(60), ["image"])["image"]
    made = [words({"image": image}) for image in stored]
    expected = [
        ([made[n]["text"] for n in ids], [made[n]["words"] for n in ids]) for ids in sampler
    ]
    assert ([], []) in expected
    arrays = [
        (b["text"], [p.tolist() for p in np.split(b["words"].values, b["words"].lengths.cumsum())])
        for b in NumpyLoader(feed)
    ]
    assert [(texts, rows[:-1]) for texts, rows in arrays] == expected
    for options in ({}, {"num_workers": 1}):
        batches = [(b["text"], b["words"]) for b in TorchLoader(feed, **options)]  # type: ignore[arg-type]
        assert batches == expected
    encoded = [
        ([t.encode() for t in texts], [[word.encode() for word in row] for row in rows])
        for texts, rows in expected
    ]
    batches = [(b["text"].numpy().tolist(), b["words"].to_list()) for b in TensorFlowLoader(feed)]
    assert batches == encoded


CAPTIONS = [f"{style} № {n}\0" for n in range(20) for style in ("a", "", "one")]
AUTHORS = ["Ann", "", "Жанна", "🦉"] * 5


def captioned(sample: dict[str, Any]) -> dict[str, Any]:
    return {"caption": sample["caption"], "initial": sample["author"][:1]}


def read_twice(batch: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**batch, "both": [*map(str.__add__, batch["caption"], batch["author"])]}


TEXT_LOADERS: list[tuple[type[Loader[Any]], dict[str, Any]]] = [
    (NumpyLoader, {}),
    (NumpyLoader, {"threads": 2}),
    (TorchLoader, {}),
    (TorchLoader, {"num_workers": 2}),
    (TensorFlowLoader, {}),
    (JaxLoader, {}),
]


def shown(value: Any) -> list[Any]:
    """The rows of a batch as plain Python; TensorFlow's bytes as text."""
    rows = value if isinstance(value, list) else np.asarray(_host(value)).tolist()
    return [row.decode() if isinstance(row, bytes) else row for row in rows]


SIDE_OPTIONS = [{}, {"transform": captioned}, {"batch_transform": read_twice}]


@pytest.mark.parametrize(
    ("views", "options"), mark_long(product([1, 3], SIDE_OPTIONS), but_every=2)
)
def test_side_tables_of_texts_are_equal_in_all_loaders(views: int, options: dict[str, Any]) -> None:
    """Captions of each record, and one author; with padding, and in an empty rank batch."""
    captions = CAPTIONS[: 20 * views]
    side = {"caption": captions, "author": ByRecord(AUTHORS), "row": ByRecord(np.arange(20) * 2)}
    order = ViewSampler(RandomSampler(60, seed=1), np.full(20, 3), per_epoch="all", seed=0)
    sampler = {
        1: ExactOnceBatchSampler(20, batch_size=19).shard(0, 2),
        3: BatchSampler(order, batch_size=16, last_batch="pad"),
    }[views]
    feed = Feed(DatasetSource({"x": np.arange(20)}), sampler, side=side, **options)
    for loader, arguments in TEXT_LOADERS:
        if loader is JaxLoader and sampler.world_size > 1:
            continue  # it takes whole feeds
        for step, batch in enumerate(loader(feed, **arguments)):
            ids = sampler.batches(0, step, step + 1)[0].tolist()
            texts = ["" if n < 0 else captions[n] for n in ids]
            authors = ["" if n < 0 else AUTHORS[n // views] for n in ids]
            assert shown(batch["caption"]) == texts
            assert shown(batch["author"]) == authors
            assert shown(batch["row"]) == [0 if n < 0 else n // views * 2 for n in ids]
            if "transform" in options:
                assert shown(batch["initial"]) == [author[:1] for author in authors]
            if "batch_transform" in options:
                assert shown(batch["both"]) == [*map(str.__add__, texts, authors)]


LOADERS: list[Any] = [NumpyLoader, TorchLoader, TensorFlowLoader, JaxLoader]


@pytest.mark.parametrize("function", [None, "decode", "transform", "batch_transform"])
@pytest.mark.parametrize(("batch_size", "rank"), [(4, 0), (16, 1), (16, 2)])
def test_padding_has_bytes_that_every_parser_takes(
    packed: dict[str, Index], batch_size: int, rank: int, function: str | None
) -> None:
    """Those of the stream's first record, on every rank."""
    index, records = packed["tfrecord"], [41, 7, 8, 9, 30, 31, 52]
    sampler = ExactOnceBatchSampler(60, batch_size=batch_size, last_batch="pad", records=records)
    options: Any = {} if function is None else {function: lambda sample, *seed: sample}
    if function == "transform":
        options = {"transform": lambda sample: {"image": sample["image"], "number": 3}}
    feed = Feed(index, sampler if batch_size == 4 else sampler.shard(rank, 4), **options)
    stored, ids = Reader(index).read(range(60))["image"], feed.sampler.batch(0, len(feed) - 1)
    wanted = [stored[n if n >= 0 else min(records)] for n in ids.tolist()]
    assert -1 in ids
    assert feed[0, len(feed) - 1]["image"] == wanted
    for make in LOADERS[: 4 if feed.sampler.world_size == 1 else 3]:
        with make(feed) as loader:
            *_, batch = loader
        assert [_host(value) for value in _host(batch["image"])] == wanted
        assert _host(batch["mask"]).tolist() == (ids >= 0).tolist()
        numbers = np.asarray(batch["number" if function == "transform" else "label"])
        assert not numbers[ids < 0].any()


EMPTY = ExactOnceBatchSampler(0, batch_size=2)
NO_RECORDS: dict[str, Feed] = {
    "of five": Feed({"x": np.ones(5)}, ExactOnceBatchSampler(5, batch_size=2, records=[])),
    "of none": Feed({"x": np.ones(0)}, EMPTY),
    "with functions": Feed({"x": np.ones(0)}, EMPTY, decode=dict, batch_transform=lambda b, s: b),
    "of a rank": Feed({"x": np.ones(0)}, EMPTY).shard(1, 2),
}


@pytest.mark.parametrize("name", NO_RECORDS)
def test_evaluation_of_no_records_has_no_batch(name: str) -> None:
    feed = NO_RECORDS[name]
    for make in LOADERS[: 4 if feed.sampler.world_size == 1 else 3]:
        with make(feed) as loader:
            assert [*loader, *loader] == []
    if name == "of five":
        assert list(TensorFlowLoader(feed).dataset) == []
        return
    with pytest.raises(LoaderError, match=r"without records does not show.*\n.*the feed spec="):
        print(TensorFlowLoader(feed).dataset)


def test_spec_makes_dataset_of_no_records() -> None:
    feed = Feed({"x": np.ones(0)}, EMPTY, spec={"x": FieldSpec((), np.dtype(np.float64))})
    assert list(TensorFlowLoader(feed).dataset) == []


def test_workers_change_no_batch(packed: dict[str, Index]) -> None:
    index = packed["tar"]
    feed = Feed(index, samplers(index)["P x K"], decode=both, transform=brighter)
    assert list(carried(TorchLoader(feed, num_workers=2))) == list(plain(feed))


def draws(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation as most are written: it draws from global states."""
    noise = [random.random(), np.random.random(), float(torch.rand(()))]
    return {"image": sample["image"], "encoded": sample["encoded"], "noise": np.array(noise)}


def test_seeded_transform_gives_same_values_in_all_loaders(packed: dict[str, Index]) -> None:
    """Without workers, with two and four, with threads, and in TensorFlow."""
    index = packed["tar"]
    feed = Feed(index, samplers(index)["P x K"], decode=both, transform=Seeded(draws))
    expected = list(plain(feed))
    loaders = [
        NumpyLoader(feed, threads=3),
        TorchLoader(feed),
        TorchLoader(feed, threads=3, prefetch=2),
        TorchLoader(feed, num_workers=2),
        TorchLoader(feed, num_workers=4, threads=2),
        TensorFlowLoader(feed),
        TensorFlowLoader(feed, threads=4),
    ]
    for loader in loaders:
        torch.manual_seed(0)
        before = torch.rand(3)
        torch.manual_seed(0)
        assert list(carried(loader)) == expected
        assert torch.equal(torch.rand(3), before)  # the loop's own dropout


@pytest.mark.parametrize("make", [NumpyLoader, TorchLoader])
def test_transform_that_sets_global_states_runs_alone(packed: dict[str, Index], make: Any) -> None:
    """Else the loop would draw from states that are the transform's."""
    called_by = []

    def noting(sample: dict[str, Any]) -> dict[str, Any]:
        called_by.append(threading.current_thread())
        return draws(sample)

    index = packed["tar"]
    feed = Feed(index, samplers(index)["random"], decode=both, transform=Seeded(noting))
    assert feed.spec
    called_by.clear()
    with make(feed, prefetch=4, threads=3) as loader:
        next(iter(loader))
    assert called_by == [threading.main_thread()] * 16


def test_both_containers_hold_bytes_of_files(packed: dict[str, Index]) -> None:
    for index in packed.values():
        with Reader(index) as reader:
            stored = set(reader.read(np.arange(60), ["image"])["image"])
        images = [path.read_bytes() for path in Path(packed["files"].root).rglob("images/**/*.png")]
        assert len(images) == 60
        assert stored == {*images}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (True, {"decode": own_source.size}),
        (False, OWN),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((False, {}), (True, OWN))),
    ],
)
def test_source_without_index_gives_batches_of_index(
    tmp_path: Path, rows: bool, options: dict[str, Any]
) -> None:
    samples = [{"word": word, "label": int(n)} for word, n in zip(WORDS, LABELS, strict=True)]
    index = pack(samples, tmp_path)["data"]
    source = DatasetSource(samples, label="label") if rows else Words()
    for sampler in own_source.samplers():
        wanted, feed = expected(index, sampler, **options), Feed(source, sampler, **options)
        for loader in (TorchLoader(feed), TorchLoader(feed, num_workers=2), TensorFlowLoader(feed)):
            with loader:
                assert received(loader) == wanted
