"""Raise the original exceptions in place of the errors that TensorFlow wraps them in."""

from __future__ import annotations

from contextlib import AbstractContextManager

import tensorflow as tf

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.loop.external_passes import ExternalPasses
from twinfeed.loaders.support import system
from twinfeed.loaders.tensorflow._callbacks import FAILED_OBJECTS


def original_errors() -> AbstractContextManager[None]:
    """Raise errors of reading, decoding and collating as they are, not as TensorFlow wraps them.

    TensorFlow turns an exception within a pipeline into an error of `tf.errors`, whose message has
    the text (shard, offset, record) between a graph node's name and a traceback. In the block, the
    original exception is raised, from TensorFlow's. A `TensorFlowLoader` does so by itself when it
    is iterated over, and in `track`. The block is for `fit`, and for loops over its `dataset`.

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
    """Context manager that raises the original errors of a loader's passes, or (None) of all."""

    def __init__(self, external_passes: ExternalPasses | None) -> None:
        self._external_passes = external_passes

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None:
        if isinstance(error, tf.errors.OpError):
            _raise_original(error, self._external_passes)


def _raise_original(error: tf.errors.OpError, external_passes: ExternalPasses | None) -> None:
    """Raise the original exception of an error of TensorFlow, found by its text, if it was stored.

    With `external_passes`, only exceptions of the loader that has these passes are looked at.
    """
    for reference in reversed(FAILED_OBJECTS):
        owner = reference()
        passes_of_owner = getattr(owner, "external_passes", external_passes)
        if external_passes is not None and passes_of_owner is not external_passes:
            continue
        raised: list[BaseException] = getattr(owner, "raised", [])
        for original in reversed(raised):
            if f"{type(original).__name__}: {original}" in error.message:
                raised.remove(original)
                raise original from error
    if "Too many open files" in error.message:
        raise LoaderError(
            f"this process may open {system.file_limit()} files, and each dataset of choose stays "
            f"open once it is drawn from",
            advice="raise `ulimit -n`, or index the files (build_index) and take a "
            "TensorFlowLoader, which opens few at a time",
        ) from error
