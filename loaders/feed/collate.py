"""From samples to one batch: stacked, padded or ragged, each array written once."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.support.array_types import Array, Int64s, as_array
from twinfeed.samplers import validate

T = TypeVar("T")

Shape = tuple[int | None, ...]
Mode = Literal["stack", "pad", "ragged"]


class Pad(NamedTuple):
    """Fill a field up at the end of each axis, as "pad" does, and say with what.

    Args:
        value: what is filled in, of the field's dtype.
        multiple: the first axis of every value gets a length that this number divides.

    >>> spec, how = {"x": FieldSpec((2,), np.dtype(np.int64))}, {"x": Pad(value=9, multiple=4)}
    >>> collate({"x": [[1, 2], [3]]}, spec, how=how)["x"]
    array([[1, 2, 9, 9],
           [3, 9, 9, 9]])
    """

    value: float = 0
    multiple: int = 1


Collate = Mode | Pad | Mapping[str, Mode | Pad]
Empty = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # like numpy.empty

# The dtype of a spec for each type of strings.
_STRINGS: dict[type, np.dtype[Any] | None] = {bytes: None, str: np.dtype(str)}

# The dtypes of numbers as both frameworks name them; numpy has second names for some.
_USUAL = {np.dtype(f"{kind}{size}").char for kind in "iu" for size in (1, 2, 4, 8)} | set("?efdFD")


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], /) -> Array:
    """Return an array of this shape, not yet written, whose memory begins at a multiple of 64.

    TensorFlow takes such an array without a copy, and copies any other array.
    """
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + 63, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + size].view(dtype).reshape(shape)


class Ragged(NamedTuple):
    """Arrays of different lengths, as one array and the length of each.

    Args:
        values: all arrays end to end, shape (sum of lengths, …). Strings are objects.
        lengths: int64[batch].

    >>> Ragged(np.array([7, 8, 9]), np.array([1, 2])).lengths
    array([1, 2])
    """

    values: Array
    lengths: Int64s


def ragged_rows(name: str, ragged: Ragged, /) -> list[Any]:
    """Return the arrays of a user's `Ragged`; raise ValueError unless its lengths fit."""
    values, lengths = ragged.values, as_array(ragged.lengths)
    sizes = lengths.tolist()
    integers = lengths.dtype.kind in "iu" and lengths.ndim == 1
    if not integers or min(sizes, default=0) < 0 or sum(sizes) != len(values):
        raise ValueError(
            f"field {name!r} holds a Ragged of {len(values)} values with the lengths "
            f"{reprlib.repr(sizes)}: give integers from 0 on whose sum is the number of values"
        )
    ends = accumulate(sizes)
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class FieldSpec(NamedTuple):
    """The shape and dtype of a field of one sample.

    Args:
        shape: None is a length that may differ from batch to batch.
        dtype: None means a byte string, `str` a text.

    >>> spec = spec_of({"image": np.zeros((8, 8), np.uint8), "name": b"cat", "text": "a cat"})
    >>> spec["image"], spec["name"].dtype, spec["text"].dtype.kind
    (FieldSpec(shape=(8, 8), dtype=dtype('uint8')), None, 'U')
    """

    shape: Shape
    dtype: np.dtype[Any] | None


class MisfitError(ValueError):
    """Report a value that does not fit its field; `position` is that of the value in the batch."""

    def __init__(self, problem: str, advice: str, position: int = 0, /) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem, self.position = problem, position


def spec_of(sample: Mapping[str, Any], how: Collate = "stack", /) -> dict[str, FieldSpec]:
    """Read the spec from one sample; raise ValueError for what no batch can hold."""
    return {name: _spec(name, value, mode_of(how, name)) for name, value in sample.items()}


def _spec(name: str, value: Any, mode: Mode) -> FieldSpec:
    for kind, dtype in _STRINGS.items():
        if isinstance(value, kind):
            return FieldSpec((), dtype)
        if mode == "ragged" and (strings := _strings(value)) and isinstance(strings[0], kind):
            return FieldSpec((None,), dtype)
    array = array_of(name, value)
    return FieldSpec(array.shape, array.dtype)


def is_string(dtype: np.dtype[Any] | None, /) -> bool:
    """Return whether a field is of strings, of bytes or of text."""
    return dtype is None or dtype.kind == "U"


