"""Convert a batch to a flat list of arrays and back to tensors, with static shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import Ragged, mode_of
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.reading.source import FieldReader
from twinfeed.loaders.support.array_types import Array


class Layout:
    """The mapping of a batch to a flat list of tensors, with their `TensorSpec`s.

    `batch_size` is the size of every batch, or None. `specs` has, by field name, the specs of its
    tensors: one, or [values, lengths] if it is ragged.
    """

    def __init__(self, feed: Feed, batch_size: int | None, reader: FieldReader) -> None:
        self.batch_size = batch_size
        recipe = recipe_of(feed)
        # A batch of no samples has the fields and dtypes of every batch.
        empty_batch = Batcher(recipe, reader=reader)(Request.plain(np.zeros(0, np.int64)))
        self.specs: dict[str, list[tf.TensorSpec]] = {}
        for name, value in empty_batch.items():
            if isinstance(value, Ragged):
                row_shape = recipe.shapes[0][name].shape[1:]
                values_spec = _tensor_spec(value.values, None, row_shape)  # of all samples together
                self.specs[name] = [values_spec, _tensor_spec(value.lengths, batch_size, ())]
            else:
                (array,) = _arrays_of(value)
                shape = _sample_shape(recipe, name, array)
                self.specs[name] = [_tensor_spec(array, batch_size, shape)]

    @property
    def flat_specs(self) -> list[tf.TensorSpec]:
        """The specs of all tensors, in the order of `flatten`."""
        return [spec for specs in self.specs.values() for spec in specs]

    def flatten(self, batch: Batch) -> list[Array]:
        """Return the arrays of all fields of a batch as a flat list; `restore` is the inverse."""
        return [array for name in self.specs for array in _arrays_of(batch[name])]

    def restore(self, flat: Sequence[tf.Tensor]) -> dict[str, Any]:
        """Make a batch, a dict by field name, of a flat list of tensors."""
        tensors = iter(flat)
        return {
            name: _join([next(tensors) for _ in specs], specs) for name, specs in self.specs.items()
        }


def _tensor_spec(array: Array, size: int | None, shape: Sequence[int | None]) -> tf.TensorSpec:
    """Return the spec [size, *shape] with the dtype of `array`. A size of None is any size."""
    dtype = tf.string if array.dtype == object else tf.as_dtype(array.dtype)
    return tf.TensorSpec([size, *shape], dtype)


def _sample_shape(recipe: Recipe, name: str, array: Array) -> Sequence[int | None]:
    """Return the static shape of one sample of a field that is not ragged.

    A size that may differ between batches is None. `array` is the field in some batch.
    """
    spec, collate = recipe.shapes  # each field's `FieldSpec`, and the user's `collate` argument
    if mode_of(collate, name) == "pad":
        return [None] * (array.ndim - 1)
    # The spec lacks fields that the loader adds to every batch, such as "id".
    return spec[name].shape if name in spec else array.shape[1:]


def _arrays_of(value: Any) -> list[Array]:
    """Return a value of a batch as arrays: [values, lengths] if it is `Ragged`, else one."""
    if isinstance(value, Ragged):
        return [value.values, value.lengths]
    if not isinstance(value, list):
        return [value]
    strings = np.empty(len(value), object)
    strings[:] = value
    return [strings]


def _join(tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> Any:
    """Set the static shapes of a field's tensors, and return the field's single tensor."""
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return tf.RaggedTensor.from_row_lengths(*tensors) if len(tensors) == 2 else tensors[0]
