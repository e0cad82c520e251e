"""The values that the callbacks of a `fit` keep, for saves and for a resumed `fit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from twinfeed.loaders.keras._saves import plain
from twinfeed.loaders.support.array_types import Array

# Of Keras's own callbacks: the attributes that change in a run. Options stay as scripts have them.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "CSVLogger": (),
    "EarlyStopping": ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    "History": ("epoch", "history"),
    "LambdaCallback": (),
    "LearningRateScheduler": (),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "OrbaxCheckpoint": (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_total_batches_seen",
    ),
    "ProgbarLogger": (),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "RemoteMonitor": (),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
    "TerminateOnNaN": (),
}


def states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the values that callbacks keep, by their names.

    Raises:
        TypeError: a value cannot be saved; the error names the callback.
    """
    found = {}
    for name, callback in _named(callbacks).items():
        known = _state(callback)
        arrays: list[Array] = []
        try:
            plain(known, arrays)
        except TypeError as error:
            raise TypeError(
                f"get_state of {name} must give numbers, texts, NumPy arrays, and lists and dicts "
                f"of them: {error}"
            ) from error
        found[name] = known
    return found


def tell(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> None:
    """Give callbacks their saved values. A callback that is not in the save begins anew."""
    for name, callback in _named(callbacks).items():
        known = saved.get(name, {})
        for attribute, value in known.get("attributes", {}).items():
            setattr(callback, attribute, value)
        if "own" in known and _keeps(callback):
            callback.set_state(known["own"])


def go_on(callbacks: Iterable[Any]) -> None:
    """Keep callbacks from reporting an early stop if the training goes on."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.EarlyStopping):
            callback.stopped_epoch = 0


def unknown(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of the callbacks that cannot be restored."""
    return [name for name, one in _named(callbacks).items() if not (_keeps(one) or _plain(one))]


def stopped(callbacks: Iterable[Any], saved: Mapping[str, Any]) -> bool:
    """Return whether EarlyStopping has ended the run, and would end it today."""
    for name, callback in _named(callbacks).items():
        known = saved.get(name, {}).get("attributes", {})
        if known.get("stopped_epoch") and known["wait"] >= callback.patience:
            return True
    return False


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks by class, by what they monitor, and by number where these are the same."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        name = type(callback).__name__ + (f"({monitor})" if isinstance(monitor, str) else "")
        same = sum(other.partition(" ")[0] == name for other in found)
        found[f"{name} {same + 1}" if same else name] = callback
    return found


def _state(callback: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    names = _attributes(callback) or ()
    if names:
        state["attributes"] = {name: getattr(callback, name, None) for name in names}
    if _keeps(callback):
        state["own"] = callback.get_state()
    return state


def _attributes(callback: Any) -> tuple[str, ...] | None:
    """Return the attributes of one of Keras's callbacks, or of a class derived from it."""
    for one in type(callback).__mro__:
        if _of_keras(one) and one.__name__ in _ATTRIBUTES:
            return _ATTRIBUTES[one.__name__]
    return None


def _plain(callback: Any) -> bool:
    """Return whether a callback is one of Keras's, with nothing added to it.

    CSVLogger empties its file when `fit` begins, unless it appends.
    """
    appends = bool(getattr(callback, "append", True))
    return appends and _of_keras(type(callback)) and _attributes(callback) is not None


def _of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


def _keeps(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")
