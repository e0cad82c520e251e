"""What TensorFlow calls back: errors given back as they were raised, and no call at exit."""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

import tensorflow as tf

P = ParamSpec("P")
T = TypeVar("T")

# TensorFlow hands on an error's text only. The last few are kept here to be found by their text;
# more than one fails where threads are ahead of each other.
_LAST: deque[BaseException] = deque(maxlen=8)

# How long calls of TensorFlow must have stayed away for the interpreter to end, and how long it
# waits for that at most, in seconds.
_QUIET, _PATIENCE = 0.1, 10.0


class Examiner(Protocol):
    """Knows the shards of a pipeline that TensorFlow itself reads."""

    def examine(self, message: str, /) -> None:
        """Raise for the record that TensorFlow's message of lost data is about."""


EXAMINERS: weakref.WeakSet[Examiner] = weakref.WeakSet()
"""Who can say more of lost data than the byte offset that TensorFlow gives."""


class _Calls:
    """The calls that TensorFlow's threads make into Python.

    One that is under way while the interpreter ends waits for the interpreter, which waits for
    TensorFlow, for ever. So none begins when the program has ended, and those under way are waited
    for.
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
        """Refuse further calls, and wait for those under way."""
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


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that TensorFlow may call, and keep what it raises for `original_errors`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _CALLS:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                _LAST.append(error)
                raise

    return call


@contextmanager
def original_errors() -> Iterator[None]:
    """Raise errors of reading, decoding and collating as they are, not as TensorFlow wraps them.

    TensorFlow turns an exception within a pipeline into one of `tf.errors`, whose message holds
    the text (shard, offset, record) between a graph node's name and a traceback. In the block,
    the exception itself is raised, from TensorFlow's.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import DecodeError, FieldSpec, pack
    >>> from twinfeed.loaders.tensorflow import make_dataset, original_errors
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}], mkdtemp())["data"]
    >>> def decode(sample): raise RuntimeError("cannot read this")
    >>> sampler = ExactOnceBatchSampler(1, batch_size=1)
    >>> dataset = make_dataset(index, sampler, decode=decode, spec={"word": FieldSpec((), None)})
    >>> try:
    ...     with original_errors():
    ...         next(iter(dataset))
    ... except DecodeError as error:
    ...     print(error)
    record 0 (...): decode failed: RuntimeError('cannot read this')
    """
    try:
        yield
    except tf.errors.OpError as error:
        for original in reversed(_LAST):
            if str(original) in error.message:
                _LAST.remove(original)
                raise original from error
        if isinstance(error, tf.errors.DataLossError):
            for examiner in list(EXAMINERS):
                examiner.examine(error.message)
        raise
