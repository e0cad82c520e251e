"""How a batch of numpy arrays becomes a batch of tensors, and which shapes are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.feed.collate import Ragged, mode_of
from twinfeed.loaders.feed.config import Batch
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.compiled import CompiledFeed
from twinfeed.loaders.making.feed import Feed, compile_feed
from twinfeed.loaders.reading.source import Reads
from twinfeed.loaders.support.array_types import Array


class Layout:
    """The tensors of each value of a batch, with their shapes as far as they are static.

    `batch` is the size of every batch, or None if batches differ in size.
    """

    def __init__(self, feed: Feed, batch: int | None, reader: Reads) -> None:
        self.batch = batch
        compiled = compile_feed(feed)
        empty = Batcher(compiled, reader=reader)(Request.plain(np.zeros(0, np.int64)))
        self.specs = {
            name: [_tensor_spec(part, batch, _rest(compiled, name, part)) for part in _parts(value)]
            for name, value in empty.items()
        }
        for name, value in empty.items():
            if isinstance(value, Ragged):  # only the lengths have an entry for each sample
                rest = compiled.shapes[0][name].shape[1:]
                self.specs[name][0] = _tensor_spec(value.values, None, rest)

    @property
    def dtypes(self) -> list[tf.DType]:
        """The types of all tensors, in the order of `flatten`."""
        return [spec.dtype for spec in self.flat]

    @property
    def flat(self) -> list[tf.TensorSpec]:
        """The specs of all tensors, in the order of `flatten`."""
        return [spec for specs in self.specs.values() for spec in specs]

    def flatten(self, batch: Batch) -> list[Array]:
        """Give the arrays of a batch in a list."""
        return [part for name in self.specs for part in _parts(batch[name])]

    def restore(self, flat: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Give the batch that the tensors of `flatten` make."""
        parts = iter(flat)
        return {
            name: _shaped([next(parts) for _ in specs], specs) for name, specs in self.specs.items()
        }


def _tensor_spec(part: Array, batch: int | None, rest: Sequence[int | None]) -> tf.TensorSpec:
    dtype = tf.string if part.dtype == object else tf.as_dtype(part.dtype)
    return tf.TensorSpec([batch, *rest], dtype)


def _rest(compiled: CompiledFeed, name: str, part: Array) -> Sequence[int | None]:
    """The static shape of one sample in an array of a batch."""
    spec, how = compiled.shapes
    if mode_of(how, name) == "pad":
        return [None] * (part.ndim - 1)
    known = spec.get(name)
    return part.shape[1:] if known is None or part.ndim == 1 else known.shape


def _parts(value: Any) -> list[Array]:
    """The arrays that one value of a batch has in the graph."""
    if isinstance(value, Ragged):
        return [value.values, value.lengths]
    if not isinstance(value, list):
        return [value]
    strings = np.empty(len(value), object)
    strings[:] = value
    return [strings]


def _shaped(parts: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> Any:
    """The tensor that the parts make: two parts make a ragged tensor."""
    for part, spec in zip(parts, specs, strict=True):
        part.set_shape(spec.shape)
    return tf.RaggedTensor.from_row_lengths(*parts) if len(parts) == 2 else parts[0]
