"""Python methods that TensorFlow calls, of objects that the graph does not own."""

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
# to be found by their text. There may be several, since threads work ahead. Here are the objects
# that raised last, by weak references: no object must live on for an error that is never looked up.
FAILED: deque[weakref.ref[Any]] = deque(maxlen=8)

# The interpreter may end after _QUIET seconds without a call of TensorFlow. For this quiet it waits
# _PATIENCE seconds at most.
_QUIET, _PATIENCE = 0.1, 10.0

# Seconds for which a destructor waits for TensorFlow's threads.
_LEAVE = 1.0

# TensorFlow keeps every function for ever, and all that a function holds. So a function holds the
# number of an object, and the object is listed here as long as something else keeps it.
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = count()


class _Calls:
    """The calls that TensorFlow's threads make into Python.

    While the interpreter ends, a call under way would wait for the interpreter, and the interpreter
    would wait for TensorFlow, for ever. So no call begins after the program has ended, and the
    program waits for the calls under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._last = 0.0
        self._ending = False

    def __enter__(self) -> None:
        with self._lock:
            self._last = time.monotonic()
            if self._ending:
                raise RuntimeError("the program has ended")
            self._under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._under_way -= 1
            self._last = time.monotonic()

    def end(self) -> None:
        """Refuse further calls, and wait for the calls under way."""
        with self._lock:
            self._ending = True
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            with self._lock:
                if not self._under_way and time.monotonic() - self._last > _QUIET:
                    return
            time.sleep(_QUIET / 4)


_CALLS = PerProcess(_Calls)
atexit.register(lambda: _CALLS().end())


def drop(held: list[Any], /) -> None:
    """Empty a list of an iterator of TensorFlow, in a thread without locks.

    A thread that destroys an iterator waits for the threads of the iterator's pass. The garbage
    collector destroys in any thread, and under any lock that these threads wait for. So the
    iterator is kept while others have it too: the collector is about to clear them. After
    `_PATIENCE` seconds the threads of the pass wait for no lock.

    Waits for a short time, so that a pass has ended when its iterator is gone.
    """
    gone, alone = threading.Event(), not _shared(held)

    def empty() -> None:
        deadline = time.monotonic() + _PATIENCE
        while _shared(held) and time.monotonic() < deadline:
            time.sleep(_QUIET / 4)
        with suppress(RuntimeError), _CALLS():  # the end of the program waits for it
            held.clear()
        gone.set()

    with suppress(RuntimeError):  # no thread begins at the end of the program
        _thread.start_new_thread(empty, ())  # locks of `threading` may be held
        if alone:
            gone.wait(_LEAVE)


def _shared(held: list[Any]) -> bool:
    """Return whether the list's item has other references."""
    return sys.getrefcount(held[0]) > 2  # the list's own, and the call's


def called(method: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Call a method from the graph, by `tf.numpy_function`. The graph does not keep the object."""
    number, name = _numbered(method)

    def call(*arrays: Any) -> Any:
        with _CALLS(), _kept(number) as owner:
            return getattr(owner, name)(*arrays)

    return tf.numpy_function(call, inputs, types)


def generated(
    method: Callable[..., Iterator[Any]], spec: Any, inputs: Sequence[Any] = ()
) -> tf.data.Dataset:
    """Make a dataset of the items of a generator method.

    The generator is closed when the iterator ends or is destroyed. While the generator runs, the
    object is kept.
    """
    items = partial(_items, *_numbered(method))
    return tf.data.Dataset.from_generator(items, args=tuple(inputs), output_signature=spec)


def _items(number: int, name: str, *inputs: Any) -> Generator[Any, None, None]:
    """Yield the items of a generator method."""
    with _kept(number) as owner, closing(getattr(owner, name)(*inputs)) as items:
        while True:
            with _CALLS():
                item = next(items, None)
            if item is None:
                return
            yield item


def _numbered(method: Callable[..., Any]) -> tuple[int, str]:
    """Return the number of a method's object, and the method's name."""
    owner: Any = method.__self__  # type: ignore[attr-defined]
    number = next(_NUMBERS)
    _OWNERS[number] = owner
    return number, method.__name__


@contextmanager
def _kept(number: int) -> Iterator[Any]:
    """Give an object, and keep the errors of the block in it, for `original_errors`."""
    owner = _OWNERS.get(number)
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
        FAILED.append(weakref.ref(owner))
        raise
