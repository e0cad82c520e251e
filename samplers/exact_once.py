"""Every record exactly once, for evaluation."""

from __future__ import annotations

from typing import Any, SupportsIndex

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64
from twinfeed.samplers._stream import FixedBatchStream


class ExactOnceBatchSampler(FixedBatchStream):
    """Give the ids ``0 … n - 1`` in stored order, each exactly once over all ranks and steps.

    Nothing is repeated and nothing dropped, and every rank has the same number of steps, so
    that no collective waits for ever. The last batch is smaller (``final="smaller"``: a rank
    may get an empty int64[0]) or padded with -1 to ``batch_size`` (``final="pad"``: the loader
    gives a mask). Zero records are zero steps. ``seed`` is for augmentation seeds alone.

    Five records, batches of four, two ranks::

        step             0            1 "smaller"    1 "pad"
        global           0 1 2 3      4              4 -1 -1 -1
        rank 0           0 1          4              4 -1
        rank 1               2 3      (empty)             -1 -1

    >>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=4).shard(1, 2)]
    [[2, 3], []]
    >>> [ids.tolist() for ids in ExactOnceBatchSampler(5, batch_size=4, final="pad")]
    [[0, 1, 2, 3], [4, -1, -1, -1]]
    """

    def __init__(
        self,
        n: SupportsIndex,
        /,
        *,
        batch_size: SupportsIndex,
        final: str = "smaller",
        seed: SupportsIndex = 0,
    ) -> None:
        """Take the number of records, the size of the global batch and the last one's rule."""
        self._n = _validate.integer("n", n, minimum=0)
        batch_size = _validate.integer("batch_size", batch_size, minimum=1)
        self._final = _validate.choice("final", final, ("smaller", "pad"))
        padding = -self._n % batch_size if self._final == "pad" else 0
        super().__init__(size=self._n + padding, batch_size=batch_size, seed=_validate.seed(seed))

    def __repr__(self) -> str:
        """Say what an epoch is."""
        return (
            f"ExactOnceBatchSampler({self._n:,} records once, {len(self):,} batches of "
            f"{self.batch_size:,}, final={self._final!r})"
        )

    @property
    def num_records(self) -> int:
        """Size of the record id space, n."""
        return self._n

    @property
    def padded(self) -> bool:
        """Whether the last batch may hold -1."""
        return self._final == "pad"

    def _draw(self, epoch: int, start: int, stop: int) -> Int64:
        ids = self._positions(start, stop)
        ids[ids >= self._n] = -1
        return ids

    def _parameters(self) -> dict[str, Any]:
        return {"n": self._n, "batch_size": self.batch_size, "final": self._final}
