"""Keyed random words of 64 bits: the only source of randomness, the same on every machine.

A random word is the output function of splitmix64 over `key + counter * golden ratio` (Steele, Lea
and Flood, "Fast splittable pseudorandom number generators", 2014): a counter-based generator, so
word number n costs as much as word 0. A key is a random word too. Streams are derived by hashing,
never by adding an offset to a seed: seed 1 epoch 2 has nothing in common with seed 2 epoch 1.
"""

from __future__ import annotations

import hashlib

import numpy as np

from twinfeed.samplers.types import Int64s, UInt64s

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def random_words(key: int | UInt64s, counter: Int64s | UInt64s) -> UInt64s:
    """Return random word number `counter` of the stream of `key`: 64 random bits, by splitmix64.
    Both are broadcast, to one dimension at least.
    """
    # The state of the generator after `counter` steps.
    x = np.atleast_1d(np.asarray(counter)).astype(np.uint64)  # always a copy: updated in place
    x += np.uint64(1)
    x *= _GOLDEN
    x = x + np.asarray(key, dtype=np.uint64)
    # Mix the bits of the state: the output function of splitmix64.
    x ^= x >> np.uint64(30)
    x *= _MULTIPLIER_1
    x ^= x >> np.uint64(27)
    x *= _MULTIPLIER_2
    x ^= x >> np.uint64(31)
    return x


def root_key(seed: int, purpose: str) -> int:
    """Return the key of the stream of one purpose, such as "random order", under a seed."""
    digest = hashlib.blake2b(f"twinfeed 1 {purpose} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def derive(key: int, *path: int) -> int:
    """Return the key of a substream, such as `derive(key, epoch, step)`: a hash of key and path.
    Each number replaces the key by its `random_words`, in Python's integers, ten times as fast for
    one.
    """
    for number in path:
        x = (key + (int(number) + 1) * int(_GOLDEN)) & _MASK
        x = (x ^ x >> 30) * int(_MULTIPLIER_1) & _MASK
        x = (x ^ x >> 27) * int(_MULTIPLIER_2) & _MASK
        key = x ^ x >> 31
    return key


def uniform_below(random: UInt64s, bound: int | Int64s) -> Int64s:
    """Return random words scaled to `[0, bound)`, for any bound up to 2^63: the upper half of the
    product (Lemire, "Fast random integer generation in an interval", 2019) of 32-bit halves,
    without that of the lower ones.
    """
    bounds = np.asarray(bound, dtype=np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    cross = (random >> half) * (bounds & low) >> half
    cross += (random & low) * (bounds >> half) >> half
    scaled: UInt64s = (random >> half) * (bounds >> half) + cross
    return scaled.astype(np.int64)
