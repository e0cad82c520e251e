"""Decode once, use many crops: the random caching filter."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, derive, root_key
from twinfeed.samplers._lanes import MAX_LANES, Lanes, equal_bounds
from twinfeed.samplers._permutation import permute
from twinfeed.samplers._stream import FixedBatchStream


class ReuseBatchSampler(FixedBatchStream):
    """Use every record ``reuse`` times an epoch while it is live, never twice in a batch.

    A cache that drops a record after its use number ``reuse - 1`` keeps at most ``live`` of them,
    and decodes at most ``n + live - 1`` in an epoch: up to ``live - 1`` are met at both of its
    ends, dropped in between. After the first ``live`` new ones come steadily, about
    ``batch_size / reuse`` a batch. A sample id is ``record * reuse + use``: ``records`` and
    ``views`` take it apart, and the use number makes a crop reproducible.

    ``live`` must be a multiple of ``batch_size`` and at most n; the last batch may be smaller.

    Four records used twice, two live, as record.use; record 2 is met at both ends::

        step     0          1          2          3
        global   2.1 3.0    1.0 3.1    0.0 1.1    0.1 2.0

    >>> sampler = ReuseBatchSampler(4, batch_size=2, reuse=2, live=2, seed=0)
    >>> [sampler.records(ids).tolist() for ids in sampler]
    [[2, 3], [1, 3], [0, 1], [0, 2]]
    >>> sampler.views(sampler.batch(0, 0)).tolist()
    [1, 0]
    """

    def __init__(
        self,
        n: SupportsIndex,
        /,
        *,
        batch_size: SupportsIndex,
        reuse: SupportsIndex,
        live: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        """Take the number of records and the numbers above; ValueError where they do not fit."""
        self._n = _validate.integer("n", n, minimum=1)
        batch_size = _validate.integer("batch_size", batch_size, minimum=1)
        self._reuse = _validate.integer("reuse", reuse, minimum=1)
        self._live = _validate.integer("live", live, minimum=1, below=MAX_LANES)
        if self._live % batch_size or self._live > self._n:
            raise ValueError(
                f"live must be a multiple of batch_size and at most n, so that a batch holds no "
                f"record twice: got live={self._live}, batch_size={batch_size}, n={self._n}"
            )
        super().__init__(
            size=self._n * self._reuse, batch_size=batch_size, seed=_validate.seed(seed)
        )
        self._bounds, self._starts = _staggered(self._n, self._reuse, self._live)
        self._key = root_key(self._seed, "reuse")

    def __repr__(self) -> str:
        """Say what an epoch is."""
        return (
            f"ReuseBatchSampler({self._n:,} records x {self._reuse} uses, {self._live:,} live, "
            f"{len(self):,} batches of {self.batch_size:,})"
        )

    @property
    def num_records(self) -> int:
        """Size of the record id space, n."""
        return self._n

    @property
    def num_ids(self) -> int:
        """Size of the sample id space, n * reuse."""
        return self._n * self._reuse

    @property
    def live(self) -> int:
        """How many decoded records may be live at once."""
        return self._live

    @property
    def reuse(self) -> int:
        """How many uses an epoch makes of a record."""
        return self._reuse

    def records(self, ids: Int64) -> Int64:
        """Return ``ids // reuse``."""
        return np.asarray(ids, dtype=np.int64) // self._reuse

    def views(self, ids: Int64) -> Int64:
        """Return the use numbers, ``ids % reuse``."""
        return np.asarray(ids, dtype=np.int64) % self._reuse

    def _draw(self, epoch: int, start: int, stop: int) -> Int64:
        key = derive(self._key, epoch)
        lanes = Lanes(self._bounds, self._starts, key=derive(key, 0), renew=True)
        turn, use = np.divmod(lanes.places(self._positions(start, stop)), self._reuse)
        return permute(self._n, derive(key, 1), turn) * self._reuse + use

    def _parameters(self) -> dict[str, Any]:
        return {
            "n": self._n,
            "batch_size": self.batch_size,
            "reuse": self._reuse,
            "live": self._live,
        }


def _staggered(n: int, reuse: int, live: int) -> tuple[Int64, Int64]:
    """Return lane bounds and starts such that records are replaced one after another.

    Bounds that fall between two records divide the lanes into chains. The lanes of a chain
    change records in rounds evenly spaced, all chains in the same ones: so each chain begins a
    little after the one before. A record cut by a bound within a chain stays live as it passes
    from lane to lane.
    """
    bounds = equal_bounds(n * reuse, live)
    heads = np.flatnonzero(bounds[:-1] % reuse == 0)
    spacing = np.gcd(np.diff(bounds)[heads], reuse)
    delay = np.empty_like(heads)
    for space in np.unique(spacing):
        alike = spacing == space
        delay[alike] = np.arange(alike.sum()) * space // alike.sum()
    return bounds, np.repeat(delay, np.diff(np.append(heads, live)))
