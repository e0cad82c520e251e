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
    """Return a dataset whose iterators are destroyed in another thread: see `release_in_thread`.

    This holds for datasets made of it too, which it does not know. So the class of all iterators
    gets a new destructor, which treats those specially that read a guarded dataset.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._is_guarded = True
        _OwnedIterator.__del__ = _destroy
    return dataset


def _destroy(iterator: Any) -> None:
    """Release an iterator in another thread, if it reads a guarded dataset (see `guarded`)."""
    attributes = vars(iterator)
    is_eager = isinstance(attributes.get("_iterator_resource"), tf.__internal__.EagerTensor)
    if is_eager and _reads_guarded(attributes.get("_dataset")):
        release_in_thread([attributes.pop("_iterator_resource")])


def _reads_guarded(dataset: Any) -> bool:
    """Return whether a dataset is guarded, or is made of one that is."""
    stack, seen = [dataset], {id(None)}
    while stack:
        upstream = stack.pop()
        if id(upstream) not in seen:
            if hasattr(upstream, "_is_guarded"):
                return True
            seen.add(id(upstream))
            stack += upstream._inputs()
    return False
