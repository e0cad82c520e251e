"""Destroy iterators of TensorFlow in a thread that has no locks."""

from __future__ import annotations

import atexit
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import release_in_thread

# TensorFlow does not export the class of its iterators.
_OwnedIterator: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type
# At exit, the modules that `_destroy` needs are cleared before the last iterators.
atexit.register(setattr, _OwnedIterator, "__del__", lambda _: None)


def guarded(dataset: Any, /) -> Any:
    """Return the same dataset, marked so that its iterators are destroyed in another thread.

    See `release_in_thread` for the reason. The mark counts for all datasets that are made of this
    one too. So TensorFlow's iterator class gets a destructor that looks for the mark upstream.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._is_guarded = True
        _OwnedIterator.__del__ = _destroy
    return dataset


def _destroy(iterator: Any) -> None:
    """Destructor of TensorFlow's iterators: one that reads a `guarded` dataset ends in a thread."""
    attributes = vars(iterator)
    is_eager = isinstance(attributes.get("_iterator_resource"), tf.__internal__.EagerTensor)
    if is_eager and _reads_guarded(attributes.get("_dataset")):
        release_in_thread([attributes.pop("_iterator_resource")])


def _reads_guarded(dataset: Any) -> bool:
    """Return whether a dataset, or a dataset that it is made of, is marked by `guarded`."""
    stack, seen = [dataset], {id(None)}
    while stack:
        upstream = stack.pop()
        if id(upstream) not in seen:
            if hasattr(upstream, "_is_guarded"):
                return True
            seen.add(id(upstream))
            stack += upstream._inputs()
    return False
