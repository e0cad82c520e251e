"""The operators of a dataset: whether its n-th element is the n-th batch of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.tensorflow._iterators import owner_of, upstream

# Operators that keep the batches and their order, or only the first batches.
_KEEP_ORDER = {"CopyToDevice", "Map", "Options", "Prefetch", "Repeat", "Restructured", "Take"}

_ADVISE_ORDER = (
    "so the loader's position after each batch is not known: use only map, prefetch and take after "
    "loader.dataset, and unbatch().map(…).batch(n) for batches that all have n records, or say "
    "order='unchecked' if each element is the loader's next batch"
)


def check_batch_order(dataset: Any, loader: Loader[Any], /) -> None:
    """Raise ValueError unless element n of a dataset is batch n of a loader."""
    # The dataset and all that it is made of, back from the last operator: in the example, the
    # datasets of `take`, of `map`, and of the loader.
    datasets = list(upstream(dataset)) if isinstance(dataset, tf.data.Dataset) else []
    sources = [owner for owner in map(owner_of, datasets) if owner is not None]
    # Each loader has a `run` of its own, which its sources have, too: it identifies the loader.
    if {getattr(source, "run", None) for source in sources} != {loader.run}:
        raise ValueError(f"the dataset is not made of this loader's dataset only, {_ADVISE_ORDER}")
    unordered = any(getattr(item, "_deterministic", None) == "false" for item in datasets)
    if unordered or dataset.options().deterministic is False:
        raise ValueError(f"the dataset has deterministic=False, {_ADVISE_ORDER}")
    # From the last to the first: "Take", "Map".
    operators = [*_operators_on_batches(datasets, sources[0].sampler.fixed_size)]
    # `take(3).repeat()` yields the same 3 batches again, instead of the next 3. Its operators are
    # "Repeat", "Take".
    if "Repeat" in operators and "Take" in operators[operators.index("Repeat") :]:
        operators.append("Repeat after a Take")
    for operator in operators:
        if operator not in _KEEP_ORDER:
            raise ValueError(f"the dataset has the operator {operator}, {_ADVISE_ORDER}")


def _operators_on_batches(datasets: list[Any], batch_size: int | None) -> Iterator[str]:
    """Yield the operators of datasets, the last first, but for those on single records."""
    on_records = False
    for dataset in datasets:
        # "Map" for a `_ParallelMapDataset`
        name = type(dataset).__name__.strip("_").removesuffix("Dataset").removeprefix("Parallel")
        size = tf.get_static_value(getattr(dataset, "_batch_size", None))
        if owner_of(dataset) is not None:
            continue
        if name == "Batch" and size and size == batch_size and not on_records:
            on_records = True
        elif name == "Unbatch" and on_records:
            on_records = False
        elif name in ("Repeat", "Take") and on_records:
            yield f"{name} between unbatch and batch"
        else:
            yield name
    if on_records:
        yield "Batch without unbatch"
