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

        The uses of all records are one sequence: the records in random order, each `reuse` times in
        a row. So that the uses of a record are in different batches, the sequence is divided into
        segments, and each round takes the next use of every segment (round-robin). If the records
        in random order are a b c d, each is used 3 times, and there are 2 segments::

            round       0   1   2   3   4   5
            segment 0   a0  a1  a2  b0  b1  b2
            segment 1   d2  c0  c1  c2  d0  d1

        Segment 1 starts with c0, but this is read in round 1, after its end. So the two segments
        come to new records in different rounds, and few records are decoded at once.
        """
        epoch_key = derive(self._key, epoch)
        segments_key, records_key = derive(epoch_key, 0), derive(epoch_key, 1)
        round_robin = self._cache.get(
            epoch, lambda: ShuffledRoundRobin(self._bounds, self._first_rounds, key=segments_key)
        )
        index = round_robin.indices_at(positions)  # into the sequence: a0 has 0, a1 has 1, b0 has 3
        number, use = np.divmod(index, self._reuse)  # b0 is use 0 of record number 1
        return permute(self.num_records, records_key, number) * self._reuse + use


def _staggered_segments(n: int, reuse: int, num_segments: int) -> tuple[Int64s, Int64s]:
    """Divide the uses of records into segments that come to new records in different rounds.

    Each of n records is used `reuse` times, and is decoded for its first use. The uses of all
    records are one sequence, record after record, which is divided into segments. Each round takes
    the next use of every segment. If all segments came to a new record in the same round, this
    round would decode many records at once, and the next rounds none.

    So a segment need not be read from its start: its *first round* is the round that reads its
    start, and earlier rounds read its end. Here the records a b c d are used 3 times each, in 2
    segments with the first rounds 0 and 1. No round has two first uses, such as a0 and c0::

        round       0   1   2   3   4   5
        segment 0   a0  a1  a2  b0  b1  b2
        segment 1   d2  c0  c1  c2  d0  d1

    Returns:
        Where each segment starts, and where the last one stops, int64[num_segments + 1], here
        [0, 6, 12]; and the first round of each segment, int64[num_segments], here [0, 1].
    """
    bounds = equal_bounds(n * reuse, num_segments)  # [0, 6, 12]
    # A bound may divide the uses of a record, as of b, if 3 records are used 4 times each:
    #     a0 a1 a2 a3 b0 b1 | b2 b3 c0 c1 c2 c3
    # Such segments are a *chain*, and have the same first round: then b2 is read right after b1.
    starts_chain = bounds[:-1] % reuse == 0  # [True, True] above, [True, False] for this chain
    chain_of_segment = np.cumsum(starts_chain) - 1  # [0, 1], or [0, 0]
    # How many rounds pass from one first use in a chain to the next. This chain has a0 in round 0,
    # c0 in round 2 and b0 in round 4.
    lengths = np.diff(bounds)[starts_chain]  # of the first segment of each chain: [6, 6], or [6]
    periods = np.gcd(lengths, reuse)  # [3, 3], or gcd(6, 4) = [2]
    return bounds, _first_rounds(periods)[chain_of_segment]


def _first_rounds(periods: Int64s) -> Int64s:
    """Return the round in which each chain of segments starts, so that they take turns.

    A chain that starts in round r comes to a new record in the rounds r, r + period, and so on.
    Chains of the same period are spread evenly over it: three chains of period 6 start in the
    rounds 0, 2 and 4. The result is int64[chains], as `periods`.
    """
    first_rounds = np.empty_like(periods)
    for period in np.unique(periods):
        chains = np.flatnonzero(periods == period)
        first_rounds[chains] = np.arange(len(chains)) * period // len(chains)
    return first_rounds
