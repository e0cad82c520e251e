"""The callback list of a resumed `fit`, which restores the states of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from twinfeed.loaders.keras import _callback_states, _model
from twinfeed.loaders.support.array_types import Array


class ResumedCallbackList(keras.callbacks.CallbackList):
    """The user's callbacks, then History, then the ResumeCallback, which checkpoints their states.

    Their states are restored after `on_train_begin`. Batches are numbered within the whole epoch.
    """

    def __init__(
        self,
        resume: Any,  # the ResumeCallback, whose module imports this one
        callbacks: Sequence[Any],
        restored: dict[str, Any],
        *,
        model: keras.Model,
        **params: Any,
    ) -> None:
        self._resume, self._restored = resume, restored
        self._epoch_rates: list[Array] = []  # learning rates when the epoch started
        self.user_callbacks = list(callbacks)
        if not any(isinstance(callback, keras.callbacks.History) for callback in callbacks):
            self.user_callbacks.append(keras.callbacks.History())
        params |= {"model": model, "steps": len(resume.loader)}
        super().__init__(
            [*self.user_callbacks, resume], add_progbar=params["verbose"] != 0, **params
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return the values of callbacks, learning rates and metrics, which are reset at step 0."""
        return {
            "callbacks": _callback_states.get_states(self.user_callbacks),
            "rates": self._epoch_rates,
            "metrics": _model.to_numpy(self.model.metrics_variables) if step else [],
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks' `on_epoch_begin`; in a resumed `fit`, first restore their states.

        In mid-epoch a scheduler gets the rate with which the epoch had started, not to change it
        twice: it had halved 8 to 4, another callback set 3, and the rate is 3 again after it.
        """
        rates = _model.learning_rates(self.model.optimizer)
        checkpoint_rates = _model.to_numpy(rates)  # 3: the model was restored already
        state = self._restore_callbacks()
        _callback_states.clear_early_stop(self.user_callbacks)
        in_epoch = bool(state) and state["loader"]["step"] > 0
        if in_epoch:
            _model.assign(self.model.metrics_variables, state["metrics"])
            _model.assign(rates, state["rates"])  # 8
        self._epoch_rates = _model.to_numpy(rates)  # 8
        super().on_epoch_begin(epoch, logs)  # the scheduler sets 4
        if in_epoch:
            _model.assign(rates, checkpoint_rates)  # 3

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self._resume._first_step, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self._resume._first_step, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Call the callbacks' `on_train_end`, and restore their states if no epoch has started."""
        self._restore_callbacks()
        super().on_train_end(logs)

    def _restore_callbacks(self) -> dict[str, Any]:
        """Restore the states of the callbacks, once; return the state of the run, or {}."""
        state, self._restored = self._restored, {}
        _callback_states.restore(self.user_callbacks, state.get("callbacks", {}))
        return state
