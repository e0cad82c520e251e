"""The global random states of Python, numpy and torch: find what draws from them, and seed them."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.array_types import Array, as_array

Argument = TypeVar("Argument")
Result = TypeVar("Result", bound=Mapping[str, Any])

LOW_32_BITS = (1 << 32) - 1

_ONE_AT_A_TIME = threading.Lock()

_RESULTS = 3  # that are kept: a function may take as many buffers in turn

_ADVICE = {
    "batch_transform": "draw from np.random.default_rng(seed), its second argument",
    "read": "leave what is random out of the dataset, and give it as transform=",
    "decode": "draw in transform, which is given a seed",
    "transform": "draw from np.random.default_rng(sample['seed']), or wrap it: Seeded(transform)",
}


class HasRandomSeed(Protocol):
    """Draw from a generator of its own, as albumentations' `Compose` does.

    >>> import numpy as np
    >>> class Noise:
    ...     def set_random_seed(self, seed):
    ...         self.generator = np.random.default_rng(seed)
    ...     def __call__(self, sample):
    ...         return {"x": self.generator.random()}
    >>> noise = Noise()
    >>> augment = Seeded(noise, also=[noise])
    >>> augment({"seed": 7, "seed32": 7}) == augment({"seed": 7, "seed32": 7})
    True
    """

    def set_random_seed(self, seed: int, /) -> Any:
        """Begin anew from a seed of 32 bits."""


class Seeded:
    """Seed the global random states of Python, numpy and torch for each call of `transform`.

    For transforms that draw from these states, as torchvision's do: `transform=Seeded(augment)`.
    The seed is the sample's, so that the result is the same in every framework and for any number
    of workers. The states are restored after each call.

    The states are those of the whole process. So a loader makes the batches in the loop's own
    thread, and no batch ahead. For speed, take worker processes (`TorchLoader(num_workers=2)`), or
    a transform that draws from `np.random.default_rng(sample["seed"])`.

    Args:
        transform: a function of one sample, as for `Feed`.
        also: objects with generators of their own, which are given the sample's 32-bit seed by
            `set_random_seed`.

    >>> import random
    >>> augment = Seeded(lambda sample: {"x": random.random()})
    >>> augment({"seed": 7, "seed32": 7}) == augment({"seed": 7, "seed32": 7})
    True
    """

    alone = True

    def __init__(
        self,
        transform: Callable[[dict[str, Any]], Mapping[str, Any]],
        /,
        *,
        also: Sequence[HasRandomSeed] = (),
    ) -> None:
        lacking = [one for one in also if not hasattr(one, "set_random_seed")]
        if lacking:
            raise TypeError(f"also must hold objects with set_random_seed, got {lacking[0]!r}")
        self.transform = transform
        self.also = tuple(also)

    def __call__(self, sample: dict[str, Any], /) -> Mapping[str, Any]:
        """Return what the transform does, drawn from the sample's seed."""
        with _ONE_AT_A_TIME, restored():
            seed_all(int(sample["seed"]))
            for one in self.also:
                one.set_random_seed(int(sample["seed32"]))
            return self.transform(sample)


@contextmanager
def restored() -> Iterator[None]:
    """Restore the states after the block; torch's only where torch was imported before."""
    torch = sys.modules.get("torch")
    python, numpy = random.getstate(), np.random.get_state()
    own = None if torch is None else torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.default_generator.set_state(own)


def seed_all(seed: int, /) -> None:
    """Set the states from one seed of 64 bits; numpy takes the low 32."""
    random.seed(seed)
    np.random.seed(seed & LOW_32_BITS)
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch.manual_seed would seed every device, at a hundred microseconds a call.
        torch.default_generator.manual_seed(seed)


def repeated(
    name: str,
    call: Callable[[Argument], Result],
    first: Argument,
    other: Argument,
    /,
    *,
    times: int,
    of: str = "one sample",
) -> Result:
    """Return the result of `times` calls on `first` under different global states.

    The results must agree, and a call on `other` must not change them: a function that returns one
    buffer again would make wrong rows.
    """
    results: deque[Result] = deque(maxlen=_RESULTS)
    with restored():
        for turn in range(1, times + 1):
            seed_all(turn)
            results.append(call(first))
            if turn == 1:
                wanted = copied(results[0])
            elif not same(wanted, results[-1]):
                raise ValueError(
                    f"{name} returned different things for {of} and one seed: {_ADVICE[name]}"
                )
        with suppress(LoaderError, OSError):  # its own batch raises this
            call(other)
    for field, value in wanted.items():
        if not all(same(value, result[field]) for result in results):
            raise reused(name, field)
    return results[-1]


def reused(name: str, field: str, /) -> ValueError:
    """Return the error of a function, or of a source's `read`, whose results share memory."""
    return ValueError(
        f"{name} returned one buffer again: a later call changed the field {field!r} of a result. "
        f"Return a copy, as buffer.copy()"
    )


def first_shared(values: Sequence[Any], /) -> int | None:
    """Return the position of the first value whose memory a later value has too, if there is one.

    Read-only arrays do not count: samples may share them.
    """
    # The objects that own the memory are compared twenty times as fast as addresses.
    arrays = (value for value in values if isinstance(value, np.ndarray))
    owners = {id(array if array.base is None else array.base) for array in arrays}
    if len(owners) == len(values):
        return None
    addresses = [_address(value) for value in values]
    counts = Counter(addresses)
    shared = (n for n, where in enumerate(addresses) if where is not None and counts[where] > 1)
    return next(shared, None)


def _address(value: Any) -> int | None:
    """Return where a mutable value begins in memory."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0] if value.flags.writeable else None
    if hasattr(value, "data_ptr"):  # a tensor of torch
        return value.data_ptr()  # type: ignore[no-any-return]
    return id(value) if isinstance(value, list) else None


def copied(value: Any, /) -> Any:
    """Return the arrays of a value, also of one within dicts and lists, as copies."""
    if isinstance(value, Mapping):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(copied, value)]
    return _as_array(value).copy()


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal to the last bit; NaN is equal to itself."""
    if isinstance(one, Mapping):
        alike = isinstance(other, Mapping) and one.keys() == other.keys()
        return alike and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        alike = isinstance(other, (list, tuple)) and len(one) == len(other)
        return alike and all(map(same, one, other))
    first, second = _as_array(one), _as_array(other)
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.dtype != object:
        return first.tobytes() == second.tobytes()
    return all(map(same if first.shape else _equal, first.flat, second.flat))


def _as_array(value: Any) -> Array:
    """Return a value as an array, of an object where numpy fails, as for a sparse tensor."""
    try:
        return as_array(value)
    except Exception:
        array = np.empty((), object)
        array[()] = value
        return array


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects are equal, as far as their class can say: decode makes arrays of them."""
    if type(one) is not type(other):
        return False
    try:
        if is_dataclass(one):
            return same(vars(one), vars(other))
        comparing: Any = type(one).__eq__
        return comparing is object.__eq__ or bool(one == other)
    except Exception:  # as where the attributes hold arrays
        return True
