"""Iterators of TensorFlow that are destroyed in a thread without locks."""

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
    """Have the iterators of a dataset, and of datasets made of it, destroyed in another thread.

    A pass that fails may leave its iterator to the garbage collector. A dataset does not know the
    datasets made of it. So the class of all iterators gets this destructor, which acts on those
    that read a guarded dataset.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._is_guarded = True
        _OwnedIterator.__del__ = _destroy
    return dataset


def _destroy(iterator: Any) -> None:
    """Destroy an iterator over a guarded dataset. Other iterators are destroyed as always."""
    attributes = vars(iterator)
    eager = isinstance(attributes.get("_iterator_resource"), tf.__internal__.EagerTensor)
    if eager and _reads_guarded(attributes.get("_dataset")):
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
