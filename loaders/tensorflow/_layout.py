"""Convert a batch to a flat list of arrays, and tensors to a batch, with static shapes."""

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
    """The mapping of a batch to a flat list of tensors, and back.

    `batch_size` is the size of every batch, or None. `specs` has the spec of each field by name,
    and `flat_specs` those of the tensors of all fields, of which a ragged field has two.
    """

    def __init__(self, feed: Feed, batch_size: int | None, reader: FieldReader) -> None:
        self.batch_size, recipe = batch_size, recipe_of(feed)
        # A batch of no samples has the fields and dtypes of every batch.
        empty_batch = Batcher(recipe, reader=reader)(Request.plain(np.zeros(0, np.int64)))
        self.specs = {
            name: _spec_of(recipe, name, value, batch_size) for name, value in empty_batch.items()
        }
        self.flat_specs = tf.nest.flatten(self.specs, expand_composites=True)

    def flatten(self, batch: Batch) -> list[Array]:
        """Return the arrays of all fields of a batch as a flat list; `restore` is the inverse."""
        return [array for name in sorted(self.specs) for array in arrays_of(batch[name])]

    def restore(self, flat: Sequence[tf.Tensor]) -> Any:
        """Make a batch, a dict by field name, of a flat list of tensors."""
        return tf.nest.pack_sequence_as(self.specs, flat, expand_composites=True)


def _spec_of(recipe: Recipe, name: str, value: Any, size: int | None) -> Any:
    """Return the spec of a field of batches, of which `value` is that of some batch."""
    spec, collate = recipe.shapes  # each field's `FieldSpec`, and the user's `collate` argument
    array = arrays_of(value)[0]
    dtype = tf.string if array.dtype == object else tf.as_dtype(array.dtype)
    # The spec lacks fields that the loader adds to every batch, such as "id".
    shape: Sequence[int | None] = spec[name].shape if name in spec else array.shape[1:]
    if isinstance(value, Ragged):
        return tf.RaggedTensorSpec([size, None, *shape[1:]], dtype, ragged_rank=1)
    if mode_of(collate, name) == "pad":
        shape = [None] * (array.ndim - 1)
    return tf.TensorSpec([size, *shape], dtype)


def arrays_of(value: Any) -> list[Array]:
    """Return a value of a batch as arrays: [values, row splits] if it is `Ragged`, else one."""
    if isinstance(value, Ragged):
        return [value.values, np.cumsum([0, *value.lengths], dtype=np.int64)]
    if not isinstance(value, list):
        return [value]
    strings = np.empty(len(value), object)
    strings[:] = value
    return [strings]
