"""Call a feed's `batch_transform` on the rows of a batch, and check its result.

The spec of the result is inferred from the first batch of the stream. An empty batch and the graph
of a framework need it before the function is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.feed.arguments import Batch, BatchTransform
from twinfeed.loaders.feed.collate import (
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
_ADVISE_SPEC = "make each batch like the first, or give batch_spec=, with None for other lengths"


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
        """Return the function with the spec of a result, and a row of each field of the result."""
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
        """Return the batch that the user's function makes of `batch`, the rows of `request`."""
        values = self.call(batch, request) if len(request.ids) else dict.fromkeys(self.spec, ())
        with _errors_with_step(request, _ADVISE_SPEC):
            return {"id": request.ids, **collate(values, self.spec, how=self.how)}

    def call(self, batch: Batch, request: Request, /) -> dict[str, Any]:
        """Call the user's function on a batch, and return a dict of the fields that it returned."""
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
def _errors_with_step(request: Request, advice: str = _ADVISE_CORRECTING) -> Iterator[None]:
    """Turn an error in the `with` block into a DecodeError with epoch, step and advice."""
    try:
        yield
    except Exception as error:
        problem = getattr(error, "problem", repr(error))
        where = f"batch_transform at epoch {request.epoch}, step {request.step}"
        raise DecodeError(f"{where}: {problem}", advice=advice) from error


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
