"""Check the arguments of `ResumeCallback` and its `fit`, where Keras's error would not help."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any

import keras

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.index import Index
from twinfeed.loaders.keras import _callback_states
from twinfeed.loaders.loop.loader import Loader
from twinfeed.samplers.validate import a_type


def check_loader(loader: Any) -> None:
    """Raise TypeError for anything but a loader."""
    if not isinstance(loader, Loader):
        raise TypeError(
            f"loader must be a loader, as in TensorFlowLoader(feed), got {a_type(loader)}"
        )


def resolve_arrange(arrange: Any) -> Any:
    """Check the argument `arrange` of `fit`, which says how to get inputs and targets.

    A tuple of field names, such as ("image", "label"), becomes a function that takes a batch and
    returns the values of these fields. The user may also pass such a function, or a dataset of
    (inputs, targets). It is returned as it is.

    Raises:
        TypeError: `arrange` is neither two or three names, nor a function, nor a dataset.
    """
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


def check_options(loader: Loader[Any], options: Mapping[str, Any], arrange: Any) -> None:
    """Refuse options of `model.fit` that Keras would ignore, and unusable validation data.

    Warns of the first class that has another index in a loader for validation.

    Args:
        loader: the loader of the training.
        options: the options of `model.fit`.
        arrange: the argument of `fit`, by which it gets inputs and targets for the training: a
            function from a batch to (inputs, targets), or a dataset of such pairs.

    Raises:
        ValueError: an option sets what `arrange` or the sampler decides already.
        TypeError: `validation_data` is a feed; or it is a loader, whose batches need a function to
            become (inputs, targets), but `arrange` is a dataset.
    """
    for name in ("batch_size", "sample_weight", "shuffle", "steps_per_epoch", "y"):
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(
                f"fit of ResumeCallback takes no {name}=: arrange makes targets and weights, and "
                f"the feed's sampler has the batch size, the order and batches_per_epoch="
            )
    validation = options.get("validation_data")
    if isinstance(validation, Feed) or (isinstance(validation, Loader) and not callable(arrange)):
        raise TypeError(
            f"validation_data must be a dataset of (inputs, targets), or a loader if arrange is a "
            f"function or names of fields, got {a_type(validation)}: map the batches of "
            f"the loader's dataset to (inputs, targets)"
        )
    feeds = getattr(loader, "feed", None), getattr(validation, "feed", None)
    train, index = (getattr(feed, "index", None) for feed in feeds)
    if isinstance(train, Index) and isinstance(index, Index) and train.classes:
        # The validation data may lack the last classes; None is the name of a missing class.
        names = islice(zip_longest(train.classes, index.classes), len(index.classes))
        for number, (train_name, name) in enumerate(names):
            if train_name != name:
                warnings.warn(
                    f"class {number} is {train_name!r} in the training and {name!r} in "
                    f"validation_data: give both the same order of classes, by twinfeed index "
                    f"VALIDATION --classes {train.where} --out {index.where}",
                    stacklevel=3,
                )
                return


def check_callbacks(callbacks: Any, resume: keras.callbacks.Callback) -> list[Any]:
    """Return the user's callbacks as a list without `resume`.

    Warns of callbacks whose states cannot be restored.

    Raises:
        ValueError: one of them is Keras's `BackupAndRestore`.
    """
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
