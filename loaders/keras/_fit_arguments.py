"""Check the arguments of `ResumeCallback` and its `fit`, where Keras's error would not help."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Any

import keras
import numpy as np

from twinfeed.loaders.formats.sniff import image_extension
from twinfeed.loaders.index import Index
from twinfeed.loaders.keras import _callback_states
from twinfeed.loaders.loop.adapter import adapter_of
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.making.feed import Feed

_OPTIONS = {
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
            f"loader must be as in TensorFlowLoader(feed), got a {type(loader).__name__}"
        )


def resolve_arrange(arrange: Any) -> Any:
    """Check the `arrange` argument of `fit`, and turn names of fields into a function of a batch.

    Raises:
        TypeError: it is neither names, nor a function, nor a dataset.
    """
    has_names = isinstance(arrange, tuple) and all(isinstance(name, str) for name in arrange)
    if has_names and len(arrange) in (2, 3):
        return itemgetter(*arrange)
    is_dataset = isinstance(arrange, Iterable) and not hasattr(arrange, "__getitem__")
    if isinstance(arrange, (Loader, Feed)) or not (callable(arrange) or is_dataset):
        raise TypeError(
            f"arrange must be names of fields, as in ('image', 'label'), a function that makes "
            f"(inputs, targets) of a batch of the loader, or a dataset that was made of the "
            f"loader's, got a {type(arrange).__name__}"
        )
    return arrange


def check_options(loader: Loader[Any], options: Mapping[str, Any], arrange: Any) -> None:
    """Refuse options of `model.fit` that the loader, its sampler or the checkpoint decides.

    Warns if training and validation number the classes differently.

    Raises:
        ValueError: such an option.
        TypeError: `validation_data` is a feed, or a loader while `arrange` is a dataset.
    """
    for name, where in _OPTIONS.items():
        if options.get(name) is not None and options[name] is not False:
            raise ValueError(f"fit of ResumeCallback takes no {name}=: {where}")
    validation = options.get("validation_data")
    if isinstance(validation, Feed) or (isinstance(validation, Loader) and not callable(arrange)):
        raise TypeError(
            f"validation_data must be a dataset of inputs and targets, or a loader where arrange "
            f"is names or a function, got a {type(validation).__name__}: give "
            f"loader.dataset.map(pairs)"
        )
    _check_classes(loader, validation)


def _check_classes(loader: Loader[Any], validation: Any) -> None:
    """Warn if a class number has another class name in the validation than in the training.

    Classes are compared if both have an `Index`. Only the first difference is reported.
    """
    test_feed = getattr(validation, "feed", None) or adapter_of(loader).feed_of(validation)
    feeds = getattr(loader, "feed", None), test_feed
    train, test = (getattr(feed, "index", None) for feed in feeds)
    if not (isinstance(train, Index) and isinstance(test, Index) and train.classes):
        return
    pairs = zip_longest(islice(train.classes, len(test.classes)), test.classes)
    for number, (train_class, test_class) in enumerate(pairs):
        if train_class != test_class:
            warnings.warn(
                f"class {number} is {train_class!r} in the training and {test_class!r} in "
                f"validation_data: number both alike, by twinfeed index VALIDATION "
                f"--classes {train.where} --out {test.where}",
                stacklevel=4,
            )
            return


def check_elements(loader: Loader[Any], data: Any, validation: Any) -> None:
    """Refuse datasets of `fit` whose elements no model takes.

    `data` and `validation` are the training and the validation data.

    Raises:
        TypeError: `validation` has whole batches (dicts), or images are not decoded.
    """
    spec, validation_spec = (
        getattr(dataset, "element_spec", None) for dataset in (data, validation)
    )
    has_whole_batches = isinstance(validation_spec, dict) and "id" in validation_spec
    if has_whole_batches and not isinstance(spec, dict | None):
        raise TypeError(
            "validation_data must hold inputs and targets: give loader.dataset.map(pairs)"
        )
    feed = getattr(loader, "feed", None)
    leaves = keras.tree.flatten(spec)
    has_strings = any(getattr(leaf, "dtype", None) == "string" for leaf in leaves)
    if feed is None or feed.has_functions or not has_strings:
        return
    for name, values in feed[0, 0].items():
        first = values[0] if isinstance(values, list) else None
        if isinstance(first, bytes) and image_extension(first[:64]):
            raise TypeError(
                f"field {name!r} holds the bytes of images: give the feed "
                f"decode=DecodeImage({name!r}, size=(height, width))"
            )


def check_labels(loader: Loader[Any], model: Any, targets: Callable[[], Any]) -> None:
    """Check that a classifier has an output for each label in the rest of the epoch.

    Only checked for sparse categorical crossentropy, and if the targets of the first batch are the
    labels of the index. Otherwise Keras's own error would name no record on a CPU, and on a GPU the
    loss would become NaN.

    Args:
        loader: of the training.
        model: of the training.
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
            f"a resumed run cannot restore the states of {', '.join(unrestorable)}: "
            f"give classes of your own get_state and set_state, and CSVLogger append=True",
            stacklevel=3,
        )
    return user_callbacks
