"""Keras's data adapter for a loader that has no dataset of its own for Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import keras
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from twinfeed.loaders.loop.adapter import adapter_of
from twinfeed.loaders.loop.loader import Loader


class LoaderDataAdapter(PyDatasetAdapter):
    """Give Keras the batches of a loader, from its position to the end of the epoch."""

    def __init__(self, loader: Loader[Any], arrange: Callable[[Any], Any], weights: Any) -> None:
        super().__init__(_BatchesByStep(loader, arrange), weights)
        self._loader, self._arrange = loader, arrange

    def __iter__(self) -> Iterator[Any]:
        return map(self._standardize_batch, adapter_of(self._loader).batches(self._arrange))

    _get_iterator = __iter__

    def on_epoch_begin(self) -> None:
        """Do nothing. The base class would fail after a resume within an epoch."""


class _BatchesByStep(keras.utils.PyDataset):
    """Batches by step, from which Keras on TensorFlow infers their shapes, without training."""

    def __init__(self, loader: Loader[Any], arrange: Callable[[Any], Any]) -> None:
        super().__init__()
        self._loader, self._arrange = loader, arrange

    @property
    def num_batches(self) -> int:
        return len(self._loader)

    def __getitem__(self, step: int) -> Any:
        with self._loader.run.peek():
            batches = adapter_of(self._loader).batches(self._arrange)
            return next(islice(batches, step, None))
