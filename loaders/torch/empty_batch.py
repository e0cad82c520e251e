"""Batches of no rows, for the ranks of an evaluation that have no record of its last batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from twinfeed.samplers import validate

Collate = Callable[[list[Any]], Any]


@validate.show_call("exact_collate(dataset, collate_fn)")
def exact_collate(dataset: Any, collate_fn: Collate = default_collate) -> Collate:
    """Return a `collate_fn` for which an empty list is a batch of no rows, as any other batch.

    With `ExactOnceBatchSampler(…).shard(rank, world_size)` all ranks have the same number of steps.
    So a rank may get an empty list in the last step, for which torch's `default_collate` raises
    IndexError. Here it is a batch with the structure, the dtypes and the shapes of the others,
    but for the number of its rows.

    The empty batch is made of record 0, when the first batch is collated: then an error comes
    early, and on all ranks. The record is collated once alone and once twice. A size that grows
    from 1 to 2 rows, in any axis, is 0 in the empty batch, as are the lengths of lists. Sizes that
    do not grow stay. Numbers are treated as sizes are.

    Args:
        dataset: what the `DataLoader` reads, with record 0.
        collate_fn: what makes a batch of a list of samples.

    Returns:
        The function, which can be pickled if the dataset and `collate_fn` can. When it is first
        called, it raises TypeError if `collate_fn` gives anything but tensors, arrays, numbers,
        strings, None, and lists, tuples and dicts of these.

    Raises:
        TypeError: the dataset has no records by number, or `collate_fn` is not a function.

    >>> from torch.utils.data import DataLoader
    >>> from twinfeed import ExactOnceBatchSampler
    >>> dataset = [{"x": torch.ones(3), "name": name} for name in "abc"]
    >>> sampler = ExactOnceBatchSampler(dataset, batch_size=2).shard(1, 2)
    >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=exact_collate(dataset))
    >>> [(batch["x"].shape, batch["name"]) for batch in loader]
    [(torch.Size([1, 3]), ['b']), (torch.Size([0, 3]), [])]
    """
    by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, MutableMapping)
    if not by_number or isinstance(dataset, IterableDataset) or validate.is_stream(dataset):
        raise TypeError(
            f"dataset must give records by number, dataset[0], got {validate.a_type(dataset)}: "
            f"write exact_collate(dataset, collate_fn)"
        )
    if not callable(collate_fn):
        raise TypeError(f"collate_fn must be a function, got {validate.a_type(collate_fn)}")
    return _ExactCollate(dataset, collate_fn)


class _ExactCollate:
    """A `collate_fn` that takes an empty list too."""

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn
        self._empty: list[Any] = []  # the empty batch, once it is made

    def __call__(self, samples: list[Any]) -> Any:
        if not self._empty:
            record = self._dataset[0]
            # Copies: a function may change the samples that it collates.
            batch = self._collate_fn([copy.deepcopy(record)])
            double = self._collate_fn([record, copy.deepcopy(record)])
            self._empty.append(_without_rows(batch, double, "batch"))
        return self._collate_fn(samples) if samples else copy.deepcopy(self._empty[0])


def _without_rows(batch: Any, double: Any, name: str) -> Any:
    """Return a batch of no samples, by a batch of one sample and a batch with the sample twice.

    1 and 2 rows give 0 rows, and 2 and 3 offsets give 1 offset.
    """
    if type(batch) is type(double):
        if isinstance(batch, MutableMapping) and batch.keys() == double.keys():
            empty = copy.copy(batch)
            empty.update(
                {k: _without_rows(v, double[k], f"{name}[{k!r}]") for k, v in batch.items()}
            )
            return empty
        if isinstance(batch, (list, tuple)) and len(batch) != len(double):
            return batch[: _shrunk(len(batch), len(double))]
        if isinstance(batch, (list, tuple)):
            pairs = enumerate(zip(batch, double, strict=True))
            parts = [_without_rows(*pair, f"{name}[{i}]") for i, pair in pairs]
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        if batch is None or isinstance(batch, (str, bytes)):
            return batch
        is_tensor = isinstance(batch, torch.Tensor) and batch.layout is torch.strided
        is_array = is_tensor or isinstance(batch, np.ndarray)
        if is_array and batch.ndim == double.ndim > 0:
            rows = batch[tuple(map(slice, map(_shrunk, batch.shape, double.shape)))]
            return rows.clone() if is_tensor else rows.copy()
        if isinstance(batch, (Number, np.generic)) or (is_array and batch.ndim == double.ndim):
            return batch if batch == double else 2 * batch - double
    raise TypeError(
        f"no rows can be made of {validate.a_type(batch)}, {name}: let collate_fn give tensors, "
        f"arrays and numbers, in lists, tuples and dicts, or the batch of an empty list itself"
    )


def _shrunk(size: int, double: int) -> int:
    """Return the size for no samples, from the sizes for a sample and for two."""
    return max(0, 2 * size - double)
