"""Call Python methods from a TensorFlow graph, without the graph keeping their objects alive."""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any

import tensorflow as tf

from twinfeed.loaders.support.fork import PerProcess

# At exit, the interpreter waits until TensorFlow has made no call for _IDLE seconds, and at most
# EXIT_TIMEOUT seconds. Loops that wait look every POLL_INTERVAL seconds.
_IDLE, EXIT_TIMEOUT, POLL_INTERVAL = 0.1, 10.0, 0.025

# TensorFlow never frees a Python function that a graph calls, nor what its closure refers to. So
# the closure has an integer key, and this dict has the object by key, as long as something else
# keeps the object alive.
_OBJECTS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_KEYS = count()


class _RunningCalls:
    """Know which threads of TensorFlow run a call into Python; refuse calls at exit.

    Otherwise the exit could hang: a call waits for the interpreter lock, and the interpreter for
    TensorFlow.
    """

    def __init__(self) -> None:
        self._threads: list[int] = []  # a thread twice if a call makes another
        self._last_time = 0.0  # when a call last started or ended
        self._exiting = False

    def __enter__(self) -> None:
        self._last_time = time.monotonic()
        self._threads.append(get_ident())  # before `_exiting` is read: `wait_at_exit` sets it first
        if self._exiting:
            self._threads.remove(get_ident())
            raise RuntimeError("the program has ended")

    def __exit__(self, *_: object) -> None:
        self._last_time = time.monotonic()
        self._threads.remove(get_ident())

    def wait_at_exit(self) -> None:
        """Refuse new calls, and wait until none has run for `_IDLE` seconds, or for a timeout."""
        self._exiting = True
        deadline = time.monotonic() + EXIT_TIMEOUT
        while self._threads or time.monotonic() - self._last_time < _IDLE:
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_INTERVAL)


running_calls = PerProcess(_RunningCalls)  # called, it returns those of this process
atexit.register(lambda: running_calls().wait_at_exit())


def numpy_function_of(method: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Let a graph call a bound method, and return its results, of dtypes `types`, as tensors."""
    return tf.numpy_function(partial(_call, *_register(method)), inputs, types)


def _call(key: int, name: str, *arrays: Any) -> Any:
    """Call the method `name` of the object registered under `key`."""
    # The exit of the program waits for running calls.
    with running_calls(), _registered_object(key) as instance:
        return getattr(instance, name)(*arrays)


def generator_dataset(
    method: Callable[..., Iterator[Any]], spec: Any, inputs: Sequence[Any] = ()
) -> tf.data.Dataset:
    """Make a dataset of the items that a generator method yields, called with `inputs`."""
    generate = partial(_generate, *_register(method))
    return tf.data.Dataset.from_generator(generate, args=tuple(inputs), output_signature=spec)


def _generate(key: int, name: str, *inputs: Any) -> Generator[Any, None, None]:
    """Yield the items of the generator method `name` of the object registered under `key`."""
    with _registered_object(key) as instance, closing(getattr(instance, name)(*inputs)) as items:
        while True:
            with running_calls():  # the exit of the program waits for the call
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
    """Yield the object registered under `key`; store an exception of the `with` block in it."""
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
        # TensorFlow passes on only the text of an exception, by which `OriginalErrors` finds it.
        # The registered object may be of any class, so its class does not define the attribute.
        instance.__dict__.setdefault("raised", deque(maxlen=8)).append(error)
        raise


def registered_objects() -> list[Any]:
    """Return the objects whose methods graphs call, the latest first."""
    return list(_OBJECTS.values())[::-1]
