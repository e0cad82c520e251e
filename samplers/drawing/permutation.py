"""Keyed permutations of `range(n)`: whole tables, and single entries by arithmetic.

A table is a sort of keyed words, which is uniform. Arithmetic is a Feistel network over
`a * b >= n` cells with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
2002), which gives any position in constant time and memory. Fewer cells need more rounds: over 81
cells six rounds leave a bias that twelve rounds do not have.

====================  =====================  =====================
items                 one permutation        a permutation a row
====================  =====================  =====================
up to 64              sorted words           sorted words
up to 2^15            sorted words           12 rounds, 32 bits
more                  6 rounds, 64 bits      6 rounds, 64 bits
====================  =====================  =====================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.int_arrays import Int64, UInt64, distinct_pairs
from twinfeed.samplers.drawing.random_words import words

Table = NDArray[np.uint16]
Unsigned = NDArray[np.unsignedinteger[Any]]

SORTED = 64
SMALL = 1 << 15
_LOW = np.uint64(0xFFFF)  # the bits of a sorted word that carry its index
_BLOCK = 1 << 13  # ids per inner call: the temporaries of one block stay in the L2 cache
_TABLE_WORDS = 1 << 19  # words sorted at once while tables are made: 4 MB
_ROUNDS, _NARROW_ROUNDS = 6, 12
_HALF = np.uint64(32)
_ODD = np.uint64(0xD6E8FEB86659FD93)
_NARROW_ODD = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def permute(n: int, key: int, positions: Int64) -> Int64:
    """Return the entries of the permutation of `range(n)` under `key` at `positions`."""
    if n <= SMALL:
        entries: Table = _shared_table(n, key)[positions]
        return entries.astype(np.int64)
    flat = positions.reshape(-1)
    out = np.empty(flat.shape, np.int64)
    for start in range(0, len(flat), _BLOCK):
        some = slice(start, start + _BLOCK)
        out[some] = feistel(n, key, flat[some])
    return out.reshape(positions.shape)


def small_table(n: int, key: int) -> Table:
    """Return the whole permutation of `range(n)` under `key`, read-only."""
    table: Table = sorted_rows(np.array([key], dtype=np.uint64), n)[0]
    table.flags.writeable = False
    return table


# The last few tables: neighbouring steps use the same table.
_shared_table = lru_cache(maxsize=8)(small_table)


def permute_rows(n: Int64, keys: UInt64, positions: Int64) -> Int64:
    """Return entries of one permutation a row, of its own size and key: int64[rows, m]."""
    kind = (n > SORTED) + (n > SMALL).astype(np.int8)
    out = np.empty(positions.shape, np.int64)
    for number, entries in enumerate((_sorted_entries, _narrow_entries, _wide_entries)):
        mine = kind == number
        if mine.all():
            return entries(n, keys, positions)
        if mine.any():
            out[mine] = entries(n[mine], keys[mine], positions[mine])
    return out


def _sorted_entries(n: Int64, keys: UInt64, positions: Int64) -> Int64:
    """Make each distinct table once and look the positions up."""
    if not len(n):
        return np.empty(positions.shape, np.int64)
    first, row = distinct_pairs(keys, n)
    n, keys = n[first], keys[first]
    # Sizes rounded up, by a quarter at most, to four widths an octave: these sort together.
    step = np.left_shift(1, np.maximum(np.frexp(n.astype(np.float64))[1] - 3, 0))
    widths = -(-n // step) * step
    base = np.cumsum(widths) - widths
    tables = np.empty(int(widths.sum()), np.uint16)
    for width in np.flatnonzero(np.bincount(widths)).tolist():  # np.unique would import numpy.ma
        rows = np.flatnonzero(widths == width)
        for some in np.array_split(rows, -(-len(rows) * width // _TABLE_WORDS)):
            made = sorted_rows(keys[some], width, n[some])
            tables[base[some][:, None] + np.arange(width)] = made
    entries: NDArray[np.uint16] = tables[base[row][:, None] + positions]
    return entries.astype(np.int64)


def sorted_rows(keys: UInt64, n: int, lengths: Int64 | None = None) -> NDArray[np.uint16]:
    """Return one permutation a row, uint16[keys, n]; of `range(lengths[row])` if given.

    Each word keeps its upper 48 bits and carries its index below them, so one plain sort is a
    stable argsort. Columns after a row's length are sorted to the end of the row.
    """
    index = np.arange(n, dtype=np.uint64)
    packed = words(keys[:, None], index[None, :])
    packed &= ~_LOW
    packed |= index
    if lengths is not None:
        packed[np.arange(n) >= lengths[:, None]] = np.uint64(0xFFFFFFFFFFFFFFFF)
    packed.sort(axis=1)
    return packed.astype(np.uint16)  # keeps the low 16 bits


def _narrow_entries(n: Int64, keys: UInt64, positions: Int64) -> Int64:
    """Return entries of permutations of at most 2^15 items, by arithmetic in 32 bits."""
    pairs = words(keys, np.arange(_NARROW_ROUNDS // 2)[:, None])
    rounds = np.empty((_NARROW_ROUNDS, len(keys)), np.uint32)
    rounds[0::2], rounds[1::2] = pairs & np.uint64(0xFFFFFFFF), pairs >> _HALF
    sizes = n.astype(np.uint32)
    if positions.shape[1] > len(n):
        x = positions.astype(np.uint32, order="C")
        return _walk(sizes[:, None], rounds[..., None], x, _narrow_hash).astype(np.int64)
    x = positions.T.astype(np.uint32, order="C")  # numpy is slow over short rows
    return _walk(sizes, rounds, x, _narrow_hash).T.astype(np.int64, order="C")


def _wide_entries(n: Int64, keys: UInt64, positions: Int64) -> Int64:
    return feistel(n[:, None], keys[:, None], positions)


def feistel(n: int | Int64, key: int | UInt64, positions: Int64) -> Int64:
    """Return the entries at `positions` of the permutations for n > 2^15, all broadcast."""
    # Arrays, also of one number: numpy 1 adds a scalar of 64 bits to a Python int as floats.
    sizes, keys = np.atleast_1d(np.asarray(n, np.uint64)), np.atleast_1d(np.asarray(key, np.uint64))
    rounds = words(keys[None], np.arange(_ROUNDS).reshape(-1, *[1] * keys.ndim))
    return _walk(sizes, rounds, positions.astype(np.uint64), _hash).view(np.int64)


def turns_of(n: int, key: int, entries: Int64) -> Int64:
    """Return where the permutation of `range(n)` under `key` has these entries.

    >>> turns_of(10**6, 3, permute(10**6, 3, np.array([7, 0, 999_999]))).tolist()
    [7, 0, 999999]
    """
    if n <= SMALL:
        return np.argsort(_shared_table(n, key))[entries]
    rounds = words(key, np.arange(_ROUNDS)[::-1, None])
    sizes = np.array([n], np.uint64)
    return _walk(sizes, rounds, entries.astype(np.uint64), _hash, _decrypt).view(np.int64)


Hash = Callable[[Any, Any, Any], Any]


def _walk(
    n: Unsigned, rounds: Unsigned, x: Unsigned, hashed: Hash, step: Callable[..., Any] | None = None
) -> Unsigned:
    """Encrypt numbers below n until the results are below n, all of one type and broadcast."""
    step = step or _encrypt
    x = step(n, rounds, x, hashed)
    at = np.nonzero(x >= n)  # rare: fewer than 1 cell in sqrt(n) lies outside
    while at[0].size:
        inner = np.broadcast_to(n, x.shape)[at]
        keys = np.stack([np.broadcast_to(key, x.shape)[at] for key in rounds])
        x[at] = moved = step(inner, keys, x[at], hashed)
        at = tuple(axis[moved >= inner] for axis in at)
    return x


def _encrypt(n: Unsigned, rounds: Unsigned, x: Unsigned, hashed: Hash) -> Unsigned:
    """Walk once through a grid of `a * b` cells, each half moved by a hash of the other."""
    a = np.ceil(np.sqrt(n)).astype(n.dtype)  # sqrt is correctly rounded on every machine
    right = x // a
    left, left_size, right_size = x - right * a, a, (n + a - 1) // a
    for key in rounds:
        moved = hashed(right, key, left_size)
        moved += left
        np.subtract(moved, left_size, out=left)
        np.minimum(moved, left, out=left)  # modulo: a difference below 0 is huge
        left, right, left_size, right_size = right, left, right_size, left_size
    left += right * left_size  # after an even number of rounds the halves are back in place
    return left


def _decrypt(n: Unsigned, rounds: Unsigned, x: Unsigned, hashed: Hash) -> Any:
    """Walk once backwards; `rounds` come from the last to the first."""
    a = np.ceil(np.sqrt(n)).astype(n.dtype)
    right = x // a
    left, left_size, right_size = x - right * a, a, (n + a - 1) // a
    for key in rounds:
        left, right, left_size, right_size = right, left, right_size, left_size
        left = left + left_size - hashed(right, key, left_size)
        np.minimum(left, left - left_size, out=left)  # modulo: a difference below 0 is huge
    left += right * left_size
    return left


def _hash(x: UInt64, key: UInt64, size: UInt64) -> UInt64:
    """Hash a half of fewer than 2^32 values to `[0, size)`."""
    h = x + key
    h *= _ODD
    h ^= h >> _HALF
    h *= _ODD
    h >>= _HALF
    h *= size
    h >>= _HALF
    return h


def _narrow_hash(x: NDArray[np.uint32], key: Unsigned, size: Unsigned) -> NDArray[np.uint32]:
    """Hash a half of fewer than 2^8 values to `[0, size)`."""
    h = x + key
    h *= _NARROW_ODD[0]
    h ^= h >> 15
    h *= _NARROW_ODD[1]
    h >>= 16
    h *= size
    h >>= 16
    return h
