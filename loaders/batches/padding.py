"""Padding: rows of a batch that are no sample, so that all batches have the same size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import Allocate, Pad, Ragged, collation_of
from twinfeed.loaders.support.array_types import Int64s

Mask = npt.NDArray[np.bool_]
"""bool[batch], False for padding."""


def with_padding(batch: Batch, ids: Int64s, recipe: Recipe, empty: Allocate, /) -> Batch:
    """Insert a row into each field of a batch where an id is -1, and add `mask`.

    Numbers are 0, or the value of the field's `Pad`. Bytes are those of the stream's first sample,
    so that a parser of the user can read them. Other strings are "", and rows of ragged fields have
    no values. `empty` allocates the arrays.
    """
    mask = ids >= 0
    if not mask.all():
        batch = {name: _padded(name, rows, mask, recipe, empty) for name, rows in batch.items()}
    return {**batch, "id": ids, "mask": mask}


def _padded(name: str, rows: Any, mask: Mask, recipe: Recipe, empty: Allocate) -> Any:
    """Return the rows of a field with a row of padding where `mask` is False."""
    spec, how = recipe.shapes
    if isinstance(rows, Ragged):
        return rows._replace(lengths=_padded("", rows.lengths, mask, recipe, empty))
    if isinstance(rows, list):
        strings, padding = iter(rows), recipe.example_bytes.get(name, "")
        return [next(strings) if is_real else padding for is_real in mask]
    pad = collation_of(how, name) if name in spec and spec[name].shape else None
    padded = empty((len(mask), *rows.shape[1:]), rows.dtype)
    padded[~mask] = pad.value if isinstance(pad, Pad) else 0
    padded[mask] = rows
    return padded
