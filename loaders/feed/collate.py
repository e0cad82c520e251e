"""Collate the values of samples into a batch: stacked, padded or ragged arrays."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from math import prod
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np

from twinfeed.loaders.support.array_types import Array, Int64s, as_array, keeps_numbers
from twinfeed.samplers import validate
from twinfeed.samplers.validate import a_type

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
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""A function that returns an array of a shape and dtype, with any values, like numpy.empty."""

# The `FieldSpec.dtype` of a string of each Python type. None means byte strings.
_STRING_DTYPES: dict[type, np.dtype[Any] | None] = {bytes: None, str: np.dtype(str)}

# `dtype.char` of the number dtypes that TensorFlow and torch both have: integers of 8 to 64 bits,
# and bool, float16, 32, 64, complex64, 128. Other characters may be aliases for one of these.
_COMMON_DTYPES = {np.dtype(f"{kind}{size}").char for kind in "iu" for size in (1, 2, 4, 8)} | set(
    "?efdFD"
)


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any], /) -> Array:
    """Return an uninitialized array, like numpy.empty, whose memory is aligned to 64 bytes."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + 63, np.uint8)
    # The first byte whose address is a multiple of 64.
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
    """Split the values of a user's `Ragged` into a list with one array for each of its lengths."""
    values, lengths = ragged.values, as_array(ragged.lengths)
    sizes = lengths.tolist()
    are_integers = lengths.dtype.kind in "iu" and lengths.ndim == 1
    if not are_integers or min(sizes, default=0) < 0 or sum(sizes) != len(values):
        raise ValueError(
            f"field {name!r} holds a Ragged of {len(values)} values with the lengths "
            f"{reprlib.repr(sizes)}: give non-negative integers whose sum is the number of values"
        )
    ends = accumulate(sizes)
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class FieldSpec(NamedTuple):
    """The shape and dtype of a field of one sample.

    Args:
        shape: None is a length that may differ from batch to batch.
        dtype: None for byte strings, `str` for strings.

    >>> spec = spec_of({"image": np.zeros((8, 8), np.uint8), "name": b"cat", "text": "a cat"})
    >>> spec["image"], spec["name"].dtype, spec["text"].dtype.kind
    (FieldSpec(shape=(8, 8), dtype=dtype('uint8')), None, 'U')
    """

    shape: Shape
    dtype: np.dtype[Any] | None


class CollateError(ValueError):
    """A value that cannot be collated, or does not fit the spec of its field.

    `position` is the value's index in the batch, and `problem` the message without the advice.
    """

    def __init__(self, problem: str, advice: str, position: int = 0, /) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem, self.position = problem, position


def spec_of(sample: Mapping[str, Any], how: Collate = "stack", /) -> dict[str, FieldSpec]:
    """Return the spec (shape and dtype) of each field of a sample.

    Raises:
        CollateError: a value that cannot be collated.
    """
    return {name: _spec_of_value(name, value, mode_of(how, name)) for name, value in sample.items()}


def _spec_of_value(name: str, value: Any, mode: Mode) -> FieldSpec:
    """Return the spec of a field from its value in one sample: a string, numbers, or if it is
    collated as "ragged", a list of strings.
    """
    for string_type, dtype in _STRING_DTYPES.items():
        if isinstance(value, string_type):
            return FieldSpec((), dtype)
        items = _items_of(value) if mode == "ragged" else None
        if items and isinstance(items[0], string_type):
            return FieldSpec((None,), dtype)
    array = array_of(name, value)
    return FieldSpec(array.shape, array.dtype)


def is_string(dtype: np.dtype[Any] | None, /) -> bool:
    """Return whether the values of a field with this dtype in its spec are `bytes` or `str`."""
    return dtype is None or dtype.kind == "U"


