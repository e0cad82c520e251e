"""Slow definitions, a few lines each, that the fast paths must equal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil, erfc, gcd, sqrt

import numpy as np

MASK = (1 << 64) - 1


def word(key: int, counter: int) -> int:
    """Return splitmix64's output number ``counter`` from the state ``key``."""
    x = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def permutation(n: int, key: int) -> list[int]:
    """Return a permutation of up to 2^15 items: sorted by the upper 48 bits of their words."""
    return sorted(range(n), key=lambda i: (word(key, i) >> 16, i))


def row(n: int, key: int) -> list[int]:
    """Return a permutation of up to 2^15 items, by the algorithm for many permutations at once."""
    return permutation(n, key) if n <= 64 else [narrow_feistel(n, key, i) for i in range(n)]


def narrow_feistel(n: int, key: int, position: int) -> int:
    """Return one entry of a permutation of 65 to 2^15 items: twelve rounds in 32 bits."""
    a = ceil(sqrt(n))
    b = -(-n // a)
    keys = [word(key, pair) >> shift & 0xFFFFFFFF for pair in range(6) for shift in (0, 32)]
    while True:
        left, right, sizes = position % a, position // a, (a, b)
        for round_key in keys:
            h = (right + round_key) * 0x7FEB352D & 0xFFFFFFFF
            h = (h ^ h >> 15) * 0x846CA68B & 0xFFFFFFFF
            left = (left + ((h >> 16) * sizes[0] >> 16)) % sizes[0]
            left, right, sizes = right, left, sizes[::-1]
        position = left + right * a
        if position < n:
            return position


def feistel(n: int, key: int, position: int) -> int:
    """Return one entry of a permutation of more than 2^15 items."""
    a = ceil(sqrt(n))  # of the nearest float, as numpy takes it
    b = -(-n // a)
    while True:
        left, right, sizes = position % a, position // a, (a, b)
        for number in range(6):
            h = (right + word(key, number)) * 0xD6E8FEB86659FD93 & MASK
            h = (h ^ h >> 32) * 0xD6E8FEB86659FD93 & MASK
            left = (left + ((h >> 32) * sizes[0] >> 32)) % sizes[0]
            left, right, sizes = right, left, sizes[::-1]
        position = left + right * a
        if position < n:
            return position


def fair_subsets(n: int, m: int, key: int, count: int) -> list[list[int]]:
    """Return the first subsets of m out of n, traversal by traversal, under a population's key."""
    if n < 2 * m - 1:
        traversals = [row(n, word(key, t // (n // gcd(n, m)))) for t in range(count)]
        return [[traversals[t][(t * m + i) % n] for i in range(m)] for t in range(count)]
    entries: list[int] = []
    for traversal in range(ceil(count * m / n)):
        new = row(n, word(key, traversal))
        unfinished = entries[len(entries) - len(entries) % m :]
        for taken in range(len(unfinished), m if unfinished else 0):
            fits = next(i for i in range(taken - len(unfinished), n) if new[i] not in unfinished)
            new.insert(taken - len(unfinished), new.pop(fits))
        entries += new
    return [entries[t * m : t * m + m] for t in range(count)]


def decodes(stream: Sequence[int], capacity: int) -> list[int]:
    """Return the places at which a cache that knows the future must load: Belady's rule."""
    uses = defaultdict(list)
    for place, item in reversed(list(enumerate(stream))):
        uses[item].append(place)
    held: set[int] = set()
    loads = []
    for place, item in enumerate(stream):
        uses[item].pop()
        if item not in held:
            loads.append(place)
            held.add(item)
        held = {i for i in held if uses[i]}
        if len(held) > capacity:
            held.remove(max(held, key=lambda i: uses[i][-1]))
    return loads


def distinct_in_a_row(items: Sequence[int], width: int) -> np.ndarray:
    """Return the number of distinct items among each `width` consecutive items."""
    rows = np.lib.stride_tricks.sliding_window_view(items, width)
    return 1 + (np.diff(np.sort(rows, axis=1), axis=1) > 0).sum(axis=1)


def decodes_by_use(
    records: Sequence[int], uses: Sequence[int], reuse: int
) -> tuple[list[int], int]:
    """Return where a cache must load that drops a record after its last use, and its most."""
    held: set[int] = set()
    loads, most = [], 0
    for place, (record, use) in enumerate(zip(records, uses, strict=True)):
        if record not in held:
            loads.append(place)
        held.add(record)
        most = max(most, len(held))
        if use == reuse - 1:
            held.remove(record)
    return loads, most


def most_batches(chunks: tuple[int, ...], p: int) -> int:
    """Return the most batches of p classes, a chunk of each, by trying the fullest first."""
    left = Counter(dict(enumerate(chunks)))
    batches = 0
    while sum(count > 0 for count in left.values()) >= p:
        left.subtract([number for number, _ in left.most_common(p)])
        batches += 1
    return batches


def p_value(statistic: float, freedom: int) -> float:
    """Return the upper tail of a chi-square, by Wilson and Hilferty's cube root."""
    scale = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - scale)) / sqrt(scale)
    return erfc(z / sqrt(2)) / 2
