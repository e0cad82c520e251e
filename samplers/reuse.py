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

_SOME = "SubsetSampler(ids, of=len(index), order=ReuseSampler(len(ids), …))"


class ReuseSampler(Sampler):
    """Every record `reuse` times an epoch, while it is in the cache, never twice in a batch.

    A cache that drops a record after its use number `reuse - 1` keeps at most `live` records. The
    cache decodes at most `n + live - 1` records in an epoch: up to `live - 1` are used at both ends
    of the epoch, and dropped in between. After the first `live`, new records come steadily, about
    one in `reuse` samples.

    A sample id is `record * reuse + use`. `records` and `views` take a sample id apart, and the use
    number makes a crop reproducible.

    Args:
        n: number of records, or a dataset, an index or a source, of which only the length is kept.
        reuse: uses of a record in an epoch.
        live: at most n, and a multiple of the size of the batches that the sampler is divided into.
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
        n = self.num_records = validate.record_count("n", n, subset=_SOME, minimum=1)
        reuse = self._uses = validate.integer("reuse", reuse, minimum=1)
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
            f"{validate.counted(self._uses, 'use')}, {self._live:,} live, seed={self.seed})"
        )

    def for_batches(self, batch_size: int, num_steps: int) -> Sampler:
        """Return this sampler; ValueError if a batch could hold a record twice.

        `live` is the number of records in the cache. Each round of `live` samples uses each of them
        once. A batch that is a part of one round holds no record twice, but a batch with the end of
        one round and the start of the next may.
        """
        if self._live % batch_size:
            raise ValueError(
                f"live must be a multiple of batch_size, so that a batch holds no record twice: "
                f"got live={self._live}, batch_size={batch_size}"
            )
        return self

    def records(self, ids: Int64s) -> Int64s:
        """Return `ids // reuse`."""
        return np.asarray(ids, dtype=np.int64) // self._uses

    def views(self, ids: Int64s) -> Int64s:
        """Return the use numbers, `ids % reuse`."""
        return np.asarray(ids, dtype=np.int64) % self._uses

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the sample ids `record * reuse + use` at these positions, int64[positions].

        All uses of all records are one sequence: the records in random order, each `reuse` times in
        a row. The sequence is divided into segments, which are read side by side (round-robin), so
        that the uses of a record are spread over several batches.
        """
        key = derive(self._key, epoch)
        round_robin = self._cache.get(
            epoch, lambda: ShuffledRoundRobin(self._bounds, self._first_rounds, key=derive(key, 0))
        )
        record_index, use = np.divmod(round_robin.entries(positions), self._uses)
        return permute(self.num_records, derive(key, 1), record_index) * self._uses + use


def _staggered_segments(n: int, reuse: int, live: int) -> tuple[Int64s, Int64s]:
    """Return the bounds and the first rounds of segments, int64[live + 1] and int64[live].

    Each of n records is used `reuse` times. The sequence of all uses, record after record, is
    divided into `live` segments, which are read cyclically and side by side: each round reads the
    next use of every segment. The *first round* of a segment is the round that reads its first use.
    First rounds differ, so that the segments come to new records at different times, and the number
    of new records in each round is nearly constant. With 4 records used 3 times each, in 2
    segments, both come to a new record every 3 rounds, and their first rounds are 0 and 1.
    """
    bounds = equal_bounds(n * reuse, live)
    # A segment may start in the middle of the uses of a record: then it must be in step with the
    # segment before it, so that the uses of the record are read in order. A *chain* is a segment
    # that starts with a new record, and all segments after it that do not: they have the same
    # first round.
    chain_starts = np.flatnonzero(bounds[:-1] % reuse == 0)
    # A chain reads a new record every `period` rounds. The first rounds of all chains of the same
    # period are spread evenly over it: those of three chains with period 6 are 0, 2 and 4.
    periods = np.gcd(np.diff(bounds)[chain_starts], reuse)
    first_rounds = np.empty_like(chain_starts)
    for period in np.unique(periods):
        chains = np.flatnonzero(periods == period)
        first_rounds[chains] = np.arange(len(chains)) * period // len(chains)
    return bounds, np.repeat(first_rounds, np.diff(np.append(chain_starts, live)))
