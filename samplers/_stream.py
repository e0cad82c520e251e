"""The batch sampler contract: a pure function of (epoch, step), and passes over it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, UInt64, derive, root_key, words
from twinfeed.samplers._cursor import Passes
from twinfeed.samplers._explain import drawing, html
from twinfeed.samplers._space import SampleSpace
from twinfeed.samplers._state import STATE_VERSION, position, told

STREAM_VERSION = 1
_CHUNK_IDS = 1 << 15  # ids of global batches drawn in one vectorised call while iterating

_Stream = TypeVar("_Stream", bound="BatchStream")


class BatchStream(SampleSpace, ABC):
    """Serve batches of sample ids: by (epoch, step), by iteration, whole or one rank's slice.

    Every epoch has `len()` steps. `batch(epoch, step)` is pure. `shard(rank, world_size)` gives
    the same stream as one rank sees it: a contiguous slice of every global batch.

    Iterating is for a plain `DataLoader(batch_sampler=…)`. Nobody tells a sampler what a training
    loop received, so a pass is an epoch from its first step:

    - The last batch moves on to the next epoch. An evaluation stays in its epoch.
    - A pass that was broken off begins the same epoch again.
    - The first pass after `load_state_dict` is the rest of the loaded epoch.
    - `set_epoch` says where the next pass begins. A running pass never changes.

    torch's workers draw `prefetch_factor * num_workers` batches as soon as an iterator is made. If
    an epoch has no more steps than the workers draw, call `set_epoch` before each pass. A loader of
    `twinfeed.loaders` counts what the loop received, and goes on there.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(10), batch_size=4)
    >>> [ids.tolist() for ids in stream]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> stream.epoch, stream.step
    (1, 0)
    >>> [ids.tolist() for ids in stream.shard(0, 2)]
    [[0, 1], [4, 5], [8]]
    """

    seed: int
    _parameters: Mapping[str, Any]  # what the stream depends on beside the seed
    #: This rank, 0 when not sharded.
    rank: int = 0
    #: Number of ranks, 1 when not sharded.
    world_size: int = 1
    #: Whether `shard` was called: `shard(0, 1)` says that every rank is meant to see all.
    sharded: bool = False
    #: Whether each pass is whole, and has no place to stand.
    evaluation: bool = False
    #: Whether batches may hold -1, for which loaders give a mask.
    padded: bool = False
    _even: bool  # whether every global batch of every epoch has the same number of ids

    def __init__(self, *, steps: int, size: int, batch_size: int, seed: int) -> None:
        # size: the most ids of an epoch; batch_size: the ids of the largest global batch
        size = _validate.integer("samples of an epoch", size, minimum=0)
        self._epochs = _validate.LIMIT // max(1, size)
        self._steps, self._largest, self.seed = steps, batch_size, seed
        self._seed_key = root_key(seed, "augmentation")
        self._passes: Passes | None = None
        self._known: dict[str, Any] = {}  # the fingerprint, once asked for; copies share the dict

    @abstractmethod
    def _draw(self, epoch: int, start: int, lows: Int64, highs: Int64) -> Int64:
        """Return ids end to end: places lows[i] to highs[i] of the global batch start + i."""

    @abstractmethod
    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        """Return the sizes of the global batches of these steps."""

    def _given(self, epoch: int, step: int) -> int:
        """Return how many ids came before a step; 0 will do where ranks divide every batch."""
        return 0

    def _check_world(self, world_size: int) -> None:
        """Refuse a world size that cannot divide the global batch. By default none is refused."""
        return

    def __len__(self) -> int:
        return self._steps

    @property
    def batch_size(self) -> int:
        """Ids of the largest batch of this rank."""
        return -(-self._largest // self.world_size)

    @property
    def drop_last(self) -> bool:
        """True: every batch is full. Trainers ask before they share batches out to processes.

        Raises TypeError for a stream that a trainer cannot share out without losing or repeating
        records: one rank's, an evaluation, and batches of several sizes.
        """
        if self.world_size > 1:
            raise TypeError(
                f"this sampler already is rank {self.rank} of {self.world_size}, and sharding it "
                f"again would lose records: give the trainer the sampler without shard(), or "
                f"iterate over a DataLoader that the trainer has not prepared"
            )
        if self.evaluation or not self._even:
            raise TypeError(
                f"sharing out the batches of {self!r} would lose or repeat records: give each "
                f"process sampler.shard(rank, world_size) in a DataLoader that the trainer has not "
                f"prepared, or for training take final='drop'"
            )
        return True

    @property
    def constant_size(self) -> int | None:
        """Size of every batch of this rank, in any epoch; None where sizes may differ."""
        each, over = divmod(self._largest, self.world_size)
        return each if self._even and self._steps and not over else None

    def batch(self, epoch: SupportsIndex, step: SupportsIndex) -> Int64:
        """Return the ids of one step, int64[batch]: the global batch, or this rank's slice.

        Raises IndexError outside `[0, len(self))`.
        """
        epoch, step = self._position(epoch, step, self._steps)
        return self._batches(epoch, step, step + 1)[0]

    def batches(
        self, epoch: SupportsIndex, start: SupportsIndex, stop: SupportsIndex
    ) -> list[Int64]:
        """Return `[batch(epoch, s) for s in range(start, stop)]` in one vectorised call."""
        epoch, start = self._position(epoch, start, self._steps + 1)
        epoch, stop = self._position(epoch, stop, self._steps + 1)
        if start > stop:
            raise IndexError(f"start must be at most stop, got {start} and {stop}")
        return self._batches(epoch, start, stop) if start < stop else []

    def _batches(self, epoch: int, start: int, stop: int) -> list[Int64]:
        """Return the batches of one step or more, of an epoch and steps that are valid."""
        lows, highs = self._slices(epoch, start, self._sizes(epoch, start, stop))
        ids = self._draw(epoch, start, lows, highs)
        # Copies, as a trainer may change a batch, and one batch should not keep all in memory.
        return [ids[a:b].copy() for a, b in pairwise([0, *np.cumsum(highs - lows).tolist()])]

    def _chunks(self, epoch: int, step: int, most: int = 0) -> Iterator[list[Int64]]:
        """Draw chunks that grow: the first batch comes at once, later ones cheaply."""
        chunk, most = 1, most or max(1, _CHUNK_IDS // self._largest)
        while step < self._steps:
            stop = min(step + chunk, self._steps)
            yield self._batches(epoch, step, stop)
            step, chunk = stop, min(2 * chunk, most)

    def seeds(self, epoch: SupportsIndex, step: SupportsIndex) -> UInt64:
        """Return one augmentation seed for each id of `batch(epoch, step)`, uint64[batch].

        A seed is a hash of (seed, epoch, step, place in the global batch). Ranks and workers
        change no seed.
        """
        epoch, step = self._position(epoch, step, self._steps)
        low, high = self._slices(epoch, step, self._sizes(epoch, step, step + 1))
        place = np.arange(low[0], high[0])
        return words(derive(self._seed_key, epoch, step), place)

    def _position(self, epoch: SupportsIndex, step: SupportsIndex, end: int) -> tuple[int, int]:
        """Return an epoch and a step below `end` as ints, which do not overflow."""
        epoch, step = _validate.whole("epoch", epoch), _validate.whole("step", step)
        if not 0 <= epoch < self._epochs:
            raise IndexError(f"epoch must be in [0, {self._epochs}), got {epoch}")
        if not 0 <= step < end:
            steps = _validate.counted(self._steps, "step")
            raise IndexError(f"step {step} of epoch {epoch}: an epoch has {steps}")
        return epoch, step

    def _settled(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the place. The end of an epoch becomes the beginning of the next pass."""
        if step == self._steps > 0:
            return (epoch if self.evaluation else epoch + 1), 0
        return epoch, step

    def _place(self, epoch: SupportsIndex, step: SupportsIndex) -> tuple[int, int]:
        """Return a place between two batches, `len(self)` included."""
        return self._settled(*self._position(epoch, step, self._steps + 1))

    def shard(self: _Stream, rank: SupportsIndex, world_size: SupportsIndex) -> _Stream:
        """Return this stream as one rank sees it; the global batches stay what they are.

        Each rank takes a contiguous slice of every global batch. Slice sizes differ by at most
        one. The longer slices rotate, so that the totals differ by at most one too.
        """
        if self.world_size != 1:
            raise ValueError(f"this sampler is already rank {self.rank} of {self.world_size}")
        world_size = _validate.integer("world_size", world_size, minimum=1)
        rank = _validate.integer("rank", rank, minimum=0, below=world_size)
        self._check_world(world_size)
        other = copy.copy(self)
        other.rank, other.world_size, other.sharded = rank, world_size, True
        return other

    def _slices(self, epoch: int, start: int, sizes: Int64) -> tuple[Int64, Int64]:
        """Return where this rank's slice of each global batch begins and ends."""
        world = self.world_size
        if world == 1:
            return np.zeros_like(sizes), sizes
        # As many ids as if all ids of the stream were dealt out in turn: the longer slices rotate.
        given = np.cumsum(np.append(self._given(epoch, start) % world, sizes))
        low, high = (
            np.diff(given // world * rank + np.minimum(given % world, rank))
            for rank in (self.rank, self.rank + 1)
        )
        return low, high

    def __copy__(self: _Stream) -> _Stream:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other._passes = copy.copy(self._passes)
        return other

    @property
    def _own(self) -> Passes:
        if self._passes is None:
            # Of a copy: a cycle would keep large tables until the garbage collector runs.
            self._passes = Passes(copy.copy(self))
        return self._passes

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that iterating draws."""
        return self._own.epoch

    @property
    def step(self) -> int:
        """Step of the next batch that the running pass draws, in `[0, len(self))`."""
        return self._own.step

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Say which epoch the next pass is; a trainer calls this before each epoch.

        After a state was loaded, until the first batch, the loaded epoch keeps its step.
        """
        self._own.set_epoch(epoch)

    def steps(self) -> Iterator[tuple[int, int, Int64]]:
        """Iterate, and yield (epoch, step, ids) for each batch."""
        return self._own.over(self)

    def __iter__(self) -> Iterator[Int64]:
        """Yield the batches of a pass; nothing is drawn before the first `next`."""
        for _, _, ids in self.steps():
            yield ids

    def state_dict(self) -> dict[str, Any]:
        """Return where iteration stands, and of which stream: a small dict that JSON can hold.

        The state counts drawn batches. Workers draw ahead of the training loop: with workers, save
        the state of a loader of `twinfeed.loaders`.
        """
        return self._own.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass at a state, of any rank and world size, in constant time.

        Raises StateMismatchError, with every differing field, for a state of other data,
        parameters or version.
        """
        self._own.load_state_dict(state)

    def state_at(self, epoch: SupportsIndex, step: SupportsIndex) -> dict[str, Any]:
        """Return the state before this step; `len(self)` is the end of the epoch."""
        epoch, step = self._place(epoch, step)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "step": step,
            "fingerprint": self.fingerprint,
        }

    def position_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the (epoch, step) of a state of this stream; raise as `load_state_dict`."""
        return position(state, self.fingerprint, steps=self._steps, epochs=self._epochs)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the stream is a function of: class, stream version, seed, parameters, digests.

        Data are hashed once for a stream and all its copies.
        """
        if not self._known:
            self._known |= {
                "sampler": type(self).__name__,
                "stream_version": STREAM_VERSION,
                "steps": self._steps,
                "seed": self.seed,
                **told(self._parameters),
            }
        return dict(self._known)

    def explain(self, *, steps: SupportsIndex = 4, world_size: SupportsIndex | None = None) -> str:
        """Return a drawing of the first steps of the current epoch, one column a rank.

        A sample is written as its record, with its view or use number where it has one.
        Padding is written as `-`.

        >>> from twinfeed.samplers import ExactOnceBatchSampler
        >>> print(ExactOnceBatchSampler(5, batch_size=4, final="pad").explain(world_size=2))
        ExactOnceBatchSampler(5 records once, 2 batches of 4, final='pad')
        step   rank 0   rank 1
        0      0 1      2 3
        1      4 -      - -
        """
        wanted = self.world_size if world_size is None else world_size
        world = _validate.integer("world_size", wanted, minimum=1)
        stop = min(_validate.integer("steps", steps, minimum=1), self._steps)
        whole = copy.copy(self)
        whole.rank, whole.world_size = 0, 1
        ranks = [whole.shard(rank, world) for rank in range(world)]
        return drawing(repr(self), [rank.batches(self.epoch, 0, stop) for rank in ranks], self)

    def _repr_html_(self) -> str:
        batches = self.batches(self.epoch, 0, min(4, self._steps))
        return html(repr(self), [f"step {step}" for step in range(len(batches))], batches, self)

    @property
    def sampler(self: _Stream) -> _Stream:
        """Itself: trainers look for `batch_sampler.sampler` when they set the epoch."""
        return self
