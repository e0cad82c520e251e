"""The callbacks of a `fit` that is resumed: in order, with their saved values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import keras

from twinfeed.loaders.keras import _callback_states, _model
from twinfeed.loaders.keras._saves import Save
from twinfeed.loaders.support.array_types import Array


class Resuming(Protocol):
    """The methods of a ResumeCallback that are used here."""

    _start: int

    def _going_on(self, *, trains: bool = True) -> Save | None: ...


class OrderedCallbacks(keras.callbacks.CallbackList):
    """Call the user's callbacks, then History, then the ResumeCallback, which saves their values.

    - Before the first epoch of a resumed `fit`, the callbacks get their saved values. This is after
      their `on_train_begin`, which in some callbacks resets everything.
    - A callback that sets the learning rate at the beginning of an epoch may begin from the rate
      it finds. So in a resumed epoch it finds the rate of the epoch's beginning.
    - Batches have their number in the whole epoch, also in the rest of an epoch.
    """

    def __init__(
        self, resume: Resuming, callbacks: Sequence[Any], *, model: keras.Model, **params: Any
    ) -> None:
        self._resume = resume
        self._rates: list[Array] = []  # at the beginning of the epoch
        given = list(callbacks)
        if not any(isinstance(one, keras.callbacks.History) for one in given):
            given.append(keras.callbacks.History())
        self.known = given
        progress = params["verbose"] != 0
        super().__init__(
            [*given, resume], add_history=True, add_progbar=progress, model=model, **params
        )

    def state(self, step: int) -> dict[str, Any]:
        """Return what a save at this step has of the callbacks, and of the epoch so far."""
        metrics = _model.values(self.model.metrics_variables) if step else []
        return {
            "callbacks": _callback_states.states(self.known),
            "rates": self._rates,
            "metrics": metrics,
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Let the first epoch begin at the step of the save."""
        rates = _model.rates(self.model.optimizer)
        save = self._resume._going_on()
        now = _model.values(rates)
        if save is not None:
            self._hand_over(save, rates)
        self._rates = _model.values(rates)
        super().on_epoch_begin(epoch, logs)
        if save is not None and save.state["loader"]["step"]:
            _model.assign(rates, now)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch + self._resume._start, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch + self._resume._start, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """End a run too that was killed between its last epoch and its end."""
        save = self._resume._going_on(trains=False)
        if save is not None:
            _callback_states.tell(self.known, save.state["callbacks"])
        super().on_train_end(logs)

    def _hand_over(self, save: Save, rates: Sequence[keras.Variable]) -> None:
        _callback_states.tell(self.known, save.state["callbacks"])
        _callback_states.go_on(self.known)
        if save.state["loader"]["step"]:
            _model.assign(self.model.metrics_variables, save.state["metrics"])
            _model.assign(rates, save.state["rates"])
