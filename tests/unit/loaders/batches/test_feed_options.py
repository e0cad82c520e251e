"""A call with wrong arguments is an error that shows the call, or names the right option."""

import inspect
from typing import Any

import pytest

from twinfeed.loaders import (
    DatasetSource,
    DecodeImage,
    Feed,
    NumpyLoader,
    build_index,
    open_index,
    pack,
    shuffled,
)
from twinfeed.samplers import PKBatchSampler

# What is called, with what, and what the error says of the last option.
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    (Feed, (None, None), {"shuffle": True}, r"takes no shuffle=: .*RandomSampler.*: write Feed\("),
    (Feed, (None, None), {"num_workers": 2}, r"takes no num_workers=: TorchLoader\(feed, num_wo"),
    (Feed, (None, None), {"device": 2}, r"takes no device=: .*TorchLoader\(feed, device="),
    (Feed, (None, None), {"transfrom": dict}, "takes no transfrom=: write Feed"),
    (Feed, (None, None), {"xyz": 1}, "takes no xyz=: write Feed"),
    (DecodeImage, ("jpg",), {"channels_first": True}, r"channels_first=: .*permute\(0, 3"),
    (shuffled, (None,), {"seed": 0, "block": 4}, "takes no block=: write shuffled"),
    (shuffled, (None,), {"batch_size": 4}, r"batch_size=: the sampler has it, .*BatchSampler\("),
    (pack, ([], "out"), {"splits": 1}, "takes no splits=: write pack"),
    (open_index, ("x",), {"rot": "y"}, "takes no rot=: write open_index"),
    (pack, ("*.tar", "x"), {"label": "cls"}, "takes no label=: pack an index with labels"),
    (
        build_index,
        ("*.tar", "x"),
        {"labels": "cls"},
        "takes no labels=: shards are read by ",
    ),
    (Feed, (None, None, 4), {}, r"too many positional arguments: write Feed\(index, sampler, tra"),
    (Feed, ({},), {"samplr": None}, "takes no samplr=: write Feed"),
    (Feed, (), {}, r"missing a required .*: write Feed\(index, sampler, "),
    (Feed, ({},), {"batch_size": 8}, "takes no batch_size=: the sampler"),
    (
        NumpyLoader,
        (),
        {"fed": None},
        r"takes no fed=: write NumpyLoader\(feed\)",
    ),
    (pack, ([],), {"out": "x"}, r"'?out'?.*: write pack\(source, out\)"),
    (DatasetSource, ({},), {"labels": "y"}, "takes no labels=: write DatasetSource"),
    (DatasetSource, (), {"data": {}}, r"'?data'?.*: write DatasetSource\(data, label='y'\)"),
    (DecodeImage, ("jpg", 3), {}, r"too many positional .*: write DecodeImage\('image', size="),
    (build_index, ("*.tar", "x"), {"xyz": 1}, "xyz=: shards are read by container, "),
    (PKBatchSampler, ([0, 1],), {"P": 2, "k": 1}, r"takes no P=: write PKBatch"),
    (PKBatchSampler, (), {"labels": [0]}, r"argument: 'p': write PKBatchSampler\(labels, p=8"),
]


@pytest.mark.parametrize(("make", "given", "options", "message"), CALLS)
def test_an_option_names_its_counterpart(
    make: Any, given: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        make(*given, **options)


LOADERS = {
    "batch_size": r"BatchSampler\(sampler, batch_size=32\)",
    "shuffle": r"BatchSampler\(RandomSampler\(dataset, seed=0\), batch_size=32\)",
    "collate_fn": "collate= for fields, batch_transform= for a whole batch",
    "drop_last": "last_batch='drop'",
    "pin_memory": "leave it out",
    "sampler": r"Feed\(index, sampler\)",
}


def check_loader(loader: Any) -> None:
    for name, message in LOADERS.items():
        with pytest.raises(TypeError, match=f"{loader.__name__} takes no {name}=: .*{message}"):
            loader(None, **{name: True})


def test_loader_option_names_its_counterpart() -> None:
    check_loader(NumpyLoader)


@pytest.mark.frameworks
def test_framework_loader_options_name_their_counterpart() -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader
    from twinfeed.loaders.torch import TorchLoader

    check_loader(TorchLoader)
    check_loader(TensorFlowLoader)


def test_signatures_are_kept() -> None:
    assert DecodeImage(field="jpg").field == "jpg"  # a positional argument that may have its name
    assert "decode" in inspect.signature(Feed).parameters
