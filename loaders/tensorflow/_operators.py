"""Whether the n-th element of a dataset is the n-th batch of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from twinfeed.loaders.loop.external_passes import ExternalPasses

# The dataset that an operator gives has the same batches, in the same order, or the first of them.
_KEEPING = {"CopyToDevice", "Map", "Options", "Prefetch", "Repeat", "Take"}

_ADVICE = (
    "so the position after its batches is not known: take loader.dataset with map, prefetch or "
    "take alone, or say order='unchecked' if each element is the loader's next batch all the same"
)


def check_position(dataset: Any, loader: ExternalPasses, /) -> None:
    """Raise ValueError if the position after the elements of a dataset is not known."""
    datasets = list(_made_of(dataset)) if isinstance(dataset, tf.data.Dataset) else []
    loaders = {_server(one).external_passes for one in datasets if _server(one) is not None}
    if loaders != {loader}:
        raise ValueError(f"the dataset is not of this loader alone, {_ADVICE}")
    kinds = [_kind(one) for one in datasets if _server(one) is None]
    unordered = any(getattr(one, "_deterministic", None) == "false" for one in datasets)
    if unordered or dataset.options().deterministic is False:
        raise ValueError(f"the dataset has deterministic=False, {_ADVICE}")
    for number, kind in enumerate(kinds):
        again = kind == "Repeat" and "Take" in kinds[number:]
        if again or kind not in _KEEPING:
            after = " after a Take" if again else ""
            raise ValueError(f"the dataset has a {kind}{after}, {_ADVICE}")


def feed_of(dataset: Any) -> Any:
    """Return the feed whose batches a dataset is made of, or None if it is not known."""
    servers = map(_server, _made_of(dataset)) if isinstance(dataset, tf.data.Dataset) else ()
    return next((getattr(one, "feed", None) for one in servers if one is not None), None)


def _made_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and the datasets that it is made of, back to those of loaders."""
    yield dataset
    if _server(dataset) is None:
        for one in dataset._inputs():
            yield from _made_of(one)


def _server(dataset: tf.data.Dataset) -> Any:
    """Return the server of a loader's own dataset, else None."""
    return getattr(dataset, "twinfeed_server", None)


def _kind(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
