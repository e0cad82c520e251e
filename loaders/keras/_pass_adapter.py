"""Keras's data adapter for a loader that has no dataset of its own for Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import keras
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from twinfeed.loaders.loop.adapter import adapter_of
from twinfeed.loaders.loop.loader import Loader


class PassAdapter(PyDatasetAdapter):
    """Keras's data adapter over the passes of a loader (a pass is an epoch, or the rest of one).

    A `PyDataset` would not do: Keras requests its batches by number, and always a whole epoch.
    """

    def __init__(self, loader: Loader[Any], arrange: Callable[[Any], Any], weights: Any) -> None:
        super().__init__(_PeekDataset(loader, arrange), weights)
        self._loader, self._arrange = loader, arrange

    def __iter__(self) -> Iterator[Any]:
        return map(self._standardize_batch, adapter_of(self._loader).batches(self._arrange))

    _get_iterator = __iter__

    def on_epoch_begin(self) -> None:
        """Do nothing: after the rest of an epoch, Keras calls this without `on_epoch_end`."""


class _PeekDataset(keras.utils.PyDataset):
    """Batches by number, from which TensorFlow infers their shapes."""

    def __init__(self, loader: Loader[Any], arrange: Callable[[Any], Any]) -> None:
        super().__init__()
        self._loader, self._arrange = loader, arrange

    @property
    def num_batches(self) -> int:
        return len(self._loader)

    def __getitem__(self, number: int) -> Any:
        with self._loader.external_passes.peek():
            return next(islice(adapter_of(self._loader).batches(self._arrange), number, None))
