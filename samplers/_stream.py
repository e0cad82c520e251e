"""The batch sampler contract: a pure function of (epoch, step), and a cursor over it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, UInt64, derive, root_key, words
from twinfeed.samplers._explain import drawing
from twinfeed.samplers._state import STATE_VERSION, position

STREAM_VERSION = 1
_CHUNK_IDS = 1 << 15  # ids drawn in one vectorised call while iterating

_Stream = TypeVar("_Stream", bound="BatchStream")


class BatchStream(ABC):
    """Serve batches of sample ids: by (epoch, step), by iteration, whole or one rank's slice.

    Every epoch has ``len()`` steps. ``batch(epoch, step)`` is pure; iterating moves a cursor
    (``epoch``, ``step``) over it, yields the rest of the current epoch and leaves the cursor
    at the start of the next. A state counts batches *drawn*: under prefetching workers use the
    loader's state, which counts batches delivered. ``shard(rank, world_size)`` gives the same
    stream seen by one rank: a contiguous slice of every global batch.

    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(10), batch_size=4)
    >>> [ids.tolist() for ids in stream]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> stream.epoch, stream.step
    (1, 0)
    >>> [ids.tolist() for ids in stream.shard(0, 2)]
    [[0, 1], [4, 5], [8]]
    """

    batch_size: int  # ids of the largest global batch; trainers read both
    drop_last: bool

    def __init__(self, *, steps: int, size: int, seed: int) -> None:
        """Start at (0, 0), unsharded; ``size`` is the most ids that an epoch has."""
        size = _validate.integer("samples of an epoch", size, minimum=0)
        self._epochs = _validate.LIMIT // max(1, size)
        self._steps, self._seed = steps, seed
        self._seed_key = root_key(seed, "augmentation")
        self._epoch = self._step = 0
        self._rank, self._world_size = 0, 1

    @abstractmethod
    def _draw(self, epoch: int, start: int, stop: int) -> Int64:
        """Return the ids of the global batches of these steps, end to end."""

    @abstractmethod
    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        """Return the sizes of the global batches of these steps."""

    def _given(self, epoch: int, step: int) -> int:
        """Return how many ids came before a step; 0 will do where ranks divide every batch."""
        return 0

    @abstractmethod
    def _parameters(self) -> dict[str, Any]:
        """Return what the stream depends on, as JSON can hold it; arrays as ``digest``."""

    @property
    @abstractmethod
    def _even(self) -> bool:
        """Whether every global batch of every epoch has ``batch_size`` ids."""

    @property
    @abstractmethod
    def num_records(self) -> int:
        """Size of the record id space."""

    @property
    def num_ids(self) -> int:
        """Size of the sample id space; the records', unless samples are something else."""
        return self.num_records

    def _check_world(self, world_size: int) -> None:
        """Refuse world sizes that the global batch cannot be divided by; here, none."""
        return

    def __len__(self) -> int:
        """Return the number of steps of every epoch."""
        return self._steps

    def batch(self, epoch: SupportsIndex, step: SupportsIndex) -> Int64:
        """Return the ids of one step, int64[batch]: the global batch, or this rank's slice.

        Raises IndexError outside ``[0, len(self))``.
        """
        epoch, step = self._position(epoch, step, self._steps)
        return self._batches(epoch, step, step + 1)[0]

    def batches(
        self, epoch: SupportsIndex, start: SupportsIndex, stop: SupportsIndex
    ) -> list[Int64]:
        """Return ``[batch(epoch, s) for s in range(start, stop)]`` in one vectorised call."""
        epoch, start = self._position(epoch, start, self._steps + 1)
        epoch, stop = self._position(epoch, stop, self._steps + 1)
        if start > stop:
            raise IndexError(f"start must be at most stop, got {start} and {stop}")
        return self._batches(epoch, start, stop) if start < stop else []

    def _batches(self, epoch: int, start: int, stop: int) -> list[Int64]:
        """Return the same for steps of an epoch, one at least."""
        ids, sizes = self._draw(epoch, start, stop), self._sizes(epoch, start, stop)
        begins = np.cumsum(sizes) - sizes
        lows, highs = (begins + edge for edge in self._slices(epoch, start, sizes))
        return [ids[a:b].copy() for a, b in zip(lows.tolist(), highs.tolist(), strict=True)]

    @property
    def constant_size(self) -> int | None:
        """Size of every batch of this rank, in any epoch; None where sizes may differ."""
        each, over = divmod(self.batch_size, self._world_size)
        return each if self._even and self._steps and not over else None

    def seeds(self, epoch: SupportsIndex, step: SupportsIndex) -> UInt64:
        """Return one augmentation seed for each id of ``batch(epoch, step)``, uint64[batch].

        A hash of (seed, epoch, step, place in the global batch): whatever the ranks or workers.
        """
        epoch, step = self._position(epoch, step, self._steps)
        low, high = self._slices(epoch, step, self._sizes(epoch, step, step + 1))
        place = np.arange(low[0], high[0])
        return words(derive(self._seed_key, epoch, step), place)

    def records(self, ids: Int64) -> Int64:
        """Return the record id of each sample id, -1 for padding, int64 as ``ids``."""
        return np.array(ids, dtype=np.int64)

    def views(self, ids: Int64) -> Int64:
        """Return the view or use number of each sample id, int64 as ``ids``."""
        return np.zeros(np.shape(ids), dtype=np.int64)

    @property
    def live(self) -> int | None:
        """How many decoded images may be live at once; None where the sampler sets no bound."""
        return None

    @property
    def reuse(self) -> int:
        """How many uses in a row a record is live for; the last has the view number reuse - 1."""
        return 1

    @property
    def padded(self) -> bool:
        """Whether batches may hold -1, for which loaders give a mask."""
        return False

    def _position(self, epoch: SupportsIndex, step: SupportsIndex, end: int) -> tuple[int, int]:
        """Return an epoch and a step below ``end`` as ints, which do not overflow."""
        epoch, step = _validate.whole("epoch", epoch), _validate.whole("step", step)
        if not 0 <= epoch < self._epochs:
            raise IndexError(f"epoch must be in [0, {self._epochs}), got {epoch}")
        if not 0 <= step < end:
            raise IndexError(f"step {step} of epoch {epoch}: an epoch has {self._steps} steps")
        return epoch, step

    @property
    def rank(self) -> int:
        """This rank, 0 when not sharded."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks, 1 when not sharded."""
        return self._world_size

    def shard(self: _Stream, rank: SupportsIndex, world_size: SupportsIndex) -> _Stream:
        """Return this stream as one rank sees it; the global batches stay what they are.

        Each rank takes a contiguous slice of every global batch, sizes within one of each
        other; the longer slices rotate, so that the totals stay within one too.
        """
        if self._world_size != 1:
            raise ValueError(f"this sampler is already rank {self._rank} of {self._world_size}")
        world_size = _validate.integer("world_size", world_size, minimum=1)
        rank = _validate.integer("rank", rank, minimum=0, below=world_size)
        self._check_world(world_size)
        other = copy.copy(self)
        other._rank, other._world_size = rank, world_size
        return other

    def _slices(self, epoch: int, start: int, sizes: Int64) -> tuple[Int64, Int64]:
        """Return where this rank's slice of each global batch begins and ends."""
        if self._world_size == 1:
            return np.zeros_like(sizes), sizes
        given = np.cumsum(sizes) - sizes + self._given(epoch, start) % self._world_size
        first = given % self._world_size  # the longer slices go on where they last stopped
        low, high = (
            _slice_start(rank, sizes, first, self._world_size)
            for rank in (self._rank, self._rank + 1)
        )
        return low, high

    @property
    def epoch(self) -> int:
        """Epoch of the next batch to be drawn."""
        return self._epoch

    @property
    def step(self) -> int:
        """Step of the next batch to be drawn, in ``[0, len(self))``."""
        return self._step

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Move to the start of an epoch; within that epoch already, stay at the step reached.

        Trainers call this before each epoch, after a state was restored as well.
        """
        epoch = _validate.integer("epoch", epoch, minimum=0, below=self._epochs)
        if epoch != self._epoch:
            self._epoch, self._step = epoch, 0

    def __iter__(self) -> Iterator[Int64]:
        """Yield the rest of the current epoch, then stand at the start of the next.

        Raises RuntimeError at the next draw where something else has moved the cursor.
        """
        return self._rest(self._epoch, self._step)

    def _rest(self, epoch: int, step: int) -> Iterator[Int64]:
        """Draw chunks that grow: the first batch comes at once, later ones cheaply."""
        chunk = 1
        while step < self._steps:
            stop = min(step + chunk, self._steps)
            for batch in self._batches(epoch, step, stop):
                if (self._epoch, self._step) != (epoch, step):
                    raise RuntimeError(
                        f"this pass stood at step {step} of epoch {epoch}, and another pass over "
                        f"the same sampler, its set_epoch or load_state_dict moved it to step "
                        f"{self._step} of epoch {self._epoch}: leave the loop first, or give each "
                        f"loop a sampler of its own"
                    )
                step += 1
                self._epoch, self._step = (epoch, step) if step < self._steps else (epoch + 1, 0)
                yield batch
            most = _CHUNK_IDS // max(1, len(batch) * self._world_size)
            chunk = max(1, min(2 * chunk, most))
        if not self._steps:
            self._epoch = epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and what it belongs to, as JSON can hold it.

        It counts batches drawn. A loader that prefetches draws ahead of the training loop: save
        the loader's state then, and give torchdata's ``StatefulDataLoader`` a ``RequestSampler``.
        """
        return self.state_at(self._epoch, self._step)

    def state_at(self, epoch: SupportsIndex, step: SupportsIndex) -> dict[str, Any]:
        """Return the state of a sampler about to draw this step, ``len(self)`` included."""
        epoch, step = self._position(epoch, step, self._steps + 1)
        if step == self._steps > 0:
            epoch, step = epoch + 1, 0
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "step": step,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the cursor to a state, of any rank and world size, in constant time.

        Raises StateMismatchError, with every differing field, for a state of other data,
        parameters or version.
        """
        self._epoch, self._step = self.position_of(state)

    def position_of(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Return the (epoch, step) of a state of this stream; raise as ``load_state_dict``."""
        return position(state, self.fingerprint, steps=self._steps, epochs=self._epochs)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the stream is a function of: class, stream version, parameters, data digests."""
        return {
            "sampler": type(self).__name__,
            "stream_version": STREAM_VERSION,
            "steps": self._steps,
            "seed": self._seed,
            **self._parameters(),
        }

    def explain(self, *, steps: SupportsIndex = 4, world_size: SupportsIndex | None = None) -> str:
        """Return a drawing of the first steps of the current epoch, one column a rank.

        A sample is written as its record, with its view or use number where it has one, and
        padding as ``-``.

        >>> from twinfeed.samplers import ExactOnceBatchSampler
        >>> print(ExactOnceBatchSampler(5, batch_size=4, final="pad").explain(world_size=2))
        ExactOnceBatchSampler(5 records once, 2 batches of 4, final='pad')
        step   rank 0   rank 1
        0      0 1      2 3
        1      4 -      - -
        """
        wanted = self._world_size if world_size is None else world_size
        world = _validate.integer("world_size", wanted, minimum=1)
        stop = min(_validate.integer("steps", steps, minimum=1), self._steps)
        whole = copy.copy(self)
        whole._rank, whole._world_size = 0, 1
        ranks = [whole.shard(rank, world) for rank in range(world)]
        return drawing(repr(self), [rank.batches(self._epoch, 0, stop) for rank in ranks], self)

    @property
    def sampler(self: _Stream) -> _Stream:
        """Itself: trainers look for ``batch_sampler.sampler`` when they set the epoch."""
        return self


class FixedBatchStream(BatchStream):
    """Cut ``size`` ids an epoch into batches of ``batch_size``, the last one smaller."""

    drop_last: bool = False

    def __init__(self, *, size: int, batch_size: int, seed: int) -> None:
        """Take validated numbers."""
        super().__init__(steps=-(-size // batch_size), size=size, seed=seed)
        self._size = size
        self.batch_size = batch_size

    @property
    def _even(self) -> bool:
        return self._size % self.batch_size == 0

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        return np.minimum(self._size - np.arange(start, stop) * self.batch_size, self.batch_size)

    def _given(self, epoch: int, step: int) -> int:
        return epoch * self._size + step * self.batch_size

    def _positions(self, start: int, stop: int) -> Int64:
        """Return the positions of an epoch that these steps cover."""
        return np.arange(start * self.batch_size, min(stop * self.batch_size, self._size))


def _slice_start(rank: int, sizes: Int64, first: Int64, world_size: int) -> Int64:
    """Return where slices begin when ranks ``first`` and on, cyclically, have the longer ones."""
    share, longer = np.divmod(sizes, world_size)
    wrapped = np.maximum(first + longer - world_size, 0)
    longer_before = np.minimum(rank, wrapped) + np.clip(rank - first, 0, longer - wrapped)
    begin: Int64 = rank * share + longer_before
    return begin
