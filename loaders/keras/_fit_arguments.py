"""Check the arguments of `ResumeCallback` and its `fit`, where Keras's error would not help."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any

import keras
import numpy as np

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.formats.sniff import image_extension
from twinfeed.loaders.index import Index
from twinfeed.loaders.keras import _callback_states
from twinfeed.loaders.loop.adapter import adapter_of
from twinfeed.loaders.loop.loader import Loader
from twinfeed.samplers.validate import a_type

# Options of `model.fit` that `ResumeCallback.fit` refuses, and what to do instead.
_REFUSED_OPTIONS = {
    "x": "arrange makes the inputs of a batch",
    "y": "arrange makes the targets of a batch",
    "sample_weight": "arrange may return (inputs, targets, weights)",
    "batch_size": "the feed's sampler has it, as in BatchSampler(order, batch_size=32)",
    "steps_per_epoch": "give the feed's sampler batches_per_epoch=",
    "initial_epoch": "the last checkpoint says where the training begins: leave it out",
    "shuffle": "the feed's sampler shuffles, as in BatchSampler(RandomSampler(n, seed=0), …)",
    "validation_split": "divide the records by split(…), and give validation_data=",
}


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
    """Refuse options of `model.fit` that do not fit a resumed run, and unusable validation data.

    Warns if a class has different indices in the training and the validation data.

    Args:
        loader: the loader of the training.
        options: the options of `model.fit`.
        arrange: the argument of `fit`, by which it gets inputs and targets for the training: a
            function from a batch to (inputs, targets), or a dataset of such pairs.

    Raises:
        ValueError: an option sets what the loader, its sampler or the checkpoint decides already.
        TypeError: `validation_data` is a feed; or it is a loader, whose batches need a function to
            become (inputs, targets), but `arrange` is a dataset.
    """
    for name, advice in _REFUSED_OPTIONS.items():
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"fit of ResumeCallback takes no {name}=: {advice}")
    validation = options.get("validation_data")
    if isinstance(validation, Feed) or (isinstance(validation, Loader) and not callable(arrange)):
        raise TypeError(
            f"validation_data must be a dataset of (inputs, targets), or a loader if arrange is a "
            f"function or names of fields, got {a_type(validation)}: map the batches of "
            f"the loader's dataset to (inputs, targets)"
        )
    _check_classes(loader, validation)


def _check_classes(loader: Loader[Any], validation: Any) -> None:
    """Warn if a class index means another class in the validation data than in the training data.

    `loader` has the training data. `validation` is a loader or a dataset. Nothing is compared
    unless both read from an `Index`. Only the first difference is reported.
    """
    # The adapter of a framework finds the feed from which a dataset of this framework was made.
    validation_feed = getattr(validation, "feed", None) or adapter_of(loader).feed_of(validation)
    feeds = getattr(loader, "feed", None), validation_feed
    train_index, index = (getattr(feed, "index", None) for feed in feeds)
    if not (isinstance(index, Index) and isinstance(train_index, Index) and train_index.classes):
        return
    # None is the name of a missing class. The validation data may lack the last classes.
    names = zip_longest(train_index.classes, index.classes)
    for class_index, (train_name, name) in enumerate(islice(names, len(index.classes))):
        if train_name != name:
            warnings.warn(
                f"class {class_index} is {train_name!r} in the training and {name!r} in "
                f"validation_data: give both the same order of classes, by twinfeed index "
                f"VALIDATION --classes {train_index.where} --out {index.where}",
                stacklevel=4,
            )
            return


def check_elements(loader: Loader[Any], data: Any, validation: Any) -> None:
    """Refuse two mistakes in the data of `fit`, by an error that says how to correct them.

    1. The validation data are batches as a loader makes them, dicts by field name, while the
       training data are pairs (inputs, targets).
    2. The training data have encoded images, such as the bytes of JPEG files.

    Args:
        loader: the loader of the training.
        data: the training data; only a dataset with an `element_spec` is checked.
        validation: the validation data.

    Raises:
        TypeError: one of these mistakes was found.
    """
    # 1. The spec of an element is nested like the element: a dict, a pair, or None if unknown.
    spec = getattr(data, "element_spec", None)
    validation_spec = getattr(validation, "element_spec", None)
    # Each batch of a loader is a dict with the field "id".
    has_dicts_of_fields = isinstance(validation_spec, dict) and "id" in validation_spec
    if has_dicts_of_fields and not isinstance(spec, dict | None):
        raise TypeError("validation_data has dicts of fields: map them to (inputs, targets)")
    feed = getattr(loader, "feed", None)
    # 2. Encoded images are strings in TensorFlow.
    dtypes = [getattr(leaf, "dtype", None) for leaf in keras.tree.flatten(spec)]
    has_strings = any(dtype == "string" for dtype in dtypes)
    # Strings may be the bytes of images, unless the user's decode or transform has made them.
    if feed is None or feed.has_functions or not has_strings:
        return
    for name, values in feed[0, 0].items():  # the batch of step 0 in epoch 0
        first = values[0] if isinstance(values, list) else None
        if isinstance(first, bytes) and image_extension(first[:64]):
            raise TypeError(
                f"field {name!r} holds the bytes of images: give the feed "
                f"decode=DecodeImage({name!r}, size=(height, width))"
            )


def check_labels(loader: Loader[Any], model: Any, targets: Callable[[], Any]) -> None:
    """Check that a classifier has an output for each label in the remaining steps of the epoch.

    Otherwise Keras's error would name no record on a CPU, and on a GPU the loss would become NaN.
    Nothing is checked unless the loss is sparse categorical crossentropy, and the targets of the
    first batch are the labels of the index.

    Args:
        loader: the loader of the training data. It may have no feed, and then no index.
        model: the model to train. It may have several outputs or no loss, and is not checked then.
        targets: a function that returns the targets of the epoch's first batch.

    Raises:
        ValueError: a record has a label that is too large.
    """
    feed: Any = getattr(loader, "feed", None)
    index, shape = getattr(feed, "index", None), getattr(model, "output_shape", None)
    loss = getattr(model, "loss", None)
    is_sparse = getattr(loss, "name", loss) == "sparse_categorical_crossentropy"
    outputs = shape[-1] if isinstance(shape, tuple) else None
    if not (is_sparse and outputs and isinstance(index, Index) and index.num_classes > outputs):
        return
    sampler, labels = feed.sampler, index.labels
    first = labels[sampler.records(sampler.batch(loader.epoch, 0))]
    if not np.array_equal(keras.ops.convert_to_numpy(targets()).ravel(), first):
        return
    for step in range(loader.step, len(loader)):
        records = sampler.records(sampler.batch(loader.epoch, step))
        without_output = records[labels[records] >= outputs].tolist()
        if without_output:
            record = without_output[0]
            raise ValueError(
                f"{index.describe(record)} has the label {labels[record]}, and the model has "
                f"{outputs} outputs: give the last layer index.num_classes ({index.num_classes})"
            )


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
