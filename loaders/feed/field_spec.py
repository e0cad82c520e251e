"""What a field of a sample holds, and how its values are to be collated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from twinfeed.loaders.support.array_types import Array, as_array
from twinfeed.samplers import validate

Shape = tuple[int | None, ...]
Mode = Literal["stack", "pad", "ragged"]


class Pad(NamedTuple):
    """Fill a field up at the end of each axis, as "pad" does, and say with what.

    Args:
        value: what is filled in, of the field's dtype.
        multiple: the first axis of every value gets a length that this number divides.

    >>> from twinfeed.loaders.feed.collate import collate
    >>> spec, how = {"x": FieldSpec((2,), np.dtype(np.int64))}, {"x": Pad(value=9, multiple=4)}
    >>> collate({"x": [[1, 2], [3]]}, spec, how=how)["x"]
    array([[1, 2, 9, 9],
           [3, 9, 9, 9]])
    """

    value: float = 0
    multiple: int = 1


Collate = Mode | Pad | Mapping[str, Mode | Pad]

# The `FieldSpec.dtype` of a string of each Python type. None stands for byte strings.
_STRING_DTYPES: dict[type, np.dtype[Any] | None] = {bytes: None, str: np.dtype(str)}

# `dtype.char` of the number dtypes that TensorFlow and torch both have: integers of 8 to 64 bits,
# and bool, float16, 32, 64, complex64, 128. Other characters may be aliases for one of these.
_COMMON_DTYPES = {np.dtype(f"{kind}{size}").char for kind in "iu" for size in (1, 2, 4, 8)} | set(
    "?efdFD"
)


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
    """A value that does not fit the spec of its field.

    `position` is the value's index in the batch, and `problem` the message without the advice.
    """

    def __init__(self, problem: str, advice: str, position: int = 0, /) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem, self.position = problem, position


def spec_of(sample: Mapping[str, Any], how: Collate = "stack", /) -> dict[str, FieldSpec]:
    """Return the spec (shape and dtype) of each field of a sample.

    Raises:
        MisfitError: a value that cannot be collated.
    """
    return {name: _spec_of_value(name, value, mode_of(how, name)) for name, value in sample.items()}


def _spec_of_value(name: str, value: Any, mode: Mode) -> FieldSpec:
    """Return the spec of a field from its value in one sample.

    The value is a string, or what numpy can convert to an array of numbers. If the field is
    collated with `mode` "ragged", it may also be a list of strings.
    """
    for string_type, dtype in _STRING_DTYPES.items():
        if isinstance(value, string_type):
            return FieldSpec((), dtype)
        items = items_of(value) if mode == "ragged" else None
        if items and isinstance(items[0], string_type):
            return FieldSpec((None,), dtype)
    array = array_of(name, value)
    return FieldSpec(array.shape, array.dtype)


def is_string(dtype: np.dtype[Any] | None, /) -> bool:
    """Return whether a field with this dtype in its spec contains byte strings or texts."""
    return dtype is None or dtype.kind == "U"


def items_of(value: Any, /) -> list[Any] | None:
    """Return the items of a list, a tuple or an array of one dimension; None for anything else."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return list(value) if isinstance(value, (list, tuple)) else None


def array_of(name: str, value: Any, /) -> Array:
    """Return the value of a field as an array of numbers in the machine's byte order.

    `_COMMON_DTYPES` are the one-letter codes of the number dtypes that TensorFlow and torch have.
    An array of these, or of bfloat16 (a dtype of another package), is returned as it is. Any other
    array of numbers is converted.

    Raises:
        MisfitError: the value cannot be converted to an array of numbers, or is a masked array.
    """
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


def _unsupported_value(name: str, value: Any, contents: str) -> MisfitError:
    """Return the error for a value that cannot be collated; `contents` says what it contains."""
    return MisfitError(
        f"field {name!r} holds a {type(value).__name__}{contents}, which a batch cannot hold",
        "make it an array of numbers or a string in decode or transform; a list of strings is "
        "collated with 'ragged', and needs spec= if the first list is empty",
    )


def mode_of(how: Collate, name: str, /) -> Mode:
    """Return the mode in which a field is collated: "stack", "pad" or "ragged".

    `how` is the `collate` argument; "stack" is the default for fields that it does not name.
    """
    collation = collation_of(how, name)
    return "pad" if isinstance(collation, Pad) else collation


def collation_of(how: Collate, name: str, /) -> Mode | Pad:
    """Return the mode, or the `Pad`, of a field in a `collate` argument."""
    return how.get(name, "stack") if isinstance(how, Mapping) else how


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


def dtype_of(field: FieldSpec, /) -> np.dtype[Any]:
    """Return the dtype of a field of numbers (only the dtype of byte strings is None)."""
    assert field.dtype is not None
    return field.dtype


def smallest_shape(shape: Shape, /) -> tuple[int, ...]:
    """Return a shape with 0 in place of None, for a length that is not known."""
    return tuple(size or 0 for size in shape)
