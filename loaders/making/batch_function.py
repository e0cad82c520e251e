"""Call a feed's `batch_transform` on the rows of a batch, and check its result.

The first batch of the stream says what the fields of all batches hold, as an empty batch and a
framework's graph must know before the function is called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.feed.collate import (
    Collate,
    FieldSpec,
    Mode,
    Ragged,
    array_of,
    collate,
    fits,
    mode_of,
    spec_of,
)
from twinfeed.loaders.feed.definition import Batch, BatchTransform, Definition, check_names
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.feed.seeded import repeated
from twinfeed.loaders.making.trial import tried
from twinfeed.loaders.reading.source import read_only
from twinfeed.samplers.drawing.bits import derive


class Shapes(NamedTuple):
    """The spec of a sample in each field of a batch, and how the field is collated."""

    spec: Mapping[str, FieldSpec]
    how: Collate


class BatchFunction:
    """Call `function` on the batches of requests, and check what it returns against `shapes`."""

    def __init__(self, function: BatchTransform, key: int, shapes: Shapes, /) -> None:
        self._function, self._key, self.shapes = function, key, shapes

    def __call__(self, batch: Batch, request: Request, /) -> Batch:
        """Return what the batch of a request will hold; `batch` has the rows without padding."""
        held = request.ids >= 0
        spec, how = self.shapes
        values: dict[str, Any] = dict.fromkeys(spec, ())
        if held.any():
            values = called(self._function, self._key, batch, request)
            for problem in self._misfits(values):
                raise DecodeError(f"batch_transform at {_place(request)} {problem}")
        rows = {name: _rows(value) for name, value in values.items()}
        if not held.all():
            rows = {name: spread(each, held) for name, each in rows.items()}
        return {"id": request.ids, **collate(rows, spec, how=how)}

    def _misfits(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Say what is not as in the first batch."""
        spec = self.shapes.spec
        if values.keys() != spec.keys():
            yield f"gave the fields {sorted(values)}, for the first batch {sorted(spec)}"
        for name, value in values.items():
            array = isinstance(value, np.ndarray)
            if array and (value.dtype != spec[name].dtype or not fits(value, spec[name])):
                yield (
                    f"gave rows of {value.dtype}{value.shape[1:]} in {name!r}, where "
                    f"{spec[name].dtype}{spec[name].shape} is expected: give the shape and dtype "
                    f"by batch_spec=, with None for a length that differs"
                )


def tried_function(
    feed: Definition, first: Callable[[Definition], tuple[Batch, Request]], /
) -> BatchFunction | None:
    """Return the function of a feed, tried by repeated calls on the `first` batch, once.

    Raises:
        ValueError: two calls give two results, or `batch_spec` does not fit.
    """
    if feed.batch_transform is None or "_function" in vars(feed):
        return vars(feed).get("_function")
    function, key, given = feed.batch_transform, feed.sampler.batch_key, feed._given_batch_spec
    batch, request = first(feed)
    values = repeated(
        "batch_transform",
        lambda: called(function, key, copy.deepcopy(batch), request),
        times=3,
        of="one batch",
    )
    if unknown := given.keys() - values.keys():
        raise ValueError(f"batch_spec names {sorted(unknown)}, the fields are {sorted(values)}")
    check_names(feed, "field", values, "give it another name in batch_transform")
    how: dict[str, Mode] = {
        name: "ragged" if isinstance(value, Ragged) else "stack" for name, value in values.items()
    }
    spec = {name: given.get(name) or _spec(feed, name, value) for name, value in values.items()}
    made = BatchFunction(function, key, Shapes(spec, how))
    vars(feed)["_function"] = made
    return made


def called(function: BatchTransform, key: int, batch: Batch, request: Request) -> dict[str, Any]:
    """Return what `function` makes of a batch, without the ids: arrays, strings and `Ragged`.

    Raises:
        DecodeError: the function failed, or returned what is no batch of as many rows.
    """
    ids = read_only(batch["id"])
    try:
        made = function({**batch, "id": ids}, derive(key, request.epoch, request.step))
        if not isinstance(made, Mapping):
            raise TypeError(f"it must return a dict of fields, got a {type(made).__name__}")
        if not np.array_equal(made.get("id", ids), ids):
            raise ValueError("it gave 'id' another value: rename it")
        return {name: _value(name, made[name], len(ids)) for name in made if name != "id"}
    except Exception as error:
        raise DecodeError(
            f"batch_transform failed at {_place(request)}: {error!r}",
            advice="call it on feed[epoch, step] of a feed without batch_transform",
        ) from error


def _value(name: str, value: Any, count: int) -> Any:
    """Return a value of a batch as an array, a list of strings or a `Ragged`."""
    strings = isinstance(value, list) and any(isinstance(one, (bytes, str)) for one in value)
    if not strings and not isinstance(value, Ragged):
        value = array_of(name, value, 0)
        value = np.ascontiguousarray(value) if value.ndim else value  # torch has no negative steps
    rows = value.lengths if isinstance(value, Ragged) else value
    if np.shape(rows)[:1] != (count,):
        raise ValueError(f"field {name!r} must have a row for each of {count} samples")
    return value


def _spec(feed: Definition, name: str, value: Any) -> FieldSpec:
    """Return the spec of a field by its first row; lengths that collation pads stay free."""
    mode: Mode = "ragged" if isinstance(value, Ragged) else "stack"
    found = spec_of({name: _rows(value)[0]}, mode)[name]
    padded = name in tried(feed) and mode_of(feed.collate, name) == "pad"
    return found._replace(shape=(None,) * len(found.shape)) if padded else found


def _rows(value: Any) -> Sequence[Any]:
    if not isinstance(value, Ragged):
        return value  # type: ignore[no-any-return]
    return np.split(value.values, np.cumsum(value.lengths)[:-1])


def spread(values: Sequence[Any], held: npt.NDArray[np.bool_]) -> Sequence[Any]:
    """Return `values` at the places without padding, and None at the others."""
    rest = iter(values)
    return [next(rest) if one else None for one in held]


def _place(request: Request) -> str:
    return f"epoch {request.epoch}, step {request.step}"
