"""The operators of a dataset: whether its n-th element is the n-th batch of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from twinfeed.loaders.loop.external_passes import ExternalPasses

# Operators whose output is the same batches in the same order, or the first of them.
_KEEP_ORDER = {"CopyToDevice", "Map", "Options", "Prefetch", "Repeat", "Take"}

_ADVICE = (
    "so the position after its batches is not known: take loader.dataset with map, prefetch or "
    "take alone, or say order='unchecked' if each element is the loader's next batch all the same"
)


def check_position(dataset: Any, loader: ExternalPasses, /) -> None:
    """Raise ValueError unless element n of a dataset is batch n of the loader with these passes.

    Only such operators are allowed after the loader's dataset that keep the batches in order.
    """
    datasets = list(_upstream(dataset)) if isinstance(dataset, tf.data.Dataset) else []
    sources = [source for source in map(_source, datasets) if source is not None]
    if {source.external_passes for source in sources} != {loader}:
        raise ValueError(f"the dataset is not of this loader alone, {_ADVICE}")
    unordered = any(getattr(dataset, "_deterministic", None) == "false" for dataset in datasets)
    if unordered or dataset.options().deterministic is False:
        raise ValueError(f"the dataset has deterministic=False, {_ADVICE}")
    operators = [_operator(dataset) for dataset in datasets if _source(dataset) is None]
    for number, operator in enumerate(operators):
        repeats_part = operator == "Repeat" and "Take" in operators[number:]
        if repeats_part or operator not in _KEEP_ORDER:
            after = " after a Take" if repeats_part else ""
            raise ValueError(f"the dataset has a {operator}{after}, {_ADVICE}")


def feed_of(dataset: Any) -> Any:
    """Return the feed whose batches a dataset is made of, or None for other datasets."""
    sources = map(_source, _upstream(dataset)) if isinstance(dataset, tf.data.Dataset) else ()
    return next((getattr(source, "feed", None) for source in sources if source is not None), None)


def _upstream(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset and all datasets that it is made of, back to the datasets of loaders."""
    yield dataset
    if _source(dataset) is None:
        for upstream in dataset._inputs():
            yield from _upstream(upstream)


def _source(dataset: tf.data.Dataset) -> Any:
    """Return the `GraphSource` that a loader's own dataset reads; None for other datasets."""
    return getattr(dataset, "twinfeed_source", None)


def _operator(dataset: tf.data.Dataset) -> str:
    """Return the name of a dataset's operator: "Map" for a `_ParallelMapDataset`."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
