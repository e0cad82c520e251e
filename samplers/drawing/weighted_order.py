"""Weighted random order without replacement: the exponential race.

Record r gets the key `-log(u) / weight`, an exponential variate of rate weight ("waiting time"),
and the records come in ascending order of their keys (Efraimidis and Spirakis, "Weighted random
sampling with a reservoir", 2006). Sorting the keys of all records at once would stop a training
loop for seconds at the start of each epoch. So the sort is spread over the epoch, as a bucket sort:

* While an epoch is drawn, the records of the next epoch are divided into buckets by their keys.
* A bucket is sorted when a draw reaches it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.prefix_sums import Counts
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Float64s, Int64s

_CHUNK = 1 << 14  # records whose keys are computed at once
_BUCKET = 1 << 15  # approximate size of a bucket, which is sorted at once
_SAMPLE = 1 << 12  # approximate number of keys from which the bounds of buckets are estimated
_HEAD_START = 1.25  # the next epoch is divided faster than this epoch is drawn, by this factor


class WeightedPermutation:
    """The records of one epoch in a weighted random order, sorted bucket by bucket."""

    def __init__(self, weights: Counts, key: int) -> None:
        self._weights, self._key = weights, key
        count = len(weights)
        self._chunks = [*slices(count, _CHUNK)]
        sample = np.sort(self._sort_keys(np.arange(0, count, max(1, count // _SAMPLE))))
        self._num_buckets = min(count // _BUCKET + 1, 1 << 15)
        # The sort keys that separate the buckets: quantiles of a sample, so that all buckets have
        # about as many records. They decide how many are sorted at once, never the order.
        quantiles = np.arange(1, self._num_buckets) * len(sample) // self._num_buckets
        self._bucket_bounds = sample[quantiles]
        # Threads may divide the same chunk: they write the same values.
        self._bucket_of = np.empty(count, np.uint16)
        self._chunks_done = 0
        self._sorted: FifoCache[Int64s] = FifoCache(2)

    def prepare(self, fraction: float) -> None:
        """Divide this fraction of the records into buckets, and a quarter more, if not done yet:
        called while the previous epoch is drawn, so that all are divided before the epoch starts.
        """
        goal = min(len(self._chunks), int(len(self._chunks) * fraction * _HEAD_START))
        for number in range(self._chunks_done, goal):
            chunk = self._chunks[number]
            keys = self._sort_keys(np.arange(chunk.start, chunk.stop))
            self._bucket_of[chunk] = np.searchsorted(self._bucket_bounds, keys, side="right")
            self._chunks_done = number + 1

    def records(self, positions: Int64s) -> Int64s:
        """Return the record at each of these positions of the weighted random order, int64[n].

        The records are sorted by random keys, in a bucket sort: all keys of a bucket are below
        those of the next bucket, and a bucket is sorted when it is needed.
        """
        bucket = np.searchsorted(self._bucket_starts, positions, side="right") - 1
        out = np.empty(positions.shape, np.int64)
        for number in np.unique(bucket).tolist():
            in_bucket = bucket == number
            members = self._sorted.get(number, lambda: self._sort_bucket(number))  # noqa: B023
            out[in_bucket] = members[positions[in_bucket] - self._bucket_starts[number]]
        return out

    @cached_property
    def _bucket_starts(self) -> Int64s:
        """The position at which each bucket starts in the weighted random order.

        The records are sorted by random keys, and a bucket is a range of keys. `prepare` computes
        the bucket of each record (`_bucket_of`), in several calls. Here all records need theirs,
        since the start of a bucket is the number of records in the buckets before it.
        """
        self.prepare(fraction=1)  # compute the buckets of the records that have none yet
        # The records are counted in chunks, since bincount makes a larger copy of its argument.
        size = self._num_buckets
        counts = sum(np.bincount(self._bucket_of[chunk], minlength=size) for chunk in self._chunks)
        return np.append(0, np.cumsum(counts))

    def _sort_bucket(self, number: int) -> Int64s:
        """Return the records of a bucket, sorted by their keys; equal keys stay in stored order."""
        records = np.flatnonzero(self._bucket_of == number)
        return records[np.argsort(self._sort_keys(records), kind="stable")]

    def _sort_keys(self, records: Int64s) -> Float64s:
        """Return the keys by which records are sorted, float64[records].

        A key is an exponential variate with the weight as its rate, `-log(uniform) / weight`, and
        infinite for weight 0. So records of a large weight are likelier to come first.
        """
        bits = random_words(self._key, records) >> np.uint64(11)  # 53 bits, as a float64 has
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
        weights: Int64s = np.asarray(self._weights[records])
        keys = -log(uniform) / np.maximum(weights, 1)
        keys[weights == 0] = np.inf
        return keys


def log(x: Float64s) -> Float64s:
    """Return natural logarithms that are the same on every CPU, as those of `np.log` are not.

    Only operations are used that IEEE 754 rounds exactly. Here x = m * 2^e with m from sqrt(1/2) to
    sqrt(2), and log x = e log 2 + log m. With s = (m - 1) / (m + 1), log m = 2 artanh(s), which is
    the series 2 (s + s^3 / 3 + s^5 / 5 + ...).
    """
    mantissa, exponent = np.frexp(x)  # mantissas from 1/2 to 1
    is_small = mantissa < 0.7071067811865476  # sqrt(1/2)
    mantissa = np.where(is_small, mantissa * 2, mantissa)
    exponent = exponent - is_small
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = np.zeros_like(s)  # of artanh(s) / s, by Horner's rule
    for odd in range(21, 0, -2):
        series = series * square
        series = series + 1 / odd
    logarithm: Float64s = exponent * 0.6931471805599453 + 2 * s * series  # log 2 = 0.693...
    return logarithm
