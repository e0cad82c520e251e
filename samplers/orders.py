"""Orders: pure functions from (epoch, positions) to ids, without state or cursor."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.permutation import SMALL, Table, permute, small_table
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.state import recorded
from twinfeed.samplers.traits import Samples

_Inner = TypeVar("_Inner", bound="InnerSampler")


class Sampler(Samples, ABC):
    """Give the sample id of each position of an epoch. `BatchSampler` cuts a sampler into batches.

    For a sampler of your own, derive a class that sets `num_records` and `parameters`, and has
    `draw`. docs/own-samplers.md has an example, and lists what else a sampler may declare.

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> len(BatchSampler(RandomSampler(10, seed=0), batch_size=4))
    3
    """

    seed: int = 0
    #: What the ids depend on beside the seed: numbers, strings, arrays, samplers, lists and dicts.
    parameters: Mapping[str, Any]

    def __len__(self) -> int:
        """Return the number of samples of an epoch. By default each sample id comes once."""
        return self.num_ids

    def __iter__(self) -> NoReturn:
        """Refuse: a sampler has no epoch of its own."""
        name = type(self).__name__
        raise TypeError(
            f"{name} is a sampler, and gives its ids to a batch sampler: "
            f"DataLoader(batch_sampler=BatchSampler({name}(…), batch_size=…)) iterates over batches"
        )

    def ids(self, epoch: SupportsIndex, positions: ArrayLike) -> Int64:
        """Return the sample ids at these positions of an epoch, int64 as `positions`.

        Raises:
            TypeError: positions that are not integers.
            IndexError: a position outside `[0, len(self))`.
        """
        limit = validate.LIMIT // max(1, len(self))
        epoch = validate.integer("epoch", epoch, minimum=0, below=limit)
        places = validate.unmasked("positions", positions)
        if places.size and places.dtype.kind not in "iu":
            raise TypeError(f"positions must be integers, got dtype {places.dtype}")
        outside = places[(places < 0) | (places >= len(self))]
        if outside.size:
            raise IndexError(f"positions must be in [0, {len(self)}), got {outside[0]}")
        return self._checked(epoch, places.astype(np.int64).reshape(-1)).reshape(places.shape)

    @abstractmethod
    def draw(self, epoch: int, positions: Int64) -> Int64:
        """Return the sample ids at positions within an epoch, int64[positions] both.

        The ids are a pure function of the epoch, the positions, the seed and the parameters.
        """

    def _checked(
        self, epoch: int, positions: Int64, named: Callable[[int, int], str] | None = None
    ) -> Int64:
        """Return `draw(epoch, positions)`, checked: a wrong id would read another record.

        `named` names the place of an epoch and a position in the error.

        Raises:
            ValueError: another number of ids, no integers, or ids outside `[0, num_ids)`.
        """
        ids = np.asarray(self.draw(epoch, positions))
        at, wrong = 0, ""
        if ids.shape != positions.shape:
            wrong = f"the shape {ids.shape} for {len(positions)} positions"
        elif ids.size and ids.dtype.kind not in "iu":
            wrong = f"{ids.dtype} in place of integers"
        elif ids.size and (ids.min() < 0 or ids.max() >= self.num_ids):
            at = int(np.flatnonzero((ids < 0) | (ids >= self.num_ids))[0])
            wrong = f"the id {ids[at]}, where ids are in [0, {self.num_ids})"
        if wrong:
            place = (named or "epoch {}, position {}".format)(epoch, int(positions[at]))
            raise ValueError(f"{self!r} gave {wrong}, at {place}: mend its draw")
        return ids.astype(np.int64, copy=False)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the sampler is a function of: class, stream version, seed, parameters, digests."""
        return {
            "name": type(self).__name__,
            "stream_version": self.stream_version,
            **recorded({"seed": self.seed, **self.parameters}),
        }

    def for_batches(self, batch_size: int) -> Sampler:
        """Return the sampler to use for batches of this size; ValueError if none fits."""
        return self


