"""Raise the original exceptions in place of the errors that TensorFlow wraps them in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import tensorflow as tf

from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.tensorflow._callbacks import registered_objects


def original_errors() -> AbstractContextManager[None]:
    """Raise the original errors of reading, decoding and collating in a `with` block.

    TensorFlow turns an exception in a pipeline into an error of `tf.errors`. The exception's text
    (shard, offset, record) is in its message, between a graph node's name and a traceback. If such
    an error leaves the block, the original exception is raised in its place, and has TensorFlow's
    error as its `__cause__`.

    Use the block around `fit`, and around loops over `loader.dataset`. Loops over a loader itself,
    and over `loader.track(dataset)`, raise the original errors without it.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import DecodeError, Feed, FieldSpec, pack
    >>> from twinfeed.loaders.tensorflow import TensorFlowLoader, original_errors
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}], mkdtemp())["data"]
    >>> def decode(sample): raise RuntimeError("cannot read this")
    >>> sampler, spec = ExactOnceBatchSampler(1, batch_size=1), {"word": FieldSpec((), None)}
    >>> loader = TensorFlowLoader(Feed(index, sampler, decode=decode, spec=spec))
    >>> try:
    ...     with original_errors():
    ...         next(iter(loader.dataset))
    ... except DecodeError as error:
    ...     print(error.problem)
    record 0 (...): decode failed: RuntimeError('cannot read this')
    """
    return OriginalErrors(None)


class OriginalErrors(AbstractContextManager[None]):
    """Raise original errors in place of TensorFlow's: of the loader with this `run`, or of all."""

    def __init__(self, run: Run | None) -> None:
        self._run = run

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        if not isinstance(error, tf.errors.OpError):
            return
        for owner in registered_objects():
            # The objects of `source_datasets` belong to no loader, so they are always looked at.
            if self._run is not None and getattr(owner, "run", self._run) is not self._run:
                continue
            for original in reversed(vars(owner).get("raised", ())):
                if f"{type(original).__name__}: {original}" in error.message:
                    owner.raised.remove(original)
                    raise original from error
