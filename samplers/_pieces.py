"""Many orders at once: a piece of each is drawn ahead, as a call for each sample is too slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinfeed.samplers._bits import Int64, distinct_pairs
from twinfeed.samplers.orders import Order

_PIECE = 64  # consecutive samples of one order


class Pieces:
    """Give samples of orders by their number since the start, through epochs of each order's own.

    The latest piece of each order is kept. What is kept changes how fast samples come, never which.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = orders
        self._kept: dict[int, tuple[int, Int64]] = {}  # by order: the piece's number and its ids

    def __reduce__(self) -> tuple[type[Pieces], tuple[Sequence[Order]]]:
        """Pickle without the pieces."""
        return type(self), (self._orders,)

    def ids(self, order: Int64, count: Int64) -> Int64:
        """Return the own sample ids of orders, after each gave `count` samples; all int64[n]."""
        if not len(order):
            return order
        piece, place = np.divmod(count, _PIECE)
        first, row = distinct_pairs(order, piece)
        wanted = zip(order[first].tolist(), piece[first].tolist(), strict=True)
        return np.stack([self._piece(*pair) for pair in wanted])[row, place]

    def _piece(self, order: int, piece: int) -> Int64:
        """Return the ids of a piece, drawn if need be."""
        kept = self._kept.get(order)
        if kept is None or kept[0] != piece:
            ids = self._drawn(self._orders[order], piece * _PIECE + np.arange(_PIECE))
            kept = self._kept[order] = piece, ids
        return kept[1]

    def _drawn(self, order: Order, count: Int64) -> Int64:
        """Draw consecutive samples of an order, epoch by epoch."""
        lap, position = np.divmod(count, len(order))
        cuts = np.flatnonzero(np.diff(lap)) + 1
        runs = zip(np.split(lap, cuts), np.split(position, cuts), strict=True)
        return np.concatenate([order._ids(int(laps[0]), places) for laps, places in runs])
