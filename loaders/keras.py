"""Resume Keras's `fit` at any step, on any backend. The only module here that imports keras."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras

from twinfeed.loaders import _checks
from twinfeed.loaders._atomic import replace_file
from twinfeed.loaders._loader import Loader

__all__ = ["ResumeCallback"]

_REST_TRAINED = "the rest of the epoch was trained on"


class ResumeCallback(keras.callbacks.Callback):
    """Save the model, its optimizer and the place of `loader` while `fit` runs, and resume there.

    The callback saves at the end of each epoch, and after every `every` batches where given.
    Batches are counted when they are trained on, however far the dataset has run ahead. While `fit`
    runs, the loader stands where the training stands. A save is whole or not there: its state names
    its weights, and is replaced last.

    `restore(model)` loads the weights of the last save, and moves the loader. The resumed `fit` is
    the same call, also in the midst of an epoch:

        resume = ResumeCallback(loader, folder, every=100)
        resume.restore(model)
        dataset = loader.dataset.map(inputs_and_targets)
        model.fit(dataset, initial_epoch=loader.epoch, epochs=epochs, callbacks=[resume])

    Refused with ValueError:

    - an `initial_epoch` that is not the loader's;
    - an epoch of `fit` that is not one of the loader: `steps_per_epoch`, and datasets that were cut
      or batched again. `batches_per_epoch` of a sampler makes shorter epochs;
    - batches that come from elsewhere, as from `dataset.cache()`, which gives one epoch for ever.

    `steps_per_execution` needs Keras 3.11. Keras saves no random states: layers such as Dropout go
    on with other numbers than in an uninterrupted run.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, NumpyLoader, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}], mkdtemp())["data"]
    >>> loader = NumpyLoader(Feed(index, ExactOnceBatchSampler(1, batch_size=1)))
    >>> ResumeCallback(loader, mkdtemp(), every=100).restore(keras.Sequential())
    False
    """

    def __init__(
        self, loader: Loader, folder: str | os.PathLike[str], /, *, every: int | None = None
    ) -> None:
        super().__init__()
        self.loader = loader
        self.folder = Path(folder)
        self.every = None if every is None else _checks.count("every", every)
        self._epoch = self._start = self._step = 0
        self._stand()

    def restore(self, model: keras.Model, /) -> bool:
        """Load the last save into `model` (compiled, built) and the loader; False without one.

        Raises StateMismatchError for a save of other data or another sampler, and ValueError for a
        model that is not compiled.
        """
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
        except FileNotFoundError:
            return False
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            raise ValueError(
                "the model must be compiled before restore, as its optimizer is restored too"
            )
        weights = state.pop("weights")
        self.loader.load_state_dict(state)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)  # else its own variables would be skipped
        model.load_weights(self.folder / weights)
        self._stand()
        return True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the epoch where the loader stands."""
        if epoch != self.loader.epoch:
            raise ValueError(
                f"the epoch of fit must be the loader's, got {epoch} and {self.loader.epoch}: call "
                f"fit with initial_epoch=loader.epoch"
            )
        steps, expected = self.params.get("steps"), len(self.loader)
        if steps not in (None, expected):
            raise ValueError(
                f"an epoch of fit must be one of the loader, got {steps} steps and {expected}: "
                f"leave steps_per_epoch out, and give fit the dataset with every batch of an epoch"
            )
        self._stand()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch; save where `every` says."""
        if not self.loader._drawn_from(self._epoch, self._start):
            raise ValueError(
                f"the batches of epoch {self._epoch} must come from the loader, got others: leave "
                f"dataset.cache() out, which gives the batches of the epoch that filled it again "
                f"and again, and give fit the dataset of this loader"
            )
        # With steps_per_execution Keras counts to the end of the last execution.
        before, self._step = self._step, min(self._start + batch + 1, len(self.loader))
        self.loader._trained(self._epoch, self._step)
        if self.every and self._step // self.every > before // self.every:
            self.save()
        if self._start and self._step == len(self.loader):
            # Keras would ask for as many batches as an epoch has. Its step without a batch warns,
            # and moves the optimizer's counters on.
            self.model.stop_training = self.model.stop_training or _REST_TRAINED

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, and have `fit` go on where only the rest of an epoch was at its end."""
        if self.model.stop_training is _REST_TRAINED:
            self.model.stop_training = False
        self.save()

    def on_train_end(self, logs: Any = None) -> None:
        """Let the loader count by itself again."""
        self.loader._disarm()

    def _stand(self) -> None:
        """Count from where the loader stands.

        This is done before `fit` begins, too. Under a strategy, `fit` draws batches only to look at
        them, and they must not count.
        """
        self._epoch, self._start = self.loader.epoch, self.loader.step
        self._step = self._start
        self.loader._arm(self._epoch, self._start)

    def save(self) -> None:
        """Save the model as it is now, and where the training stands."""
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.loader.feed.sampler.state_at(self._epoch, self._step)
        state = {**self.loader.state_dict(), **place}
        weights = f"{state['epoch']}-{state['step']}.weights.h5"
        self.model.save_weights(self.folder / weights, overwrite=True)
        replace_file(self.folder / "state.json", json.dumps(state | {"weights": weights}).encode())
        for other in self.folder.glob("*.weights.h5"):
            if other.name != weights:
                other.unlink()