def _items_of(value: Any) -> list[Any] | None:
    """Return the items of a list, a tuple or an array of one dimension; None for anything else."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return list(value) if isinstance(value, (list, tuple)) else None


def array_of(name: str, value: Any, /) -> Array:
    """Return the value of a field as an array of numbers in the machine's byte order."""
    try:
        array = as_array(value)
    except (TypeError, ValueError, RuntimeError) as error:  # nested lists, a tensor on a device
        raise _unsupported_value(name, value, f" that is not an array ({error})") from error
    dtype, is_masked = array.dtype, isinstance(value, np.ma.MaskedArray)
    is_common = dtype.char in _COMMON_DTYPES and dtype.isnative and not is_masked
    if is_common or dtype.name == "bfloat16":  # `name` is slow, so it comes last
        return array
    # Booleans, integers, floats and complex numbers, but not the long doubles "g" and "G".
    is_number = dtype.kind in "biufc" and dtype.char not in "gG"
    if not is_number or is_masked:
        # The message is "field 'x' holds a list of strings, which a batch cannot hold".
        contents = {"S": " of byte strings", "U": " of strings"}.get(dtype.kind, f" of {dtype}")
        if dtype.kind == "O":  # any Python objects
            has_none = array.ndim and any(item is None for item in array.flat)
            contents = " with None in it" if has_none else ""
        raise _unsupported_value(name, value, contents)
    # `dtype.str` is the byte order, the kind and the size, such as ">i8". Without the byte order,
    # "i8" is int64 in the machine's own order, also for an alias of it such as long long.
    return array.astype(dtype.str[1:])


def _unsupported_value(name: str, value: Any, contents: str) -> CollateError:
    """Return the error for a value that cannot be collated; `contents` says what it contains."""
    return CollateError(
        f"field {name!r} holds {a_type(value)}{contents}, which a batch cannot hold",
        "make it an array of numbers or a string in decode or transform; a list of strings is "
        "collated with 'ragged', and needs spec= if the first list is empty",
    )


def mode_of(how: Collate, name: str, /) -> Mode:
    """Return the mode in which a field is collated: "stack", "pad" or "ragged"."""
    collation = collation_of(how, name)
    return "pad" if isinstance(collation, Pad) else collation


def collation_of(how: Collate, name: str, /) -> Mode | Pad:
    """Return the mode, or the `Pad`, of a field in a `collate` argument."""
    return how if isinstance(how, (str, Pad)) else how.get(name, "stack")


def check_collate(how: Collate, /) -> Mode | Pad | dict[str, Mode | Pad]:
    """Check a `collate` argument of a feed, and return a copy of it.

    Raises:
        ValueError: an unknown mode, or an invalid `Pad`.
    """
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
    empty: Allocate = aligned,
) -> dict[str, Any]:
    """Make a batch of the values of each field.

    The values are written to arrays that `empty` allocates, as numpy.empty does.

    - Byte strings become a list of `bytes`, and strings a list of `str`.
    - A stacked field is an array of shape (batch, …).
    - A padded field is an array of shape (batch, …), filled up at the end of each axis: see `Pad`.
      Beside it is `<field>_length` (int64[batch]), or `<field>_shape` (int64[batch, axes]) where
      the field has several axes.
    - A ragged field is a `Ragged`. Each of its values may be a list of strings.

    Raises:
        CollateError: other fields than those of `spec`, or values that do not fit their field.

    >>> collate({"x": [[1, 2], [3]]}, {"x": FieldSpec((2,), np.dtype(np.int64))}, how="pad")
    {'x': array([[1, 2],
           [3, 0]]), 'x_length': array([2, 1])}
    """
    if columns.keys() != spec.keys():
        fields = f"the fields are {sorted(columns)} where {sorted(spec)} are expected"
        raise CollateError(fields, "name them with spec=")
    batch: dict[str, Any] = {}
    for name, field in spec.items():
        values, mode = columns[name], collation_of(how, name)
        if is_string(field.dtype):
            batch[name] = _collate_strings(name, values, field)
        elif mode == "stack" or not field.shape:
            batch[name] = _collate_stacked(name, values, field, empty)
        elif mode == "ragged":
            batch[name] = _collate_ragged(name, values, field, empty)
        else:
            batch |= _collate_padded(name, values, field, empty, mode)
    return batch


def _convert_each(convert: Callable[[Any], T], values: Sequence[Any]) -> list[T]:
    """Call `convert` for each value; a CollateError that it raises gets the value's position."""
    converted: list[T] = []
    for value in values:
        try:
            converted.append(convert(value))
        except CollateError as error:
            error.position = len(converted)
            raise
    return converted


