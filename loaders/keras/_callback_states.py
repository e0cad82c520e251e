"""The states of callbacks: the values that a checkpoint has, and a resumed `fit` restores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import keras

_MODEL_CHECKPOINT = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")

# The attributes of Keras's own callbacks that change in a run. They are saved and restored. Options
# are not: they stay as the script has them.
_CHANGING_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "CSVLogger": (),
    "EarlyStopping": ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    "History": ("epoch", "history"),
    "LambdaCallback": (),
    "LearningRateScheduler": (),
    "ModelCheckpoint": _MODEL_CHECKPOINT,
    "OrbaxCheckpoint": (*_MODEL_CHECKPOINT, "_total_batches_seen"),
    "ProgbarLogger": (),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "RemoteMonitor": (),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
    "TerminateOnNaN": (),
}


def get_states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return a dict with the state of each callback by its name, to be saved in a checkpoint."""
    return {name: _state_of(callback) for name, callback in _by_name(callbacks).items()}


def restore(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> None:
    """Restore the saved states of callbacks. A callback without a saved state stays as it is."""
    for name, callback in _by_name(callbacks).items():
        state = saved.get(name, {})
        for attribute, value in state.get("attributes", {}).items():
            setattr(callback, attribute, value)
        if "own" in state and _has_state_methods(callback):
            callback.set_state(state["own"])


def clear_early_stop(callbacks: Iterable[Any]) -> None:
    """Reset `stopped_epoch` of each EarlyStopping, or it would report that it stopped this fit."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.EarlyStopping):
            callback.stopped_epoch = 0


def unrestorable_callbacks(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of callbacks without `get_state` that are not Keras's own."""

    def is_restorable(callback: Any) -> bool:
        # CSVLogger(append=False) empties its file when `fit` begins.
        is_own = _is_of_keras(type(callback)) and getattr(callback, "append", True)
        return is_own or _has_state_methods(callback)

    return [name for name, value in _by_name(callbacks).items() if not is_restorable(value)]


def stopped_early(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> bool:
    """Return whether an EarlyStopping callback ended the saved run, and would end it again."""
    return any(
        state.get("stopped_epoch") and state["wait"] >= callback.patience
        for name, callback in _by_name(callbacks).items()
        if (state := saved.get(name, {}).get("attributes"))
    )


def _by_name(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks by name, such as "EarlyStopping(loss)", "Mine" and "Mine 2"."""
    counts: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        name = type(callback).__name__ + (f"({monitor})" if isinstance(monitor, str) else "")
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
    return named


def _state_of(callback: Any) -> dict[str, Any]:
    """Return the state to save of a callback: its changing attributes, and its own `get_state`."""
    state: dict[str, Any] = {}
    if names := _attributes_to_save(callback):
        state["attributes"] = {name: getattr(callback, name, None) for name in names}
    if _has_state_methods(callback):
        state["own"] = callback.get_state()
    return state


def _attributes_to_save(callback: Any) -> tuple[str, ...] | None:
    """Return the attributes to save of a callback of Keras or of its subclass; else None."""
    own = (base for base in type(callback).__mro__ if _is_of_keras(base))
    return next((_CHANGING_ATTRIBUTES[base.__name__] for base in own), None)


def _is_of_keras(class_: type) -> bool:
    """Return whether a class is one of Keras's callbacks, whose attributes are known."""
    is_own = class_.__module__.partition(".")[0] == "keras"
    return is_own and class_.__name__ in _CHANGING_ATTRIBUTES


def _has_state_methods(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")
