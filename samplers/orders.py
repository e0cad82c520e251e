"""Samplers: pure functions from (epoch, positions) to ids, without a position of their own."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, Literal, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import MAX_TABLE_SIZE, Table, permute, random_table
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.iteration import IdPass
from twinfeed.samplers.processes import warn_unsharded
from twinfeed.samplers.state import json_value
from twinfeed.samplers.stream import Stream
from twinfeed.samplers.traits import check_independent_of_steps, check_record_ids
from twinfeed.samplers.types import Bools, Int64s


class Sampler(Stream):
    """The sample id of each position of an epoch. `BatchSampler` cuts a sampler into batches.

    A sampler also goes into torch's `DataLoader(dataset, sampler=…)`, where its ids are record
    ids: iterating yields the ids of an epoch, and the next pass is the next epoch. A pass that was
    broken off begins its epoch again, and the first pass after `load_state_dict` is the rest of the
    loaded epoch. The latest iterator moves the position, and has it as a state of its own: a loader
    that keeps the iterator's state with each batch, as `StatefulDataLoader`, resumes after that
    batch. `IdSequence` has the ids of many epochs.

    For a sampler of your own, derive a class that sets `num_records` and `parameters`, and has
    `draw`. docs/own-samplers.md has an example, and lists what else a sampler may declare.

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> len(BatchSampler(RandomSampler(10, seed=0), batch_size=4))
    3
    >>> sampler = RandomSampler(5, seed=0)
    >>> [list(sampler) for epoch in range(2)]
    [[4, 0, 2, 1, 3], [4, 3, 1, 2, 0]]
    >>> sampler.state_dict()["epoch"]
    2
    """

    #: All on which the ids depend, except the seed: numbers, strings, arrays, samplers,
    #: and lists and dicts of these.
    parameters: Mapping[str, Any]
    # How `BatchSampler` cuts this sampler: the size of a batch, and the batches of an epoch.
    _batch_size: int = 1
    _num_steps: int = 0

    def __repr__(self) -> str:
        records = validate.counted(self.num_records, "record")
        return f"{type(self).__name__}({records}, seed={self.seed})"

    def __len__(self) -> int:
        """Return the number of samples of an epoch. By default each sample id comes once."""
        return self.num_ids

    @property
    def _max_epochs(self) -> int:  # type: ignore[override]
        return validate.LIMIT // max(1, len(self))

    @property
    def _unsharded(self) -> Sampler:
        return self

    def __copy__(self) -> Self:
        sampler = super().__copy__()
        vars(sampler).pop("_fingerprint", None)  # `for_batches` may change parameters of the copy
        return sampler

    def shard(
        self,
        rank: SupportsIndex,
        world_size: SupportsIndex,
        *,
        uneven: Literal["raise", "drop", "keep"] = "raise",
    ) -> Sampler:
        """Return the sampler of one rank, which has every `world_size`-th position of an epoch.

        With batches of b on each of W ranks, step s of all ranks has the positions from `s * W * b`
        to `(s + 1) * W * b`. A saved state has the position of all ranks together, so it can be
        loaded with any number of ranks.

        Args:
            rank: this rank.
            world_size: the number of ranks.
            uneven: what happens if an iteration has a number of ids that is not a multiple of
                `world_size`. `"raise"`: an error, since ranks with more steps would wait for ever
                for the others. `"drop"`: the last ids are left out, fewer than there are ranks.
                `"keep"`: some ranks have one id more, for an evaluation without collectives.

        Raises:
            ValueError: `world_size` does not divide the number of ids, and `uneven` is `"raise"`;
                `"drop"` would leave out all ids; or `rank` is not in `[0, world_size)`.

        >>> [list(RandomSampler(6, seed=0).shard(rank, 2)) for rank in range(2)]
        [[4, 2, 3], [0, 1, 5]]
        >>> list(SequentialSampler(7).shard(0, 2, uneven="drop"))
        [0, 2, 4]
        """
        return RankSampler(self, rank, world_size, uneven)

    def ids(self, epoch: SupportsIndex, positions: ArrayLike) -> Int64s:
        """Return the sample ids at these positions of an epoch, int64 of the shape of `positions`.

        Raises:
            TypeError: positions that are not integers, or ids that depend on the training step.
            IndexError: a position outside `[0, len(self))`.
        """
        check_independent_of_steps(self)
        epoch = validate.integer("epoch", epoch, minimum=0, below=self._max_epochs)
        index = validate.unmasked("positions", positions)
        if index.size and index.dtype.kind not in "iu":
            raise TypeError(f"positions must be integers, got dtype {index.dtype}")
        outside = index[(index < 0) | (index >= len(self))]
        if outside.size:
            raise IndexError(f"positions must be in [0, {len(self)}), got {outside[0]}")
        return checked_draw(self, epoch, index.astype(np.int64).reshape(-1)).reshape(index.shape)

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of an epoch, as Python ints; nothing is drawn before the first `next`.

        Raises:
            TypeError: ids are not record ids, but views or uses of records.
        """
        check_record_ids(self, "sampler.ids(epoch, positions)")
        warn_unsharded(self)
        return IdPass(self, self._positions_from, self._unsharded.ids)

    def _positions_from(self, start: int) -> range:
        """Return the positions of an epoch that this sampler reads, from position `start` on."""
        return range(start, len(self))

    @abstractmethod
    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the sample id at each of these positions of an epoch. Both are int64[n].

        The ids are a pure function of the epoch, the positions, the seed and the parameters.
        """

    def state_at(self, epoch: SupportsIndex, position: SupportsIndex) -> dict[str, Any]:
        """Return the state to resume from at this position; `len` of all ranks ends the epoch.

        Args:
            epoch: the epoch of the next id.
            position: its position in the epoch, which counts the ids of all ranks.

        Raises:
            TypeError: ids depend on the training step, which a batch sampler knows.
            IndexError: a position outside the epoch.

        >>> sampler = RandomSampler(5, seed=0)
        >>> sampler.load_state_dict(sampler.state_at(1, 3))
        >>> list(sampler), list(sampler) == sampler.ids(2, range(5)).tolist()
        ([2, 0], True)
        """
        check_independent_of_steps(self)
        return super().state_at(epoch, position)

    @property
    def num_groups(self) -> int | None:
        """The number of groups that `draw_groups` returns; None without groups."""
        return self.traits.num_groups

    def draw_groups(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the class or data set of the sample at each position of an epoch, int64[n]."""
        return self.group_of(self.draw(epoch, positions))

    def _fields(self) -> dict[str, Any]:
        return {
            "name": type(self).__name__,
            "stream_version": self.stream_version,
            **json_value({"seed": self.seed, **self.parameters}),
        }

    def for_batches(self, batch_size: int, num_steps: int) -> Sampler:
        """Return this sampler, or a copy, for `num_steps` batches an epoch, each of `batch_size`.

        `BatchSampler` calls this. A sampler that changes at training steps computes them in the
        copy. A subclass raises ValueError if it cannot be divided into such batches.
        """
        if not self.traits.needs_steps:
            return self
        sampler = copy.copy(self)
        sampler._batch_size, sampler._num_steps = batch_size, num_steps
        return sampler

    def _steps_at(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the training step at which each position of an epoch is drawn."""
        return epoch * self._num_steps + positions // self._batch_size


def checked_draw(
    sampler: Sampler,
    epoch: int,
    positions: Int64s,
    position_text: Callable[[int, int], str] = "epoch {}, position {}".format,
) -> Int64s:
    """Return `sampler.draw(epoch, positions)`, after checking the ids, as a dataset might accept a
    wrong one. `position_text(epoch, position)` is for the error.

    Raises: ValueError: a wrong number of ids, ids that are not integers, or ids outside `[0,
    num_ids)`.
    """
    ids = np.asarray(sampler.draw(epoch, positions))
    index, problem = 0, ""
    if ids.shape != positions.shape:
        problem = f"the shape {ids.shape} for {len(positions)} positions"
    elif ids.size and ids.dtype.kind not in "iu":
        problem = f"{ids.dtype} in place of integers"
    elif ids.size and (ids.min() < 0 or ids.max() >= sampler.num_ids):
        index = int(np.flatnonzero((ids < 0) | (ids >= sampler.num_ids))[0])
        problem = f"the id {ids[index]}, where ids are in [0, {sampler.num_ids})"
    if problem:
        position = position_text(epoch, int(positions[index]))
        raise ValueError(f"{sampler!r} gave {problem}, at {position}: correct its draw")
    ids = ids.astype(np.int64, copy=False)
    if sampler._replacements is not None:
        ids = sampler._replacements.at(epoch * len(sampler) + positions, ids)
    return ids


class RankSampler(Sampler):
    """The ids of one rank of a sampler, as `Sampler.shard` says."""

    sharded = True

    def __init__(
        self, sampler: Sampler, rank: SupportsIndex, world_size: SupportsIndex, uneven: str
    ) -> None:
        if sampler.sharded:
            raise ValueError(f"this sampler is already {sampler!r}")
        self._inner_sampler, self.seed = sampler, sampler.seed
        self.world_size = validate.integer("world_size", world_size, minimum=1)
        self.rank = validate.integer("rank", rank, minimum=0, below=self.world_size)
        self._uneven = validate.choice("uneven", uneven, ("raise", "drop", "keep"))
        self.num_records, self.traits = sampler.num_records, sampler.traits
        self.parameters = {"order": sampler, "rank": self.rank, "world_size": self.world_size}
        self._length = len(self._positions_from(0))
        if not self._length and len(sampler) and uneven == "drop":
            number = validate.counted(len(sampler), "id")
            raise ValueError(f"uneven='drop' would leave out all: {number} on {world_size} ranks")

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size} of {self._inner_sampler!r}"

    @property
    def _unsharded(self) -> Sampler:
        return self._inner_sampler

    def state_at(self, epoch: SupportsIndex, position: SupportsIndex) -> dict[str, Any]:
        return self._inner_sampler.state_at(epoch, position)

    def position_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        return self._inner_sampler.position_of(state)

    def _positions_from(self, start: int) -> range:
        """Return this rank's positions of an epoch from `start` on: every `world_size`-th."""
        stop, world_size = len(self._inner_sampler), self.world_size
        remainder = (stop - start) % world_size
        if remainder and self._uneven == "raise":
            raise ValueError(
                f"{world_size} ranks must divide the {validate.counted(stop - start, 'id')} of an "
                f"iteration: uneven='drop' leaves out the last {remainder}, and uneven='keep' is "
                f"for an evaluation without collectives"
            )
        if self._uneven == "drop":
            stop -= remainder
        return range(start + self.rank, stop, world_size)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        return checked_draw(self._inner_sampler, epoch, positions * self.world_size + self.rank)


class InnerSampler(Sampler):
    """Base of samplers that map the ids of another, `_inner_sampler`, to ids of their own."""

    _inner_sampler: Sampler

    def _set_inner_sampler(self, inner_sampler: Sampler, size: int, expected: str) -> None:
        """Set the sampler whose ids are mapped; ValueError unless they are of `size` records."""
        # Several ids may be of the same record, and cannot be mapped as records.
        if require_sampler(inner_sampler).traits.num_ids is not None:
            raise ValueError(
                f"order must give record ids, got {inner_sampler!r}: take views after the subset, "
                f"as ViewSampler(SubsetSampler(…), …), and reuse without either"
            )
        if inner_sampler.num_records != size:
            raise ValueError(f"order must be a sampler of {expected}, got {inner_sampler!r}")
        self._inner_sampler = inner_sampler

    @abstractmethod
    def _inner_ids(self, ids: Int64s) -> Int64s:
        """Return the id of the inner sampler for each sample id, or -1."""

    def _are_drawn(self, ids: Int64s) -> Bools:
        inner_ids = self._inner_ids(ids)
        return (inner_ids >= 0) & self._inner_sampler._are_drawn(np.maximum(inner_ids, 0))

    def _are_alike(self, bad: Int64s, good: Int64s) -> Bools:
        return self._inner_sampler._are_alike(self._inner_ids(bad), self._inner_ids(good))

    def __len__(self) -> int:
        return len(self._inner_sampler)

    def for_batches(self, batch_size: int, num_steps: int) -> Self:
        """Return a copy of this sampler for batches of this size: the inner sampler is adapted."""
        sampler = copy.copy(self)
        sampler._inner_sampler = self._inner_sampler.for_batches(batch_size, num_steps)
        return sampler


def require_sampler(sampler: Sampler, *, name: str = "order") -> Sampler:
    """Return a user's sampler, argument `name`; TypeError if it is none, sharded or without
    parameters.
    """
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"{name} must be a Sampler such as twinfeed.RandomSampler, got a "
            f"{type(sampler).__name__}: SubsetSampler(ids, of=len(index)) makes one of ids"
        )
    if sampler.sharded:
        raise TypeError(
            f"{name} must be the sampler of all ranks, got {sampler!r}: call "
            f"shard(rank, world_size) on the batch sampler or on the feed instead"
        )
    if sampler._replacements is not None:
        raise TypeError(f"{name} must not have replaced ids: call replaced() on what is made of it")
    if not isinstance(getattr(sampler, "parameters", None), Mapping):
        raise TypeError(
            f"{type(sampler).__name__}.parameters must be a dict of all values on which the ids "
            f"depend, except the seed: by these, a saved state is recognised"
        )
    # Raise TypeError if a parameter has a type that a state cannot save. The result is not needed.
    json_value({"seed": sampler.seed, **sampler.parameters}, hashed=False)
    return sampler


