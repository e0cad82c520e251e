"""Iterators of TensorFlow that are destroyed in a thread without locks."""

from __future__ import annotations

import atexit
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import drop

# As TensorFlow names the class of its iterators, which it does not export.
_Owned: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type
# The end of the program takes what `_destroy` needs before it takes the last iterators.
atexit.register(setattr, _Owned, "__del__", lambda _: None)


def guarded(dataset: Any, /) -> Any:
    """Let the iterators of a dataset, and of all that is made of it, be destroyed without locks.

    A pass that fails may leave its iterator to the garbage collector. A dataset does not know what
    is made of it. So all iterators have this destructor, which looks at what an iterator reads.
    """
    if isinstance(dataset, tf.data.Dataset):
        dataset._is_guarded = True
        _Owned.__del__ = _destroy
    return dataset


def _destroy(iterator: Any) -> None:
    """Destroy an iterator over a guarded dataset. Any other iterator ends as it always does."""
    has = vars(iterator)
    eager = isinstance(has.get("_iterator_resource"), tf.__internal__.EagerTensor)
    if eager and _reads_guarded(has.get("_dataset")):
        drop([has.pop("_iterator_resource")])


def _reads_guarded(dataset: Any) -> bool:
    """Whether a dataset is guarded, or is made of one that is."""
    queue, seen = [dataset], {id(None)}
    while queue:
        each = queue.pop()
        if id(each) not in seen:
            if hasattr(each, "_is_guarded"):
                return True
            seen.add(id(each))
            queue += each._inputs()
    return False