def _strings(value: Any) -> list[Any] | None:
    """Return the items of a flat list or array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return list(value) if isinstance(value, (list, tuple)) else None


def array_of(name: str, value: Any, /) -> Array:
    """Return the value as an array of numbers in the machine's byte order."""
    try:
        array = as_array(value)
    except (TypeError, ValueError, RuntimeError) as error:  # nested lists, a tensor elsewhere
        raise _no_array(name, value, f" that is no array ({error})") from error
    dtype, masked = array.dtype, isinstance(value, np.ma.MaskedArray)
    usual = dtype.char in _USUAL and not masked
    if (usual and dtype.isnative) or dtype.name == "bfloat16":  # numpy is slow to give its name
        return array
    if dtype.kind not in "biufc" or dtype.char in "gG" or masked:
        none = " with None in it" if array.ndim and any(item is None for item in array.flat) else ""
        kinds = {"O": none, "S": " of byte strings", "U": " of strings"}
        raise _no_array(name, value, kinds.get(dtype.kind, f" of {dtype}"))
    return array.astype(dtype.str[1:])


def _no_array(name: str, value: Any, what: str) -> MisfitError:
    return MisfitError(
        f"field {name!r} holds a {type(value).__name__}{what}, which no batch can hold",
        "make it an array of numbers or a string in decode or transform; a list of strings is "
        "collated with 'ragged', and needs spec= where the first is empty",
    )


def mode_of(how: Collate, name: str, /) -> Mode:
    """Return the collation of a field; a field that a mapping leaves out is stacked."""
    collation = _collation_of(how, name)
    return "pad" if isinstance(collation, Pad) else collation


def _collation_of(how: Collate, name: str) -> Mode | Pad:
    return how.get(name, "stack") if isinstance(how, Mapping) else how


def check_collate(how: Collate, /) -> Mode | Pad | dict[str, Mode | Pad]:
    """Return `how`, or raise ValueError for a mode that does not exist, or a wrong `Pad`."""
    for mode in how.values() if isinstance(how, Mapping) else (how,):
        if isinstance(mode, Pad):
            validate.integer("multiple of Pad", mode.multiple, minimum=1)
        elif mode not in get_args(Mode):
            modes = ", ".join(get_args(Mode))
            raise ValueError(f"collate must be one of {modes}, or a Pad, got {mode!r}")
    return dict(how) if isinstance(how, Mapping) else how


def collate(
    columns: Mapping[str, Sequence[Any]],
    spec: Mapping[str, FieldSpec],
    /,
    *,
    how: Collate = "stack",
    real: npt.NDArray[np.bool_] | None = None,
    empty: Empty = aligned,
) -> dict[str, Any]:
    """Make one batch of each field's values. None, a missing value, becomes zeros or empty bytes.

    With `real` (bool[batch]), the values are of the samples where it is True, and those of padding
    are missing. `empty` makes the arrays that the values are written to.

    - Byte strings become a list of bytes, texts a list of str.
    - A stacked field is an array of shape (batch, …).
    - A padded field is an array of shape (batch, …), filled up at the end of each axis: see `Pad`.
      Beside it is `<field>_length` (int64[batch]), or `<field>_shape` (int64[batch, axes]) where
      the field has several axes.
    - A ragged field is a `Ragged`. Each of its values may be a list of strings.

    Raises:
        MisfitError: other fields than those of `spec`, or values that do not fit their field.

    >>> collate({"x": [[1, 2], [3]]}, {"x": FieldSpec((2,), np.dtype(np.int64))}, how="pad")
    {'x': array([[1, 2],
           [3, 0]]), 'x_length': array([2, 1])}
    """
    if columns.keys() != spec.keys():
        fields = f"the fields are {sorted(columns)} where {sorted(spec)} are expected"
        raise MisfitError(fields, "name them with spec=")
    batch: dict[str, Any] = {}
    for name, field in spec.items():
        values, mode = columns[name], mode_of(how, name)
        if real is not None:
            remaining = iter(values)
            values = [next(remaining) if is_real else None for is_real in real]
        if is_string(field.dtype):
            batch[name] = _texts(name, values, field)
        elif mode == "stack" or not field.shape:
            batch[name] = _stack(name, values, field, empty)
        elif mode == "pad":
            batch |= _pad(name, values, field, empty, _collation_of(how, name))
        else:
            batch[name] = _ragged(name, values, field, empty)
    return batch


