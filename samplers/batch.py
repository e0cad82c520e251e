"""Batches of consecutive positions of any sampler."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal, SupportsIndex

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers._stream import BatchStream
from twinfeed.samplers.drawing.int_arrays import Int64, ranges
from twinfeed.samplers.orders import Sampler, check_order


class BatchSampler(BatchStream):
    """Cut a sampler into batches of `batch_size` consecutive positions.

    Args:
        order: what is cut.
        batch_size: ids of a global batch.
        final: what happens if `batch_size` does not divide the sampler's length. `"smaller"`: the
            last batch is smaller, and a rank may get an empty batch, int64[0]. `"pad"`: the last
            batch is filled with -1, and loaders give a mask. `"drop"`: the last batch is left out,
            and its records are not visited in that epoch.
        batches_per_epoch: cuts the endless stream of these batches into epochs of another length:
            epoch k is batches `k * n` to `(k + 1) * n`. The sampler begins anew when all of its
            batches were given, wherever an epoch ends. By default an epoch is one round of the
            order.

    Raises:
        ValueError: the sampler cannot be cut so: `sections` of a shuffle that do not divide
            `batch_size`, for reuse a `live` that is no multiple of `batch_size`, or `final="drop"`,
            or there is no batch, as of fewer records than `batch_size` with `final="drop"`.

    Seven records, batches of three; over two ranks the longer slices take turns::

        step      0          1          2
        global    0 1 2      3 4 5      6
        rank 0    0 1        3          6
        rank 1        2        4 5      (empty)

    >>> from twinfeed.samplers import SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(7), batch_size=3)
    >>> [ids.tolist() for ids in stream.shard(1, 2)]
    [[2], [4, 5], []]
    >>> BatchSampler(SequentialSampler(4), batch_size=3, final="pad").batch(0, 1).tolist()
    [3, -1, -1]
    >>> len(BatchSampler(SequentialSampler(7), batch_size=3, final="drop"))
    2
    >>> stream = BatchSampler(SequentialSampler(7), batch_size=3, batches_per_epoch=2)
    >>> [[ids.tolist() for ids in stream.batches(epoch, 0, 2)] for epoch in range(2)]
    [[[0, 1, 2], [3, 4, 5]], [[6], [0, 1, 2]]]
    """

    def __init__(
        self,
        order: Sampler,
        /,
        *,
        batch_size: SupportsIndex,
        final: Literal["smaller", "pad", "drop"] = "smaller",
        batches_per_epoch: SupportsIndex | None = None,
    ) -> None:
        batch_size = validate.integer("batch_size", batch_size, minimum=1)
        self._final = validate.choice("final", final, ("smaller", "pad", "drop"))
        order = self._order = check_order(order).for_batches(batch_size)
        if order.traits.max_cached is not None and final == "drop":
            raise ValueError(
                "final must be 'smaller' or 'pad' for a sampler that reuses records, so that each "
                "record has all its uses, got 'drop'"
            )
        self.num_records = order.num_records
        self.traits = replace(order.traits, padded=final == "pad")
        more = {"smaller": 0, "pad": -len(order) % batch_size, "drop": -(len(order) % batch_size)}
        self._size = len(order) + more[final]
        largest = min(batch_size, self._size) or batch_size
        steps, size = -(-self._size // largest), self._size
        self._round = steps
        self._even = self._size % largest == 0
        self.parameters = {"batch_size": largest, "final": final, "order": order}
        if batches_per_epoch is not None and steps:
            steps = validate.integer("batches_per_epoch", batches_per_epoch, minimum=1)
            self.parameters["batches_per_epoch"] = steps
            size = steps * largest
        super().__init__(num_steps=steps, size=size, batch_size=largest, seed=order.seed)

    def __repr__(self) -> str:
        final = "" if self._final == "smaller" else f", final={self._final!r}"
        return f"{type(self).__name__}({self._order!r}, {self._counts}{final})"

    @property
    def _counts(self) -> str:
        return f"{validate.counted(self._steps, 'batch')} of {self._largest:,}"

    def spans(self, records: Int64, epoch: int | None = None) -> tuple[Int64, Int64]:
        # An epoch that is no round of the sampler may have parts of several rounds.
        return self._order.spans(records, epoch if self._round == self._steps else None)

    def records(self, ids: Int64) -> Int64:
        ids = np.asarray(ids, dtype=np.int64)
        return np.where(ids < 0, -1, self._order.records(np.maximum(ids, 0)))

    def views(self, ids: Int64) -> Int64:
        ids = np.asarray(ids, dtype=np.int64)
        return np.where(ids < 0, 0, self._order.views(np.maximum(ids, 0)))

    def group_of(self, ids: Int64) -> Int64:
        return self._order.group_of(ids)

    @property
    def by_group(self) -> tuple[int, BatchSampler] | None:
        groups = None if self.traits.padded else self._order.by_group
        if groups is None:
            return None
        other = copy.copy(self)
        number, other._order = groups
        return number, other

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        steps = (epoch * self._steps + np.arange(start, stop)) % max(1, self._round)
        return np.minimum(self._size - steps * self._largest, self._largest)

    def _given(self, epoch: int, step: int) -> int:
        lap, step = divmod(epoch * self._steps + step, max(1, self._round))
        return lap * self._size + step * self._largest

    def _draw(self, epoch: int, start: int, lows: Int64, highs: Int64) -> Int64:
        """Draw round by round of the sampler: an epoch may end within a round."""
        lap, start = divmod(epoch * self._steps + start, max(1, self._round))
        parts = []
        while len(lows):
            left = self._round - start
            parts.append(self._of_round(lap, start, lows[:left], highs[:left]))
            lap, start, lows, highs = lap + 1, 0, lows[left:], highs[left:]
        return np.concatenate(parts)

    def _of_round(self, lap: int, start: int, lows: Int64, highs: Int64) -> Int64:
        """Return ids as `_draw` does, of steps of one round of the sampler."""
        begins = (start + np.arange(len(lows))) * self._largest
        positions = ranges(begins + lows, begins + highs)
        real = positions[: np.searchsorted(positions, len(self._order))]
        ids = np.full(len(positions), -1)
        ids[: len(real)] = self._order._checked(lap, real, self._named)
        return ids

    def _named(self, lap: int, position: int) -> str:
        """Name the place of a position of a round of the sampler."""
        epoch, step = divmod(lap * self._round + position // self._largest, self._steps)
        return f"epoch {epoch}, step {step}"
