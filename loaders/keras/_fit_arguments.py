"""Check the arguments of `ResumeCallback` and its `fit`, where Keras's error would not help."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import keras

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.keras import _callback_states
from twinfeed.loaders.loop.loader import Loader
from twinfeed.samplers.validate import a_type


def resolve_arrange(arrange: Any) -> Any:
    """Check the argument `arrange` of `fit`; names of fields become a function of a batch."""
    has_names = isinstance(arrange, tuple) and all(isinstance(name, str) for name in arrange)
    if has_names and len(arrange) in (2, 3):
        return itemgetter(*arrange)
    is_dataset = isinstance(arrange, Iterable) and not hasattr(arrange, "__getitem__")
    if isinstance(arrange, (Loader, Feed)) or not (callable(arrange) or is_dataset):
        raise TypeError(
            f"arrange must be names of fields, as in ('image', 'label'), a function from a batch "
            f"to (inputs, targets), or a dataset made from loader.dataset, got a "
            f"{type(arrange).__name__}"
        )
    return arrange


def check_options(options: Mapping[str, Any], arrange: Any) -> None:
    """Refuse options of `model.fit` that Keras would ignore, and unusable validation data."""
    for name in ("batch_size", "initial_epoch", "sample_weight", "shuffle", "steps_per_epoch", "y"):
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(
                f"fit of ResumeCallback takes no {name}=: arrange makes targets and weights, and "
                f"the feed's sampler has the batch size, the order and batches_per_epoch=, and the "
                f"loader the epoch"
            )
    validation = options.get("validation_data")
    if isinstance(validation, Feed) or (isinstance(validation, Loader) and not callable(arrange)):
        raise TypeError(
            f"validation_data must be a dataset of (inputs, targets), or a loader if arrange is a "
            f"function or names of fields, got {a_type(validation)}: map the batches of "
            f"the loader's dataset to (inputs, targets)"
        )


def check_callbacks(callbacks: Any, resume: keras.callbacks.Callback) -> list[Any]:
    """Return the callbacks as a list without `resume`; warn of those that cannot be restored."""
    user_callbacks = [] if callbacks is None else keras.tree.flatten(callbacks)
    user_callbacks = [callback for callback in user_callbacks if callback is not resume]
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in user_callbacks):
        raise ValueError(
            "BackupAndRestore restores the model without the loader: leave BackupAndRestore out"
        )
    if unrestorable := _callback_states.unrestorable_callbacks(user_callbacks):
        warnings.warn(
            f"a resumed run cannot restore the states of {', '.join(unrestorable)}: implement "
            f"get_state and set_state in your own callbacks, and create CSVLogger with append=True",
            stacklevel=3,
        )
    return user_callbacks