class SequentialSampler(Sampler):
    """The ids `0 … n - 1` in stored order, in every epoch.

    Args:
        dataset: a dataset, an index or a source, of which only the length is kept, or that length.

    >>> import numpy as np
    >>> SequentialSampler(5).ids(0, np.arange(5)).tolist()
    [0, 1, 2, 3, 4]
    """

    _fixed_order = True

    @validate.show_call("SequentialSampler(dataset)")
    def __init__(self, dataset: SupportsIndex | Sized) -> None:
        self.num_records = validate.record_count(
            "dataset", dataset, subset="SubsetSampler(ids, of=len(index))"
        )
        self.parameters = {"n": self.num_records}

    def __repr__(self) -> str:
        return f"SequentialSampler({validate.counted(len(self), 'record')})"

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        return positions.copy()


class RandomSampler(Sampler):
    """The ids `0 … n - 1` in a new keyed random order every epoch.

    Access is random, in constant time and memory for any n below 2^62.

    Args:
        dataset: a dataset, an index or a source, of which only the length is kept, or that length.
        seed: the only source of chance.

    >>> import numpy as np
    >>> order = RandomSampler(5, seed=0)
    >>> [order.ids(epoch, np.arange(5)).tolist() for epoch in range(2)]
    [[4, 0, 2, 1, 3], [4, 3, 1, 2, 0]]
    >>> RandomSampler(10**12, seed=0).ids(0, np.array([10**12 - 1])).tolist()
    [240864868365]
    """

    @validate.show_call("RandomSampler(dataset, seed=0)")
    def __init__(
        self,
        dataset: SupportsIndex | Sized,
        *,
        seed: SupportsIndex,
    ) -> None:
        subset = "SubsetSampler(ids, of=len(index), order=RandomSampler(len(ids), seed=…))"
        self.num_records = validate.record_count("dataset", dataset, subset=subset)
        self.seed = validate.seed(seed)
        self._key = root_key(self.seed, "random order")
        self.parameters = {"n": self.num_records}
        self._cache: FifoCache[Table] = FifoCache(2)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        key = derive(self._key, epoch)
        n = self.num_records
        if n > MAX_TABLE_SIZE:
            return permute(n, key, positions)
        # Compute the permutation as a table. `permute` would do this too, but its cache has room
        # for the tables of a few samplers only, and a mixture may have many.
        table = self._cache.get(epoch, lambda: random_table(n, key))
        return table[positions].astype(np.int64)
