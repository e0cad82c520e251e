"""An option of another library names its counterpart; what is given by place, its name."""

import inspect
from typing import Any

import pytest

from twinfeed.loaders import (
    DecodeImage,
    Feed,
    Index,
    NumpyLoader,
    build_index,
    open_index,
    pack,
    shuffled,
)
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ShardShuffleSampler,
    WeightedSampler,
    split,
)

Factory = pytest.TempPathFactory


@pytest.fixture(scope="module")
def index(tmp_path_factory: Factory) -> Index:
    return pack([{"x": b"a", "label": 0}], tmp_path_factory.mktemp("one"))["data"]


@pytest.fixture(scope="module")
def feed(index: Index) -> Feed:
    return Feed(index, ExactOnceBatchSampler(1, batch_size=1))


SAMPLERS: dict[str, tuple[Any, str]] = {
    "place": (
        lambda: BatchSampler(RandomSampler(9, seed=0), 4),  # type: ignore[misc]
        "BatchSampler takes its options by name, as in batch_size=…, got 4",
    ),
    "place of a seed": (lambda: RandomSampler(9, 4), "as in seed=…, got 4"),  # type: ignore[misc]
    "place of P": (lambda: PKBatchSampler([0], 8, 4), "as in p=…, got 8"),  # type: ignore[misc]
    "drop_last": (
        lambda: BatchSampler(RandomSampler(9, seed=0), batch_size=4, drop_last=True),  # type: ignore[call-arg]
        "takes no drop_last=: final='drop'",
    ),
    "m": (
        lambda: PKBatchSampler([0], m=4, batch_size=8),  # type: ignore[call-arg]
        "takes no m=: k= is",
    ),
    "num_replicas": (
        lambda: ExactOnceBatchSampler(9, batch_size=4, num_replicas=2, rank=0),  # type: ignore[call-arg]
        r"takes no num_replicas=: shard\(rank, world_size\)",
    ),
    "generator": (
        lambda: RandomSampler(9, generator=None),  # type: ignore[call-arg]
        "takes no generator=: seed=",
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_name_the_counterpart(name: str) -> None:
    make, told = SAMPLERS[name]
    with pytest.raises(TypeError, match=told):
        make()


LOADERS = {
    "batch_size": r"BatchSampler\(order, batch_size=…\)",
    "shuffle": r"BatchSampler\(RandomSampler\(n, seed=0\), batch_size=…\)",
    "collate_fn": "collate= says how fields become a batch",
    "drop_last": "final='drop'",
    "pin_memory": "leave it out",
    "sampler": r"Feed\(index, sampler\)",
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_names_the_counterpart(feed: Feed, name: str) -> None:
    options: Any = {name: True}
    with pytest.raises(TypeError, match=f"NumpyLoader takes no {name}=: .*{LOADERS[name]}"):
        NumpyLoader(feed, **options)


@pytest.mark.frameworks
@pytest.mark.parametrize("name", LOADERS)
def test_the_loaders_of_frameworks_name_it_too(feed: Feed, name: str) -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader
    from twinfeed.loaders.torch import TorchLoader

    options: Any = {name: True}
    for loader in (TorchLoader, TensorFlowLoader):
        with pytest.raises(
            TypeError, match=f"{loader.__name__} takes no {name}=: .*{LOADERS[name]}"
        ):
            loader(feed, **options)


def test_a_feed_names_the_sampler_and_the_loader(index: Index, feed: Feed) -> None:
    with pytest.raises(TypeError, match=r"Feed takes no shuffle=: .*RandomSampler"):
        Feed(index, feed.sampler, shuffle=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Feed takes no num_workers=: .*TorchLoader\(feed, num_wo"):
        Feed(index, feed.sampler, num_workers=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("block", "ShardShuffleSampler takes it"),
        ("buffer_size", "memory= is"),
        ("batch_size", r"BatchSampler\(shuffled\(index, seed=0\), batch_size="),
    ],
)
def test_a_shuffle_of_an_index_names_what_it_finds_itself(
    index: Index, option: str, advice: str
) -> None:
    with pytest.raises(TypeError, match=f"shuffled takes no {option}=: .*{advice}"):
        shuffled(index, seed=0, **{option: 4})  # type: ignore[call-overload]


def test_a_decoder_of_images_names_what_is_done_to_a_batch() -> None:
    with pytest.raises(TypeError, match=r"DecodeImage takes no channels_first=: .*permute\(0, 3"):
        DecodeImage("jpg", channels_first=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"DecodeImage takes no dtype=: .*float\(\) / 255"):
        DecodeImage("jpg", dtype="float32")  # type: ignore[call-arg]


MISSPELT: dict[str, Any] = {
    r"BatchSampler takes no batchsize=: did you mean batch_size=\?": lambda _: BatchSampler(
        RandomSampler(9, seed=0),
        batchsize=4,  # type: ignore[call-arg]
    ),
    r"WeightedSampler takes no sede=: did you mean seed=": lambda _: WeightedSampler([1], sede=4),  # type: ignore[call-arg]
    r"takes no bloc=: did you mean block=": lambda _: ShardShuffleSampler([1], seed=0, bloc=4),  # type: ignore[call-arg]
    r"Feed takes no transfrom=: did you mean transform=": lambda index: Feed(
        index,
        BatchSampler(RandomSampler(1, seed=0), batch_size=1),
        transfrom=dict,  # type: ignore[call-arg]
    ),
    r"Feed takes no xyz=: its options are fields, decode, ": lambda index: Feed(
        index,
        BatchSampler(RandomSampler(1, seed=0), batch_size=1),
        xyz=1,  # type: ignore[call-arg]
    ),
    r"pack takes no splits=: did you mean split=": lambda _: pack([], "out", splits=1),  # type: ignore[call-arg]
    r"open_index takes no rot=: did you mean root=": lambda _: open_index("x", rot="y"),  # type: ignore[call-arg]
    r"split takes no stratify=: by= divides each class": lambda _: split(8, stratify=[0]),  # type: ignore[call-arg]
    r"build_index takes no labels=: did you mean label=": lambda _: build_index(
        "*.tar",
        "x.index",
        labels="cls",  # type: ignore[call-arg]
    ),
    r"build_index takes no xyz=: its options are label, classes, fields, ": lambda _: build_index(
        "*.tar",
        "x.index",
        xyz=1,  # type: ignore[call-arg]
    ),
}


@pytest.mark.parametrize("told", MISSPELT)
def test_a_misspelt_option_names_the_nearest(index: Index, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        MISSPELT[told](index)


def test_a_shuffle_over_shards_names_what_chooses_its_numbers() -> None:
    with pytest.raises(TypeError, match=r"ShardShuffleSampler needs block=: shuffled\(index, seed"):
        ShardShuffleSampler([9], seed=0)  # type: ignore[call-arg]


def test_signatures_are_kept() -> None:
    assert "batch_size" in inspect.signature(BatchSampler).parameters
    assert "decode" in inspect.signature(Feed).parameters
