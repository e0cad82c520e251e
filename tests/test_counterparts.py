"""An option of another library names its counterpart; what is given by place, its name."""

import inspect
from typing import Any

import pytest

from twinfeed.loaders import (
    DecodeImage,
    Feed,
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

ORDER = RandomSampler(9, seed=0)
# What is called, with what, and what the error says of the last option.
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (BatchSampler, (ORDER,), {"drop_last": True}, "takes no drop_last=: final='drop'"),
    (BatchSampler, (ORDER,), {"batchsize": 4}, r"takes no batchsize=: did you mean batch_size=\?"),
    (PKBatchSampler, ([0],), {"m": 4, "batch_size": 8}, "takes no m=: k= is"),
    (ExactOnceBatchSampler, (9,), {"num_replicas": 2}, r"num_replicas=: shard\(rank, world_size\)"),
    (RandomSampler, (9,), {"generator": None}, "takes no generator=: seed="),
    (WeightedSampler, ([1],), {"sede": 4}, "takes no sede=: did you mean seed="),
    (ShardShuffleSampler, ([1],), {"seed": 0, "bloc": 4}, "takes no bloc=: did you mean block="),
    (ShardShuffleSampler, ([9],), {"seed": 0}, r"needs block=: shuffled\(index, seed"),
    (split, (8,), {"stratify": [0]}, "takes no stratify=: by= divides each class"),
    (Feed, (None, None), {"shuffle": True}, "takes no shuffle=: .*RandomSampler"),
    (Feed, (None, None), {"num_workers": 2}, r"takes no num_workers=: .*TorchLoader\(feed, num_wo"),
    (Feed, (None, None), {"transfrom": dict}, "takes no transfrom=: did you mean transform="),
    (Feed, (None, None), {"xyz": 1}, "takes no xyz=: its options are fields, decode, "),
    (DecodeImage, ("jpg",), {"channels_first": True}, r"channels_first=: .*permute\(0, 3"),
    (shuffled, (None,), {"seed": 0, "block": 4}, "no block=: .*ShardShuffleSampler takes it"),
    (shuffled, (None,), {"seed": 0, "buffer_size": 4}, "takes no buffer_size=: .*memory= is"),
    (shuffled, (None,), {"batch_size": 4}, r"BatchSampler\(shuffled\(index, seed=0\), batch_size="),
    (pack, ([], "out"), {"splits": 1}, "takes no splits=: did you mean split="),
    (open_index, ("x",), {"rot": "y"}, "takes no rot=: did you mean root="),
    (build_index, ("*.tar", "x"), {"labels": "cls"}, "takes no labels=: did you mean label="),
    (build_index, ("*.tar", "x"), {"xyz": 1}, "xyz=: its options are label, classes, fields, "),
    (BatchSampler, (ORDER, 4), {}, "takes its options by name, as in batch_size=…, got 4"),
    (RandomSampler, (9, 4), {}, "as in seed=…, got 4"),
    (PKBatchSampler, ([0], 8, 4), {}, "as in p=…, got 8"),
]


@pytest.mark.parametrize(("make", "given", "options", "told"), CALLS)
def test_an_option_names_its_counterpart(
    make: Any, given: tuple[Any, ...], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(TypeError, match=f"{make.__name__} .*{told}"):
        make(*given, **options)


LOADERS = {
    "batch_size": r"BatchSampler\(order, batch_size=…\)",
    "shuffle": r"BatchSampler\(RandomSampler\(n, seed=0\), batch_size=…\)",
    "collate_fn": "collate= says how fields become a batch",
    "drop_last": "final='drop'",
    "pin_memory": "leave it out",
    "sampler": r"Feed\(index, sampler\)",
}


def check_loader(loader: Any) -> None:
    for name, told in LOADERS.items():
        with pytest.raises(TypeError, match=f"{loader.__name__} takes no {name}=: .*{told}"):
            loader(None, **{name: True})


def test_a_loader_names_the_counterpart() -> None:
    check_loader(NumpyLoader)


@pytest.mark.frameworks
def test_the_loaders_of_frameworks_name_it_too() -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader
    from twinfeed.loaders.torch import TorchLoader

    check_loader(TorchLoader)
    check_loader(TensorFlowLoader)


def test_signatures_are_kept() -> None:
    assert "batch_size" in inspect.signature(BatchSampler).parameters
    assert "decode" in inspect.signature(Feed).parameters
