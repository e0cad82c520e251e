"""Several streams mixed in exact proportion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, distinct_pairs, root_key
from twinfeed.samplers._fair import Pattern
from twinfeed.samplers._memo import Recent
from twinfeed.samplers.orders import Order, check_order

_LONGEST = 1 << 24  # turns of a period, which are kept as a table
_PIECE = 64  # consecutive samples of one order, drawn at once: a call for each is too slow


class MixtureSampler(Order):
    """Mix orders by integer weights, exactly so in every `sum(weights)` consecutive samples.

    Weights are divided by their common divisor: 50 and 50 are 1 and 1. The divided weights sum to
    at most 2^24, as the mixture keeps a table with so many entries of some bytes each.

    Each order goes through epochs of its own, one after the other. An epoch of the mixture has
    `num_samples`, and the next epoch goes on after them. Ids are numbered order by order, like the
    records of a joined index: the ids of the second order begin after the ids of the first order.

    Weights 2 and 1, three records (0 1 2) and two (3 4), nine samples an epoch. Two of
    three samples are of the first order, which begins again after three of its own::

        stream    0 3 2  1 4 1  2 4 0

    Raises ValueError for an empty order, and for an order that reuses records.

    >>> import numpy as np
    >>> from twinfeed.samplers import RandomSampler
    >>> first, second = RandomSampler(3, seed=0), RandomSampler(2, seed=1)
    >>> order = MixtureSampler([first, second], weights=[2, 1], num_samples=9, seed=0)
    >>> order.ids(0, np.arange(9)).tolist()
    [0, 3, 2, 1, 4, 1, 2, 4, 0]
    """

    repeats = True

    def __init__(
        self,
        orders: Sequence[Order],
        /,
        *,
        weights: ArrayLike,
        num_samples: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        self._orders = [check_order(order, name="each of orders") for order in orders]
        empty = [order for order in self._orders if not len(order)]
        if not self._orders or empty:
            raise ValueError(f"orders must hold one at least, none of them empty, got {orders!r}")
        reusing = [order for order in self._orders if order.live is not None]
        if reusing:
            raise ValueError(
                f"orders must not reuse records, as other samples come between the uses, "
                f"got {reusing[0]!r}"
            )
        self._weights = _reduced(_validate.counts("weights", weights, minimum=1))
        if len(self._weights) != len(self._orders):
            raise ValueError(
                f"weights must be as many as orders, {len(self._orders)}, got {len(self._weights)}"
            )
        self._samples = _validate.integer("num_samples", num_samples, minimum=1)
        self.seed = _validate.seed(seed)
        self._parameters = {
            "num_samples": self._samples,
            "weights": self._weights.tolist(),
            "orders": self._orders,
        }
        self._pattern = Pattern(self._weights, root_key(self.seed, "mixture"))
        self.in_blocks = any(order.in_blocks for order in self._orders)
        self._recent: list[Recent[Int64]] = [Recent(1) for _ in self._orders]  # a piece of each
        self._id_bounds = _bounds([order.num_ids for order in self._orders])
        self._record_bounds = _bounds([order.num_records for order in self._orders])
        self._num_ids, self.num_records = int(self._id_bounds[-1]), int(self._record_bounds[-1])

    def __len__(self) -> int:
        return self._samples

    def __repr__(self) -> str:
        mixed = ", ".join(
            f"{weight} x {order!r}"
            for weight, order in zip(self._weights.tolist(), self._orders, strict=True)
        )
        return f"MixtureSampler({mixed}, {_validate.counted(self._samples, 'sample')})"

    def records(self, ids: Int64) -> Int64:
        """Return the record of each sample id in the joined index."""
        return self._by_order(ids, lambda order, own: order.records(own), self._record_bounds)

    def views(self, ids: Int64) -> Int64:
        offsets = np.zeros_like(self._record_bounds)
        return self._by_order(ids, lambda order, own: order.views(own), offsets)

    def spans(self, records: Int64) -> tuple[Int64, Int64]:
        """Return the range of records around each record, as its order says."""
        records = np.asarray(records, dtype=np.int64)
        stream = np.searchsorted(self._record_bounds, records, side="right") - 1
        first, stop = np.empty_like(records), np.empty_like(records)
        for number in np.unique(stream).tolist():
            mine, offset = stream == number, self._record_bounds[number]
            begin, end = self._orders[number].spans(records[mine] - offset)
            first[mine], stop[mine] = begin + offset, end + offset
        return first, stop

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

    def _ids(self, epoch: int, positions: Int64) -> Int64:
        if not len(positions):
            return positions
        stream, count = self._pattern.turns(epoch * self._samples + positions)
        piece, place = np.divmod(count, _PIECE)
        first, row = distinct_pairs(stream, piece)
        pieces = [
            self._recent[of].get(number, lambda: _drawn(self._orders[of], number))  # noqa: B023
            for of, number in zip(stream[first].tolist(), piece[first].tolist(), strict=True)
        ]
        own: Int64 = np.stack(pieces)[row, place]
        return self._id_bounds[stream] + own


def _drawn(order: Order, piece: int) -> Int64:
    """Draw consecutive samples of an order, epoch by epoch."""
    lap, position = np.divmod(piece * _PIECE + np.arange(_PIECE), len(order))
    cuts = np.flatnonzero(np.diff(lap)) + 1
    runs = zip(np.split(lap, cuts), np.split(position, cuts), strict=True)
    return np.concatenate([order._ids(int(laps[0]), places) for laps, places in runs])


def _reduced(weights: Int64) -> Int64:
    """Return weights without their common divisor; ValueError where the sum is still too large."""
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
    """Return where the ids of each order begin, and where the ids of the last order end."""
    return np.cumsum([0, *_validate.counts("sizes of orders", sizes, minimum=0)])
