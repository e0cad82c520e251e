"""Destroy iterators of TensorFlow in a thread that has no locks."""

from __future__ import annotations

import atexit
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import release_in_thread

# TensorFlow does not export the class of its iterators.
_OwnedIterator: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type
# At exit, the modules that `_destroy_iterator` needs are cleared before the last iterators.
atexit.register(setattr, _OwnedIterator, "__del__", lambda _: None)


def destroy_in_thread(dataset: Any, /) -> Any:
    """Return the same dataset, marked so that its iterators are destroyed in another thread.

    See `release_in_thread` for the reason. The mark counts for all datasets that are made of this
    one too. So TensorFlow's iterator class gets a destructor that looks for the mark upstream.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._destroyed_in_thread = True
        _OwnedIterator.__del__ = _destroy_iterator
    return dataset


def _destroy_iterator(iterator: Any) -> None:
    """Destructor of TensorFlow's iterators: one of a marked dataset ends in a thread."""
    attributes = vars(iterator)
    is_eager = isinstance(attributes.get("_iterator_resource"), tf.__internal__.EagerTensor)
    if is_eager and _is_marked(attributes.get("_dataset")):
        release_in_thread([attributes.pop("_iterator_resource")])


def _is_marked(dataset: Any) -> bool:
    """Return whether `destroy_in_thread` has marked a dataset, or one that it is made of."""
    stack, seen = [dataset], {id(None)}
    while stack:
        upstream = stack.pop()
        if id(upstream) not in seen:
            if hasattr(upstream, "_is_guarded"):
                return True
            seen.add(id(upstream))
            stack += upstream._inputs()
    return False
