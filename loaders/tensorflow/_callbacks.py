"""`tf.numpy_function` and generators of methods, whose objects the graph does not keep alive."""

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

# TensorFlow passes on only the text of an error. So an object keeps the errors of its last calls,
# to be found by their text: several, since threads work ahead. Here are weak references to the
# objects that raised last, which must not live on for an error that nobody looks up.
FAILED_OWNERS: deque[weakref.ref[Any]] = deque(maxlen=8)

# At exit, the interpreter waits until TensorFlow has made no call for _IDLE seconds, and at most
# _EXIT_TIMEOUT seconds.
_IDLE, _EXIT_TIMEOUT = 0.1, 10.0

# Seconds for which a destructor waits for TensorFlow's threads.
_RELEASE_TIMEOUT = 1.0

# TensorFlow never frees a Python function, nor what its closure refers to. So the closure has an
# integer key, and the object is found here as long as something else keeps it alive.
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_KEYS = count()


class _RunningCalls:
    """The calls of TensorFlow's threads into Python that run now, as a context for each call.

    While the interpreter exits, a running call would wait for the interpreter, and the interpreter
    would wait for TensorFlow, for ever. So no call starts after the program has ended, and the
    program waits for the calls that run.
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
        """Refuse further calls, and wait for the calls that run."""
        with self._lock:
            self._exiting = True
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while time.monotonic() < deadline:
            with self._lock:
                if not self._running and time.monotonic() - self._last_time > _IDLE:
                    return
            time.sleep(_IDLE / 4)


_CALLS = PerProcess(_RunningCalls)
atexit.register(lambda: _CALLS().wait_at_exit())


def release_in_thread(references: list[Any], /) -> None:
    """Clear a list that has the last reference to an iterator of TensorFlow, in a new thread.

    A thread that destroys an iterator waits for the threads of the iterator's pass. The garbage
    collector runs in any thread, and under any lock that these threads may need. It may be about to
    clear other references to the iterator: the new thread waits for that, for `_EXIT_TIMEOUT`
    seconds at most.

    The caller waits for a short time, so that a pass has ended when its iterator is destroyed.
    """
    released, is_last = threading.Event(), not _has_other_references(references)

    def release() -> None:
        deadline = time.monotonic() + _EXIT_TIMEOUT
        while _has_other_references(references) and time.monotonic() < deadline:
            time.sleep(_IDLE / 4)
        with suppress(RuntimeError), _CALLS():  # so that the exit of the program waits for it
            references.clear()
        released.set()

    with suppress(RuntimeError):  # no thread starts while the program exits
        _thread.start_new_thread(release, ())  # a lock of `threading` may be locked here
        if is_last:
            released.wait(_RELEASE_TIMEOUT)


def _has_other_references(references: list[Any]) -> bool:
    """Return whether the list's item is referred to from elsewhere."""
    return sys.getrefcount(references[0]) > 2  # the list's reference, and the argument's


def numpy_function_of(method: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Call a method from the graph, by `tf.numpy_function`. The graph does not keep the object."""
    key, name = _register(method)

    def call(*arrays: Any) -> Any:
        with _CALLS(), _owner(key) as owner:
            return getattr(owner, name)(*arrays)

    return tf.numpy_function(call, inputs, types)


def generator_dataset(
    method: Callable[..., Iterator[Any]], spec: Any, inputs: Sequence[Any] = ()
) -> tf.data.Dataset:
    """Make a dataset of the items of a generator method.

    The generator is closed when the iterator ends or is destroyed. The object is kept alive while
    the generator runs.
    """
    generate = partial(_generate, *_register(method))
    return tf.data.Dataset.from_generator(generate, args=tuple(inputs), output_signature=spec)


def _generate(key: int, name: str, *inputs: Any) -> Generator[Any, None, None]:
    """Yield the items of a generator method of a registered object."""
    with _owner(key) as owner, closing(getattr(owner, name)(*inputs)) as items:
        while True:
            with _CALLS():
                item = next(items, None)
            if item is None:
                return
            yield item


def _register(method: Callable[..., Any]) -> tuple[int, str]:
    """Register the object of a method; return its key, and the method's name."""
    owner: Any = method.__self__  # type: ignore[attr-defined]
    key = next(_KEYS)
    _OWNERS[key] = owner
    return key, method.__name__


@contextmanager
def _owner(key: int) -> Iterator[Any]:
    """Yield a registered object, and record the errors of the block for `original_errors`."""
    owner = _OWNERS.get(key)
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
        FAILED_OWNERS.append(weakref.ref(owner))
        raise
