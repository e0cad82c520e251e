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

        A batch costs its number of records times its largest cost, and is as large as the budget
        allows. `costs` are the costs of all records (such as lengths), sorted. All batch sizes but
        one are multiples of `multiple`.

        No batch may be above the budget in any epoch. But each epoch shuffles records of similar
        costs: it sorts them by keys, the sum of all costs up to the record, plus a random number
        from 0 to `window`. So first find the largest cost that may come at each position.

        The comments have the values for costs 1 to 6, a budget of 12, `multiple` 1 and window 7.
        """
        num_records, multiple = len(costs), self._multiple
        # `_cost_sums` are [1, 3, 6, 10, 15, 21]. The keys of the first two records are at most
        # 3 + 7. A record with a sum above 10 comes after both, so it cannot come at position 1: the
        # last record that can is the one with the sum 10.
        last = np.searchsorted(self._cost_sums, self._cost_sums + window, side="right") - 1
        max_costs = costs[last]  # at each position: [3, 4, 4, 5, 6, 6]
        remainder = num_records % multiple
        bounds = [0, remainder] if remainder else [0]  # the batch of another size comes first
        while bounds[-1] < num_records:
            start = bounds[-1]  # 0, then 3, then 5
            # No batch from here on is larger, since all its costs may be at least the first.
            max_size = min(num_records - start, self._budget // int(max_costs[start]))  # 4
            sizes = np.arange(multiple, max_size + 1, multiple)  # [1, 2, 3, 4]
            # The largest cost of a batch of each size, and the cost that the budget allows:
            # [3, 4, 4, 5] and [12, 6, 4, 3]. The first three sizes fit.
            fits = max_costs[start + sizes - 1] <= self._budget // sizes
            bounds.append(start + multiple * int(fits.sum()))
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

        `number` is the number of the batch in the order of costs. Each epoch sorts all records by
        keys: the sum of all costs up to the record, plus a random number from 0 to the window. The
        batch has the positions `start` to `stop - 1` of this order.

        Only a few records can come there, and only these are sorted. With costs 1 to 6, the sums
        are 1 3 6 10 15 21. Say that the window is 4, and the batch has the positions 2 and 3, at
        which the sums are 6 and 10. The record with sum 1 has a key of at most 1 + 4. All records
        from sum 6 on have larger keys, so it comes before the batch. The first four records have
        keys of at most 10 + 4, so the records with the sums 15 and 21 come after the batch.
        """
        start, stop = self._bounds[number : number + 2]  # 2, 4
        sums = self._cost_sums  # up to each record, in the order of costs
        # The candidates are the records whose sums are at most a window away from the sums of the
        # batch: 3, 6 and 10. One record is before the candidates.
        num_before = int(np.searchsorted(sums, sums[start] - self._window))
        candidate_stop = int(np.searchsorted(sums, sums[stop - 1] + self._window, side="right"))
        candidates = self._records_by_cost[num_before:candidate_stop]
        random = random_words(derive(self._keys["record"], epoch), candidates)
        sort_keys = sums[num_before:candidate_stop] + uniform_below(random, self._window + 1)
        sorted_candidates = candidates[np.argsort(sort_keys, kind="stable")]
        # The candidates have the positions from `num_before` on: 1, 2 and 3.
        records = sorted_candidates[start - num_before : stop - num_before]
        # Shuffle the batch.
        random = random_words(derive(self._keys["place"], epoch), records)
        return records[np.argsort(random, kind="stable")]
