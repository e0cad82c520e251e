"""Batches of consecutive positions of any order."""

from __future__ import annotations

from typing import Literal, SupportsIndex

import numpy as np

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, ranges
from twinfeed.samplers._stream import BatchStream
from twinfeed.samplers.orders import Order, check_order


class BatchSampler(BatchStream):
    """Cut an order into batches of `batch_size` consecutive positions.

    `final` says what happens where `batch_size` does not divide the order's length:

    - `"smaller"`: the last batch is smaller. A rank may get an empty batch, int64[0].
    - `"pad"`: the last batch is filled with -1, and loaders give a mask.
    - `"drop"`: the last batch is left out, and its records are not met in that epoch.

    Seven records, batches of three; over two ranks the longer slices take turns::

        step      0          1          2
        global    0 1 2      3 4 5      6
        rank 0    0 1        3          6
        rank 1        2        4 5      (empty)

    Raises ValueError where the order cannot be cut so: `sections` of a shuffle that do not divide
    `batch_size`, and for reuse a `live` that is no multiple of `batch_size`, or `final="drop"`.

    >>> from twinfeed.samplers import SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(7), batch_size=3)
    >>> [ids.tolist() for ids in stream.shard(1, 2)]
    [[2], [4, 5], []]
    >>> [ids.tolist() for ids in BatchSampler(SequentialSampler(4), batch_size=3, final="pad")]
    [[0, 1, 2], [3, -1, -1]]
    >>> len(BatchSampler(SequentialSampler(7), batch_size=3, final="drop"))
    2
    """

    def __init__(
        self,
        order: Order,
        /,
        *,
        batch_size: SupportsIndex,
        final: Literal["smaller", "pad", "drop"] = "smaller",
    ) -> None:
        batch_size = _validate.integer("batch_size", batch_size, minimum=1)
        self._final = _validate.choice("final", final, ("smaller", "pad", "drop"))
        self._order = check_order(order).for_batches(batch_size)
        if order.live is not None and final == "drop":
            raise ValueError(
                "final must be 'smaller' or 'pad' for an order that reuses records, so that each "
                "record has all its uses, got 'drop'"
            )
        self.num_records, self._num_ids = order.num_records, order.num_ids
        self.repeats, self.live, self.reuse = order.repeats, order.live, order.reuse
        self.in_blocks, self.padded = order.in_blocks, final == "pad"
        more = {"smaller": 0, "pad": -len(order) % batch_size, "drop": -(len(order) % batch_size)}
        self._size = len(order) + more[final]
        largest = min(batch_size, self._size) or batch_size
        steps = -(-self._size // largest)
        self._even = self._size % largest == 0
        self._parameters = {"batch_size": largest, "final": final, "order": order}
        super().__init__(steps=steps, size=self._size, batch_size=largest, seed=order.seed)

    def __repr__(self) -> str:
        final = "" if self._final == "smaller" else f", final={self._final!r}"
        return f"{type(self).__name__}({self._order!r}, {self._told_size}{final})"

    @property
    def _told_size(self) -> str:
        return f"{_validate.counted(self._steps, 'batch')} of {self._largest:,}"

    def spans(self, records: Int64) -> tuple[Int64, Int64]:
        return self._order.spans(records)

    def records(self, ids: Int64) -> Int64:
        ids = np.asarray(ids, dtype=np.int64)
        return np.where(ids < 0, -1, self._order.records(np.maximum(ids, 0)))

    def views(self, ids: Int64) -> Int64:
        ids = np.asarray(ids, dtype=np.int64)
        return np.where(ids < 0, 0, self._order.views(np.maximum(ids, 0)))

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        return np.minimum(self._size - np.arange(start, stop) * self._largest, self._largest)

    def _given(self, epoch: int, step: int) -> int:
        return epoch * self._size + step * self._largest

    def _draw(self, epoch: int, start: int, lows: Int64, highs: Int64) -> Int64:
        begins = (start + np.arange(len(lows))) * self._largest
        positions = ranges(begins + lows, begins + highs)
        real = positions[: np.searchsorted(positions, len(self._order))]
        ids = np.full(len(positions), -1)
        ids[: len(real)] = self._order._ids(epoch, real)
        return ids
