"""What TensorFlow calls back: methods of objects that the graph does not own."""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

# TensorFlow passes on only the text of an error. So an object keeps the errors of its last calls,
# to be found by their text. There may be several, since threads work ahead. Here are the objects
# that raised last, by weak references: no object must live on for an error that nobody asks for.
FAILED: deque[weakref.ref[Any]] = deque(maxlen=8)

# The interpreter may end after _QUIET seconds without a call of TensorFlow. For this quiet it waits
# _PATIENCE seconds at most.
_QUIET, _PATIENCE = 0.1, 10.0

# Seconds for which a destructor waits for TensorFlow's threads.
_LEAVE = 1.0

# TensorFlow keeps every function for ever, and all that a function holds. So a function holds the
# number of an object, and the object stands here for as long as something else keeps it.
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


_CALLS = _Calls()
atexit.register(_CALLS.end)
os.register_at_fork(after_in_child=_CALLS.__init__)  # type: ignore[misc]  # no call is under way


def drop(held: list[Any], /) -> None:
    """Empty a list of one iterator of TensorFlow, in a thread that holds no lock.

    Whoever destroys an iterator waits for the threads of its pass. The garbage collector destroys
    in any thread, and under any lock that these threads wait for. So the iterator is kept while
    others have it too: the collector is about to clear them. After `_PATIENCE` seconds the threads
    of the pass wait for no lock.

    Waits for a short time, so that a pass has ended when its iterator is gone.
    """
    gone, alone = threading.Event(), not _shared(held)

    def empty() -> None:
        deadline = time.monotonic() + _PATIENCE
        while _shared(held) and time.monotonic() < deadline:
            time.sleep(_QUIET / 4)
        with suppress(RuntimeError), _CALLS:  # the end of the program waits for it
            held.clear()
        gone.set()

    with suppress(RuntimeError):  # no thread begins at the end of the program
        _thread.start_new_thread(empty, ())  # locks of `threading` may be held
        if alone:
            gone.wait(_LEAVE)


def _shared(held: list[Any]) -> bool:
    """Return whether somebody else has what the list holds."""
    return sys.getrefcount(held[0]) > 2  # the list's own, and the call's


def called(method: Callable[..., Any], inputs: Sequence[Any], types: Any) -> Any:
    """Call a method from the graph, by `tf.numpy_function`. The graph does not keep the object."""
    number, name = _numbered(method)

    def call(*arrays: Any) -> Any:
        return _call(number, name, *arrays)

    return tf.numpy_function(call, inputs, types)


def generated(method: Callable[[], Iterator[Any]], spec: tf.TensorSpec) -> tf.data.Dataset:
    """Make a dataset of what a generator method yields.

    The generator is closed when the iterator ends or is given up. While the generator runs, the
    object is kept.

    `Dataset.from_generator` does the same, but has TensorFlow trace four functions for each
    dataset, which is a quarter of the work to make a loader's dataset. Here all datasets share
    them.
    """
    number, name = _numbered(method)
    one = tf.data.Dataset.from_tensors(np.int64(number))
    variant = tf.raw_ops.FlatMapDataset(
        input_dataset=tf.data.experimental.to_variant(one),
        other_arguments=[],
        f=_generating(name, spec),
        output_types=[spec.dtype],
        output_shapes=[spec.shape],
    )
    return tf.data.experimental.from_variant(variant, spec)


@cache
def _generating(name: str, spec: tf.TensorSpec) -> Any:
    """Trace a function from an object's number to the variant of a dataset of what a method yields.

    The dataset is made within a function, as TensorFlow cannot write it out, for snapshot.
    """
    running: dict[int, Generator[Any, None, None]] = {}

    def begin(owner: np.int64) -> np.int64:
        number = next(_NUMBERS)
        running[number] = _items(int(owner), name)
        return np.int64(number)

    def draw(number: np.int64) -> Any:
        return next(running[int(number)])

    def end(number: np.int64) -> np.int64:
        running.pop(int(number)).close()
        return number

    def calling(call: Callable[..., Any], result: tf.TensorSpec) -> Any:
        def in_graph(number: tf.Tensor) -> tf.Tensor:
            found = tf.numpy_function(call, [number], result.dtype)
            found.set_shape(result.shape)
            return found

        return _traced(in_graph)

    def generating(owner: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.GeneratorDataset(
            init_func_other_args=[owner],
            next_func_other_args=[],
            finalize_func_other_args=[],
            init_func=calling(begin, scalar),
            next_func=calling(draw, spec),
            finalize_func=calling(end, scalar),
            output_types=[spec.dtype],
            output_shapes=[spec.shape],
        )

    scalar = tf.TensorSpec([], tf.int64)
    with tf.init_scope(), tf.device(None):
        return _traced(generating)


def _traced(function: Callable[..., Any]) -> Any:
    """Trace a function of a number."""
    made = tf.function(function, autograph=False)
    return made.get_concrete_function(tf.TensorSpec([], tf.int64))


def _items(number: int, name: str) -> Generator[Any, None, None]:
    """Yield what a generator method yields."""
    with _kept(number) as owner:
        yield from getattr(owner, name)()


def _numbered(method: Callable[..., Any]) -> tuple[int, str]:
    """Return the number of a method's object, and the method's name."""
    owner: Any = method.__self__  # type: ignore[attr-defined]
    number = next(_NUMBERS)
    _OWNERS[number] = owner
    return number, method.__name__


def _call(number: int, name: str, *arrays: Any) -> Any:
    """Call the method."""
    with _CALLS, _kept(number) as owner:
        return getattr(owner, name)(*arrays)


@contextmanager
def _kept(number: int) -> Iterator[Any]:
    """Give an object, and have it keep what is raised for `original_errors`."""
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