class GroupSampler(Sampler):
    """Give the number of the group of each position of a sampler, in place of the id."""

    def __init__(self, order: Sampler, groups: int, draw: Callable[[int, Int64], Int64], /) -> None:
        self.num_records, self.parameters = groups, {}
        self._length, self._draw = len(order), draw

    def __len__(self) -> int:
        return self._length

    def draw(self, epoch: int, positions: Int64) -> Int64:
        return self._draw(epoch, positions)


class InnerSampler(Sampler):
    """A sampler over the places that another sampler, of record ids, gives."""

    _order: Sampler

    def _take(self, order: Sampler, places: int, what: str) -> None:
        """Take the inner sampler, which must be over so many places."""
        if check_order(order).traits.num_ids is not None:
            raise ValueError(
                f"order must give record ids, got {order!r}: put views outermost, "
                f"ViewSampler(SubsetSampler(…), …)"
            )
        if order.num_records != places:
            raise ValueError(f"order must be over {what}, got {order!r}")
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def for_batches(self: _Inner, batch_size: int) -> _Inner:
        """Return this sampler over the inner sampler that is used for batches of this size."""
        other = copy.copy(self)
        other._order = self._order.for_batches(batch_size)
        return other


def check_order(order: Sampler, *, name: str = "order") -> Sampler:
    """Return a sampler; TypeError for anything else."""
    if not isinstance(order, Sampler):
        raise TypeError(
            f"{name} must be a Sampler such as RandomSampler, got a {type(order).__name__}: "
            f"SubsetSampler(ids, of=len(index)) makes one of ids"
        )
    if not isinstance(getattr(order, "parameters", None), Mapping):
        raise TypeError(
            f"{type(order).__name__}.parameters must be a dict of what its ids depend on beside "
            f"the seed, which states compare"
        )
    recorded({"seed": order.seed, **order.parameters}, hashed=False)
    return order


class SequentialSampler(Sampler):
    """Give the ids `0 … n - 1` in stored order, in every epoch.

    >>> import numpy as np
    >>> SequentialSampler(5).ids(0, np.arange(5)).tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, n: SupportsIndex, /) -> None:
        self.num_records = validate.size(n, ids="SubsetSampler(ids, of=len(index))")
        self.parameters = {"n": self.num_records}

    def __repr__(self) -> str:
        return f"SequentialSampler({validate.counted(len(self), 'record')})"

    def draw(self, epoch: int, positions: Int64) -> Int64:
        return positions.copy()


class RandomSampler(Sampler):
    """Give the ids `0 … n - 1` in a new keyed random order every epoch.

    Access is random, in constant time and memory for any n below 2^62.

    >>> import numpy as np
    >>> order = RandomSampler(5, seed=0)
    >>> [order.ids(epoch, np.arange(5)).tolist() for epoch in range(2)]
    [[4, 0, 2, 1, 3], [4, 3, 1, 2, 0]]
    >>> RandomSampler(10**12, seed=0).ids(0, np.array([10**12 - 1])).tolist()
    [240864868365]
    """

    def __init__(self, n: SupportsIndex, /, *, seed: SupportsIndex) -> None:
        ids = "SubsetSampler(ids, of=len(index), order=RandomSampler(len(ids), seed=…))"
        self.num_records = validate.size(n, ids=ids)
        self.parameters = {"n": self.num_records}
        self.seed = validate.seed(seed)
        self._key = root_key(self.seed, "random order")
        self._recent: Recent[Table] = Recent(2)

    def __repr__(self) -> str:
        return f"RandomSampler({validate.counted(len(self), 'record')}, seed={self.seed})"

    def draw(self, epoch: int, positions: Int64) -> Int64:
        key = derive(self._key, epoch)
        n = self.num_records
        if n > SMALL:
            return permute(n, key, positions)
        # A sampler keeps its own tables: permute keeps few, and a mixture has many samplers.
        table = self._recent.get(epoch, lambda: small_table(n, key))
        return table[positions].astype(np.int64)
