"""Resume `model.fit` at any step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras

from twinfeed.loaders.atomic import replace_file
from twinfeed.samplers import BatchStream


class ResumeCallback(keras.callbacks.Callback):
    """Save the model, its optimizer and (epoch, step) while `fit` runs, and resume from there.

    Saves at the end of each epoch, and after every `every` batches where given. Batches are
    counted as they are trained on, however far the dataset has run ahead. A save is whole or not
    there: its state names its weights, and is replaced last.

    `restore(model)` brings the last save back: it loads the weights and moves the sampler. The
    remainder of an interrupted epoch is a dataset and a `fit` of its own:

        resume.restore(model)
        while sampler.epoch < epochs:
            stop = sampler.epoch + 1 if sampler.step else epochs
            model.fit(
                make_dataset(index, sampler).map(inputs_and_targets),
                initial_epoch=sampler.epoch, epochs=stop, callbacks=[resume],
            )

    An epoch of `fit` must be one of the sampler, or its remainder: `steps_per_epoch` and datasets
    that were cut or batched again are refused with ValueError; `batches_per_epoch` of a sampler
    makes shorter epochs. So is `every` below 1. Under a strategy build the model before `fit`, as
    Keras would draw batches to learn their shapes. Keras saves no random states: layers such as
    Dropout go on with other numbers than in an uninterrupted run.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> sampler = ExactOnceBatchSampler(10, batch_size=4)
    >>> ResumeCallback(sampler, mkdtemp(), every=100).restore(keras.Sequential())
    False
    """

    def __init__(
        self, sampler: BatchStream, folder: str | os.PathLike[str], /, *, every: int | None = None
    ) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.sampler = sampler
        self.folder = Path(folder)
        self.every = every
        self._epoch, self._step = sampler.epoch, sampler.step

    def restore(self, model: keras.Model, /) -> bool:
        """Load the last save into `model` (compiled, built) and the sampler; False without one.

        Raises StateMismatchError for a save of other data or another sampler.
        """
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
        except FileNotFoundError:
            return False
        weights = state.pop("weights")
        self.sampler.load_state_dict(state)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)  # else its own variables would be skipped
        model.load_weights(self.folder / weights)
        return True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the pass begins."""
        steps, left = self.params.get("steps"), len(self.sampler) - self.sampler.step
        if steps not in (None, left):
            raise ValueError(
                f"an epoch of fit has {steps} steps here, the sampler has {left} to go: leave "
                f"steps_per_epoch out, and give fit the dataset with every batch of an epoch"
            )
        self._epoch, self._start = self.sampler.epoch, self.sampler.step
        self._step = self._start

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch; save where `every` says."""
        # With steps_per_execution Keras counts to the end of the last execution.
        before, self._step = self._step, min(self._start + batch + 1, len(self.sampler))
        if self.every and self._step // self.every > before // self.every:
            self.save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save."""
        self.save()

    def position(self) -> dict[str, Any]:
        """Say after which batch the training stands: a state of the sampler."""
        return self.sampler.state_at(self._epoch, self._step)

    def save(self) -> None:
        """Save the model as it is now, and where it stands."""
        self.folder.mkdir(parents=True, exist_ok=True)
        state = self.position()
        weights = f"{state['epoch']}-{state['step']}.weights.h5"
        self.model.save_weights(self.folder / weights, overwrite=True)
        replace_file(self.folder / "state.json", json.dumps(state | {"weights": weights}).encode())
        for other in self.folder.glob("*.weights.h5"):
            if other.name != weights:
                other.unlink()
