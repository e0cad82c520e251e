"""An option of another library names its counterpart; what is given by place, its name."""

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

# What is called, with what, and what the error says of the last option.
CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
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
    (pack, ("*.tar", "x"), {"label": "cls"}, "takes no label=: give CompressedShards"),
    (build_index, ("*.tar", "x"), {"labels": "cls"}, "takes no labels=: did you mean label="),
    (Feed, (None, None, 4), {}, "takes its options by name, as in missing=…, got 4"),
    (Feed, ({},), {"sampler": None}, r"needs index, sampler by position: write Feed\(index, samp"),
    (Feed, (), {}, r"needs index, sampler by position: write Feed\(index, sampler\)"),
    (Feed, ({},), {"batch_size": 8}, "takes no batch_size=: the feed's sampler"),
    (NumpyLoader, (), {"feed": None}, r"needs feed by position: write NumpyLoader\(feed\)"),
    (pack, ([],), {"out": "x"}, r"needs source, out by position: write pack\(source, out\)"),
    (DatasetSource, ({},), {"labels": "y"}, "takes no labels=: did you mean label="),
    (DatasetSource, (), {"data": {}}, r"needs data by position: write DatasetSource\(data\)"),
    (DecodeImage, ("jpg", 3), {}, "takes its options by name, as in strict=…, got 3"),
    (build_index, ("*.tar", "x"), {"xyz": 1}, "xyz=: its options are label, classes, fields, "),
]


@pytest.mark.parametrize(("make", "given", "options", "message"), CALLS)
def test_an_option_names_its_counterpart(
    make: Any, given: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"{make.__name__} .*{message}"):
        make(*given, **options)


LOADERS = {
    "batch_size": r"BatchSampler\(order, batch_size=…\)",
    "shuffle": r"BatchSampler\(RandomSampler\(n, seed=0\), batch_size=…\)",
    "collate_fn": "collate= says how fields become a batch",
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
