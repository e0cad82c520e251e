"""Keyed 64-bit words: the only source of randomness, the same on every machine and numpy.

A word is splitmix64's output function over `key + counter * golden ratio` (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014). A key is a word too. So streams are
derived, never offset: seed 1 epoch 2 has nothing in common with seed 2 epoch 1.
"""

from __future__ import annotations

import hashlib

import numpy as np

from twinfeed.samplers.drawing.int_arrays import Int64, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def words(key: int | UInt64, counter: Int64 | UInt64) -> UInt64:
    """Return the word number `counter` of the stream of `key`, broadcast, at least 1-d."""
    x = np.atleast_1d(np.asarray(counter)).astype(np.uint64)  # always a copy: updated in place
    x += np.uint64(1)
    x *= _GOLDEN
    x = x + np.asarray(key, dtype=np.uint64)
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return x


def root_key(seed: int, purpose: str) -> int:
    """Return the key of one purpose (a stream's name) under a seed."""
    digest = hashlib.blake2b(f"twinfeed 1 {purpose} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def derive(key: int, *path: int) -> int:
    """Return the key found by following `path` (epoch, pass, …) down from `key`.

    Each step is `words(key, step)` in plain integers: numpy takes ten times as long for one word.
    """
    for step in path:
        x = (key + (int(step) + 1) * int(_GOLDEN)) & _MASK
        x = (x ^ x >> 30) * int(_FIRST) & _MASK
        x = (x ^ x >> 27) * int(_SECOND) & _MASK
        key = x ^ x >> 31
    return key


def below(word: UInt64, bound: int | Int64) -> Int64:
    """Scale words to `[0, bound)` for any bound up to 2^63: the upper half of the product."""
    wide = np.asarray(bound, dtype=np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    cross = (word >> half) * (wide & low) >> half
    cross += (word & low) * (wide >> half) >> half
    scaled: UInt64 = (word >> half) * (wide >> half) + cross
    return scaled.astype(np.int64)
