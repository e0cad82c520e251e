"""The base class of TensorFlow's loaders: a dataset, and passes whose position is tracked."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

import tensorflow as tf

from twinfeed.loaders.loop.adapter import Adapter, adapter_of
from twinfeed.loaders.loop.loader import B, Loader, Pass, explain_key_error
from twinfeed.loaders.loop.run import Order
from twinfeed.loaders.tensorflow._operators import check_batch_order
from twinfeed.loaders.tensorflow.device import chosen_device, prefetch_to_device
from twinfeed.loaders.tensorflow.original import OriginalErrors
from twinfeed.samplers import validate


class _Adapter(Adapter):
    """Adapt a loader to Keras on TensorFlow, which trains on its dataset."""

    def dataset(self, backend: str, arrange: Any, model: Any) -> Any:
        """Return the dataset that `fit` trains on: the loader's, or the user's as it is."""
        loader = self.loader
        if not callable(arrange):
            length = arrange.cardinality() if isinstance(arrange, tf.data.Dataset) else len(loader)
            if length not in (len(loader), tf.data.UNKNOWN_CARDINALITY):
                raise ValueError(
                    f"the dataset of fit must have the {len(loader)} batches of an epoch, got "
                    f"{'an infinite dataset' if length < 0 else int(length)}: remove its repeat or "
                    f"take"
                )
            return arrange
        strategy = getattr(model, "distribute_strategy", None)
        # A method of `TensorFlowLoader`, which makes the batches of several ranks. The other loader
        # for TensorFlow, that of `choose`, lacks it.
        dataset_for = getattr(loader, "dataset_for", None)
        if dataset_for and strategy is not None and strategy.num_replicas_in_sync > 1:
            return strategy.distribute_datasets_from_function(
                lambda context: dataset_for(context).map(arrange)
            )
        # If `arrange` asks for a field that is missing, the error lists the fields of a batch.
        with explain_key_error(loader.dataset.element_spec):
            return loader._to_device(loader.dataset.map(arrange))

    def check_position(self, batches: Any) -> None:
        if not isinstance(batches, tf.distribute.DistributedDataset):
            check_batch_order(batches, self.loader)

    def original_errors(self) -> AbstractContextManager[None]:
        # None: also the errors of other loaders, such as that of the validation data.
        return OriginalErrors(None)


class DatasetLoader(Loader[B], tf.train.experimental.PythonState):
    """A loader whose batches are a `tf.data.Dataset`. Loops over it, or in `track`, are counted."""

    _counting_advice = "loop over loader.track(dataset)"
    _adapter = _Adapter
    _not_copied = ("_current_pass", "_continued_pass", "dataset", "_on_device")

    device: str | None
    prefetch: int
    _by_rank = False  # whether `dataset_for` has made datasets, each with the batches of its ranks

    @cached_property
    def dataset(self) -> tf.data.Dataset:
        """Batches as a `tf.data.Dataset`, for `fit`, `map` and `tf.distribute`.

        An iteration of the dataset reads from the loader's position to the end of the epoch. With a
        sampler for evaluation it reads the whole epoch, but for the first after `load_state_dict`.
        After its last batch, the position is the start of the next epoch; an iteration that is
        stopped earlier does not change it. The length is that of a whole epoch. Shapes are static
        where they can be.

        For a position that changes with each batch, loop over `track(dataset)`, or train with a
        `ResumeCallback`. You also need one of the two if batches are read without being used: by a
        `map` or `prefetch` that reads a whole short epoch ahead, or under a strategy, where `fit`
        reads a batch to infer its shapes. A validation needs a loader of its own.

        Warns if a third iteration starts in the same training epoch: the same batches come again.
        """
        return self._make_dataset()

    @abstractmethod
    def _make_dataset(self) -> tf.data.Dataset:
        """Make the dataset of the batches of all passes."""

    def track(self, dataset: Iterable[Any], /, *, order: Order | None = None) -> Iterator[Any]:
        """Iterate over a dataset that was made of `self.dataset`, and count its batches.

        The loader's position is then that of the batches which the loop has received, as in a loop
        over the loader itself.

        Args:
            dataset: `self.dataset`, which may be mapped, cut by `take`, repeated, prefetched,
                copied to a device, or distributed by `tf.distribute`. Each element is a batch.
                `unbatch().map(parse).batch(n)` is accepted if every batch has n records.
            order: `"unchecked"` says that each element is the next batch of the loader. Then the
                operators of the dataset are not checked.

        Raises:
            ValueError: before the first batch, if it is not known that element n is batch n: the
                dataset has other operators, or is an iterable of another kind.
        """
        check_process()
        if validate.choice("order", order, (None, "unchecked")) is None:
            adapter_of(self).check_position(dataset)
        epoch, start = self._new_pass()
        distributed = isinstance(dataset, tf.distribute.DistributedDataset)
        # From now on, this loop sets the loader's position, and the end of an iteration does not.
        # `reshardable`: whether a `tf.distribute` strategy may divide the batches, so that the
        # sampler must allow it. A strategy never divides a plain dataset.
        self.run.track_from(epoch, start, reshardable=distributed)
        running = _DatasetPass(self, dataset)
        # `divided`: whether each process receives other samples than the other processes. There are
        # three kinds of datasets:
        # - A plain dataset is not divided.
        # - `strategy.experimental_distribute_dataset` divides each batch among the processes.
        # - `strategy.distribute_datasets_from_function` takes what the user's function returns. It
        #   is divided if the function calls `dataset_for`, which sets `_by_rank`. TensorFlow does
        #   not export the class of such a dataset, so it is recognized by its name.
        from_function = "FromFunction" in type(dataset).__name__
        divided = distributed and (self._by_rank or not from_function)
        yield from self._iterate_pass(running, self.run.received, divided=divided)

    def serialize(self) -> str:
        """Return the state as text, for `tf.train.Checkpoint`."""
        return json.dumps(self.state_dict())

    def deserialize(self, state: str | bytes, /) -> None:
        """Load a state that `tf.train.Checkpoint` has restored."""
        self.load_state_dict(json.loads(state))

    def _start_pass(self, epoch: int, start: int) -> Pass:
        self.run.track_from(epoch, start, reshardable=False)
        # Without any step, the dataset may not be made: no record shows what its batches have.
        return _DatasetPass(self, self._on_device if len(self) else ())

    @cached_property
    def _on_device(self) -> tf.data.Dataset:
        """The dataset that a loop over the loader reads: its batches are on the device."""
        return self._to_device(self.dataset)

    def _to_device(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Prefetch the batches of a dataset to the loader's device, unless this is the CPU."""
        device = chosen_device(self.device)
        if device == "/CPU:0":
            return dataset
        return prefetch_to_device(dataset, device=device, prefetch=self.prefetch)


@cache
def _process() -> int:
    """Return the id of the process in which this function was called first."""
    return os.getpid()


def check_process() -> None:
    """Raise RuntimeError in a forked child, which has none of TensorFlow's threads."""
    if _process() != os.getpid():
        raise RuntimeError(
            "TensorFlow does not work in a forked child of a process that has used it: start the "
            "child by spawn (multiprocessing.get_context('spawn')), or use a NumpyLoader there"
        )


class _DatasetPass(Iterator[Any]):
    """An iterator over a dataset that raises original errors, not TensorFlow's; can be closed."""

    def __init__(self, loader: DatasetLoader[Any], dataset: Iterable[Any]) -> None:
        self._loader = loader
        self._dataset = dataset
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        with OriginalErrors(self._loader.run):
            if self._batches is None:
                self._batches = iter(self._dataset)
            return next(self._batches)

    def close(self) -> None:
        """Drop the iterator with its prefetched batches, and stop tracking the position."""
        self._loader.run.stop_tracking()
        self._dataset, self._batches = (), iter(())  # `__next__` raises StopIteration from now on
