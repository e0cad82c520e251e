"""Batches of records of similar cost, as many as fit a budget (bucketing by length)."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers._stream import BatchStream
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key, uniform_below
from twinfeed.samplers.state import digest
from twinfeed.samplers.types import Int64s


class BucketBatchSampler(BatchStream):
    """Batches of records of similar cost, filled up to a budget: sentences, clips, point clouds.

    The cost of a batch is its number of records times its largest cost, which is what padding
    makes of it. No batch costs more than the budget. Every record comes exactly once in an epoch,
    and every epoch has the same number of batches, in a random order.

    In each epoch a record moves up by at most `window` batches in the order of costs. So two
    records that share a batch share a batch of the next epoch with a chance of about 2 / (3 *
    window). A batch is made for the largest costs that the window may bring into it. So a wider
    window mixes better, and makes more batches, which counts most where there are few.

    Records of a batch lie anywhere in the shards. Over ranks, slices of a batch have equal counts
    if the ranks divide `multiple`, and equal costs only in the mean.

    Args:
        costs: one for each record, such as its number of tokens (integers of at least 1).
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
        cost_array = validate.counts("costs", costs, minimum=1)
        self._multiple = validate.integer("multiple", multiple, minimum=1)
        least = self._multiple * int(cost_array.max(initial=1))
        name = f"budget, for multiple={self._multiple} records of the largest cost,"
        self._budget = validate.integer(name, budget, minimum=least)
        self._records_by_cost = np.argsort(cost_array, kind="stable")  # the records by their costs
        sorted_costs = cost_array[self._records_by_cost]
        self._cost_sums = np.cumsum(sorted_costs)
        if window is None:
            window = min(8, (len(self._batch_bounds(sorted_costs, 0)) - 1) // 50)
        window = validate.integer("window", window, minimum=0)
        # In units of cost: a record's sum grows by a random number up to this.
        self._window = validate.integer("window * budget", window * self._budget, minimum=0)
        self._bounds = self._batch_bounds(sorted_costs, self._window)
        self._counts = np.diff(self._bounds)  # records of each batch
        self.num_records = len(cost_array)
        self.parameters = {
            "costs": digest(cost_array),
            "budget": self._budget,
            "multiple": self._multiple,
            "window": window,
        }
        seed = validate.seed(seed)
        self._keys = {use: root_key(seed, f"bucket {use}") for use in ("batch", "record", "place")}
        self._cache: FifoCache[Int64s] = FifoCache(3)
        largest = int(self._counts.max(initial=1))
        super().__init__(
            num_steps=len(self._counts), size=len(cost_array), batch_size=largest, seed=seed
        )
        self.size_divisor = int(np.gcd.reduce(self._counts))

    def _batch_bounds(self, costs: Int64s, window: int) -> Int64s:
        """Return where batches start and stop in the order of costs, int64[batches + 1].

        `costs` are the costs of all records (such as lengths), sorted. A batch costs its number of
        records times its largest cost, and is as large as the budget allows. All sizes but one are
        multiples of `multiple`. With costs 1 to 6, a budget of 12 and window 0, the bounds are
        0, 3, 5, 6: three records of cost 3 at most, two of 5 at most, and one of 6.

        Each epoch shuffles records of similar costs: it sorts them by the sum of all costs up to
        the record, plus a random number from 0 to `window`. So a position may get a record whose
        sum is up to `window` larger. The sums of costs 1 to 6 are 1 3 6 10 15 21: with a window of
        7, position 1 (sum 3) may get the records of sums up to 10, which cost 4 at most. No batch
        may be above the budget even then.
        """
        num_records, multiple = len(costs), self._multiple
        # The largest cost that a record at each position may have, in any epoch: that of the last
        # record whose sum is within the window.
        last = np.searchsorted(self._cost_sums, self._cost_sums + window, side="right") - 1
        max_costs = costs[last]
        remainder = num_records % multiple
        bounds = [0, remainder] if remainder else [0]  # the batch of another size comes first
        while bounds[-1] < num_records:
            start = bounds[-1]
            max_size = min(num_records - start, self._budget // int(max_costs[start]))
            sizes = np.arange(multiple, max_size + 1, multiple)
            # The largest cost grows with the size, so the sizes that fit come first.
            fits = max_costs[start + sizes - 1] <= self._budget // sizes
            bounds.append(start + multiple * int(fits.sum()))
        return np.array(bounds, np.int64)

    def __repr__(self) -> str:
        records = validate.counted(self.num_records, "record")
        batches = f"{validate.counted(len(self), 'batch')} of at most {self._budget:,}"
        options = f"multiple={self._multiple}, window={self._window // self._budget}"
        return f"BucketBatchSampler({records}, {batches}, {options})"

    def _batch_order(self, epoch: int) -> Int64s:
        """Return the random order of an epoch's batches, which are numbered by their costs."""
        key = derive(self._keys["batch"], epoch)
        return self._cache.get(epoch, lambda: permute(self._steps, key, np.arange(self._steps)))

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64s:
        return self._counts[self._batch_order(epoch)[start:stop]]

    def _samples_before(self, epoch: int, step: int) -> int:
        return epoch * self.num_records + int(self._sizes(epoch, 0, step).sum())

    def _draw(self, epoch: int, start: int, lows: Int64s, highs: Int64s) -> Int64s:
        batches = self._batch_order(epoch)[start : start + len(lows)].tolist()
        slices = zip(batches, lows, highs, strict=True)
        return np.concatenate([self._batch_records(epoch, n)[low:high] for n, low, high in slices])

    def _batch_records(self, epoch: int, number: int) -> Int64s:
        """Return the records of one batch of an epoch in random order, int64[n].

        `number` is the number of the batch in the order of costs. Each epoch sorts all records by
        the sum of all costs up to the record, plus a random number from 0 to the window. Batch i
        has the positions `bounds[i]` to `bounds[i + 1] - 1` of this order. Only the records that
        may come at these positions are sorted here. Say that the sums are 1 3 6 10 15 21, and the
        window is 7: the batch of positions 1 and 2 (sums 3 and 6) may have the records with sums
        from 3 - 7 to 6 + 7. Any record of a larger sum comes after all records up to position 2.
        """
        # `sums[i]` is the sum of all costs up to record `self._records_by_cost[i]`.
        sums, (start, stop) = self._cost_sums, self._bounds[number : number + 2]
        first = int(np.searchsorted(sums, sums[start] - self._window))
        end = int(np.searchsorted(sums, sums[stop - 1] + self._window, side="right"))
        candidates = self._records_by_cost[first:end]
        random = random_words(derive(self._keys["record"], epoch), candidates)
        sort_keys = sums[first:end] + uniform_below(random, self._window + 1)
        by_key = candidates[np.argsort(sort_keys, kind="stable")]
        # All `first` records of smaller sums come before position `start`. Without them, the batch
        # starts at position `start - first`.
        records = by_key[start - first : stop - first]
        # Shuffle the batch.
        random = random_words(derive(self._keys["place"], epoch), records)
        return records[np.argsort(random, kind="stable")]
