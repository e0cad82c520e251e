"""The callback list of a resumed `fit`, which restores the states of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from twinfeed.loaders.keras import _callback_states, _model
from twinfeed.loaders.keras._checkpoints import Checkpoint
from twinfeed.loaders.support.array_types import Array


class ResumedCallbackList(keras.callbacks.CallbackList):
    """The user's callbacks, then History, then the ResumeCallback, which checkpoints their states.

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
        """Return the values of callbacks, learning rates and metrics, for a checkpoint.

        `step` is the step of the epoch. At step 0, metrics are reset and need not be saved.
        """
        return {
            "callbacks": _callback_states.get_states(self.user_callbacks),
            "rates": self._epoch_rates,
            "metrics": _model.to_numpy(self.model.metrics_variables) if step else [],
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks' `on_epoch_begin`; in a resumed `fit`, first restore their states.

        The comments show the learning rate in a run that was saved in the middle of an epoch. The
        epoch began with the rate 8. A scheduler, which halves the rate at the start of each epoch,
        then set 4, and another callback had set 3 by the step of the checkpoint. The scheduler must
        find 8 again, or it would halve twice, and the training must continue with 3.
        """
        rates = _model.learning_rates(self.model.optimizer)  # the variables of the rates
        # In the first epoch of a resumed `fit`, this is the checkpoint from which it continues, and
        # the model has its weights and learning rates from now on. In other epochs, it is None.
        checkpoint = self._resume._start_resumed_training()
        rates_at_resume = _model.to_numpy(rates)  # 3: the rate of the checkpoint
        if checkpoint is not None:
            self._restore_states(checkpoint, rates)  # sets the rate 8, as when the epoch started
        self._epoch_rates = _model.to_numpy(rates)  # 8
        super().on_epoch_begin(epoch, logs)  # the scheduler sets 4
        if checkpoint is not None and checkpoint.state["loader"]["step"]:  # within an epoch
            _model.assign(rates, rates_at_resume)  # 3

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self._resume._first_step, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self._resume._first_step, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Call the callbacks' `on_train_end`.

        A run may be resumed after its last epoch, if it was killed before it ended. Then no epoch
        starts, and `on_epoch_begin` cannot restore the callbacks' states. So this restores them.
        """
        checkpoint = self._resume._pop_restored_checkpoint()
        if checkpoint is not None:  # no epoch has started
            _callback_states.restore(self.user_callbacks, checkpoint.state["callbacks"])
        super().on_train_end(logs)

    def _restore_states(self, checkpoint: Checkpoint, rates: Sequence[keras.Variable]) -> None:
        """Restore the callbacks' states from a checkpoint.

        If it was made within an epoch, restore also the metrics, and the learning rates that the
        epoch started with.
        """
        _callback_states.restore(self.user_callbacks, checkpoint.state["callbacks"])
        _callback_states.clear_early_stop(self.user_callbacks)
        if checkpoint.state["loader"]["step"]:
            _model.assign(self.model.metrics_variables, checkpoint.state["metrics"])
            _model.assign(rates, checkpoint.state["rates"])
