"""The callback list of a resumed `fit`, which restores the states of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from twinfeed.loaders.keras import _callback_states, _model
from twinfeed.loaders.keras._saves import Save
from twinfeed.loaders.support.array_types import Array


class ResumedCallbackList(keras.callbacks.CallbackList):
    """The user's callbacks, then History, then the ResumeCallback, which saves their states.

    - Before the first epoch of a resumed `fit`, the states of the callbacks are restored: after
      their `on_train_begin`, which in some callbacks resets everything.
    - Schedulers derive the rate of an epoch from the current rate. So the rate that was set when
      the epoch started is restored before them, and the saved rate of mid-epoch after them.
    - Batches are numbered within the whole epoch, also after a resume in mid-epoch.
    """

    def __init__(
        self,
        resume: Any,  # the ResumeCallback, whose module imports this one
        callbacks: Sequence[Any],
        *,
        model: keras.Model,
        **params: Any,
    ) -> None:
        self._resume = resume
        self._epoch_rates: list[Array] = []  # learning rates when the epoch started
        user_callbacks = list(callbacks)
        if not any(isinstance(callback, keras.callbacks.History) for callback in user_callbacks):
            user_callbacks.append(keras.callbacks.History())
        self.user_callbacks = user_callbacks
        progress = params["verbose"] != 0
        super().__init__(
            [*user_callbacks, resume], add_history=True, add_progbar=progress, model=model, **params
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return the states of the callbacks and of the metrics, for a save at this step."""
        metrics = _model.to_numpy(self.model.metrics_variables) if step else []
        return {
            "callbacks": _callback_states.get_states(self.user_callbacks),
            "rates": self._epoch_rates,
            "metrics": metrics,
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start an epoch. Before the first of a resumed `fit`, restore the states of the save."""
        rates = _model.learning_rates(self.model.optimizer)
        save = self._resume._take_restored()
        saved_rates = _model.to_numpy(rates)
        if save is not None:
            self._restore_states(save, rates)
        self._epoch_rates = _model.to_numpy(rates)
        super().on_epoch_begin(epoch, logs)
        if save is not None and save.state["loader"]["step"]:
            _model.assign(rates, saved_rates)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self._resume._start, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self._resume._start, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """End a run. If it was killed after its last epoch, restore the callbacks before."""
        save = self._resume._take_restored(continues=False)
        if save is not None:
            _callback_states.restore(self.user_callbacks, save.state["callbacks"])
        super().on_train_end(logs)

    def _restore_states(self, save: Save, rates: Sequence[keras.Variable]) -> None:
        """Restore callbacks, and in mid-epoch the metrics and the rates when the epoch started."""
        _callback_states.restore(self.user_callbacks, save.state["callbacks"])
        _callback_states.clear_early_stop(self.user_callbacks)
        if save.state["loader"]["step"]:
            _model.assign(self.model.metrics_variables, save.state["metrics"])
            _model.assign(rates, save.state["rates"])