def _collate_strings(name: str, values: Sequence[Any], field: FieldSpec) -> list[Any] | Ragged:
    """Collate a field of strings to a list, or a field of lists of strings to a `Ragged`."""
    string_type = bytes if field.dtype is None else str  # a spec has the dtype None for bytes
    if not field.shape:  # one string for each sample
        if set(map(type, values)) == {string_type}:
            return list(values)
        return _convert_each(partial(_to_string, name, string_type), values)

    def to_strings(value: Any) -> list[Any]:
        """Return the value of a sample as a list of strings."""
        if (items := _items_of(value)) is None:
            raise _wrong_dtype(name, type(value).__name__, f"a list of {string_type.__name__}")
        return [_to_string(name, string_type, item) for item in items]

    lists = _convert_each(to_strings, values)
    lengths = [*map(len, lists)]
    strings = np.fromiter(chain.from_iterable(lists), object, sum(lengths))
    return Ragged(strings, np.array(lengths, np.int64))


def _to_string(name: str, string_type: type, value: Any) -> Any:
    """Return a string as exactly `string_type` (bytes or str): numpy's strings are subclasses."""
    if isinstance(value, string_type):
        return string_type(value)
    is_string = isinstance(value, (bytes, str))
    found = type(value).__name__ if is_string else str(array_of(name, value).dtype)
    raise _wrong_dtype(name, found, string_type.__name__)


def _collate_stacked(name: str, values: Sequence[Any], field: FieldSpec, empty: Allocate) -> Array:
    """Return the values of a field, an array or a list of values of one shape, as one array."""
    if (
        isinstance(values, np.ndarray)
        and values.dtype == field.dtype
        and _matches(values.shape[1:], field.shape)
    ):
        # A writable array was allocated for this batch, and decode has written into it. An array
        # that was read from a source is read-only, and is copied.
        if values.flags.writeable:
            return values
        out = empty(values.shape, values.dtype)
        out[...] = values
        return out
    # No axis is variable: all values must have the same shape.
    arrays, shape = _to_field_arrays(name, _stack_tensors(values), field, num_variable_axes=0)
    out = empty((len(arrays), *shape), dtype_of(field))
    for row, array in enumerate(arrays):
        out[row] = array
    return out


def _matches(shape: tuple[int, ...], expected: Shape) -> bool:
    """Return whether a shape is the expected one, in which None means any length."""
    return shape == expected or (
        len(shape) == len(expected)
        and all(length in (None, size) for size, length in zip(shape, expected, strict=True))
    )


def _stack_tensors(values: Sequence[Any]) -> Any:
    """Return tensors of torch of one shape and dtype as one array, by one call; other values
    unchanged.
    """
    torch = sys.modules.get("torch")
    if torch is None or not all(type(value) is torch.Tensor for value in values):
        return values
    if len({value.dtype for value in values}) > 1:  # torch.stack would promote them
        return values
    try:
        return as_array(torch.stack(tuple(values)))
    except (RuntimeError, TypeError):  # different shapes, or tensors on a device or with a gradient
        return values


def dtype_of(field: FieldSpec, /) -> np.dtype[Any]:
    """Return the dtype of a field of numbers (only the dtype of byte strings is None)."""
    assert field.dtype is not None
    return field.dtype


def smallest_shape(shape: Shape, /) -> tuple[int, ...]:
    """Return a shape with 0 in place of None, for a length that is not known."""
    return tuple(size or 0 for size in shape)


def _to_field_array(name: str, dtype: np.dtype[Any], value: Any) -> Array:
    """Return a value as an array that can be cast to the dtype of its field without loss."""
    if isinstance(value, (bytes, str)):
        raise _wrong_dtype(name, type(value).__name__, str(dtype))
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype == dtype:
        return value  # type: ignore[return-value]
    array = array_of(name, value)
    if array.dtype == dtype or _can_cast(array, dtype, has_dtype=hasattr(value, "dtype")):
        return array
    # The message names the dtype of the value; and the value itself if it is a single number.
    found = str(array.dtype) if array.shape else f"{array.dtype} {array}"
    raise _wrong_dtype(name, found, str(dtype))


def _can_cast(array: Array, dtype: np.dtype[Any], *, has_dtype: bool) -> bool:
    """Return whether an array can be cast to a dtype of numbers without changing a value."""
    from_integers = array.dtype.kind in "biu"
    to_floats = dtype.kind in "fc" or dtype.name == "bfloat16"
    if np.can_cast(array.dtype, dtype):
        # Such as int64 to float64.
        may_round = from_integers and to_floats and array.dtype.itemsize == 8
        return not may_round or keeps_numbers(array, dtype)
    if has_dtype:
        return False
    if from_integers or (array.dtype.kind == "f" and to_floats):
        return keeps_numbers(array, dtype)
    return not array.size  # numpy makes a float array of an empty list, which fits any dtype


