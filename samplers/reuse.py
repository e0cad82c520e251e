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

        `BatchSampler` calls this. The cache has `live` records, and each round of `live` samples
        uses each of them once. So a batch within one round has no record twice, but a batch with
        the end of one round and the start of the next may.
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
        a row. The sequence is divided into segments, segment i from `_bounds[i]` on. Each round
        takes the next use of every segment (round-robin), so that the uses of a record are spread
        over several batches. Segment i is read from its middle to its end, and then from its start,
        which comes in round `_first_rounds[i]`: so the segments reach new records in different
        rounds, and few are decoded at once.
        """
        # The key of the epoch. Two keys are derived from it: one for the order of the segments in
        # each round (0), and one for the order of the records (1).
        key = derive(self._key, epoch)
        round_robin = self._cache.get(
            epoch, lambda: ShuffledRoundRobin(self._bounds, self._first_rounds, key=derive(key, 0))
        )
        # The record of each use, as its index in the random order of the records.
        record_index, use = np.divmod(round_robin.indices_at(positions), self._reuse)
        return permute(self.num_records, derive(key, 1), record_index) * self._reuse + use


def _staggered_segments(n: int, reuse: int, num_segments: int) -> tuple[Int64s, Int64s]:
    """Return the bounds and the first rounds of segments, which say in what order records are used.

    Each of n records is used `reuse` times. The sequence of all uses, record after record, is
    divided into segments. Each round reads the next use of every segment. A segment is read
    cyclically: its start is read in its *first round*, and its end in the round before.

    First rounds differ, so that the segments reach new records in different rounds. Here 4 records
    are used 3 times each, in 2 segments. The bounds are 0 6 12, and the first rounds 0 1. In the
    table 2.0 is use 0 of record 2. Uses 0 come in rounds 0, 1, 3 and 4, and only one in each::

        round       0    1    2    3    4    5
        segment 0   0.0  0.1  0.2  1.0  1.1  1.2
        segment 1   3.2  2.0  2.1  2.2  3.0  3.1

    Returns:
        The bounds, int64[num_segments + 1], and the first rounds, int64[num_segments].
    """
    bounds = equal_bounds(n * reuse, num_segments)
    # A bound may divide the uses of a record. Then the segments before and after it get the same
    # first round r: the uses before the bound are read up to round r - 1, and the others from round
    # r on. Such segments are a *chain*: only its first segment starts with a new record. Here 3
    # records are used 4 times each, and both segments are one chain:
    #     0.0 0.1 0.2 0.3 1.0 1.1
    #     1.2 1.3 2.0 2.1 2.2 2.3
    chain_starts = np.flatnonzero(bounds[:-1] % reuse == 0)
    chain_lengths = np.diff(np.append(chain_starts, num_segments))  # in segments
    # The segments of a chain together reach a new record every `period` rounds: in the example
    # in rounds 0, 2 and 4, so every gcd(6, 4) = 2 rounds for segments of 6 uses.
    periods = np.gcd(np.diff(bounds)[chain_starts], reuse)
    # Spread the first rounds of all chains of the same period evenly over it: those of three chains
    # with period 6 are 0, 2 and 4.
    first_rounds = np.empty_like(chain_starts)
    for period in np.unique(periods):
        chains = np.flatnonzero(periods == period)
        first_rounds[chains] = np.arange(len(chains)) * period // len(chains)
    return bounds, np.repeat(first_rounds, chain_lengths)
