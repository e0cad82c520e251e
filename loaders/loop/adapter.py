"""Adapt a loader to a framework that iterates by itself, as Keras's `fit` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from twinfeed.loaders.loop.loader import Loader, explain_key_error


class Adapter:
    """Serve the batches of a loader to a framework that does not say which it has received.

    A loader whose framework has datasets of its own names a subclass as `_adapter`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self, arrange: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield `arrange(batch)` for each batch from the loader's position to the epoch's end.

        After the last batch, the position of the loader becomes the next epoch.
        """
        loader = self.loader
        loader._end_pass()
        pass_start = loader.external_passes.start()
        epoch, step, _ = pass_start
        loader.meter.start(step)
        running, num_batches = loader._start_pass(epoch, step), len(loader) - step
        numbers = count(1)

        def count_received() -> bool:
            """Count a batch, and return whether it is the last of the epoch."""
            is_last: bool = next(numbers) == num_batches
            if is_last:
                loader.external_passes.finish(pass_start)
            return is_last

        for batch in loader._iterate_pass(running, count_received, batches=num_batches):
            with explain_key_error(batch):
                arranged = arrange(batch)
            yield arranged

    def dataset(self, backend: str, arrange: Any, model: Any) -> Any:
        """Return the dataset that Keras's `fit` trains on; None if it takes the loader's batches.

        A subclass makes a dataset of the framework. Here there is none.

        Args:
            backend: the name of Keras's backend.
            arrange: a function of a batch, or a dataset that the user made of the loader's.
            model: the model to train.
        """
        return None

    def check_state(self, state: Mapping[str, Any], /) -> None:
        """Raise StateMismatchError if the loader could not load a state."""
        self.loader._check_state(state)

    def check_position(self, batches: Any) -> None:
        """Raise ValueError unless element n of `batches`, a dataset, is batch n of the loader.

        A subclass that knows the datasets of its framework checks this. Here nothing is checked.
        """

    def feed_of(self, batches: Any) -> Any:
        """Return the feed that a dataset's batches were made of; None if this is not known."""
        return None

    def original_errors(self) -> AbstractContextManager[None]:
        """Return a context manager that raises original errors in place of the framework's."""
        return nullcontext()


def adapter_of(loader: Loader[Any]) -> Adapter:
    """Return the adapter of a loader's framework."""
    kind: type[Adapter] = getattr(loader, "_adapter", Adapter)
    return kind(loader)
