"""Call a feed's `batch_transform` on the rows of a batch, and check its result.

The spec of the result is inferred from the first batch of the stream. An empty batch and the graph
of a framework need it before the function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.feed.arguments import Batch, BatchTransform
from twinfeed.loaders.feed.collate import (
    CollateError,
    FieldSpec,
    Mode,
    Ragged,
    array_of,
    collate,
    ragged_rows,
    spec_of,
)
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.reading.source import read_only
from twinfeed.samplers.drawing.random_words import derive
from twinfeed.samplers.validate import a_type

_ADVISE_CORRECTING = "correct the function: try it on feed[epoch, step] of a feed without it"


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """The `batch_transform` of a feed, whose results must fit the spec of its first result.

    Attributes:
        function: the `batch_transform`.
        key: `sampler.batch_key`, from which its seeds are derived.
        declared: the `batch_spec` argument of the feed.
        spec: the spec of each field of a result; empty before the function is tried.
        how: whether the rows of a field are a list or an array.

    Raises:
        DecodeError: the function failed, or returned other fields, dtypes, shapes or another number
            of rows.
    """

    function: BatchTransform
    key: int
    declared: Mapping[str, FieldSpec]
    spec: Mapping[str, FieldSpec] = field(default_factory=dict)
    how: Mapping[str, Mode] = field(default_factory=dict)

    def with_spec(
        self, values: Mapping[str, Sequence[Any]], padded_fields: Set[str], /
    ) -> tuple[BatchFunction, Mapping[str, Any]]:
        """Return the function with the spec of a result, and a row of each field of the result.

        `padded_fields` are fields that are padded to the longest sample of each batch.
        """
        # A list holds strings, or arrays of different lengths.
        how: dict[str, Mode] = {
            name: "ragged" if isinstance(rows, list) else "stack" for name, rows in values.items()
        }
        # The first row with values shows the dtype best: an empty list has none.
        first_row = {name: next(filter(np.size, rows), rows[0]) for name, rows in values.items()}
        spec = spec_of(first_row, how)
        for name in spec.keys() & padded_fields:
            spec[name] = spec[name]._replace(shape=(None,) * len(spec[name].shape))
        return replace(self, spec={**spec, **self.declared}, how=how), first_row

    def __call__(self, batch: Batch, request: Request, /) -> Batch:
        """Return the batch that the user's function makes of `batch`, the rows of `request`.

        The function is not called for a batch without rows.
        """
        values = self.call(batch, request) if len(request.ids) else dict.fromkeys(self.spec, ())
        with _errors_with_step(request, partial(self._batch_spec_advice, values)):
            return {"id": request.ids, **collate(values, self.spec, how=self.how)}

    def _batch_spec_advice(self, values: Mapping[str, Sequence[Any]]) -> str:
        """Return the advice about a batch unlike the first one: a `batch_spec` that fits both, if
        one exists, as (None, 8) fits rows of the shapes (5, 8) and (3, 8).
        """
        # The `batch_spec` to advise: what the user has declared, with None for sizes that differ.
        advised = dict(self.declared)
        try:
            for name, field in self.spec.items():
                shape = np.shape(values[name][0])
                if len(shape) == len(field.shape) and shape != field.shape:
                    sizes = zip(shape, field.shape, strict=True)
                    common_shape = tuple(size if size == first else None for size, first in sizes)
                    advised[name] = FieldSpec(common_shape, field.dtype)
            # Raises CollateError if the batch does not fit this spec either.
            collate(values, {**self.spec, **advised}, how=self.how)
        except (KeyError, CollateError):
            return "make each batch like the first, or give the dtypes and shapes as batch_spec="
        shown = {  # as the user writes it: (shape, name of the dtype), or None for byte strings
            name: (field.shape, field.dtype and field.dtype.name) for name, field in advised.items()
        }
        return f"give the feed batch_spec={shown}, or make each batch like the first"

    def call(self, batch: Batch, request: Request, /) -> dict[str, Any]:
        """Call the user's function on a batch, and return a dict of the fields that it returned.

        Each field has a row for each sample. The "id" of the batch is removed from the result.

        Raises:
            DecodeError: the function failed or returned something else.
        """
        ids = read_only(batch["id"])
        with _errors_with_step(request):
            seed = derive(self.key, request.epoch, request.step)
            result = self.function({**batch, "id": ids}, seed)
            if not isinstance(result, Mapping):
                raise TypeError(f"it must return a dict of fields, got {a_type(result)}")
            if not np.array_equal(result.get("id", ids), ids):
                raise ValueError("it changed 'id': give the new value another name")
            return {name: _rows(name, result[name], len(ids)) for name in result if name != "id"}


@contextmanager
def _errors_with_step(
    request: Request, advice: Callable[[], str] = lambda: _ADVISE_CORRECTING
) -> Iterator[None]:
    """Turn an error in the `with` block into a DecodeError with epoch, step and `advice()`."""
    try:
        yield
    except Exception as error:
        problem = getattr(error, "problem", repr(error))
        where = f"batch_transform at epoch {request.epoch}, step {request.step}"
        raise DecodeError(f"{where}: {problem}", advice=advice()) from error


def _rows(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return what the user's function gave for a field as rows, one for each of `count` samples."""
    has_strings = isinstance(value, list) and any(isinstance(row, (bytes, str)) for row in value)
    if isinstance(value, Ragged):
        value = ragged_rows(name, value)
    elif not has_strings:
        value = np.ascontiguousarray(array_of(name, value))  # torch has no negative strides
    if len(value) != count:
        raise ValueError(f"field {name!r} must have a row for each of {count} samples")
    return value  # type: ignore[no-any-return]
