"""What neighbouring steps share is kept: recent results of a function, and permutations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers._bits import Int64, words
from twinfeed.samplers._permutation import SMALL, permute_rows, table_widths, write_tables

T = TypeVar("T")


class Recent(Generic[T]):
    """Keep the last `size` results made; a copy in another process begins empty."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of this key, which is made where none is kept."""
        kept = self._kept  # replaced, never changed: safe to read from several threads
        if key not in kept:
            newest = list(kept.items())[max(0, len(kept) - self._size + 1) :]
            kept = self._kept = {**dict(newest), key: make()}
        return kept[key]

    def __reduce__(self) -> tuple[type[Recent[T]], tuple[int]]:
        """Pickle without the results."""
        return type(self), (self._size,)


class TableCache:
    """Keep the latest lap of each small population, two bytes an item.

    The cache changes how fast entries come, never which entries. While another thread uses the
    cache, or used it when this process was forked, entries are computed without the cache.
    """

    def __init__(self, sizes: Int64, key: int) -> None:
        self._sizes, self._key = sizes, key
        self._lock = threading.Lock()
        self._laps = np.full(len(sizes), -1)
        widths = np.where(sizes <= SMALL, table_widths(sizes), 0)
        self._base = np.cumsum(widths) - widths
        self._tables = np.empty(int(widths.sum()), np.uint16)

    def entries(self, population: Int64, lap: Int64, positions: Int64) -> Int64:
        """Return entries of the permutations of a population and lap a row: int64[rows, m]."""
        if not self._lock.acquire(blocking=False):
            return self._computed(population, lap, positions)
        try:
            self._fill(population, lap)
            held = self._laps[population] == lap
            out = np.empty(positions.shape, np.int64)
            base = self._base[population[held]]
            out[held] = self._tables[base[:, None] + positions[held]]
        finally:
            self._lock.release()
        rest = ~held
        if rest.any():
            out[rest] = self._computed(population[rest], lap[rest], positions[rest])
        return out

    def _computed(self, population: Int64, lap: Int64, positions: Int64) -> Int64:
        return permute_rows(self._sizes[population], self._keys(population, lap), positions)

    def _keys(self, population: Int64, lap: Int64) -> NDArray[np.uint64]:
        return words(words(self._key, population), lap)

    def _fill(self, population: Int64, lap: Int64) -> None:
        """Make tables of the latest laps. Of the lap before, only the tail is ever asked for."""
        held = self._laps[population]
        new = ((lap > held) | (lap < held - 1)) & (self._sizes[population] <= SMALL)
        if not new.any():
            return
        population, lap = population[new], lap[new]
        order = np.lexsort((lap, population))
        population, lap = population[order], lap[order]
        last = np.append(population[1:] != population[:-1], True)
        population, lap = population[last], lap[last]
        keys = self._keys(population, lap)
        self._laps[population] = -1  # should the next line be interrupted
        write_tables(self._tables, self._base[population], self._sizes[population], keys)
        self._laps[population] = lap
