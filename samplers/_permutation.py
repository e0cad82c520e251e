"""Keyed permutations of `range(n)`, by table for a small n and by arithmetic for any n.

Up to 2^15 items a permutation is a sort of keyed words, which is uniform. Above 2^15 items a
permutation is a Feistel network over `a * b >= n` cells with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002), which gives any position in constant time and
memory. Over few cells a Feistel network would give even permutations only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers._bits import Int64, UInt64, distinct_pairs, words

Table = NDArray[np.uint16]

SMALL = 1 << 15
_LOW = np.uint64(0xFFFF)  # the bits of a sorted word that carry its index
_BLOCK = 1 << 13  # ids per inner call: the temporaries of one block stay in the L2 cache
_TABLE_WORDS = 1 << 19  # words sorted at once while tables are made: 4 MB
_ROUNDS = 6
_HALF = np.uint64(32)
_ODD = np.uint64(0xD6E8FEB86659FD93)


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


# The last few tables: neighbouring steps ask for the same one.
_shared_table = lru_cache(maxsize=8)(small_table)


def permute_rows(n: Int64, keys: UInt64, positions: Int64) -> Int64:
    """Return entries of one permutation a row, of its own size and key: int64[rows, m]."""
    small = n <= SMALL
    if small.all():
        return _table_entries(n, keys, positions)
    out = np.empty(positions.shape, np.int64)
    out[small] = _table_entries(n[small], keys[small], positions[small])
    large = ~small
    out[large] = feistel(n[large][:, None], keys[large][:, None], positions[large])
    return out


def _table_entries(n: Int64, keys: UInt64, positions: Int64) -> Int64:
    """Make each distinct table once and look the positions up."""
    if not len(n):
        return np.empty(positions.shape, np.int64)
    first, row = distinct_pairs(keys, n)
    widths = table_widths(n[first])
    base = np.cumsum(widths) - widths
    tables = np.empty(int(widths.sum()), np.uint16)
    write_tables(tables, base, n[first], keys[first])
    entries: NDArray[np.uint16] = tables[base[row][:, None] + positions]
    return entries.astype(np.int64)


def table_widths(n: Int64) -> Int64:
    """Round sizes up, by a quarter at most, to four widths an octave: these sort together."""
    step = np.left_shift(1, np.maximum(np.frexp(n.astype(np.float64))[1] - 3, 0))
    widths: Int64 = -(-n // step) * step
    return widths


def write_tables(out: NDArray[np.uint16], base: Int64, n: Int64, keys: UInt64) -> None:
    """Write one permutation of `range(n)` for each key into `out`, from `base` on.

    A table takes `table_widths(n)` places; the places after its n entries mean nothing.
    """
    widths = table_widths(n)
    for width in np.flatnonzero(np.bincount(widths)).tolist():  # np.unique would import numpy.ma
        rows = np.flatnonzero(widths == width)
        for some in np.array_split(rows, -(-len(rows) * width // _TABLE_WORDS)):
            made = sorted_rows(keys[some], width, n[some])
            out[base[some][:, None] + np.arange(width)] = made


def sorted_rows(keys: UInt64, n: int, lengths: Int64 | None = None) -> NDArray[np.uint16]:
    """Return one permutation a row, uint16[keys, n]; of `range(lengths[row])` where given.

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


def feistel(n: int | Int64, key: int | UInt64, positions: Int64) -> Int64:
    """Return the entries at `positions` of the permutations for n > 2^15, all broadcast."""
    sizes, keys = np.asarray(n, dtype=np.int64), np.asarray(key, dtype=np.uint64)
    x = _encrypt(sizes, keys, positions)
    while (outside := x >= sizes).any():  # rare: fewer than 1 cell in sqrt(n) lies outside
        inner_sizes = np.broadcast_to(sizes, x.shape)[outside]
        inner_keys = np.broadcast_to(keys, x.shape)[outside]
        x[outside] = _encrypt(inner_sizes, inner_keys, x[outside])
    return x


def _encrypt(n: Int64, key: UInt64, positions: Int64) -> Int64:
    """Walk once through a grid of `a * b` cells, each half moved by a hash of the other."""
    a = np.ceil(np.sqrt(n)).astype(np.int64)  # sqrt is correctly rounded on every machine
    b = -(-n // a)
    rounds = words(key[None], np.arange(_ROUNDS).reshape(-1, *[1] * key.ndim))
    high = positions // a
    left: UInt64 = (positions - high * a).view(np.uint64)
    right: UInt64 = high.view(np.uint64)
    left_size, right_size = a.astype(np.uint64), b.astype(np.uint64)
    for round_key in rounds:
        left += _hash(right, round_key, left_size)
        left -= left_size * (left >= left_size).astype(np.uint64)
        left, right, left_size, right_size = right, left, right_size, left_size
    left += right * left_size  # after an even number of rounds the halves are back in place
    return left.view(np.int64)


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