def _wrong_dtype(name: str, found: str, expected: str) -> CollateError:
    """Return the error for a value of a field that has another dtype than the field's spec."""
    return CollateError(
        f"field {name!r} holds {found} where {expected} is expected",
        "give all values one dtype, or say with spec= what they hold",
    )


def _wrong_shape(
    name: str, shape: Shape, expected: Shape, position: int, *, from_spec: bool = False
) -> CollateError:
    """Return the error for a value whose shape is not that of an earlier value or, with
    `from_spec`, of the spec. The advice is what would help: resizing images, or padding.
    """
    source = "in the first record or in spec=" if from_spec else "in an earlier record of the batch"
    same_axes = len(shape) == len(expected)
    pad = ", or collate it with 'pad'" if same_axes else ""
    resize = ", as DecodeImage(size=(height, width)) does" if same_axes and len(shape) == 3 else ""
    return CollateError(
        f"field {name!r} has shape {shape}, but {expected} {source}",
        f"make them equal in decode{resize}{pad}",
        position,
    )


def _to_field_arrays(
    name: str, values: Sequence[Any], field: FieldSpec, *, num_variable_axes: int
) -> tuple[list[Array], tuple[int, ...]]:
    """Return the values of a field as arrays, and the shape that all have behind the first axes, of
    which `num_variable_axes` may differ: ragged values of the shapes (2, 3) and (5, 3) have (3,).
    """
    arrays = _convert_each(partial(_to_field_array, name, dtype_of(field)), values)
    # The fixed axes of the spec, (3,), where None would mean any length; and (None,), by which
    # messages describe the variable axes.
    expected, any_length = field.shape[num_variable_axes:], (None,) * num_variable_axes
    if not arrays:
        return [], smallest_shape(expected)
    shape = arrays[0].shape[num_variable_axes:]
    for position, array in enumerate(arrays):
        if array.ndim != len(field.shape):
            raise _wrong_shape(name, array.shape, field.shape, position, from_spec=True)
        if array.shape[num_variable_axes:] != shape:
            raise _wrong_shape(name, array.shape, any_length + shape, position)
    # All arrays have the fixed axes of the first one: compare these with the spec.
    if not _matches(shape, expected):
        found = arrays[0].shape
        raise _wrong_shape(name, found, any_length + expected, 0, from_spec=True)
    return arrays, shape


def _collate_padded(
    name: str, values: Sequence[Any], field: FieldSpec, empty: Allocate, how: Mode | Pad
) -> dict[str, Any]:
    """Pad the values of a field to the same shape, and stack them: [1, 2, 3] and [4] of "x" become
    "x" [[1, 2, 3], [4, 0, 0]] and "x_length" [3, 1].
    """
    value, multiple = how if isinstance(how, Pad) else Pad()  # by default (0, 1)
    axes = len(field.shape)
    arrays, _ = _to_field_arrays(name, values, field, num_variable_axes=axes)
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(len(arrays), axes)
    padded_shape = shapes.max(axis=0, initial=0)
    padded_shape[0] += -padded_shape[0] % multiple  # round the first axis up
    out = empty((len(arrays), *padded_shape.tolist()), dtype_of(field))
    out[...] = _to_field_array(f"Pad of {name}", dtype_of(field), value)
    for row, array in zip(out, arrays, strict=True):
        row[tuple(slice(size) for size in array.shape)] = array  # at the start of each axis
    if axes == 1:
        return {name: out, f"{name}_length": shapes[:, 0]}
    return {name: out, f"{name}_shape": shapes}


def _collate_ragged(name: str, values: Sequence[Any], field: FieldSpec, empty: Allocate) -> Ragged:
    """Join the values of a field, arrays that differ in length, end to end into a `Ragged`."""
    arrays, shape = _to_field_arrays(name, values, field, num_variable_axes=1)
    lengths = np.array([len(array) for array in arrays], np.int64)
    joined = empty((int(lengths.sum()), *shape), dtype_of(field))
    # numpy cannot concatenate an empty list, so an array without rows makes it at least one array.
    # The cast is safe: `_to_field_array` has checked it.
    np.concatenate([joined[:0], *arrays], out=joined, casting="unsafe")
    return Ragged(joined, lengths)
