"""The callback that saves a run of `fit` and resumes it at any step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import keras

from twinfeed.loaders.keras import _callback_states, _fit_arguments, _model
from twinfeed.loaders.keras._callback_list import ResumedCallbackList
from twinfeed.loaders.keras._checkpoints import ADVISE_NEW_RUN, Checkpoint, last_checkpoint, write
from twinfeed.loaders.keras._data_adapter import LoaderDataAdapter
from twinfeed.loaders.keras._model import check_model
from twinfeed.loaders.loop.adapter import adapter_of
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.loop.run import Order
from twinfeed.samplers import StateMismatchError, validate

# A true value of `stop_training`, by which this callback ends an epoch that was resumed within.
_STOPPED_AT_EPOCH_END = "the rest of the epoch was trained on"


class ResumeCallback(keras.callbacks.Callback):
    """Save a run of `fit`, and resume the run at the batch after the last checkpoint.

    `fit` trains from the last checkpoint on, and prints its position, unless `verbose` is 0. Run
    the same script again after an interrupt::

        resume = ResumeCallback(loader, folder, save_freq=100)
        resume.fit(model, ("image", "label"), epochs=10, validation_data=evaluation_loader)

    A checkpoint is written at the end of each epoch, and after every `save_freq` batches if given.
    It has the weights, the optimizer, the states of random layers, the metrics of the epoch so far,
    the values of the other callbacks, and the position of `loader`. Batches are counted when they
    are trained on, not when the dataset reads them ahead. Each checkpoint is a file of Keras's
    weights, written atomically. The last two are kept.

    Nothing is saved while the loss or a trained weight is not a finite number.

    The callback can also be given to `model.fit`, after `restore(model)`. It then cannot check the
    dataset, so you have to know that its order is the loader's. The values of other callbacks are
    not saved::

        resume = ResumeCallback(loader, folder, order="unchecked")
        resume.restore(model)
        dataset = loader.dataset.map(inputs_and_targets)
        model.fit(dataset, initial_epoch=loader.epoch, epochs=epochs, callbacks=[resume])

    Under a `tf.distribute` strategy, a step of `fit` counts as a step of the loader. A validation
    may use the same loader: it gets a whole epoch, and does not move the position.

    `steps_per_execution` needs Keras 3.11.

    Args:
        loader: its batches are trained on.
        folder: the folder of the checkpoints of one run; for a new run, name another folder.
        save_freq: the number of batches after which another checkpoint is written. With "epoch",
            Keras's default, as with None, none is written within an epoch.
        order: `"unchecked"` says that each element is the next batch of the loader, where the
            callback cannot check this.

    Raises:
        TypeError: `loader` is not a loader, but a feed for example.
        NotADirectoryError: `folder` is empty, a file, or below a file.
        ValueError: an `initial_epoch` that is not the loader's.
        ValueError: an epoch of `fit` is not an epoch of the loader: `steps_per_epoch`, and datasets
            that were cut or batched again. `batches_per_epoch` of a sampler makes shorter epochs.
        ValueError: a dataset that does not have the loader's batches in order. `map`, `prefetch`,
            `take` and copies to a device keep the order. Other operators, such as `cache` and
            `shuffle`, are refused before the first batch.
        ValueError: Keras's `BackupAndRestore` beside this callback.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, NumpyLoader, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}], mkdtemp())["data"]
    >>> loader = NumpyLoader(Feed(index, ExactOnceBatchSampler(1, batch_size=1)))
    >>> ResumeCallback(loader, mkdtemp(), save_freq=100).restore(keras.Sequential())
    False
    """

    @validate.show_call("ResumeCallback(loader, folder)")
    def __init__(
        self,
        loader: Loader[Any],
        folder: str | os.PathLike[str],
        /,
        *,
        save_freq: int | Literal["epoch"] | None = None,
        order: Order | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(loader, Loader):
            found = validate.a_type(loader)
            raise TypeError(f"loader must be a loader, as in TensorFlowLoader(feed), got {found}")
        self.loader, self._adapter = loader, adapter_of(loader)
        self.folder = Path(folder)
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not os.fspath(folder) or not existing.is_dir():
            raise NotADirectoryError(f"folder must be a folder for checkpoints, got {folder!r}")
        self.order = validate.choice("order", order, (None, "unchecked"))
        self.save_freq: int | None = None
        if save_freq is not None and save_freq != "epoch":
            self.save_freq = validate.integer("save_freq", save_freq, minimum=1)
        self._last_file: Path | None = None  # the last checkpoint that was written or restored
        self._has_unsaved_batches = False  # batches were trained on since the last checkpoint
        self._warned_not_finite = False
        self._callbacks: ResumedCallbackList | None = None  # within `fit` of this object
        self._epoch = self._first_step = self._step = 0
        self._start_tracking()

    def __repr__(self) -> str:
        return f"ResumeCallback({self.loader!r}, {str(self.folder)!r})"

    def fit(
        self,
        model: keras.Model,
        arrange: Callable[[Any], Any] | Any,
        /,
        *,
        epochs: int = 1,
        callbacks: Any = (),
        verbose: str | int = "auto",
        **options: Any,
    ) -> Any:
        """Train `model` (compiled) to the end of epoch `epochs`, from the last checkpoint on.

        The same call starts a run, and resumes it. If the run has ended, the call trains nothing:
        callbacks end their training again, and the model is as the ended run left it.

        A run that `EarlyStopping` has ended stays ended, unless its patience is raised. A run that
        another callback stopped, for example before a time limit, is resumed.

        Args:
            model: compiled.
            arrange: the names of two or three fields, such as `("image", "label")`; or a function
                that turns a batch into what a model takes: `inputs`, `(inputs, targets)` or
                `(inputs, targets, weights)`; or a dataset that you have made of `loader.dataset`,
                whose elements are such values.
            epochs: the number of epochs of the whole run, as `epochs` of `model.fit`.
            callbacks: one, or several. They get their saved values back, such as the best value of
                `ModelCheckpoint` and `EarlyStopping`. A callback of your own needs `get_state()`,
                which returns a dict of numbers, strings, arrays of numbers, and lists and dicts of
                them, and `set_state(state)`. A warning names the callbacks without them.
            verbose: as of `model.fit`.
            **options: other options of `model.fit`, except those that the loader or its sampler
                decides. If `validation_data` is a loader, its batches go through `arrange` too.

        Returns:
            Keras's `History`, with the epochs before the resume.

        Raises:
            StateMismatchError: a checkpoint of other data or another sampler.
            ValueError: the model or the optimizer differs from the checkpoint, or the loader or its
                sampler has the option.
            TypeError: the model is not of Keras 3; `arrange` is neither names nor a function nor a
                dataset; or `validation_data` is a feed.
        """
        epochs = validate.integer("epochs", epochs, minimum=0)
        arrange = _fit_arguments.resolve_arrange(arrange)
        _fit_arguments.check_options(options, arrange)
        callbacks = _fit_arguments.check_callbacks(callbacks, self)
        data = _fit_data(self.loader, arrange, check_model(model), options.get("class_weight"))
        if isinstance(options.get("validation_data"), Loader):
            options["validation_data"] = _fit_data(options["validation_data"], arrange, model)
        if self.order is None:
            self._adapter.check_position(data)
        state = self._restore_last_checkpoint(model, arrange)
        stopped = _callback_states.stopped_early(callbacks, state.get("callbacks", {}))
        ended = self.loader.epoch >= epochs or stopped
        if verbose and state and ended:
            print(f"{self.folder}: already trained {self.loader.epoch} of {epochs} epochs")
        elif verbose and state:
            print(f"resuming {self.folder} at epoch {self.loader.epoch}, step {self.loader.step}")
        self._callbacks = ResumedCallbackList(
            self, callbacks, state, model=model, verbose=verbose, epochs=epochs
        )
        try:
            with self._adapter.original_errors():
                return model.fit(
                    data,
                    epochs=epochs,
                    initial_epoch=epochs if ended else self.loader.epoch,
                    callbacks=self._callbacks,
                    verbose=verbose,
                    **{"shuffle": False, **options},
                )
        finally:
            self._callbacks = None
            self.loader.run.stop_tracking()

    def restore(self, model: keras.Model, /) -> bool:
        """Load the last checkpoint into `model` (compiled, built) and the loader.

        Returns:
            False if there is no checkpoint.

        Raises:
            StateMismatchError: a checkpoint of other data or another sampler.
            ValueError: the model is not compiled, the model or its optimizer differs from the
                checkpoint, or the checkpoint is of another version.
        """
        checkpoint = last_checkpoint(self.folder)
        if checkpoint is not None:
            self._restore(model, checkpoint)
        return checkpoint is not None

    def _restore(self, model: keras.Model, checkpoint: Checkpoint) -> None:
        """Load a checkpoint into a model and the loader."""
        state = checkpoint.state
        try:
            self._adapter.check_state(state["loader"])
        except (TypeError, ValueError) as error:  # StateMismatchError is a ValueError
            raise StateMismatchError(
                f"{error}\nthe checkpoint is {checkpoint.file}: {ADVISE_NEW_RUN}"
            ) from None
        if difference := _model.first_difference(model, state["model"]):
            raise ValueError(
                f"{checkpoint.file} is of another model: {difference}: {ADVISE_NEW_RUN}"
            )
        model.load_weights(checkpoint.file)
        _model.assign(_model.random_states(model), state["random"])
        self.loader.load_state_dict(state["loader"])
        self._last_file = checkpoint.file
        self._has_unsaved_batches = False
        self._start_tracking()

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a `model.fit` in an unknown order of batches, or without the last checkpoint."""
        # `ResumeCallback.fit` checks the dataset itself, and sets `_callbacks`. In `model.fit`, a
        # callback cannot see the dataset.
        if self._callbacks is None and self.order is None:
            raise ValueError(
                "ResumeCallback cannot check the dataset of model.fit: train by "
                "resume.fit(model, dataset), or say order='unchecked'"
            )
        unrestored = last_checkpoint(self.folder) if self._last_file is None else None
        if unrestored is not None:
            raise ValueError(
                f"{unrestored.file} is a checkpoint that was not restored: call restore(model) "
                f"before fit, or {ADVISE_NEW_RUN}"
            )

    def on_test_begin(self, logs: Any = None) -> None:
        """Let a validation read whole epochs of the loader without moving its position."""
        # Keras iterates by itself, and `run` says where each iteration starts.
        self.loader.run.peeking = True

    def on_test_end(self, logs: Any = None) -> None:
        self.loader.run.peeking = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Check that `fit` and the loader start the same epoch, and count batches from there."""
        if epoch != self.loader.epoch:
            raise ValueError(
                f"fit starts epoch {epoch}, but the loader is at epoch {self.loader.epoch}: give "
                f"fit initial_epoch=loader.epoch; an ExactOnceBatchSampler never leaves its epoch"
            )
        fit_steps, loader_steps = self.params.get("steps"), len(self.loader)
        if fit_steps not in (None, loader_steps):  # None if Keras does not know it yet
            raise ValueError(
                f"fit must have the {loader_steps} steps of the loader's epoch, got {fit_steps}: "
                f"remove steps_per_epoch, and batch or take after the loader's dataset"
            )
        self._start_tracking()  # sets the counters of epoch and step to the loader's position

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Move the loader's position past a batch that was trained on; save if it is time to.

        1. After the first batch, check that the batches come from the loader.
        2. Compute the new step of the epoch, and set the loader's position to it.
        3. Within the epoch, save after every `save_freq` batches, or if `fit` is to stop here.
        4. At the end of an epoch that was resumed at a later step, stop `fit`'s loop over batches.

        With `steps_per_execution=4`, Keras calls this only after every fourth batch.
        """
        # `run` decides where each iteration over the loader's dataset starts.
        passes, start = self.loader.run, self._first_step
        # 1. If no iteration has started at the step of the first batch, the batch came from
        # somewhere else, such as a cache.
        if self._step == start and not passes.started_at(self._epoch, start):
            raise ValueError(
                f"the batches of epoch {self._epoch} must come from the loader, but fit got others"
                f": remove dataset.cache(), and give fit the dataset of this loader"
            )
        # 2. `batch` is an index. In `fit` of this object, which sets `_callbacks`, it is the step
        # of the epoch. If the user calls `model.fit`, Keras counts it from the step of the resume:
        # after a resume at step 60, the first batch is 60 in the one case, and 0 in the other.
        trained = batch + 1 if self._callbacks is not None else start + batch + 1  # 61
        # With steps_per_execution, `batch` may go beyond the last step of the epoch.
        previous, self._step = self._step, min(trained, len(self.loader))
        self._has_unsaved_batches = True
        passes.advance_to(self._epoch, self._step)
        if self._step < len(self.loader):  # else `on_epoch_end` saves, with the logs of the epoch
            # 3. Whether a multiple of `save_freq` lies between the previous step and this one. With
            # save_freq=10, 70 lies between 68 and 72: 72 // 10 > 68 // 10.
            is_due = self.save_freq and self._step // self.save_freq > previous // self.save_freq
            # If `fit` stops here, save before the callbacks get the logs of a part of an epoch.
            if is_due or getattr(self._model, "stop_training", False):
                self._save(logs)
        elif start:
            # 4. Keras would request as many batches as a whole epoch has. If it has 100, and was
            # resumed at step 60, 40 batches were trained on, and no more will come. A step without
            # a batch warns, and advances the optimizer's counters. So set `stop_training` to a true
            # value, at which Keras ends the epoch. `on_epoch_end` recognizes the value, and sets
            # False again, so that `fit` continues with the next epoch.
            self.model.stop_training = self.model.stop_training or _STOPPED_AT_EPOCH_END

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save. If this callback itself stopped `fit` at the end of a resumed epoch, continue."""
        if self.model.stop_training is _STOPPED_AT_EPOCH_END:
            self.model.stop_training = False
        self._save(logs)

    def on_train_end(self, logs: Any = None) -> None:
        self.loader.run.stop_tracking()  # the callback no longer sets the position

    def save(self) -> None:
        """Save the model as it is now, and the position of the training."""
        self._save(None)

    def _start_tracking(self) -> None:
        """Let this callback set the loader's position, batch by batch, until `on_train_end`."""
        self._epoch, self._first_step = self.loader.epoch, self.loader.step
        self._step = self._first_step
        # `run` decides where each iteration over the loader's dataset starts. After
        # this call, only `run.advance_to` changes the loader's position.
        self.loader.run.track_from(self._epoch, self._first_step)

    def _save(self, logs: dict[str, Any] | None) -> None:
        """Write a checkpoint if batches were trained on since the last, and numbers are finite."""
        if not self._has_unsaved_batches:
            return
        if not _model.is_finite(self.model, logs):
            if not self._warned_not_finite:
                self._warned_not_finite = True
                warnings.warn(
                    f"the loss or a weight is not finite at epoch {self._epoch}, step {self._step},"
                    f" so nothing is saved; the last checkpoint is {self._last_file}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        position = self.loader.state_at(self._epoch, self._step)
        # The states of the other callbacks, the learning rates at the start of the epoch, and the
        # metrics. If the user calls `model.fit`, and not `fit` of this object, they are not known.
        fit_state: dict[str, Any] = {"callbacks": {}, "rates": [], "metrics": []}
        if self._callbacks is not None:
            fit_state = self._callbacks.state(position["step"])
        state = {
            "loader": position,
            "model": _model.describe(self.model),
            "random": _model.to_numpy(_model.random_states(self.model)),
            **fit_state,
        }
        self._last_file = write(self.folder, state, self.model.save_weights)
        self._has_unsaved_batches = self._warned_not_finite = False

    def _restore_last_checkpoint(self, model: keras.Model, arrange: Any) -> dict[str, Any]:
        """Restore the last checkpoint of this run into a model, and return its state, or {}.

        If variables are missing that Keras creates with the first batch, a batch is evaluated
        first.
        """
        checkpoint = last_checkpoint(self.folder)
        if checkpoint is None:
            return {}
        # The model's variables are restored now, and the metrics' when `fit` starts its first
        # epoch. `fit` creates the metrics' variables only later, in its first step. An exception is
        # a model under a `tf.distribute` strategy: there it creates them before the epoch.
        misses_metrics = len(model.metrics_variables) < len(checkpoint.state["metrics"])
        has_strategy = getattr(model, "_distribute_strategy", None) is not None
        if not model.built or (misses_metrics and not has_strategy):
            data = _fit_data(self.loader, arrange, None)
            with self.loader.run.peek():  # reading does not move the loader's position
                model.evaluate(data, steps=1, verbose=0)  # creates the variables
        self._restore(model, checkpoint)
        return checkpoint.state


def _fit_data(loader: Loader[Any], arrange: Any, model: Any, weights: Any = None) -> Any:
    """Return a loader's batches for Keras's `fit`, as a dataset or a data adapter."""
    # The adapter of the loader's framework returns None if the framework has no datasets.
    dataset = adapter_of(loader).dataset(keras.config.backend(), arrange, model)
    # Keras has class weights for datasets of TensorFlow, and refuses them for a DataLoader.
    if dataset is not None and (weights is None or hasattr(dataset, "element_spec")):
        return dataset
    return LoaderDataAdapter(loader, arrange, weights) if callable(arrange) else arrange
