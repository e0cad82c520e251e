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

    Each call is a `with` block of this object. Without it, the exit of the program can hang: a
    running call waits for the interpreter lock, and the interpreter waits for TensorFlow.
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

    Destroying an iterator blocks until the threads of its pipeline have ended. The garbage
    collector may destroy it in a thread that holds a lock which those threads need: a deadlock. A
    new thread holds no lock.

    Python destroys an object when the last reference to it is deleted. So the new thread waits
    until only the list refers to the iterator, and then clears the list. After `_EXIT_TIMEOUT`
    seconds it clears the list in any case.

    The caller waits for the new thread, for at most `_RELEASE_TIMEOUT` seconds, so that the
    pipeline has usually ended when this returns. It does not wait if something else refers to the
    iterator: that may be the caller itself.
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
    """Let a graph call a bound method by `tf.numpy_function`, and return its results as tensors.

    The graph does not keep the method's object alive: it calls the method by name, on the object
    that is registered under a key.

    Args:
        method: called with arrays whenever the graph runs.
        inputs: tensors; their values are the arguments.
        types: the dtypes of the results.
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

    The generator is closed when the dataset's iterator ends or is destroyed. The graph keeps the
    method's object alive only while the generator runs.
    """
    generate = partial(_generate, *_register(method))
    return tf.data.Dataset.from_generator(generate, args=tuple(inputs), output_signature=spec)


def _generate(key: int, name: str, *inputs: Any) -> Generator[Any, None, None]:
    """Yield the items of the generator method `name` of the object registered under `key`.

    `inputs` are the arguments of the method. No item is None.
    """
    with _registered_object(key) as instance, closing(getattr(instance, name)(*inputs)) as items:
        while True:
            with _call_counter():  # counts the call: the exit of the program waits for it
                item = next(items, None)
            if item is None:  # the generator has ended
                return
            yield item


def _register(method: Callable[..., Any]) -> tuple[int, str]:
    """Store a weak reference to the object of a bound method.

    Returns:
        The key by which `_registered_object` finds the object, and the name of the method.
    """
    instance: Any = method.__self__  # type: ignore[attr-defined]
    key = next(_KEYS)
    _OBJECTS[key] = instance
    return key, method.__name__


@contextmanager
def _registered_object(key: int) -> Iterator[Any]:
    """Yield the object registered under `key`; store an exception of the `with` block in it.

    TensorFlow turns the exception into an error of its own. `original_errors` finds the exception
    in the object's attribute `raised`, the list of its last exceptions.

    Raises:
        RuntimeError: the object was destroyed.
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