def _convert_each(convert: Callable[[Any], T], values: Sequence[Any]) -> dict[int, T]:
    """Return `convert(value)` by position, of each value but None; an error gets the position."""
    converted = {}
    for position, value in enumerate(values):
        try:
            if value is not None:
                converted[position] = convert(value)
        except MisfitError as error:
            error.position = position
            raise
    return converted


def _texts(name: str, values: Sequence[Any], field: FieldSpec) -> list[Any] | Ragged:
    """Return a list of strings, or of lists of strings their `Ragged`."""
    kind = bytes if field.dtype is None else str
    if not field.shape:
        if set(map(type, values)) == {kind}:
            return list(values)
        texts = _convert_each(lambda value: _text(name, value, kind), values)
        return [texts.get(position, kind()) for position in range(len(values))]

    def to_texts(row: Any) -> list[Any]:
        if (strings := _strings(row)) is None:
            raise _wrong_dtype(name, "no list", f"a list of {kind.__name__}")
        return [_text(name, string, kind) for string in strings]

    rows = _convert_each(to_texts, values)
    lengths = [len(rows.get(position, ())) for position in range(len(values))]
    strings = np.fromiter(chain.from_iterable(rows.values()), object, sum(lengths))
    return Ragged(strings, np.array(lengths, np.int64))


def _text(name: str, value: Any, kind: type) -> Any:
    """Return a string of exactly this type; numpy has subclasses."""
    if isinstance(value, kind):
        return kind(value)
    is_text = isinstance(value, (bytes, str))
    found = type(value).__name__ if is_text else str(array_of(name, value).dtype)
    raise _wrong_dtype(name, found, kind.__name__)


def _stack(name: str, values: Sequence[Any], field: FieldSpec, empty: Empty) -> Array:
    if isinstance(values, np.ndarray) and _holds(values, field):
        if values.flags.writeable:
            return values  # decoded in place; what a source gives is read-only
        out = empty(values.shape, values.dtype)
        out[...] = values
        return out
    arrays, shape = _arrays(name, _stack_tensors(values), field, 0)
    out = empty((len(arrays), *shape), dtype_of(field))
    for row, array in enumerate(arrays):
        out[row] = array
    return out


def _holds(values: Array, field: FieldSpec) -> bool:
    """Whether the rows of an array have the dtype and the shape of a field."""
    return values.dtype == field.dtype and _matches(values.shape[1:], field.shape)


def _matches(shape: tuple[int, ...], expected: Shape) -> bool:
    """Whether a shape is the expected one, in which None is any length."""
    return len(shape) == len(expected) and all(
        length in (None, size) for size, length in zip(shape, expected, strict=True)
    )


def _stack_tensors(values: Sequence[Any]) -> Any:
    """Return tensors of torch as the rows of one array: to turn each into an array is slow."""
    torch = sys.modules.get("torch")
    if torch is None or not all(type(value) is torch.Tensor for value in values):
        return values
    try:
        return as_array(torch.stack(tuple(values)))
    except (RuntimeError, TypeError):  # tensors of several shapes, on a device, or with a gradient
        return values


def dtype_of(field: FieldSpec, /) -> np.dtype[Any]:
    """Return the dtype of a field of numbers; byte strings make no array."""
    assert field.dtype is not None
    return field.dtype


def smallest_shape(shape: Shape, /) -> tuple[int, ...]:
    """Return the shape of no values: 0 for each length that is not known."""
    return tuple(size or 0 for size in shape)


def _fitting(name: str, value: Any, field: FieldSpec) -> Array:
    """Return the value as an array that can be written to the field's dtype without loss."""
    dtype = dtype_of(field)
    if isinstance(value, (bytes, str)):
        raise _wrong_dtype(name, type(value).__name__, str(dtype))
    if type(value) is np.ndarray and value.dtype == dtype:
        return value
    array = array_of(name, value)
    if array.dtype == dtype or _castable(array, dtype, python=not hasattr(value, "dtype")):
        return array
    found = str(array.dtype) if array.shape else f"{array.dtype} {array}"
    raise _wrong_dtype(name, found, str(dtype))


