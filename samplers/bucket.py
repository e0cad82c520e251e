"""Batches of one budget: records of similar cost, as many as fit."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers._stream import BatchStream
from twinfeed.samplers.drawing.fifo_cache import Recent
from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import below, derive, root_key, words
from twinfeed.samplers.state import digest


class BucketBatchSampler(BatchStream):
    """Fill each batch up to a budget with records of similar cost: sentences, clips, point clouds.

    The cost of a batch is its number of records times its largest cost, which is what padding
    makes of it. No batch costs more than the budget. Every record comes exactly once in an epoch,
    and every epoch has the same number of batches, in a random order.

    In each epoch a record moves up by at most `window` batches in the order of costs. So two
    records that share a batch share a batch of the next epoch with a chance of about 2 / (3 *
    window). A batch is cut for the largest costs that the window may bring into it. So a wider
    window mixes better, and makes more batches, which counts most where there are few.

    Records of a batch lie anywhere in the shards. Over ranks, slices of a batch have equal counts
    if the ranks divide `multiple`, and equal costs only in the mean.

    Args:
        costs: one a record, such as its number of tokens (integers of at least 1).
        budget: the most that a batch costs.
        multiple: the number of records in a batch is a multiple of this, except in one batch of an
            epoch, which has the remainder.
        seed: the only source of chance.
        window: by how many batches a record moves at most. Default: 8, or a fiftieth of the
            batches if these are fewer than 400. With 0, batches are the same in every epoch.

    Raises:
        ValueError: a budget below `multiple` times the largest cost, costs below 1.

    Costs of 1 to 6 and a budget of 12: three records of at most 3 fit, and two of at most 6.

    >>> stream = BucketBatchSampler([1, 2, 3, 4, 5, 6], budget=12, seed=0)
    >>> [ids.tolist() for ids in stream]
    [[5], [1, 0, 2], [4, 3]]
    """

    def __init__(
        self,
        costs: ArrayLike,
        /,
        *,
        budget: SupportsIndex,
        multiple: SupportsIndex = 1,
        seed: SupportsIndex,
        window: SupportsIndex | None = None,
    ) -> None:
        given = validate.counts("costs", costs, minimum=1)
        self._multiple = validate.integer("multiple", multiple, minimum=1)
        least = self._multiple * int(given.max(initial=1))
        of = f"budget, for multiple={self._multiple} records of the largest cost,"
        self._budget = validate.integer(of, budget, minimum=least)
        self._order = np.argsort(given, kind="stable")  # the records by their costs
        rising = given[self._order]
        self._sums = np.cumsum(rising)  # where each record ends, in units of cost
        if window is None:
            window = min(8, (len(self._cut(rising, 0)) - 1) // 50)
        moves = validate.integer("window", window, minimum=0)
        self._window = validate.integer("window * budget", moves * self._budget, minimum=0)
        self._cuts = self._cut(rising, self._window)
        self._counts = np.diff(self._cuts)
        self.num_records = len(given)
        self.parameters = {
            "costs": digest(given),
            "budget": self._budget,
            "multiple": self._multiple,
            "window": moves,
        }
        seed = validate.seed(seed)
        self._keys = {of: root_key(seed, f"bucket {of}") for of in ("batch", "record", "place")}
        self._recent: Recent[Int64] = Recent(3)
        largest = int(self._counts.max(initial=1))
        super().__init__(
            num_steps=len(self._counts), size=len(given), batch_size=largest, seed=seed
        )
        self._even = bool((self._counts == largest).all())

    def divisible(self, by: int, /) -> bool:
        return not (self._counts % by).any()

    def _cut(self, costs: Int64, window: int) -> Int64:
        """Return where each batch ends in the order of costs, if records move up by `window`."""
        n, multiple = len(costs), self._multiple
        last = np.searchsorted(self._sums, self._sums + window, side="right") - 1
        most = costs[last]  # the largest cost that may come to each place
        cuts = [0, n % multiple] if n % multiple else [0]
        while cuts[-1] < n:
            start = cuts[-1]
            fits = self._budget // int(most[start])
            counts = np.arange(multiple, min(n - start, fits) + 1, multiple)
            fitting = most[start + counts - 1] <= self._budget // counts  # the cost grows with both
            cuts.append(start + multiple * int(fitting.sum()))
        return np.array(cuts, np.int64)

    def __repr__(self) -> str:
        records = validate.counted(self.num_records, "record")
        batches = f"{validate.counted(len(self), 'batch')} of at most {self._budget:,}"
        moves = f"multiple={self._multiple}, window={self._window // self._budget}"
        return f"BucketBatchSampler({records}, {batches}, {moves})"

    def _numbers(self, epoch: int) -> Int64:
        """Return the batches of an epoch in their order, by their numbers in the order of costs."""
        key = derive(self._keys["batch"], epoch)
        return self._recent.get(epoch, lambda: permute(self._steps, key, np.arange(self._steps)))

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64:
        return self._counts[self._numbers(epoch)[start:stop]]

    def _given(self, epoch: int, step: int) -> int:
        return epoch * self.num_records + int(self._sizes(epoch, 0, step).sum())

    def _draw(self, epoch: int, start: int, lows: Int64, highs: Int64) -> Int64:
        numbers = self._numbers(epoch)[start : start + len(lows)].tolist()
        drawn = zip(numbers, lows, highs, strict=True)
        return np.concatenate([self._batch(epoch, one)[low:high] for one, low, high in drawn])

    def _batch(self, epoch: int, number: int) -> Int64:
        """Return the records of a batch by its number in the order of costs.

        Each record moves up by less than a window. So the records at some places are among those
        whose sums lie within a window of the places' sums, and only these are sorted.
        """
        sums, first, last = self._sums, self._cuts[number], self._cuts[number + 1]
        low = int(np.searchsorted(sums, sums[first] - self._window))
        high = int(np.searchsorted(sums, sums[last - 1] + self._window, side="right"))
        ids = self._order[low:high]
        moved = below(words(derive(self._keys["record"], epoch), ids), self._window + 1)
        ids = ids[np.argsort(sums[low:high] + moved, kind="stable")[first - low : last - low]]
        return ids[np.argsort(words(derive(self._keys["place"], epoch), ids), kind="stable")]
