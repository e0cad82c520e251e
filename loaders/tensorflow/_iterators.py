"""Find the loaders that a dataset is made of, and destroy its iterators in a new thread."""

from __future__ import annotations

import _thread
import atexit
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow._callbacks import EXIT_TIMEOUT, POLL_INTERVAL, running_calls

# Seconds for which a destructor waits for TensorFlow's threads.
_RELEASE_TIMEOUT = 1.0

# TensorFlow does not export the class of its iterators.
_OwnedIterator: Any = tf.data.IteratorSpec(tf.TensorSpec([])).value_type
# At exit, the modules that `_destroy_iterator` needs are cleared before the last iterators.
atexit.register(setattr, _OwnedIterator, "__del__", lambda _: None)


def set_owner(dataset: Any, owner: Any, /) -> Any:
    """Return the dataset, which keeps `owner` alive: the object whose methods its graph calls."""
    # Iterators of the dataset, and of those that the user makes of it, are destroyed in a thread.
    dataset.twinfeed_owner = owner
    _OwnedIterator.__del__ = _destroy_iterator
    return dataset


def owner_of(dataset: Any, /) -> Any:
    """Return the object whose methods the graph of a loader's own dataset calls, or None."""
    return getattr(dataset, "twinfeed_owner", None)


def upstream(dataset: Any, /) -> Iterator[Any]:
    """Yield a dataset and all that it is made of, up to the loaders' own datasets."""
    stack, seen = [dataset], {id(None)}  # an iterator may have None for its dataset: ignore it
    while stack:
        found = stack.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            stack += [] if owner_of(found) else found._inputs()


def _destroy_iterator(iterator: Any) -> None:
    """Destroy an iterator of TensorFlow; if a loader's dataset is upstream, in a new thread."""
    attributes = vars(iterator)
    # In a graph, the resource is a symbolic tensor, and there is nothing to destroy.
    is_eager = isinstance(attributes.get("_iterator_resource"), tf.__internal__.EagerTensor)
    # `pop`: the thread destroys the resource only when nothing else refers to it.
    if is_eager and any(map(owner_of, upstream(attributes.get("_dataset")))):
        _release_in_thread([attributes.pop("_iterator_resource")])


def _release_in_thread(references: list[Any]) -> None:
    """Destroy a TensorFlow iterator, the only item of the list `references`, in a new thread.

    Destroying an iterator blocks until its pipeline has ended. The garbage collector may do so in a
    thread that holds a lock which the pipeline needs: a deadlock. So a new thread waits until only
    the list refers to the iterator, and clears the list.
    """
    released = threading.Event()
    has_last_reference = not _has_other_references(references)

    def release() -> None:
        deadline = time.monotonic() + EXIT_TIMEOUT
        while _has_other_references(references) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        # The exit of the program waits until the block has ended. During the exit, RuntimeError is
        # raised, and the iterator is not destroyed.
        with suppress(RuntimeError), running_calls():
            references.clear()
        released.set()

    with suppress(RuntimeError):  # no thread starts while the program exits
        # Not `threading.Thread`, whose start takes a lock that may be locked here.
        _thread.start_new_thread(release, ())
        if has_last_reference:
            released.wait(_RELEASE_TIMEOUT)


def _has_other_references(references: list[Any]) -> bool:
    """Return whether something else refers to the first item of the list."""
    return sys.getrefcount(references[0]) > 2  # the list, and the argument of getrefcount
