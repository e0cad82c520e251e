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
    """Return the names of the callbacks whose state cannot be saved and restored.

    The state of a callback can be restored in two cases: the callback has the methods `get_state`
    and `set_state`, or it is one of Keras's own callbacks, such as EarlyStopping, whose attributes
    are known. A subclass of EarlyStopping may have more attributes, so it needs the two methods.
    """
    return [
        name
        for name, callback in _by_name(callbacks).items()
        if not (_has_state_methods(callback) or _can_resume_keras_callback(callback))
    ]


def stopped_early(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> bool:
    """Return whether an EarlyStopping callback ended the saved run, and would end it again.

    It would not if its `patience` has been raised since. `saved` has the callbacks' states by name.
    """
    for name, callback in _by_name(callbacks).items():
        state = saved.get(name, {}).get("attributes", {})
        if state.get("stopped_epoch") and state["wait"] >= callback.patience:
            return True
    return False


def _by_name(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks by a unique name: the class and what it monitors, numbered if repeated.

    For example "EarlyStopping(val_loss)", "MyCallback" and "MyCallback 2".
    """
    counts: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        name = type(callback).__name__ + (f"({monitor})" if isinstance(monitor, str) else "")
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
    return named


def _state_of(callback: Any) -> dict[str, Any]:
    """Return the state to save of a callback.

    "attributes" has the values that change in a callback of Keras, "own" what its `get_state`
    returns. A callback without either has an empty state.
    """
    state: dict[str, Any] = {}
    if names := _attributes_to_save(callback):
        state["attributes"] = {name: getattr(callback, name, None) for name in names}
    if _has_state_methods(callback):
        state["own"] = callback.get_state()
    return state


def _attributes_to_save(callback: Any) -> tuple[str, ...] | None:
    """Return the names of the attributes that are saved for a callback.

    They are known for Keras's own callbacks, such as EarlyStopping, and hold for their subclasses
    too. For other callbacks, None is returned.
    """
    for base in type(callback).__mro__:
        if _is_of_keras(base) and base.__name__ in _CHANGING_ATTRIBUTES:
            return _CHANGING_ATTRIBUTES[base.__name__]
    return None


def _can_resume_keras_callback(callback: Any) -> bool:
    """Return whether a callback is one of Keras's own, not a subclass, that can be resumed.

    CSVLogger(append=False) cannot: it empties its file when `fit` begins.
    """
    appends = bool(getattr(callback, "append", True))
    return appends and _is_of_keras(type(callback)) and _attributes_to_save(callback) is not None


def _is_of_keras(class_: type) -> bool:
    return class_.__module__.partition(".")[0] == "keras"


def _has_state_methods(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")
