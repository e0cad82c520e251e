"""Batches of records of similar cost, as many as fit a budget (bucketing by length)."""

from __future__ import annotations

from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.batch_stream import BatchStream
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key, uniform_below
from twinfeed.samplers.state import digest
from twinfeed.samplers.types import Bools, Int64s


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
    >>> list(stream)
    [[5], [1, 0, 2], [4, 3]]
    """

    @validate.show_call("BucketBatchSampler(costs, budget=4096, seed=0)")
    def __init__(
        self,
        costs: ArrayLike,
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
            num_batches = len(self._batch_bounds(sorted_costs)) - 1  # if no record moved
            window = min(8, num_batches // 50)
        window = validate.integer("window", window, minimum=0)
        # In units of cost: a record's sum grows by a random number up to this.
        self._window = validate.integer("window * budget", window * self._budget, minimum=0)
        max_costs = _largest_costs(sorted_costs, self._cost_sums, self._window)
        self._bounds = self._batch_bounds(max_costs)
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

    def _are_alike(self, bad: Int64s, good: Int64s) -> Bools:
        """Return whether records have equal costs, so that no batch is above its budget."""
        costs = np.empty_like(self._cost_sums)
        costs[self._records_by_cost] = np.diff(self._cost_sums, prepend=0)
        return np.equal(costs[bad], costs[good])

    def _batch_bounds(self, max_costs: Int64s) -> Int64s:
        """Divide records that are sorted by cost into batches within the budget; return the bounds.
        The comments have the largest costs 3 4 4 5 6 6 at the positions, and a budget of 12: [0, 3,
        5, 6].
        """
        num_records, multiple = len(max_costs), self._multiple
        # All batch sizes are multiples of `multiple`, which is 1 in the example. Only the first
        # batch may have another size, the remainder.
        remainder = num_records % multiple  # 0
        bounds = [0, remainder] if remainder else [0]
        while bounds[-1] < num_records:
            start = bounds[-1]  # 0, then 3, then 5; the comments below are for 0
            # The batch would have this size if all its costs were the first one, the smallest.
            max_size = min(num_records - start, self._budget // int(max_costs[start]))  # 12 // 3
            sizes = np.arange(multiple, max_size + 1, multiple)  # to try: [1, 2, 3, 4]
            # The largest cost of a batch of each size is [3, 4, 4, 5], and the budget allows
            # [12, 6, 4, 3]. So the first three sizes fit. (The first size always fits.)
            fits = max_costs[start + sizes - 1] <= self._budget // sizes
            bounds.append(start + multiple * int(fits.sum()))  # 0 + 3
        return np.array(bounds, np.int64)

    def _describe(self) -> str:
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
        """Return the records of batch `number` of an epoch, in random order, int64[n]."""
        start, stop = self._bounds[number : number + 2]
        records = self._records_at(epoch, start, stop)
        # Shuffle them: sort by random words.
        random = random_words(derive(self._keys["place"], epoch), records)
        return records[np.argsort(random, kind="stable")]

    def _records_at(self, epoch: int, start: int, stop: int) -> Int64s:
        """Return the records at the positions `start` to `stop - 1` of an epoch's order: by the sum
        of all costs up to a record's own, plus a random shift. Only the candidates are sorted.
        """
        first, last = self._candidate_range(start, stop)
        candidates = self._records_by_cost[first : last + 1]
        random = random_words(derive(self._keys["record"], epoch), candidates)
        sort_keys = self._cost_sums[first : last + 1] + uniform_below(random, self._window + 1)
        sorted_candidates = candidates[np.argsort(sort_keys, kind="stable")]
        # The `first` records of smaller costs have the positions before the candidates.
        return sorted_candidates[start - first : stop - first]

    def _candidate_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first and last record, in the order of costs, that may come at these
        positions: its keys, the sum of costs and that plus the window, overlap theirs.
        """
        sums = self._cost_sums
        first = np.searchsorted(sums, sums[start] - self._window)
        last = np.searchsorted(sums, sums[stop - 1] + self._window, side="right") - 1
        return int(first), int(last)


def _largest_costs(costs: Int64s, cost_sums: Int64s, window: int) -> Int64s:
    """Return the largest cost that may come at each position in any epoch, int64[records].

    A record's key is from the sum of costs to that plus the window. With costs 1 to 6 and window 7,
    two records have keys of at most 10, so position 1 has one of at most 10: record 3 at most, of
    cost 4::

        record          0    1    2    3    4    5
        lowest key      1    3    6    10   15   21    the sum of costs
        highest key     8    10   13   17   22   28
        largest cost    3    4    4    5    6    6     at this position
    """
    last_record = np.searchsorted(cost_sums, cost_sums + window, side="right") - 1
    return costs[last_record]
