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

    Destroying an iterator waits for the threads of its pipeline. The garbage collector may do so in
    a thread that holds a lock which they need: a deadlock. A new thread holds no lock.

    An iterator of a downstream dataset, such as `dataset.map(f)`, waits for the same threads. But
    the user makes the downstream dataset later, and it has no mark. So TensorFlow's iterator class
    gets a destructor. It looks for the mark in the iterator's dataset and in all datasets upstream,
    from which this dataset was made.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._destroyed_in_thread = True
        _OwnedIterator.__del__ = _destroy_marked_iterator
    return dataset


def _destroy_marked_iterator(iterator: Any) -> None:
    """Destructor of TensorFlow's iterators: destroy those of a loader's datasets in a new thread.

    `destroy_iterators_in_thread` has marked the datasets of loaders. Destroying an iterator waits
    for the threads of its pipeline. The garbage collector may call this destructor in a thread that
    holds a lock which those threads need, and waiting here would be a deadlock.
    """
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
