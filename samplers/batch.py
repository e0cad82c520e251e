"""Batches of consecutive positions of any order."""

from __future__ import annotations

from typing import Any, SupportsIndex

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64
from twinfeed.samplers._stream import FixedBatchStream
from twinfeed.samplers.orders import Order, check_order


class BatchSampler(FixedBatchStream):
    """Cut an order into batches of ``batch_size`` consecutive positions.

    The last batch of an epoch is smaller where ``batch_size`` does not divide the order's
    length, and left out with ``drop_last=True``: then those records are not met in that epoch.

    Seven records, batches of three; over two ranks the longer slices take turns::

        step      0          1          2
        global    0 1 2      3 4 5      6
        rank 0    0 1        3          6
        rank 1        2        4 5      (empty)

    >>> from twinfeed.samplers import SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(7), batch_size=3)
    >>> [ids.tolist() for ids in stream.shard(1, 2)]
    [[2], [4, 5], []]
    >>> len(BatchSampler(SequentialSampler(7), batch_size=3, drop_last=True))
    2
    """

    def __init__(
        self, order: Order, /, *, batch_size: SupportsIndex, drop_last: bool = False
    ) -> None:
        """Take an order, the size of the global batch and what to do with a smaller last one."""
        batch_size = _validate.integer("batch_size", batch_size, minimum=1)
        self._order = check_order(order).for_batches(batch_size)
        self.drop_last = _validate.flag("drop_last", drop_last)
        dropped = len(order) % batch_size if self.drop_last else 0
        super().__init__(size=len(order) - dropped, batch_size=batch_size, seed=order.seed)

    def __repr__(self) -> str:
        """Say what an epoch is."""
        return f"BatchSampler({self._order!r}, {len(self):,} batches of {self.batch_size:,})"

    @property
    def num_records(self) -> int:
        """Size of the order's record id space."""
        return self._order.num_records

    @property
    def num_ids(self) -> int:
        """Size of the order's sample id space."""
        return self._order.num_ids

    def records(self, ids: Int64) -> Int64:
        """Return the record id of each sample id, as the order says."""
        return self._order.records(ids)

    def views(self, ids: Int64) -> Int64:
        """Return the view number of each sample id, as the order says."""
        return self._order.views(ids)

    def _draw(self, epoch: int, start: int, stop: int) -> Int64:
        return self._order._ids(epoch, self._positions(start, stop))

    def _parameters(self) -> dict[str, Any]:
        own = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        return {**own, **self._order.parameters()}
