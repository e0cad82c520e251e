"""Samples that use each decoded record several times, from a bounded cache of decoded records."""

from __future__ import annotations

from collections.abc import Sized
from typing import SupportsIndex

import numpy as np

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.drawing.round_robin import MAX_SEGMENTS, ShuffledRoundRobin, equal_bounds
from twinfeed.samplers.orders import Sampler
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Int64s

# How to draw from some of the records: the advice in an error.
_SUBSET_CALL = "SubsetSampler(ids, of=len(index), order=ReuseSampler(len(ids), …))"


class ReuseSampler(Sampler):
    """Every record `reuse` times an epoch, while it is in the cache, never twice in a batch.

    A cache that drops a record after its use number `reuse - 1` keeps at most `live` records. The
    cache decodes at most `n + live - 1` records in an epoch: up to `live - 1` are used at both ends
    of the epoch, and dropped in between. After the first `live`, new records come steadily, about
    one in `reuse` samples.

    A sample id is `record * reuse + use`, where `use` counts the uses of a record in an epoch, from
    0 on. `records` and `views` take a sample id apart, and the use makes a crop reproducible.

    Args:
        n: number of records, or a dataset, an index or a source, of which only the length is kept.
        reuse: uses of a record in an epoch.
        live: the records in the cache: at most n, and a multiple of the batch size.
        seed: the only source of chance.

    Raises:
        ValueError: `live` is above n.

    Four records used twice, two live, as record.use; record 2 is used at both ends::

        stream   2.1 3.0 1.0 3.1 0.0 1.1 0.1 2.0

    >>> from twinfeed.samplers import BatchSampler
    >>> sampler = BatchSampler(ReuseSampler(4, reuse=2, live=2, seed=0), batch_size=2)
    >>> [sampler.records(ids).tolist() for ids in sampler.batches(0, 0, 4)]
    [[2, 3], [1, 3], [0, 1], [0, 2]]
    >>> sampler.views(sampler.batch(0, 0)).tolist()
    [1, 0]
    """

    def __init__(
        self,
        n: SupportsIndex | Sized,
        /,
        *,
        reuse: SupportsIndex,
        live: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        n = self.num_records = validate.record_count("n", n, subset=_SUBSET_CALL, minimum=1)
        reuse = self._reuse = validate.integer("reuse", reuse, minimum=1)
        live = self._live = validate.integer("live", live, minimum=1, below=MAX_SEGMENTS)
        if live > n:
            raise ValueError(f"live must be at most n, got live={live}, n={n}")
        samples = validate.integer("samples of an epoch", n * reuse, minimum=1)
        self.traits = SamplerTraits(num_ids=samples, max_cached=live, uses=reuse)
        self.seed = validate.seed(seed)
        self.parameters = {"n": n, "reuse": reuse, "live": live}
        self._bounds, self._first_rounds = _staggered_segments(n, reuse, live)
        self._key = root_key(self.seed, "reuse")
        self._cache: FifoCache[ShuffledRoundRobin] = FifoCache(2)

    def __repr__(self) -> str:
        return (
            f"ReuseSampler({validate.counted(self.num_records, 'record')} x "
            f"{validate.counted(self._reuse, 'use')}, {self._live:,} live, seed={self.seed})"
        )

    def for_batches(self, batch_size: int, num_steps: int) -> Sampler:
        """Return this sampler, or raise ValueError if a batch could hold a record twice.

        `BatchSampler` calls this for the sampler that it divides into batches. The cache holds
        `live` records at a time. The samples come in rounds of `live` samples, which are of
        different records. With live=4, a batch of 2 is within a round. But of batches of 3, the
        second has the end of a round and the start of the next, which may have the same record.
        """
        if self._live % batch_size:
            raise ValueError(
                f"live must be a multiple of batch_size, so that a batch holds no record twice: "
                f"got live={self._live}, batch_size={batch_size}"
            )
        return self

    def records(self, ids: Int64s) -> Int64s:
        """Return `ids // reuse`."""
        return np.asarray(ids, dtype=np.int64) // self._reuse

    def views(self, ids: Int64s) -> Int64s:
        """Return which use of its record each sample is, from 0 on: `ids % reuse`."""
        return np.asarray(ids, dtype=np.int64) % self._reuse

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the sample ids `record * reuse + use` at these positions, int64[positions].

        All uses of all records are one sequence: the records in random order, each `reuse` times in
        a row. So that the uses of a record are in different batches, the sequence is divided into
        segments, and each round takes the next use of every segment (round-robin). Here 4 records
        are used 3 times each, in 2 segments. In the table 2.0 is use 0 of record 2::

            round       0    1    2    3    4    5
            segment 0   0.0  0.1  0.2  1.0  1.1  1.2
            segment 1   3.2  2.0  2.1  2.2  3.0  3.1

        So that few records are decoded at once, the segments reach new records in different rounds:
        here the start of segment 1 is read in round 1, and its end in round 0. In general segment i
        starts at `_bounds[i]`, and its start is read in round `_first_rounds[i]`.

        The comments follow round 1, positions 2 and 3. Its uses are at the indices 1 and 6 of the
        sequence, in random order.
        """
        # The key of the epoch. Two keys are derived from it: one for the order of the segments in
        # each round (0), and one for the order of the records (1).
        key = derive(self._key, epoch)
        round_robin = self._cache.get(
            epoch, lambda: ShuffledRoundRobin(self._bounds, self._first_rounds, key=derive(key, 0))
        )
        indices = round_robin.indices_at(positions)  # such as [6, 1]
        record_index, use = np.divmod(indices, self._reuse)  # [2, 0] and [0, 1]: uses 2.0 and 0.1
        # Replace each number in the table by a record, in random order.
        return permute(self.num_records, derive(key, 1), record_index) * self._reuse + use


def _staggered_segments(n: int, reuse: int, num_segments: int) -> tuple[Int64s, Int64s]:
    """Divide the uses of records into segments that reach new records at different times.

    Each of n records is used `reuse` times, and is decoded for its first use. The uses of all
    records are one sequence, record after record, which is divided into segments. Each round takes
    the next use of every segment. If all segments reached a new record in the same round, that
    round would decode many records at once, and the next rounds none.

    So each segment has a *first round*, which takes its first use. The rounds before take the end
    of the segment: it is read in a circle. Here 4 records are used 3 times each, in 2 segments with
    the first rounds 0 and 1. In the table 2.0 is use 0 of record 2: no round has two uses 0::

        round       0    1    2    3    4    5
        segment 0   0.0  0.1  0.2  1.0  1.1  1.2
        segment 1   3.2  2.0  2.1  2.2  3.0  3.1

    Returns:
        Where each segment starts, and where the last one stops, int64[num_segments + 1], here
        [0, 6, 12]; and the first round of each segment, int64[num_segments], here [0, 1].
    """
    bounds = equal_bounds(n * reuse, num_segments)  # [0, 6, 12]
    # A bound may divide the uses of one record. Then the segments on both sides get the same first
    # round, so that one goes on with the record right after the other has come to its end. Such
    # segments are a *chain*. If 3 records are used 4 times each, both segments are one chain, since
    # the bound divides the uses of record 1:
    #     0.0 0.1 0.2 0.3 1.0 1.1 | 1.2 1.3 2.0 2.1 2.2 2.3
    chain_starts = np.flatnonzero(bounds[:-1] % reuse == 0)  # [0, 1] above, [0] for the one chain
    chain_lengths = np.diff(np.append(chain_starts, num_segments))  # in segments: [1, 1], or [2]
    # A chain reaches a new record every `period` rounds. The one chain does so in rounds 0 and 4
    # (segment 0) and in round 2 (segment 1), so its period is 2.
    periods = np.gcd(np.diff(bounds)[chain_starts], reuse)  # [3, 3], or gcd(6, 4) = [2]
    # Spread the first rounds of all chains of the same period evenly over it: for three chains with
    # period 6, they are 0, 2 and 4.
    first_rounds = np.empty_like(chain_starts)
    for period in np.unique(periods):
        chains = np.flatnonzero(periods == period)
        first_rounds[chains] = np.arange(len(chains)) * period // len(chains)  # [0, 1]
    return bounds, np.repeat(first_rounds, chain_lengths)
