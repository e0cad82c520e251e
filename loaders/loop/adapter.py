"""Adapt a loader to a framework that iterates by itself, as Keras's `fit` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from twinfeed.loaders.loop.loader import Loader, explain_key_error


class Adapter:
    """Serve the passes of a loader to a framework that does not say what it received.

    A loader whose framework has datasets of its own names a subclass as `_adapter`.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def batches(self, arrange: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield `arrange(batch)` for each batch of a pass.

        After the last batch, the position of the loader becomes the next epoch.
        """
        loader = self.loader
        loader._end()
        pass_start = loader.external_passes.start()
        epoch, step, _ = pass_start
        loader.meter.start(step)
        running, num_batches = loader._start_pass(epoch, step), len(loader) - step
        numbers = count(1)

        def received() -> bool:
            is_last: bool = next(numbers) == num_batches
            if is_last:
                loader.external_passes.finished(pass_start)
            return is_last

        for batch in loader._deliver(running, received, batches=num_batches):
            with explain_key_error(batch):
                arranged = arrange(batch)
            yield arranged

    def dataset(self, backend: str, arrange: Any, model: Any) -> Any:
        """Return a dataset of the framework for `fit`, or None if the backend needs none.

        `arrange` is a function of a batch, or the user's own dataset; `model` is to be trained.
        """
        return None

    def check_state(self, state: Mapping[str, Any], /) -> None:
        """Raise StateMismatchError if the loader could not load a state."""
        self.loader._check_state(state)

    def check_position(self, batches: Any) -> None:
        """Raise ValueError if it is not known which batches of the loader are in `batches`."""

    def feed_of(self, batches: Any) -> Any:
        """Return the feed that a framework's batches were made of, or None if it is not known."""
        return None

    def original_errors(self) -> AbstractContextManager[None]:
        """Return a context in which the original errors are raised, without the framework's."""
        return nullcontext()


def adapter_of(loader: Loader[Any]) -> Adapter:
    """Return the adapter of a loader's framework."""
    kind: type[Adapter] = getattr(loader, "_adapter", Adapter)
    return kind(loader)
