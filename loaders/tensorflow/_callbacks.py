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
# last exceptions in the attribute `raised`, and `original_errors` finds them by their text. Here
# are weak references to the objects whose methods failed last.
FAILED_OBJECTS: deque[weakref.ref[Any]] = deque(maxlen=8)

# At exit, the interpreter waits until TensorFlow has made no call for _IDLE seconds, and at most
# _EXIT_TIMEOUT seconds. Loops that wait look every _POLL_INTERVAL seconds.
_IDLE, _EXIT_TIMEOUT, _POLL_INTERVAL = 0.1, 10.0, 0.025

# Seconds for which a destructor waits for TensorFlow's threads.
_RELEASE_TIMEOUT = 1.0

# TensorFlow never frees a Python function that a graph calls, nor what its closure refers to. So
# the closure has an integer key, and this dict has the object by key, as long as something else
# keeps the object alive.
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_KEYS = count()


class _CallCounter:
    """Count the running calls of TensorFlow's threads into Python; refuse calls at exit.

    Otherwise the exit could hang: a call waits for the interpreter lock, and the interpreter for
    TensorFlow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last_time = 0.0  # when a call last started or ended
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
            time.sleep(_POLL_INTERVAL)


_call_counter = PerProcess(_CallCounter)  # called, it returns the counter of this process
atexit.register(lambda: _call_counter().wait_at_exit())


def release_in_thread(references: list[Any], /) -> None:
    """Destroy a TensorFlow iterator, the only item of the list `references`, in a new thread.

    Destroying an iterator blocks until its pipeline has ended. The garbage collector may do so in a
    thread that holds a lock which the pipeline needs: a deadlock. So a new thread waits until only
    the list refers to the iterator, and clears the list.
    """
    released = threading.Event()
    has_last_reference = not _has_other_references(references)

    def release() -> None:
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while _has_other_references(references) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL)
        # `_call_counter` makes the exit of the program wait until the block has ended. During the
        # exit it raises RuntimeError, and the iterator is not destroyed.
        with suppress(RuntimeError), _call_counter():
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


def numpy_function_of(method: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Let a graph call a bound method, and return its results, of dtypes `types`, as tensors.

    The graph calls the method by name, on the object that is registered under a key, and so does
    not keep the object alive.
    """
    key, name = _register(method)

    def call(*arrays: Any) -> Any:
        # `_call_counter` counts the call, so that the exit of the program waits for it.
        with _call_counter(), _registered_object(key) as instance:
            return getattr(instance, name)(*arrays)

    return tf.numpy_function(call, inputs, types)


def generator_dataset(
    method: Callable[..., Iterator[Any]], spec: Any, inputs: Sequence[Any] = ()
) -> tf.data.Dataset:
    """Make a dataset of the items that a generator method yields, called with `inputs`.

    The generator is closed when the dataset's iterator ends or is destroyed.
    """
    generate = partial(_generate, *_register(method))
    return tf.data.Dataset.from_generator(generate, args=tuple(inputs), output_signature=spec)


def _generate(key: int, name: str, *inputs: Any) -> Generator[Any, None, None]:
    """Yield the items of the generator method `name` of the object registered under `key`."""
    with _registered_object(key) as instance, closing(getattr(instance, name)(*inputs)) as items:
        while True:
            with _call_counter():  # counts the call: the exit of the program waits for it
                item = next(items, None)
            if item is None:  # the generator has ended
                return
            yield item


def _register(method: Callable[..., Any]) -> tuple[int, str]:
    """Store a weak reference to the object of a method; return its key and the method's name."""
    instance: Any = method.__self__  # type: ignore[attr-defined]
    key = next(_KEYS)
    _OBJECTS[key] = instance
    return key, method.__name__


@contextmanager
def _registered_object(key: int) -> Iterator[Any]:
    """Yield the object registered under `key`; store an exception of the `with` block in it.

    `original_errors` finds the exception there, as TensorFlow raises an error of its own.
    """
    instance = _OBJECTS.get(key)
    if instance is None:
        raise RuntimeError(
            "the loader of this dataset no longer exists: keep a reference to the loader, or to "
            "loader.dataset, while a dataset that was made of it is in use"
        )
    try:
        yield instance
    except GeneratorExit:  # an iterator was destroyed, which is not a failure
        raise
    except BaseException as error:
        # The registered object may be of any class, so its class does not define the attribute.
        instance.__dict__.setdefault("raised", deque(maxlen=8)).append(error)
        FAILED_OBJECTS.append(weakref.ref(instance))
        raise
