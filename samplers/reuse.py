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
_SUBSET_CALL = "a dataset or an index of them alone, as reuse has no subset"


class ReuseSampler(Sampler):
    """Every record `reuse` times an epoch, while it is in the cache, never twice in a batch.

    A cache that drops a record after its use number `reuse - 1` keeps at most `live` records. The
    cache decodes at most `n + live - 1` records in an epoch: up to `live - 1` are used at both ends
    of the epoch, and dropped in between. After the first `live`, new records come steadily, about
    one in `reuse` samples.

    A sample id is `record * reuse + use`, where `use` counts the uses of a record in an epoch, from
    0 on. `records` and `views` take a sample id apart, and the use makes a crop reproducible.

    Args:
        dataset: a dataset, an index or a source, of which only the length is kept, or that length.
        reuse: uses of a record in an epoch.
        live: the records in the cache: at most all, and a multiple of the batch size.
        seed: the only source of chance.

    Raises:
        ValueError: `live` is above the number of records.

    Four records used twice, two live, as record.use; record 2 is used at both ends::

        stream   2.1 3.0 1.0 3.1 0.0 1.1 0.1 2.0

    >>> from twinfeed.samplers import BatchSampler
    >>> sampler = BatchSampler(ReuseSampler(4, reuse=2, live=2, seed=0), batch_size=2)
    >>> [sampler.records(ids).tolist() for ids in sampler.batches(0, 0, 4)]
    [[2, 3], [1, 3], [0, 1], [0, 2]]
    >>> sampler.views(sampler.batch(0, 0)).tolist()
    [1, 0]
    """

    @validate.show_call("ReuseSampler(dataset, reuse=4, live=1000, seed=0)")
    def __init__(
        self,
        dataset: SupportsIndex | Sized,
        *,
        reuse: SupportsIndex,
        live: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        n = validate.record_count("dataset", dataset, subset=_SUBSET_CALL, minimum=1)
        self.num_records = n
        reuse = self._reuse = validate.integer("reuse", reuse, minimum=1)
        live = self._live = validate.integer("live", live, minimum=1, below=MAX_SEGMENTS)
        if live > n:
            raise ValueError(f"live must be at most the number of records, {n}, got {live}")
        samples = validate.integer("samples of an epoch", n * reuse, minimum=1)
        self.traits = SamplerTraits(num_ids=samples, max_cached=live, uses=reuse)
        self.seed = validate.seed(seed)
        self.parameters = {"n": n, "reuse": reuse, "live": live}
        self._bounds = equal_bounds(samples, live)
        self._first_rounds = _staggered_first_rounds(self._bounds, reuse)
        self._key = root_key(self.seed, "reuse")
        self._cache: FifoCache[ShuffledRoundRobin] = FifoCache(2)

    def __repr__(self) -> str:
        return (
            f"ReuseSampler({validate.counted(self.num_records, 'record')} x "
            f"{validate.counted(self._reuse, 'use')}, {self._live:,} live, seed={self.seed})"
        )

    def for_batches(self, batch_size: int, num_steps: int) -> Sampler:
        """Return this sampler, or raise ValueError if a batch could hold a record twice: a batch
        must be within a round, which has one sample of each of the `live` records.
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
        """Return the sample id at each of these positions of an epoch, int64[n]. Its uses are one
        sequence: the records in random order, each `reuse` times in a row.
        """
        epoch_key = derive(self._key, epoch)
        round_robin = self._cache.get(
            epoch,
            lambda: ShuffledRoundRobin(self._bounds, self._first_rounds, key=derive(epoch_key, 0)),
        )
        index = round_robin.indices_at(positions)
        number, use = np.divmod(index, self._reuse)  # index 4 is use 1 of record number 1
        record = permute(self.num_records, derive(epoch_key, 1), number)
        return record * self._reuse + use


def _staggered_first_rounds(bounds: Int64s, reuse: int) -> Int64s:
    """Return the round that reads the start of each segment, so that records are decoded steadily.

    Rounds before it read the end of the segment. 4 records are used 3 times each: with the bounds
    [0, 6, 12] and the result [0, 1], no round has two first uses::

        round       0   1   2   3   4   5
        segment 0   a0  a1  a2  b0  b1  b2
        segment 1   d2  c0  c1  c2  d0  d1
    """
    # A bound may divide the uses of a record, as of b, if 3 records are used 4 times each:
    #     a0 a1 a2 a3 b0 b1 | b2 b3 c0 c1 c2 c3
    # Such segments are a *chain*. They have the same first round: then the round that reads b2 is
    # the next one after that of b1 (round 0 comes after the last).
    starts_chain = bounds[:-1] % reuse == 0  # [True, True] above, [True, False] for this chain
    chain_of_segment = np.cumsum(starts_chain) - 1  # [0, 1], or [0, 0]
    # All segments have the same length, or lengths that differ by one, which is ignored here.
    lengths = np.diff(bounds)[starts_chain]  # of the segments of each chain: [6, 6], or [6]
    # The rounds from one first use to the next, in each chain: segment i has first uses in the
    # rounds -i * length modulo `reuse`, which are multiples of the common divisor.
    periods = np.gcd(lengths, reuse)  # [3, 3], or [2]
    first_rounds: Int64s = _evenly_spread_offsets(periods)[chain_of_segment]
    return first_rounds


def _evenly_spread_offsets(periods: Int64s) -> Int64s:
    """Return an offset within each period, int64[n], spread evenly for equal periods: 0, 2 and 4
    for three periods of 6.
    """
    offsets = np.empty_like(periods)
    for period in np.unique(periods):
        events = np.flatnonzero(periods == period)
        offsets[events] = np.arange(len(events)) * period // len(events)
    return offsets
