"""From samples to one batch: stacked, padded or ragged, each array written once."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.support.array_types import Array, Int64s, as_array
from twinfeed.samplers import validate

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

_Masked = np.ma.MaskedArray

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


def pieces(name: str, ragged: Ragged, /) -> list[Any]:
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
    """Report a value that does not fit its field; `place` is its place in the batch."""

    def __init__(self, problem: str, advice: str, /, *, place: int) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem, self.place = problem, place


def spec_of(sample: Mapping[str, Any], how: Collate = "stack", /) -> dict[str, FieldSpec]:
    """Read the spec from one sample; raise ValueError for what no batch can hold."""
    return {name: _spec(name, value, mode_of(how, name)) for name, value in sample.items()}


def _spec(name: str, value: Any, mode: Mode) -> FieldSpec:
    for kind, dtype in _STRINGS.items():
        if isinstance(value, kind):
            return FieldSpec((), dtype)
        if mode == "ragged" and (strings := _strings(value)) and isinstance(strings[0], kind):
            return FieldSpec((None,), dtype)
    array = array_of(name, value, 0)
    return FieldSpec(array.shape, array.dtype)


def is_string(dtype: np.dtype[Any] | None, /) -> bool:
    """Return whether a field is of strings, of bytes or of text."""
    return dtype is None or dtype.kind == "U"


def _strings(value: Any) -> list[Any] | None:
    """Return the items of a flat list or array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return list(value) if isinstance(value, (list, tuple)) else None


def array_of(name: str, value: Any, place: int, /) -> Array:
    """Return the value as an array of numbers in the machine's byte order."""
    try:
        array = as_array(value)
    except (TypeError, ValueError, RuntimeError) as error:  # nested lists, a tensor elsewhere
        raise _no_array(name, value, f" that is no array ({error})", place) from error
    dtype = array.dtype
    usual = dtype.char in _USUAL and not isinstance(value, _Masked)
    if (usual and dtype.isnative) or dtype.name == "bfloat16":  # numpy is slow to give its name
        return array
    if dtype.kind not in "biufc" or dtype.char in "gG" or isinstance(value, _Masked):
        none = " with None in it" if array.ndim and any(item is None for item in array.flat) else ""
        kinds = {"O": none, "S": " of byte strings", "U": " of strings"}
        raise _no_array(name, value, kinds.get(dtype.kind, f" of {dtype}"), place)
    return array.astype(dtype.str[1:])


def _no_array(name: str, value: Any, what: str, place: int) -> MisfitError:
    return MisfitError(
        f"field {name!r} holds a {type(value).__name__}{what}, which no batch can hold",
        "make it an array of numbers or a string in decode or transform; a list of strings is "
        "collated with 'ragged', and needs spec= where the first is empty",
        place=place,
    )


def mode_of(how: Collate, name: str, /) -> Mode:
    """Return the collation of a field; a field that a mapping leaves out is stacked."""
    given = _given(how, name)
    return "pad" if isinstance(given, Pad) else given


def _given(how: Collate, name: str) -> Mode | Pad:
    return how.get(name, "stack") if isinstance(how, Mapping) else how


def check_collate(how: Collate, /) -> Mode | Pad | dict[str, Mode | Pad]:
    """Return `how`, or raise ValueError for a mode that does not exist, or a wrong `Pad`."""
    for mode in how.values() if isinstance(how, Mapping) else (how,):
        if isinstance(mode, Pad):
            validate.integer("multiple of Pad", mode.multiple, minimum=1)
        elif mode not in get_args(Mode):
            known = ", ".join(get_args(Mode))
            raise ValueError(f"collate must be one of {known}, or a Pad, got {mode!r}")
    return dict(how) if isinstance(how, Mapping) else how


