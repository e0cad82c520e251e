"""Check that a user's function is deterministic, and does not return one buffer for all results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.feed.seeded import restore_random_states, seed_all
from twinfeed.loaders.support.array_types import Array, as_array

Argument = TypeVar("Argument")
Fields = Mapping[str, Any]

_ADVICE = {
    "batch_transform": "one batch and one seed: draw from np.random.default_rng(seed)",
    "read": "one record: move random operations from the dataset to transform=",
    "decode": "one record: draw random numbers in transform, which gets a seed",
    "transform": "one sample and one seed: draw from np.random.default_rng(sample['seed']), or "
    "wrap it: Seeded(transform)",
}


def call_repeatedly(
    name: str,
    function: Callable[[Argument], Sequence[Fields]],
    argument: Argument,
    /,
    *later: Argument,
    times: int,
) -> Fields:
    """Return the one sample of `function(argument)`, called under several global random seeds."""
    results: list[Fields] = []
    shared: list[tuple[Fields, Fields]] = []  # the first and the last sample of a call
    with restore_random_states():
        for seed in range(1, times + 1):
            seed_all(seed)
            results += function(argument)
            if seed == 1:
                expected = array_copy(results[0])
            elif not bitwise_equal(expected, results[-1]):
                raise ValueError(f"{name} returned different results for {_ADVICE[name]}")
        for argument in later:
            with suppress(LoaderError, OSError):  # raised again when its own batch is made
                samples = function(argument)
                shared += [(samples[0], samples[-1])] if len(samples) > 1 else []
    for field, value in expected.items():
        same = [first for first, last in shared if bitwise_equal(first.get(field), last.get(field))]
        if not all(bitwise_equal(value, result[field]) for result in (*results, *same)):
            raise ValueError(
                f"{name} returned the same buffer again: a later call changed the field {field!r} "
                f"of an earlier result. Return a copy, as in buffer.copy()"
            )
    return results[-1]


def array_copy(value: Any, /) -> Any:
    """Return a copy of a value as an array; dicts and lists are copied recursively."""
    if isinstance(value, Mapping):
        return {name: array_copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(array_copy, value)]
    return _to_array(value).copy()


def bitwise_equal(first: Any, second: Any, /) -> bool:
    """Return whether two values (arrays, or dicts and lists of them) are equal to the last bit."""
    if isinstance(first, Mapping):
        same_keys = isinstance(second, Mapping) and first.keys() == second.keys()
        return same_keys and all(bitwise_equal(item, second[name]) for name, item in first.items())
    if isinstance(first, (list, tuple)):
        same_length = isinstance(second, (list, tuple)) and len(first) == len(second)
        return same_length and all(map(bitwise_equal, first, second))
    first_array, second_array = _to_array(first), _to_array(second)
    if first_array.dtype != second_array.dtype or first_array.shape != second_array.shape:
        return False
    if first_array.dtype != object:
        return first_array.tobytes() == second_array.tobytes()
    # An array of objects. If it has axes, its items may be arrays or lists: compare them in turn by
    # this function. If it has no axes, `_to_array` has put a value into it that is not an array.
    items_equal = bitwise_equal if first_array.ndim else _equal
    return all(map(items_equal, first_array.flat, second_array.flat))


def _to_array(value: Any) -> Array:
    """Return a value as an array, or as an array of one object if numpy cannot convert it."""
    try:
        return as_array(value)
    except Exception:
        array = np.empty((), object)
        array[()] = value
        return array


def _equal(first: Any, second: Any) -> bool:
    """Return whether two objects that are no arrays are equal, or of one class without `==`."""
    if type(first) is not type(second):
        return False
    with suppress(Exception):  # `==` fails if, for example, the attributes are arrays
        if is_dataclass(first):
            return bitwise_equal(vars(first), vars(second))
        compare: Any = type(first).__eq__
        return compare is object.__eq__ or bool(first == second)
    return True
