"""Errors raised inside a pipeline, given back as they were raised."""

from __future__ import annotations

import functools
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
_LAST: deque[Exception] = deque(maxlen=8)


class Examiner(Protocol):
    """Knows the shards of a pipeline that TensorFlow itself reads."""

    def examine(self, message: str, /) -> None:
        """Raise for the record that TensorFlow's message of lost data is about."""


EXAMINERS: weakref.WeakSet[Examiner] = weakref.WeakSet()
"""Who can say more of lost data than the byte offset that TensorFlow gives."""


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Keep what `function` raises for `original_errors`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
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