def collate(
    columns: Mapping[str, Sequence[Any]],
    spec: Mapping[str, FieldSpec],
    /,
    *,
    how: Collate = "stack",
    held: npt.NDArray[np.bool_] | None = None,
    empty: Empty = aligned,
) -> dict[str, Any]:
    """Make one batch of each field's values. None, a missing value, becomes zeros or empty bytes.

    With `held`, the values are of the places that are True, and the others are missing. `empty`
    makes the arrays that the values are written to.

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
        raise MisfitError(fields, "name them with spec=", place=0)
    batch: dict[str, Any] = {}
    for name, field in spec.items():
        values, mode = columns[name], mode_of(how, name)
        if held is not None:
            rest = iter(values)
            values = [next(rest) if one else None for one in held]
        if is_string(field.dtype):
            batch[name] = _texts(name, values, field)
        elif mode == "stack" or not field.shape:
            batch[name] = _stack(name, values, field, empty)
        elif mode == "pad":
            batch |= _pad(name, values, field, empty, _given(how, name))
        else:
            batch[name] = _ragged(name, values, field, empty)
    return batch


def _texts(name: str, values: Sequence[Any], field: FieldSpec) -> list[Any] | Ragged:
    """Return a list of strings, or of lists of strings their `Ragged`."""
    kind = bytes if field.dtype is None else str
    if not field.shape:
        if set(map(type, values)) == {kind}:
            return list(values)
        return [
            kind() if value is None else _text(name, value, kind, place)
            for place, value in enumerate(values)
        ]
    rows = [[] if value is None else _strings(value) for value in values]
    texts = []
    for place, row in enumerate(rows):
        if row is None:
            raise _other_dtype(name, "no list", f"a list of {kind.__name__}", place)
        texts += [_text(name, one, kind, place) for one in row]
    joined = np.empty(len(texts), object)
    joined[:] = texts
    return Ragged(joined, np.array([len(row or ()) for row in rows], np.int64))


def _text(name: str, value: Any, kind: type, place: int) -> Any:
    """Return a string of exactly this type; numpy has subclasses."""
    if isinstance(value, kind):
        return kind(value)
    known = isinstance(value, (bytes, str))
    found = type(value).__name__ if known else str(array_of(name, value, place).dtype)
    raise _other_dtype(name, found, kind.__name__, place)


def _stack(name: str, values: Sequence[Any], field: FieldSpec, empty: Empty) -> Array:
    if isinstance(values, np.ndarray) and values.dtype == field.dtype and fits(values, field):
        if values.flags.writeable:
            return values  # decoded in place; what a source gives is read-only
        out = empty(values.shape, values.dtype)
        out[...] = values
        return out
    values = _joined(values)
    arrays, shape = _arrays(name, values, field, 0)
    out = empty((len(arrays), *shape), dtype_of(field))
    for place, array in enumerate(arrays):
        out[place] = array
    return out


def fits(values: Array, field: FieldSpec, /) -> bool:
    """Return whether the rows of an array have the shape of the field."""
    rest = values.shape[1:]
    return len(rest) == len(field.shape) and all(
        known in (None, size) for size, known in zip(rest, field.shape, strict=True)
    )


def _joined(values: Sequence[Any]) -> Any:
    """Return tensors of torch as the rows of one array: to turn each into an array is slow."""
    torch = sys.modules.get("torch")
    if torch is None or not all(type(one) is torch.Tensor for one in values):
        return values
    try:
        return as_array(torch.stack(tuple(values)))
    except (RuntimeError, TypeError):  # tensors of several shapes, on a device, or with a gradient
        return values


def dtype_of(field: FieldSpec, /) -> np.dtype[Any]:
    """Return the dtype of a field of numbers; byte strings make no array."""
    assert field.dtype is not None
    return field.dtype


def least(shape: Shape, /) -> tuple[int, ...]:
    """Return the shape of no values: 0 for each length that is not known."""
    return tuple(size or 0 for size in shape)


def _fitting(name: str, value: Any, field: FieldSpec, place: int) -> Array:
    """Return the value as an array that can be written to the field's dtype without loss.

    Python's own numbers have no dtype. Integers are taken where they fit, floats by any float type.
    """
    assert field.dtype is not None
    if isinstance(value, (bytes, str)):
        raise _other_dtype(name, type(value).__name__, str(field.dtype), place)
    if type(value) is np.ndarray and value.dtype == field.dtype:
        return value
    array = array_of(name, value, place)
    if array.dtype == field.dtype:
        return array
    # numpy calls it safe to cast 64-bit integers to float64, which rounds the large ones.
    rounds = array.dtype.char in "lLqQ" and field.dtype.kind in "fc"
    if np.can_cast(array.dtype, field.dtype) and not (rounds and not _survives(array, field.dtype)):
        return array
    if not hasattr(value, "dtype"):
        fractions = field.dtype.kind in "fc" or field.dtype.name == "bfloat16"
        if not array.size or (array.dtype.kind == "f" and fractions):
            return array
        if array.dtype.kind in "bi" and _survives(array, field.dtype):
            return array
    found = str(array.dtype) if array.shape else f"{array.dtype} {array}"
    raise _other_dtype(name, found, str(field.dtype), place)


def _survives(integers: Array, dtype: np.dtype[Any]) -> bool:
    """Whether each integer keeps its value in a dtype."""
    with np.errstate(all="ignore"):  # too large for the dtype
        cast = np.real(integers.astype(dtype)).astype(integers.dtype)
    return bool(np.array_equal(cast, integers))


def _other_dtype(name: str, found: str, expected: str, place: int) -> MisfitError:
    return MisfitError(
        f"field {name!r} holds {found} where {expected} is expected",
        "give all values one dtype, or say with spec= what they hold",
        place=place,
    )


def _other_shape(
    name: str, shape: Shape, other: Shape, place: int, *, first: bool = False
) -> MisfitError:
    beside = f"{other} as in the first record, or in spec=" if first else f"{other}"
    also = ", or collate it with 'pad'" if len(shape) == len(other) else ""
    images = ", as DecodeImage(size=(height, width)) does" if len(shape) == len(other) == 3 else ""
    return MisfitError(
        f"field {name!r} has shape {shape} beside {beside}",
        f"make them equal in decode{images}{also}",
        place=place,
    )


def _arrays(
    name: str, values: Sequence[Any], field: FieldSpec, free: int
) -> tuple[list[Array], tuple[int, ...]]:
    """Return arrays that agree in all axes but the first `free`, and the shape of the other axes.

    None becomes zeros, with length 0 in the free axes.
    """
    given = {n: _fitting(name, each, field, n) for n, each in enumerate(values) if each is not None}
    first = next(iter(given), -1)
    wanted = field.shape[free:]
    shape = given[first].shape[free:] if given else least(wanted)
    axes = len(field.shape)
    for place, array in given.items():
        found = array.shape
        if len(found) != axes:
            raise _other_shape(name, found, field.shape, place, first=True)
        if found[free:] != shape:
            raise _other_shape(name, found, (None,) * free + shape, place)
    if any(known not in (None, size) for size, known in zip(shape, wanted, strict=True)):
        raise _other_shape(name, given[first].shape, (None,) * free + wanted, first, first=True)
    if len(given) == len(values):
        return [*given.values()], shape
    nothing = np.zeros((0,) * free + shape, field.dtype)
    return [given.get(place, nothing) for place in range(len(values))], shape


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
    out[...] = _fitting(f"Pad of {name}", value, field, 0)
    for padded, array in zip(out, arrays, strict=True):
        padded[tuple(slice(size) for size in array.shape)] = array
    if axes == 1:
        return {name: out, f"{name}_length": shapes[:, 0]}
    return {name: out, f"{name}_shape": shapes}


def _ragged(name: str, values: Sequence[Any], field: FieldSpec, empty: Empty) -> Ragged:
    arrays, rest = _arrays(name, values, field, 1)
    lengths = np.array([len(array) for array in arrays], np.int64)
    joined = empty((int(lengths.sum()), *rest), dtype_of(field))
    np.concatenate([joined[:0], *arrays], out=joined, casting="unsafe")
    return Ragged(joined, lengths)
