"""Samples to one batch: stacked, padded or ragged, each array written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Mode = Literal["stack", "pad", "ragged"]
Collate = Mode | Mapping[str, Mode]
MODES = ("stack", "pad", "ragged")


class Ragged(NamedTuple):
    """Hold arrays of different lengths as one array and the length of each.

    `values` has shape (sum of lengths, …), `lengths` is int64[batch].

    >>> Ragged(np.array([7, 8, 9]), np.array([1, 2])).lengths
    array([1, 2])
    """

    values: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]


class FieldSpec(NamedTuple):
    """Say what one sample holds in a field; `dtype` None means a byte string.

    >>> spec_of({"image": np.zeros((8, 8), np.uint8), "name": b"cat"})["image"]
    FieldSpec(shape=(8, 8), dtype=dtype('uint8'))
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None


def spec_of(sample: Mapping[str, Any], /) -> dict[str, FieldSpec]:
    """Read the spec off one sample; ValueError for what no array holds.

    >>> spec_of({"name": b"cat"})
    {'name': FieldSpec(shape=(), dtype=None)}
    """
    return {name: _spec(name, value) for name, value in sample.items()}


def _spec(name: str, value: Any) -> FieldSpec:
    if isinstance(value, (bytes, str)):
        return FieldSpec((), None)
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise ValueError(
            f"field {name!r} holds {type(value).__name__}, which no batch can hold: "
            f"make it an array, a number or a string in decode or transform"
        )
    return FieldSpec(array.shape, array.dtype)


def mode_of(how: Collate, name: str, /) -> Mode:
    """Give the collation of field `name`; a field that a mapping leaves out is stacked.

    >>> mode_of({"tokens": "pad"}, "tokens"), mode_of({"tokens": "pad"}, "image")
    ('pad', 'stack')
    """
    return how.get(name, "stack") if isinstance(how, Mapping) else how


def check_collate(how: Collate, /) -> Collate:
    """Return `how`, or raise ValueError when it names a mode that does not exist.

    >>> check_collate("pad")
    'pad'
    """
    for mode in how.values() if isinstance(how, Mapping) else (how,):
        if mode not in MODES:
            raise ValueError(f"collate must be one of {', '.join(MODES)}, got {mode!r}")
    return how


def collate(
    columns: Mapping[str, Sequence[Any]],
    spec: Mapping[str, FieldSpec],
    /,
    *,
    how: Collate = "stack",
) -> dict[str, Any]:
    """Make one batch of each field's values; None stands for nothing there: zeros or empty bytes.

    Every field of `spec` is there whatever the number of values, also none. Byte strings become
    a list of bytes. A stacked field is an array of shape (batch, …); a padded one too, filled up
    with zeros at the end of each axis, with `<field>_length` (int64[batch]) beside it, or
    `<field>_shape` (int64[batch, axes]) where it has several axes; a ragged one is a `Ragged`.
    Raises ValueError where values do not fit together.

    >>> collate({"x": [[1, 2], [3]]}, {"x": FieldSpec((2,), np.dtype(np.int64))}, how="pad")
    {'x': array([[1, 2],
           [3, 0]]), 'x_length': array([2, 1])}
    """
    batch: dict[str, Any] = {}
    for name, field in spec.items():
        values, mode = columns[name], mode_of(how, name)
        if field.dtype is None:
            batch[name] = [v if type(v) is bytes else _as_bytes(v) for v in values]
        elif mode == "stack" or not field.shape:
            batch[name] = _stack(name, values, field)
        elif mode == "pad":
            batch.update(_pad(name, values, field))
        else:
            batch[name] = _ragged(name, values, field)
    return batch


def _as_bytes(value: Any) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else bytes(value)


def _stack(name: str, values: Sequence[Any], field: FieldSpec) -> npt.NDArray[Any]:
    if isinstance(values, np.ndarray) and values.dtype == field.dtype:
        return values  # decoded in place
    shape = next((np.shape(value) for value in values if value is not None), field.shape)
    out = np.empty((len(values), *shape), field.dtype)
    for place, value in enumerate(values):
        if value is None:
            out[place] = 0
            continue
        if np.shape(value) != shape:
            modes = "'pad' or 'ragged'" if np.shape(value)[1:] == shape[1:] else "'pad'"
            raise _unequal(name, np.shape(value), shape, modes)
        out[place] = value
    return out


def _unequal(name: str, shape: tuple[int, ...], beside: tuple[int, ...], modes: str) -> ValueError:
    return ValueError(
        f"field {name!r} has shape {shape} beside {beside} in one batch: "
        f"make them equal in decode, or collate it with {modes}"
    )


def _arrays(values: Sequence[Any], field: FieldSpec) -> list[npt.NDArray[Any]]:
    empty = np.zeros((0,) * len(field.shape), field.dtype)
    return [empty if value is None else np.asarray(value, field.dtype) for value in values]


def _pad(name: str, values: Sequence[Any], field: FieldSpec) -> dict[str, Any]:
    arrays, axes = _arrays(values, field), len(field.shape)
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), axes)
    out = np.zeros((len(arrays), *shapes.max(axis=0, initial=0)), field.dtype)
    for padded, array in zip(out, arrays, strict=True):
        padded[tuple(slice(size) for size in array.shape)] = array
    if axes == 1:
        return {name: out, f"{name}_length": shapes[:, 0]}
    return {name: out, f"{name}_shape": shapes}


def _ragged(name: str, values: Sequence[Any], field: FieldSpec) -> Ragged:
    rest = next((np.shape(value)[1:] for value in values if value is not None), field.shape[1:])
    empty = np.zeros((0, *rest), field.dtype)
    arrays = [empty if value is None else np.asarray(value, field.dtype) for value in values]
    for array in arrays:
        if array.shape[1:] != rest:
            raise _unequal(name, array.shape, (len(arrays[0]), *rest), "'pad'")
    lengths = np.array([len(array) for array in arrays], np.int64)
    return Ragged(np.concatenate([empty, *arrays]), lengths)
