"""The operators of a dataset: whether its n-th element is the n-th batch of a loader."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.tensorflow._iterators import owner_of, upstream

# Operators that keep the batches and their order, or only the first batches.
_KEEP_ORDER = {"CopyToDevice", "Map", "Options", "Prefetch", "Restructured", "Take"}

_ADVISE_ORDER = (
    "so the loader's position after each batch is not known: use only map, prefetch and take "
    "after loader.dataset, or say order='unchecked' if each element is the loader's next batch"
)


def check_batch_order(dataset: Any, loader: Loader[Any], /) -> None:
    """Raise ValueError unless element n of a dataset is batch n of a loader."""
    # The dataset and all that it is made of, back from the last operator: in the example, the
    # datasets of `prefetch`, of `map`, and of the loader.
    datasets = list(upstream(dataset)) if isinstance(dataset, tf.data.Dataset) else []
    # Each loader has a `run` of its own, which its sources have, too: it identifies the loader.
    if {getattr(owner_of(item), "run", None) for item in datasets if owner_of(item)} != {
        loader.run
    }:
        raise ValueError(f"the dataset is not made of this loader's dataset only, {_ADVISE_ORDER}")
    unordered = any(getattr(item, "_deterministic", None) == "false" for item in datasets)
    if unordered or dataset.options().deterministic is False:
        raise ValueError(f"the dataset has deterministic=False, {_ADVISE_ORDER}")
    for item in datasets:
        # "Map" for a `_ParallelMapDataset`
        name = type(item).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
        if owner_of(item) is None and name not in _KEEP_ORDER:
            raise ValueError(f"the dataset has the operator {name}, {_ADVISE_ORDER}")
