"""Call Python methods from a TensorFlow graph, without the graph keeping their objects alive."""

from __future__ import annotations

import _thread
import atexit
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import tensorflow as tf

from twinfeed.loaders.support.fork import PerProcess

# TensorFlow passes on only the text of an exception. So the object of a failed method keeps its
# last exceptions as `raised`, to be found by their text. These are weak references to the objects
# whose methods failed last.
FAILED_OBJECTS: deque[weakref.ref[Any]] = deque(maxlen=8)

# At exit, the interpreter waits until TensorFlow has made no call for _IDLE seconds, and at most
# _EXIT_TIMEOUT seconds.
_IDLE, _EXIT_TIMEOUT = 0.1, 10.0

# Seconds for which a destructor waits for TensorFlow's threads.
_RELEASE_TIMEOUT = 1.0

# TensorFlow never frees a Python function, nor what its closure refers to. So the closure has an
# integer key, and the object is found here as long as something else keeps it alive.
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_KEYS = count()


class _RunningCalls:
    """Count the running calls of TensorFlow's threads into Python; refuse calls at exit.

    Each call is a `with` block of this object. Without it, the exit of the program can hang: a
    running call waits for the interpreter lock, and the interpreter waits for TensorFlow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last_time = 0.0
        self._exiting = False

    def __enter__(self) -> None:
        with self._lock:
            self._last_time = time.monotonic()
            if self._exiting:
                raise RuntimeError("the program has ended")
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            self._last_time = time.monotonic()

    def wait_at_exit(self) -> None:
        """Refuse new calls, and wait until none has run for `_IDLE` seconds, or for a timeout."""
        with self._lock:
            self._exiting = True
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while time.monotonic() < deadline:
            with self._lock:
                if not self._running and time.monotonic() - self._last_time > _IDLE:
                    return
            time.sleep(_IDLE / 4)


_RUNNING_CALLS = PerProcess(_RunningCalls)
atexit.register(lambda: _RUNNING_CALLS().wait_at_exit())


def release_in_thread(references: list[Any], /) -> None:
    """Destroy a TensorFlow iterator, the only item of the list `references`, in a new thread.

    Destroying an iterator blocks until its pipeline's threads have ended. The garbage collector may
    run in a thread that holds a lock which these threads need, so a new thread clears the list:
    once nothing else refers to the iterator, or after `_EXIT_TIMEOUT` seconds.

    The caller waits for up to a second, so that the pipeline has usually ended when this returns.
    """
    released, is_last = threading.Event(), not _has_other_references(references)

    def release() -> None:
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while _has_other_references(references) and time.monotonic() < deadline:
            time.sleep(_IDLE / 4)
        with (
            suppress(RuntimeError),
            _RUNNING_CALLS(),
        ):  # so that the exit of the program waits for it
            references.clear()
        released.set()

    with suppress(RuntimeError):  # no thread starts while the program exits
        _thread.start_new_thread(release, ())  # a lock of `threading` may be locked here
        if is_last:
            released.wait(_RELEASE_TIMEOUT)


def _has_other_references(references: list[Any]) -> bool:
    """Return whether something else refers to the first item of the list."""
    return sys.getrefcount(references[0]) > 2  # the list's reference, and the argument's


def numpy_function_of(method: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Return tensors of what a method returns, called by `tf.numpy_function` when the graph runs.

    `inputs` are tensors, which the method gets as arrays; `types` are the dtypes of its results.
    The graph does not keep the method's object alive.
    """
    key, name = _register(method)

    def call(*arrays: Any) -> Any:
        with _RUNNING_CALLS(), _registered_object(key) as owner:
            return getattr(owner, name)(*arrays)

    return tf.numpy_function(call, inputs, types)


def generator_dataset(
    method: Callable[..., Iterator[Any]], spec: Any, inputs: Sequence[Any] = ()
) -> tf.data.Dataset:
    """Make a dataset of the items that a generator method yields, called with `inputs`.

    The generator is closed when the dataset's iterator ends or is destroyed. The graph keeps the
    method's object alive only while the generator runs.
    """
    generate = partial(_generate, *_register(method))
    return tf.data.Dataset.from_generator(generate, args=tuple(inputs), output_signature=spec)


def _generate(key: int, name: str, *inputs: Any) -> Generator[Any, None, None]:
    """Yield the items of the generator method `name` of the object registered as `key`."""
    with _registered_object(key) as owner, closing(getattr(owner, name)(*inputs)) as items:
        while True:
            with _RUNNING_CALLS():
                item = next(items, None)
            if item is None:
                return
            yield item


def _register(method: Callable[..., Any]) -> tuple[int, str]:
    """Store a weak reference to the object of a bound method.

    Returns:
        The key by which `_registered_object` finds the object, and the name of the method.
    """
    owner: Any = method.__self__  # type: ignore[attr-defined]
    key = next(_KEYS)
    _OBJECTS[key] = owner
    return key, method.__name__


@contextmanager
def _registered_object(key: int) -> Iterator[Any]:
    """Yield the object registered as `key`, and store an exception of the `with` block in it.

    `original_errors` finds the exception there.

    Raises:
        RuntimeError: the object was destroyed.
    """
    owner = _OBJECTS.get(key)
    if owner is None:
        raise RuntimeError(
            "the loader of this dataset is gone: keep the loader, or the dataset that it gave, "
            "for as long as what was made of the dataset is in use"
        )
    try:
        yield owner
    except GeneratorExit:
        raise
    except BaseException as error:
        owner.__dict__.setdefault("raised", deque(maxlen=8)).append(error)
        FAILED_OBJECTS.append(weakref.ref(owner))
        raise
