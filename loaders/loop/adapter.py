"""Adapt a loader to a framework that iterates by itself, as Keras's `fit` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from twinfeed.loaders.loop.loader import Loader, explain_key_error


class Adapter:
    """Serve the batches of a loader to a framework that does not say which it has received.

    This is the default adapter. A loader whose framework has datasets of its own, such as
    TensorFlow, names a subclass as `_adapter`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self, arrange: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield `arrange(batch)` for each batch from the loader's position to the epoch's end.

        One such iteration is called a pass. After its last batch, the loader's position becomes the
        next epoch. Within an epoch it does not change, since the framework may draw batches that it
        drops.

        Args:
            arrange: the user's function, which turns a batch into what the model takes, such as
                (inputs, targets).
        """
        loader = self.loader
        loader._end_pass()  # stops the threads of an earlier pass, if it was abandoned
        # The epoch and step at which this pass starts. When `finish` is called with them, below,
        # the loader's position moves to the next epoch.
        pass_start = loader.run.start_external()
        loader.meter.start()
        num_batches = len(loader) - pass_start.step
        batch_numbers = count(1)

        def count_received() -> bool:
            """Count a batch, and return whether it is the last of the epoch."""
            is_last: bool = next(batch_numbers) == num_batches
            if is_last:
                loader.run.finish_external(pass_start)
            return is_last

        # Threads start to make batches. `_iterate_pass` yields them, and calls `count_received` for
        # each before it is yielded.
        batches = loader._pass_at(pass_start.epoch, pass_start.step)
        for batch in loader._iterate_pass(
            batches, count_received, num_batches=num_batches, epoch=pass_start.epoch
        ):
            with explain_key_error(batch):
                arranged = arrange(batch)
            yield arranged

    def dataset(self, backend: str, arrange: Any, model: Any) -> Any:
        """Return a `tf.data.Dataset`, or the like, for Keras's `fit` to iterate over, or None.

        None means that the framework has no such class: `fit` then iterates over `batches`. A
        subclass overrides this.

        Args:
            backend: the name of Keras's backend.
            arrange: the user's function, which turns a batch into what the model takes, such as
                (inputs, targets). Or a `tf.data.Dataset` that the user has made of `loader.dataset`
                by methods such as `map`.
            model: the model to train.
        """
        return None

    def check_state(self, state: Mapping[str, Any], /) -> None:
        """Raise StateMismatchError if the loader could not load a state."""
        self.loader._check_state(state)

    def check_position(self, batches: Any) -> None:
        """Raise ValueError unless element n of `batches`, a dataset, is batch n of the loader.

        Only a subclass for the datasets of one framework can check this.
        """

    def original_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that raises original errors in place of the framework's."""
        return nullcontext()


def adapter_of(loader: Loader[Any]) -> Adapter:
    """Return the adapter of a loader's framework."""
    adapter_class: type[Adapter] = getattr(loader, "_adapter", Adapter)
    return adapter_class(loader)
