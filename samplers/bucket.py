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
        """Divide the records, sorted by cost, into batches within the budget; return the bounds.

        A batch costs its number of records times its largest cost. From the cheapest record on,
        each batch takes as many records as the budget allows. `costs` are sorted.

        The bounds are the same in all epochs, but each epoch sorts the records anew: by a key,
        which is the sum of all costs up to the record, plus a random number from 0 to `window`. So
        calculate with the largest cost that a position can have in any epoch. For costs 1 to 6, a
        budget of 12 and window 7::

            position        0    1    2    3    4    5
            sum of costs    1    3    6    10   15   21    the lowest key
            highest key     8    10   13   17   22   28
            largest cost    3    4    4    5    6    6
            batch           0    0    0    1    1    2

        Records 0 and 1 have keys up to 10. The records with the sums 15 and 21 come after both, so
        position 1 has at most the cost 4, which is that of the record with the sum 10.
        """
        num_records, multiple = len(costs), self._multiple
        # The last record that can come at each position: [2, 3, 3, 4, 5, 5].
        last = np.searchsorted(self._cost_sums, self._cost_sums + window, side="right") - 1
        max_costs = costs[last]  # at each position: [3, 4, 4, 5, 6, 6]
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
            # [12, 6, 4, 3]. So the first three sizes fit.
            fits = max_costs[start + sizes - 1] <= self._budget // sizes  # [1, 1, 1, 0]
            bounds.append(start + multiple * int(fits.sum()))  # 0 + 3
        return np.array(bounds, np.int64)  # [0, 3, 5, 6]

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

        A batch has records of similar cost, which are others in each epoch. Each epoch sorts all
        records by a key: the sum of all costs up to the record, plus a random number from 0 to the
        window. Batch `number` has the positions `start` to `stop - 1` of this order. With costs 1
        to 6 and a window of 4, the batch of the positions 2 and 3::

            record           0    1    2    3    4    5
            sum of costs     1    3    6    10   15   21    the lowest key
            highest key      5    7    10   14   19   25

        Only the candidates 1, 2 and 3 are sorted. Record 0 is always before the batch, since its
        key is below all keys from record 2 on. Records 4 and 5 are always after it, since their
        keys are above the keys of records 0 to 3.
        """
        start, stop = self._bounds[number : number + 2]  # 2, 4
        sums = self._cost_sums  # [1, 3, 6, 10, 15, 21]
        # The candidates have sums from 6 - 4 to 10 + 4.
        num_before = int(np.searchsorted(sums, sums[start] - self._window))  # 1
        candidate_stop = int(np.searchsorted(sums, sums[stop - 1] + self._window, side="right"))
        candidates = self._records_by_cost[num_before:candidate_stop]  # [1, 2, 3]
        # Add random numbers, such as [4, 0, 2], to the sums [3, 6, 10], and sort by the results.
        random = random_words(derive(self._keys["record"], epoch), candidates)
        sort_keys = sums[num_before:candidate_stop] + uniform_below(random, self._window + 1)
        sorted_candidates = candidates[np.argsort(sort_keys, kind="stable")]  # [2, 1, 3]
        # Positions 2 and 3 are the indices 1 and 2 here, as one record is before the candidates.
        records = sorted_candidates[start - num_before : stop - num_before]  # [1, 3]
        # Shuffle the batch.
        random = random_words(derive(self._keys["place"], epoch), records)
        return records[np.argsort(random, kind="stable")]
