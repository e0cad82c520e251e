"""Keyed random permutations of `range(n)`: by a sorted table, or by a Feistel network.

A table is the argsort of random words, which is uniform. A Feistel network computes any entry in
constant time and memory. It encrypts numbers below `a * b >= n`, and *cycle walking* (encrypting
again until the result is below n) makes that a permutation of `range(n)` (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Small n need more rounds: of 81 items, six rounds
leave a bias that twelve rounds do not have.

====================  =====================  =====================
items                 one permutation        a permutation a row
====================  =====================  =====================
up to 64              sorted table           sorted table
up to 2^15            sorted table           12 rounds, 32 bits
more                  6 rounds, 64 bits      6 rounds, 64 bits
====================  =====================  =====================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.int_arrays import distinct_pairs
from twinfeed.samplers.drawing.random_words import random_words
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Int64s, UInt64s, Unsigned

Table = NDArray[np.uint16]

MAX_TABLE_SIZE = 1 << 15  # items up to which a single permutation is a sorted table
_MAX_ROW_TABLE_SIZE = 64  # items up to which each row of several has a sorted table
# Small tables are computed together if they have the same width, one of these few.
_TABLE_WIDTHS = np.array([*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64])
_INDEX_BITS = np.uint64(0xFFFF)  # the bits of a sorted word that carry its index
_CHUNK = 1 << 13  # positions per inner call, whose temporaries then stay in the L2 cache
_TABLE_WORDS = 1 << 19  # random words that are sorted at once: 4 MB
_ROUNDS, _NARROW_ROUNDS = 6, 12
_HALF = np.uint64(32)
# The constants of `_hash`, by the bytes of its integers: two multipliers and two shifts.
_HASH_CONSTANTS: dict[int, tuple[Any, ...]] = {
    4: tuple(map(np.uint32, (0x7FEB352D, 0x846CA68B, 15, 16))),
    8: tuple(map(np.uint64, (0xD6E8FEB86659FD93, 0xD6E8FEB86659FD93, 32, 32))),
}


def permute(n: int, key: int, positions: Int64s) -> Int64s:
    """Return `permutation[positions]`, for the random permutation of `range(n)` under `key`. A
    small permutation is computed once, as a table.
    """
    if n <= MAX_TABLE_SIZE:
        values: Table = _cached_table(n, key)[positions]
        return values.astype(np.int64)
    flat = positions.reshape(-1)
    out = np.empty(flat.shape, np.int64)
    for start in range(0, len(flat), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        out[chunk] = feistel(n, key, flat[chunk])
    return out.reshape(positions.shape)


def random_table(n: int, key: int) -> Table:
    """Return the whole random permutation of `range(n)` under `key`, read-only."""
    table: Table = random_permutations(np.array([key], dtype=np.uint64), n)[0]
    table.flags.writeable = False
    return table


# The last few tables: neighbouring steps use the same table.
_cached_table = lru_cache(maxsize=8)(random_table)


def permute_rows(n: Int64s, keys: UInt64s, positions: Int64s) -> Int64s:
    """Return for each row i `permutation_i[positions[i]]`, of `range(n[i])` under `keys[i]`."""
    # The index of the function below: 0 for n up to 64, 1 for n up to 2^15, and 2 for larger n.
    method = np.searchsorted((_MAX_ROW_TABLE_SIZE, MAX_TABLE_SIZE), n)
    functions = (_permute_by_tables, _permute_by_feistel_32, _permute_by_feistel_64)
    out = np.empty(positions.shape, np.int64)
    for number, compute in enumerate(functions):
        rows = method == number
        if rows.all():
            return compute(n, keys, positions)
        if rows.any():
            out[rows] = compute(n[rows], keys[rows], positions[rows])
    return out


def _permute_by_tables(n: Int64s, keys: UInt64s, positions: Int64s) -> Int64s:
    """Return `permute_rows` for n of at most 64, each distinct permutation once. The comments have
    three rows with the keys 5 3 5 and n = 4 2 4.
    """
    if not len(n):
        return np.empty(positions.shape, np.int64)
    # Number the distinct permutations: that of key 3 is number 0, and that of key 5 is number 1.
    # Row 1 has number 0, and the first row of number 1 is row 0.
    first_row, number = distinct_pairs(keys, n)  # [1, 0] and [1, 0, 1]
    tables = _small_permutations(n[first_row], keys[first_row])
    values: Table = tables[number[:, None], positions]
    return values.astype(np.int64)


def _small_permutations(n: Int64s, keys: UInt64s) -> Table:
    """Return a table whose row i begins with the permutation of `range(n[i])`, n of at most 64."""
    # One call computes all permutations of the same width. So n is rounded up to one of a few
    # widths, such as 33 to 40.
    widths = _TABLE_WIDTHS[np.searchsorted(_TABLE_WIDTHS, n)]
    table = np.empty((len(n), widths.max()), np.uint16)
    for width in np.flatnonzero(np.bincount(widths)).tolist():  # np.unique would import numpy.ma
        same_width = np.flatnonzero(widths == width)
        for chunk in slices(len(same_width), _TABLE_WORDS // width):  # to bound memory
            rows = same_width[chunk]
            table[rows, :width] = random_permutations(keys[rows], width, n[rows])
    return table


def random_permutations(keys: UInt64s, n: int, lengths: Int64s | None = None) -> NDArray[np.uint16]:
    """Return a random permutation of `range(n)` for each key, uint16[keys, n]; with `lengths`, row
    i begins with one of `range(lengths[i])`. The lower 16 bits of each random word are replaced by
    its index, as a sort is faster than an argsort.
    """
    index = np.arange(n, dtype=np.uint64)
    packed = random_words(keys[:, None], index[None, :])
    packed &= ~_INDEX_BITS
    packed |= index
    if lengths is not None:
        # The largest word: sorted to the end of the row.
        packed[np.arange(n) >= lengths[:, None]] = np.uint64(0xFFFFFFFFFFFFFFFF)
    packed.sort(axis=1)
    return packed.astype(np.uint16)  # keeps the low 16 bits


def _permute_by_feistel_32(n: Int64s, keys: UInt64s, positions: Int64s) -> Int64s:
    """Return `permute_rows` for n of at most 2^15, by integers of 32 bits, which are faster."""
    sizes, round_keys = n.astype(np.uint32), _round_keys_32(keys)
    # `_cycle_walk` encrypts, and encrypts results of n or more again. It broadcasts its arguments.
    # numpy is slow if the last axis is short, so the longer axis comes last.
    if positions.shape[1] > len(n):  # x is [rows, m], sizes are [rows, 1], keys [12, rows, 1]
        x = positions.astype(np.uint32, order="C")
        return _cycle_walk(_encrypt, sizes[:, None], round_keys[..., None], x).astype(np.int64)
    x = positions.T.astype(np.uint32, order="C")  # x is [m, rows], sizes are [rows]
    return _cycle_walk(_encrypt, sizes, round_keys, x).T.astype(np.int64, order="C")


def _round_keys_32(keys: UInt64s) -> NDArray[np.uint32]:
    """Return keys of 32 bits for the 12 rounds, uint32[12, keys]: the halves of random words."""
    words = random_words(keys, np.arange(_NARROW_ROUNDS // 2)[:, None])  # uint64[6, keys]
    round_keys = np.empty((_NARROW_ROUNDS, len(keys)), np.uint32)
    round_keys[0::2] = words & np.uint64(0xFFFFFFFF)
    round_keys[1::2] = words >> _HALF
    return round_keys


def _permute_by_feistel_64(n: Int64s, keys: UInt64s, positions: Int64s) -> Int64s:
    return feistel(n[:, None], keys[:, None], positions)


def feistel(n: int | Int64s, key: int | UInt64s, positions: Int64s) -> Int64s:
    """Return `permutation[positions]` of `range(n)` under `key`, n above 2^15, all broadcast."""
    # Make arrays even of single numbers: numpy 1 would add a number of 64 bits and a Python int as
    # floats, which have only 53 bits.
    sizes, keys = np.atleast_1d(np.asarray(n, np.uint64)), np.atleast_1d(np.asarray(key, np.uint64))
    # Each key has a key for each round, along a new first axis: uint64[rounds, *keys.shape].
    round_numbers = np.arange(_ROUNDS).reshape(_ROUNDS, *(1,) * keys.ndim)
    round_keys = random_words(keys, round_numbers)
    # Cycle walking: encrypt numbers again until they are below n.
    return _cycle_walk(_encrypt, sizes, round_keys, positions.astype(np.uint64)).view(np.int64)


def inverse_permute(n: int, key: int, values: Int64s) -> Int64s:
    """Return the positions of these values in the random permutation of `range(n)` under `key`."""
    if n <= MAX_TABLE_SIZE:
        return np.argsort(_cached_table(n, key))[values]
    round_keys = random_words(key, np.arange(_ROUNDS)[::-1, None])  # the last round first
    sizes = np.array([n], np.uint64)
    return _cycle_walk(_decrypt, sizes, round_keys, values.astype(np.uint64)).view(np.int64)


def _cycle_walk(
    encrypt: Callable[[Unsigned, Unsigned, Unsigned], Unsigned],
    n: Unsigned,
    round_keys: Unsigned,
    x: Unsigned,
) -> Unsigned:
    """Return numbers x below n encrypted to numbers below n: results of n or more again. All arrays
    are broadcast.
    """
    x = encrypt(n, round_keys, x)
    outside = np.nonzero(x >= n)  # the indices of these results: one in sqrt(n), approximately
    while outside[0].size:
        sizes = np.broadcast_to(n, x.shape)[outside]
        keys = np.stack([np.broadcast_to(key, x.shape)[outside] for key in round_keys])
        encrypted = encrypt(sizes, keys, x[outside])
        x[outside] = encrypted
        outside = tuple(axis[encrypted >= sizes] for axis in outside)
    return x


def _split_into_halves(n: Unsigned, x: Unsigned) -> tuple[Unsigned, Unsigned, Unsigned, Unsigned]:
    """Return the left and right half of numbers, and how many values each may have: `x % left_size`
    and `x // left_size`, where `left_size` is the square root of n, rounded up.
    """
    left_size = np.ceil(np.sqrt(n)).astype(n.dtype)  # sqrt is correctly rounded on every machine
    right = x // left_size
    left = x - right * left_size
    return left, right, left_size, (n + left_size - 1) // left_size


def _encrypt(n: Unsigned, round_keys: Unsigned, x: Unsigned) -> Unsigned:
    """Return numbers x encrypted once by a Feistel network. Each round adds a hash of the right
    half to the left half, modulo its size, and swaps them. Results may be a little above n.
    """
    left, right, left_size, right_size = _split_into_halves(n, x)
    for key in round_keys:
        total = _hash(right, key, left_size)
        total += left
        # left = total % left_size, without a slow division. The total is below 2 * left_size, so
        # the remainder is `total` or `total - left_size`. It is the smaller one, since a negative
        # difference of unsigned integers wraps around to a huge number.
        np.subtract(total, left_size, out=left)
        np.minimum(total, left, out=left)
        left, right, left_size, right_size = right, left, right_size, left_size
    left += right * left_size  # after an even number of rounds the halves are back in place
    return left


def _decrypt(n: Unsigned, round_keys: Unsigned, x: Unsigned) -> Unsigned:
    """Return numbers decrypted once: the inverse of `_encrypt`, with its round keys reversed."""
    left, right, left_size, right_size = _split_into_halves(n, x)
    for key in round_keys:
        left, right, left_size, right_size = right, left, right_size, left_size
        total = left + left_size - _hash(right, key, left_size)  # not negative: hash < left_size
        # left = total % left_size, without a slow division. The total is below 2 * left_size, so
        # the remainder is `total` or `total - left_size`. It is the smaller one, since a negative
        # difference of unsigned integers wraps around to a huge number.
        left = np.minimum(total, total - left_size)
    return left + right * left_size


def _hash(x: Unsigned, key: Unsigned, size: Unsigned) -> Unsigned:
    """Return a hash of each x under a key, in `[0, size)`: multiply-xorshift, with the constants of
    lowbias32 (32 bits) and degski64 (64 bits) from https://github.com/skeeto/hash-prospector,
    scaled by multiply-high, which is faster than a modulo.
    """
    multiplier_1, multiplier_2, shift, half = _HASH_CONSTANTS[x.itemsize]  # for 32 or 64 bits
    h = x + key
    h *= multiplier_1
    h ^= h >> shift
    h *= multiplier_2
    h >>= half
    h *= size
    h >>= half
    return h
