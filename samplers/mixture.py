"""Several streams mixed in exact proportion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, root_key
from twinfeed.samplers._pattern import Pattern
from twinfeed.samplers._stream import FixedBatchStream
from twinfeed.samplers.orders import Order, check_order, nested_parameters

_LONGEST = 1 << 24  # turns of a period, which are kept as a table


class MixtureSampler(FixedBatchStream):
    """Mix orders by integer weights, exactly so in every ``sum(weights)`` consecutive samples.

    Weights are divided by what divides all of them: 50 and 50 are 1 and 1. Then they sum to at
    most 2^24, the entries of a table of some bytes each.

    Each order goes through epochs of its own, one after the other, whatever the epoch of the
    mixture; ``batches_per_epoch`` says how long that is. Ids are numbered order by order, the
    second one's after the first one's, as records are in a joined index: ``records`` agrees.

    Weights 2 and 1, three records (0 1 2) and two (3 4), batches of three: two of the first and
    one of the second each, and the first begins again after three of its own::

        step      0        1        2
        global    0 3 2    1 4 1    2 4 0

    >>> from twinfeed.samplers import RandomSampler
    >>> first, second = RandomSampler(3, seed=0), RandomSampler(2, seed=1)
    >>> stream = MixtureSampler(
    ...     [first, second], weights=[2, 1], batch_size=3, batches_per_epoch=3, seed=0
    ... )
    >>> [ids.tolist() for ids in stream]
    [[0, 3, 2], [1, 4, 1], [2, 4, 0]]
    """

    drop_last = True

    def __init__(
        self,
        orders: Sequence[Order],
        /,
        *,
        weights: ArrayLike,
        batch_size: SupportsIndex,
        batches_per_epoch: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        """Take the orders, none of them empty, and one weight of at least 1 for each."""
        self._orders = [check_order(order, name="each of orders") for order in orders]
        empty = [order for order in self._orders if not len(order)]
        if not self._orders or empty:
            raise ValueError(f"orders must hold one at least, none of them empty, got {orders!r}")
        self._weights = _reduced(_validate.counts("weights", weights, minimum=1))
        if len(self._weights) != len(self._orders):
            raise ValueError(
                f"weights must be as many as orders, {len(self._orders)}, got {len(self._weights)}"
            )
        batch_size = _validate.integer("batch_size", batch_size, minimum=1)
        steps = _validate.integer("batches_per_epoch", batches_per_epoch, minimum=1)
        super().__init__(size=steps * batch_size, batch_size=batch_size, seed=_validate.seed(seed))
        self._pattern = Pattern(self._weights, root_key(self._seed, "mixture"))
        self._id_bounds = _bounds([order.num_ids for order in self._orders])
        self._record_bounds = _bounds([order.num_records for order in self._orders])

    def __repr__(self) -> str:
        """Say what an epoch is."""
        mixed = ", ".join(
            f"{weight} x {order!r}"
            for weight, order in zip(self._weights.tolist(), self._orders, strict=True)
        )
        return f"MixtureSampler({mixed}, {len(self):,} batches of {self.batch_size:,})"

    @property
    def num_records(self) -> int:
        """Size of the record id space: the sum over the orders."""
        return int(self._record_bounds[-1])

    @property
    def num_ids(self) -> int:
        """Size of the sample id space, that of all orders together."""
        return int(self._id_bounds[-1])

    def records(self, ids: Int64) -> Int64:
        """Return the record of each sample id in the joined index."""
        return self._by_order(ids, lambda order, own: order.records(own), self._record_bounds)

    def views(self, ids: Int64) -> Int64:
        """Return the view number of each sample id."""
        offsets = np.zeros_like(self._record_bounds)
        return self._by_order(ids, lambda order, own: order.views(own), offsets)

    def _by_order(self, ids: Int64, ask: Callable[[Order, Int64], Int64], offsets: Int64) -> Int64:
        """Ask each order about its own ids."""
        ids = np.asarray(ids, dtype=np.int64)
        stream = np.searchsorted(self._id_bounds, ids, side="right") - 1
        out = np.empty(ids.shape, np.int64)
        for number in np.unique(stream).tolist():
            mine = stream == number
            answer = ask(self._orders[number], ids[mine] - self._id_bounds[number])
            out[mine] = offsets[number] + answer
        return out

    def _draw(self, epoch: int, start: int, stop: int) -> Int64:
        stream, count = self._pattern.turns(epoch * self._size + self._positions(start, stop))
        out = np.empty(stream.shape, np.int64)
        for number in np.unique(stream).tolist():
            mine = stream == number
            lap, position = np.divmod(count[mine], len(self._orders[number]))
            ids = np.empty(lap.shape, np.int64)
            for own_epoch in np.unique(lap).tolist():
                now = lap == own_epoch
                ids[now] = self._orders[number]._ids(own_epoch, position[now])
            out[mine] = self._id_bounds[number] + ids
        return out

    def _parameters(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "weights": self._weights.tolist(),
            "orders": [nested_parameters(order) for order in self._orders],
        }


def _reduced(weights: Int64) -> Int64:
    """Return weights without their common divisor; ValueError where their sum is too long still."""
    reduced: Int64 = weights // np.gcd.reduce(weights)
    total = int(reduced.sum())
    if total > _LONGEST:
        rounded = np.rint(reduced * (1000 / total)).astype(np.int64).clip(1)
        raise ValueError(
            f"weights must sum to at most {_LONGEST:,} without their common divisor, got "
            f"{total:,}: give rounded weights such as {rounded.tolist()}"
        )
    return reduced


def _bounds(sizes: list[int]) -> Int64:
    """Return where the ids of each order begin, and where those of the last one end."""
    return np.cumsum([0, *_validate.counts("sizes of orders", sizes, minimum=0)])
