"""Convert a batch to a flat list of arrays and back to tensors, with static shapes."""

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
    """The tensor specs of each value of a batch: shapes are as static as they can be.

    `batch` is the size of every batch, or None if batches differ in size.
    """

    def __init__(self, feed: Feed, batch: int | None, reader: Reads) -> None:
        self.batch = batch
        compiled = compile_feed(feed)
        empty = Batcher(compiled, reader=reader)(Request.plain(np.zeros(0, np.int64)))
        self.specs: dict[str, list[tf.TensorSpec]] = {}
        for name, value in empty.items():
            shapes = [(part, _sample_shape(compiled, name, part)) for part in _parts(value)]
            self.specs[name] = [_tensor_spec(part, batch, shape) for part, shape in shapes]
            if isinstance(value, Ragged):  # only the lengths have an entry for each sample
                shape = compiled.shapes[0][name].shape[1:]
                self.specs[name][0] = _tensor_spec(value.values, None, shape)

    @property
    def flat(self) -> list[tf.TensorSpec]:
        """The specs of all tensors, in the order of `flatten`."""
        return [spec for specs in self.specs.values() for spec in specs]

    def flatten(self, batch: Batch) -> list[Array]:
        """Return the arrays of all values of a batch as a flat list; `restore` is the inverse."""
        return [part for name in self.specs for part in _parts(batch[name])]

    def restore(self, flat: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Return a batch by field name, made of tensors in the order of `flatten`."""
        parts = iter(flat)
        return {
            name: _join([next(parts) for _ in specs], specs) for name, specs in self.specs.items()
        }


def _tensor_spec(part: Array, batch: int | None, shape: Sequence[int | None]) -> tf.TensorSpec:
    """Return the spec of a tensor of `part`: of `batch` samples (or any number) of a shape."""
    dtype = tf.string if part.dtype == object else tf.as_dtype(part.dtype)
    return tf.TensorSpec([batch, *shape], dtype)


def _sample_shape(compiled: CompiledFeed, name: str, part: Array) -> Sequence[int | None]:
    """Return the static shape of a sample in `part`, an array of field `name` of a batch.

    Sizes that differ between batches, as of padded fields, are None.
    """
    spec, collate = compiled.shapes
    if mode_of(collate, name) == "pad":
        return [None] * (part.ndim - 1)
    if part.ndim == 1 or name not in spec:
        return part.shape[1:]
    return spec[name].shape


def _parts(value: Any) -> list[Array]:
    """Return a value of a batch as a list of arrays: [values, lengths] of a `Ragged`, else one.

    A list of strings becomes an array of objects.
    """
    if isinstance(value, Ragged):
        return [value.values, value.lengths]
    if not isinstance(value, list):
        return [value]
    strings = np.empty(len(value), object)
    strings[:] = value
    return [strings]


def _join(parts: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> Any:
    """Return the tensor of a field from its `parts`, after setting their static shapes.

    Two parts are the values and the row lengths of a ragged tensor.
    """
    for part, spec in zip(parts, specs, strict=True):
        part.set_shape(spec.shape)
    return tf.RaggedTensor.from_row_lengths(*parts) if len(parts) == 2 else parts[0]