def _castable(array: Array, dtype: np.dtype[Any], *, python: bool) -> bool:
    """Whether an array keeps its values in a dtype.

    Numbers of `python` have no dtype: integers fit if they keep their value, floats any float type.
    """
    integers = array.dtype.kind in "biu"
    fractions = dtype.kind in "fc" or dtype.name == "bfloat16"
    if np.can_cast(array.dtype, dtype):
        # numpy calls it safe to cast 64-bit integers to float64, which rounds the large ones.
        rounds = integers and fractions and array.dtype.itemsize == 8
        return not rounds or keeps_integers(array, dtype)
    if not python or not array.size:
        return python
    return keeps_integers(array, dtype) if integers else array.dtype.kind == "f" and fractions


def keeps_integers(integers: Array, dtype: np.dtype[Any], /) -> bool:
    """Whether each integer keeps its value in a dtype of numbers."""
    with np.errstate(all="ignore"):  # too large for the dtype
        cast = np.real(integers.astype(dtype)).astype(integers.dtype)
    return bool(np.array_equal(cast, integers))


def _wrong_dtype(name: str, found: str, expected: str) -> MisfitError:
    return MisfitError(
        f"field {name!r} holds {found} where {expected} is expected",
        "give all values one dtype, or say with spec= what they hold",
    )


def _wrong_shape(
    name: str, shape: Shape, expected: Shape, position: int, *, from_spec: bool = False
) -> MisfitError:
    source = " as in the first record, or in spec=" if from_spec else ""
    same_axes = len(shape) == len(expected)
    pad = ", or collate it with 'pad'" if same_axes else ""
    resize = ", as DecodeImage(size=(height, width)) does" if same_axes and len(shape) == 3 else ""
    return MisfitError(
        f"field {name!r} has shape {shape} beside {expected}{source}",
        f"make them equal in decode{resize}{pad}",
        position,
    )


def _arrays(
    name: str, values: Sequence[Any], field: FieldSpec, free: int
) -> tuple[list[Array], tuple[int, ...]]:
    """Return the values as arrays of one shape but for the first `free` axes, and this shape.

    None, a missing value, becomes zeros, with length 0 in the free axes.
    """
    arrays = _convert_each(lambda value: _fitting(name, value, field), values)
    first = next(iter(arrays), -1)
    expected, any_length = field.shape[free:], (None,) * free
    shape = arrays[first].shape[free:] if arrays else smallest_shape(expected)
    for position, array in arrays.items():
        if array.ndim != len(field.shape):
            raise _wrong_shape(name, array.shape, field.shape, position, from_spec=True)
        if array.shape[free:] != shape:
            raise _wrong_shape(name, array.shape, any_length + shape, position)
    if not _matches(shape, expected):
        found = arrays[first].shape
        raise _wrong_shape(name, found, any_length + expected, first, from_spec=True)
    if len(arrays) == len(values):
        return [*arrays.values()], shape
    nothing = np.zeros((0,) * free + shape, field.dtype)
    return [arrays.get(position, nothing) for position in range(len(values))], shape


def _pad(
    name: str, values: Sequence[Any], field: FieldSpec, empty: Empty, how: Mode | Pad
) -> dict[str, Any]:
    value, multiple = how if isinstance(how, Pad) else Pad()
    axes = len(field.shape)
    arrays, _ = _arrays(name, values, field, axes)
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), axes)
    longest = shapes.max(axis=0, initial=0)
    longest[:1] += -longest[:1] % multiple
    out = empty((len(arrays), *longest.tolist()), dtype_of(field))
    out[...] = _fitting(f"Pad of {name}", value, field)
    for padded, array in zip(out, arrays, strict=True):
        padded[tuple(slice(size) for size in array.shape)] = array
    if axes == 1:
        return {name: out, f"{name}_length": shapes[:, 0]}
    return {name: out, f"{name}_shape": shapes}


def _ragged(name: str, values: Sequence[Any], field: FieldSpec, empty: Empty) -> Ragged:
    arrays, shape = _arrays(name, values, field, 1)
    lengths = np.array([len(array) for array in arrays], np.int64)
    joined = empty((int(lengths.sum()), *shape), dtype_of(field))
    np.concatenate([joined[:0], *arrays], out=joined, casting="unsafe")
    return Ragged(joined, lengths)
