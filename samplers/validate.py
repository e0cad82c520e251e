"""Checks of arguments, for constructors: each rule and its error message once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import suppress
from fractions import Fraction
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, SupportsIndex, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers.mapped import as_mapped, is_increasing, is_mapped
from twinfeed.samplers.traits import SampleSpace
from twinfeed.samplers.types import Array, Int64s

T = TypeVar("T")

P = ParamSpec("P")

# Lightning and Fabric make another sampler by `type(sampler)(ids, batch_size=, drop_last=)`.
_TRAINER_ADVICE = (
    "\n(if Lightning or Fabric made this call: pass use_distributed_sampler=False, and give each "
    "rank sampler.shard(rank, world_size))"
)

_SAMPLER = "the sampler has it, as in BatchSampler({}, batch_size=32{})"
_SHUFFLED = _SAMPLER.format("RandomSampler(dataset, seed=0)", "")
_DROP_LAST = _SAMPLER.format("sampler", ", last_batch='drop'")
_FEED = "the feed has it: Feed(index, sampler{})"
_LOADER = "the loader has it, as in TorchLoader(feed, {}=…)"

# What options of torch's DataLoader and of tf.data are called here.
_OPTION_HINTS = {
    "batch_size": _SAMPLER.format("sampler", ""),
    **dict.fromkeys(("drop_last", "drop_remainder"), _DROP_LAST),
    **dict.fromkeys(("shuffle", "seed", "generator"), _SHUFFLED),
    **dict.fromkeys(("sampler", "batch_sampler"), _FEED.format("")),
    "transform": _FEED.format(", transform=…"),
    "collate_fn": "the feed has it: collate= for fields, batch_transform= for a whole batch",
    **{name: _LOADER.format(name) for name in ("device", "prefetch", "threads")},
    "num_workers": "TorchLoader(feed, num_workers=4) has processes, other loaders have threads=",
    "pin_memory": "leave it out: batches come through pinned memory where device= is a GPU",
}

LIMIT = 1 << 62  # above every size and sum: int64 holds the sum of two


def show_call(call: str, /, **hints: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that its TypeErrors for wrong arguments show how to call it. `hints`
    has the advice by name for options that it does not have.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        accepted = signature(function)
        if function.__module__.startswith("twinfeed.loaders"):
            hints.update(_OPTION_HINTS | hints)

        @wraps(function)
        def check_and_call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:  # only the names and the number of arguments: other errors stay as they are
                accepted.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in accepted.parameters), None)
                problem = str(error)
                if unknown:
                    hint = f": {hints[unknown]}" if unknown in hints else ""
                    problem = f"{call.partition('(')[0]} takes no {unknown}={hint}"
                advice = _TRAINER_ADVICE if "drop_last" in kwargs.keys() - hints.keys() else ""
                raise TypeError(f"{problem}: write {call}{advice}") from None
            return function(*args, **kwargs)

        return check_and_call

    return decorate


def as_int(name: str, value: SupportsIndex) -> int:
    """Return an integer of Python, numpy or torch as a Python int; TypeError for anything else."""
    if type(value) is int:
        return value
    with suppress(TypeError):  # not an integer
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    raise TypeError(f"{name} must be an integer, got {value!r}")


def json_key(key: Any) -> Any:
    """Return the key of a dict, as an int if it is a string of digits, which JSON makes of ints."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def integer(name: str, value: SupportsIndex, *, minimum: int, below: int = LIMIT) -> int:
    """Return argument `name` as an int; ValueError unless it is in `[minimum, below)`."""
    number = as_int(name, value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if number >= below:
        raise ValueError(f"{name} must be below {below}, got {number}")
    return number


def is_array_like(data: object) -> bool:
    """Return whether `np.asarray(data)` has the items of `data` as its values."""
    return isinstance(data, Sequence) or hasattr(data, "__array__")


def is_list(data: object) -> bool:
    """Return whether data are a sequence, or an array or a column of one dimension."""
    shape = getattr(data, "shape", None)  # None for a sequence
    return is_array_like(data) and (shape is None or len(shape) == 1)


def record_count(name: str, n: SupportsIndex | Sized, *, subset: str, minimum: int = 0) -> int:
    """Return a number of records as an int: `n` itself, or the length of the dataset `n`. A list of
    numbers is refused, as it may be ids: the error advises `subset`.

    Raises: TypeError: neither a number nor a dataset, or a list of numbers.
    """
    if _is_number(n):
        return integer(name, cast(SupportsIndex, n), minimum=minimum)
    kind = type(n).__name__
    if is_list(n) and _is_number(next(iter(cast(Sequence[Any], n)), None)):
        raise TypeError(
            f"{name} must be the number of records or a dataset, got {kind} of numbers: to draw "
            f"only these records, use {subset}"
        )
    if not _is_dataset(n):
        advice = ": write len(data['label'])" if isinstance(n, Mapping) else ""
        raise TypeError(
            f"{name} must be the number of records or a dataset with __len__ and __getitem__, got "
            f"{kind}{advice}"
        )
    return integer(name, len(cast(Sized, n)), minimum=minimum)


def _is_dataset(data: object) -> bool:
    """Return whether data has a length, which is its number of records, and items."""
    if isinstance(data, (str, bytes, bytearray, Mapping)) or not isinstance(data, Sized):
        return False
    # The classes of this library that read records have `digests` in place of `__getitem__`.
    has_items = hasattr(data, "__getitem__") or hasattr(data, "digests")
    return has_items and not is_stream(data)


def is_stream(value: object) -> bool:
    """Return whether a value is a sampler, or a feed of one: its length may count batches."""
    return any(isinstance(v, SampleSpace) for v in (value, getattr(value, "sampler", None)))


def _is_number(value: Any) -> bool:
    """Return whether a value is a scalar number, of Python, numpy, torch or another library."""
    is_convertible = hasattr(value, "__index__") or hasattr(value, "__float__")
    # An array has `__float__`, too. A scalar has no shape, or the empty shape ().
    is_scalar = getattr(value, "shape", ()) == ()
    return is_convertible and is_scalar and not isinstance(value, (str, bytes))


def seed(value: SupportsIndex) -> int:
    """Return a seed: any integer that fits 64 unsigned bits."""
    if value is None:
        raise TypeError("seed must be an integer, got None: a shuffle needs one to be repeatable")
    return integer("seed", value, minimum=0, below=1 << 64)


def flag(name: str, value: bool) -> bool:
    """Return a bool; TypeError for anything else."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def choice(name: str, value: T, allowed: tuple[T, ...]) -> T:
    """Return the value if it is allowed; otherwise raise ValueError."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def counted(number: int, noun: str) -> str:
    """Return a number with its noun as text, in the plural unless the number is 1."""
    plural = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def a_type(value: object) -> str:
    """Return the name of a value's type with its article, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def unmasked(name: str, values: Any) -> Array:
    """Return values as an array; ValueError if an entry is masked (`np.ma`), TypeError for what
    `np.asarray` would read item by item, or take for one value.
    """
    has_items = hasattr(values, "__getitem__") and not isinstance(values, Mapping)
    if isinstance(values, (Set, Iterator)) or (has_items and not is_array_like(values)):
        raise TypeError(f"{name} must be a list or an array, got {a_type(values)}")
    masked = np.flatnonzero(np.ma.getmask(values))
    if len(masked):
        raise ValueError(f"{name} must have no masked entry, got one at {masked[0]}: fill it first")
    return np.asarray(values)


def decimals(name: str, values: ArrayLike) -> list[Fraction]:
    """Return numbers as exact fractions of their printed decimals: 0.1 becomes 1/10."""
    array = unmasked(name, values)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a sequence of finite numbers, got {values!r}")
    return [Fraction(str(number)) for number in array]


def integers(name: str, values: ArrayLike, *, minimum: int) -> Int64s:
    """Return the integers of argument `name`, int64[n]; an error unless all are in `[minimum,
    2^62)`. Only an array that is mapped from a file is not copied: a read-only view, of its own
    type.
    """
    array = unmasked(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size and array.dtype.kind == "b":
        raise TypeError(f"{name} must hold integers, got a mask: give np.flatnonzero(mask)")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.size and array.max() >= LIMIT:
        index = int(array.argmax())
        raise ValueError(f"{name} must be below {LIMIT}, got {array[index]} at {index}")
    if array.size and array.min() < minimum:
        index = int(array.argmin())
        raise ValueError(f"{name} must be at least {minimum}, got {array[index]} at {index}")
    if not is_mapped(array):
        return array.astype(np.int64)
    # View uint64 ("u8") as int64 ("i8"), without a copy: values below 2^62 have the same bytes.
    return as_mapped(array.view(array.dtype.str.replace("u8", "i8")))


def sorted_distinct(name: str, array: Int64s) -> Int64s:
    """Return the values of an array sorted; ValueError if two are equal."""
    if is_increasing(array):  # sorted already, as for ids in stored order: no copy
        return array
    values, counts = np.unique(array, return_counts=True)
    if len(values) < len(array):
        raise ValueError(
            f"{name} must differ from each other, got {values[counts > 1][0]} more than once"
        )
    return values


def sorted_record_ids(values: ArrayLike, num_records: int, name: str = "records") -> Int64s:
    """Return record ids, or those of a mask, sorted; ValueError unless distinct and below
    `num_records`.
    """
    mask = unmasked(name, values)
    if mask.dtype.kind == "b" and mask.size:
        if mask.shape != (num_records,):
            raise ValueError(f"{name} as a mask must be bool[{num_records}], got {mask.shape}")
        return np.flatnonzero(mask)
    ids = sorted_distinct(name, integers(name, values, minimum=0))
    if len(ids) and ids[-1] >= num_records:
        raise ValueError(f"{name} must be below {num_records}, their number, got {ids[-1]}")
    return ids


def counts(name: str, values: ArrayLike, *, minimum: int) -> Int64s:
    """Return integers of at least `minimum`, int64[n]; ValueError if they sum to 2^62."""
    array = integers(name, values, minimum=minimum)
    total = float(array.sum(dtype=np.float64))  # approximate, as a sum in int64 may overflow
    if total >= LIMIT:
        raise ValueError(f"{name} must sum to less than {LIMIT}, got about {total:.3g}")
    return array
