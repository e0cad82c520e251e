"""Destroy iterators of TensorFlow in a new thread, which holds no lock."""

from __future__ import annotations

import atexit
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import release_in_thread

# TensorFlow does not export the class of its iterators.
_OwnedIterator: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type
# At exit, the modules that `_destroy_marked_iterator` needs are cleared before the last iterators.
atexit.register(setattr, _OwnedIterator, "__del__", lambda _: None)


def destroy_iterators_in_thread(dataset: Any, /) -> Any:
    """Mark a dataset so that its iterators are destroyed in a new thread; return the dataset.

    TensorFlow's iterator class gets a destructor, which looks for the mark in the iterator's
    dataset and in all datasets upstream: the user makes downstream datasets later.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._destroyed_in_thread = True
        _OwnedIterator.__del__ = _destroy_marked_iterator
    return dataset


def _destroy_marked_iterator(iterator: Any) -> None:
    """Destroy an iterator of TensorFlow; if a loader's dataset is upstream, in a new thread."""
    attributes = vars(iterator)
    # In a graph, the resource is a symbolic tensor, and there is nothing to destroy.
    is_eager = isinstance(attributes.get("_iterator_resource"), tf.__internal__.EagerTensor)
    # `pop`: the thread destroys the resource only when nothing else refers to it.
    if is_eager and _is_marked(attributes.get("_dataset")):
        release_in_thread([attributes.pop("_iterator_resource")])


def _is_marked(dataset: Any) -> bool:
    """Return whether a dataset, or one that it is made of, has the mark of this module."""
    stack, seen = [dataset], {id(None)}  # an iterator may have None for its dataset: ignore it
    while stack:
        upstream = stack.pop()
        if id(upstream) not in seen:
            if hasattr(upstream, "_destroyed_in_thread"):
                return True
            seen.add(id(upstream))
            stack += upstream._inputs()
    return False
