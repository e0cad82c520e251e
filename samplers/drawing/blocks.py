"""The blocks of shards, in another order each epoch: by arithmetic, and tables that do not grow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.int_arrays import Int64
from twinfeed.samplers.drawing.permutation import permute, turns_of
from twinfeed.samplers.drawing.prefix_sums import RunningSums
from twinfeed.samplers.mapped import pieces

_MOST = 1 << 17  # entries of a table


class Blocks:
    """Cut shards into blocks of `block` records, numbered as they are stored.

    The last block of a shard may have fewer records.
    """

    def __init__(self, lengths: NDArray[Any], block: int) -> None:
        self._lengths, self.block = lengths, block
        self._records = RunningSums(lengths, _MOST)
        self._numbers = RunningSums(_Divided(lengths, block), _MOST)

    def __len__(self) -> int:
        return self._numbers.total

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self._lengths)

    def short(self) -> tuple[Int64, Int64]:
        """Return the numbers of the blocks that are short, and how many records each lacks."""
        lengths = self._at(np.arange(self.shards))
        rest = lengths % self.block
        shard = np.flatnonzero(rest)
        return np.cumsum(-(-lengths // self.block))[shard] - 1, self.block - rest[shard]

    @property
    def usual(self) -> int:
        """The size that most blocks have; of several such sizes, the largest."""
        times: dict[int, int] = {}
        for some in pieces(len(self._lengths)):
            lengths = np.asarray(self._lengths[some]).astype(np.int64)
            sizes, found = np.unique(lengths % self.block, return_counts=True)
            for size, count in zip(sizes.tolist(), found.tolist(), strict=True):
                times[size] = times.get(size, 0) + count
            times[self.block] = times.get(self.block, 0) + int((lengths // self.block).sum())
        times.pop(0, None)  # these shards have no short block
        most = max(times.values(), default=0)
        return max(size for size, count in times.items() if count == most) if most else 1

    def of_records(self, records: Int64) -> tuple[Int64, Int64]:
        """Return where the blocks of these records begin and stop."""
        shard, begin = self._records.locate(records)
        first = records - (records - begin) % self.block
        stop: Int64 = np.minimum(first + self.block, begin + self._at(shard))
        return first, stop

    def spans(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return the first record and the size of these blocks."""
        shard, within, sizes = self.sizes(numbers)
        return self._records.before(shard) + within, sizes

    def sizes(self, numbers: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the shard of these blocks, the records before them in it, and their sizes."""
        shard, before = self._numbers.locate(numbers)
        within = (numbers - before) * self.block
        return shard, within, np.minimum(self._at(shard) - within, self.block)

    def _at(self, shard: Int64) -> Int64:
        return np.asarray(self._lengths[shard]).astype(np.int64, copy=False)


class _Divided:
    """The number of blocks of each shard."""

    def __init__(self, lengths: NDArray[Any], block: int) -> None:
        self._lengths, self._block = lengths, block

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, places: Any) -> Int64:
        lengths: Int64 = np.asarray(self._lengths[places]).astype(np.int64)
        return -(-lengths // self._block)


class BlockOrder:
    """Put blocks one after the other in the order of a key."""

    def __init__(self, blocks: Blocks, key: int) -> None:
        self._blocks, self._key, self._count = blocks, key, len(blocks)
        self._table: NDArray[Any] | None = None
        if self._count <= _MOST:
            self._table = permute(self._count, key, np.arange(self._count)).astype(np.int32)
        few = self._table is None and blocks.shards <= _MOST
        self._sums = _Pieces(blocks, key) if few else RunningSums(_Sizes(self, blocks), _MOST)

    def numbers(self, turns: Int64) -> Int64:
        """Return the blocks at these turns of the order."""
        if self._table is None:
            return permute(self._count, self._key, turns)
        return self._table[turns].astype(np.int64)

    def at(self, places: Int64) -> tuple[Int64, Int64, Int64]:
        """Return the blocks at these places of all records end to end: the place where each begins,
        its first record, and its size.
        """
        turns, begin = self._sums.locate(places)
        return begin, *self._blocks.spans(self.numbers(turns))


class _Pieces:
    """Find blocks in their order, from a table of the short blocks alone.

    A piece is some whole blocks and the short block after them. So the table has one entry a shard,
    and does not grow with the blocks.
    """

    def __init__(self, blocks: Blocks, key: int) -> None:
        numbers, missing = blocks.short()
        turns = turns_of(len(blocks), key, numbers)
        order = np.argsort(turns)
        self._block = blocks.block
        self._turns = np.append(0, turns[order] + 1)
        self._begins = self._turns * self._block - np.append(0, np.cumsum(missing[order]))

    def locate(self, places: Int64) -> tuple[Int64, Int64]:
        """Return the turn of the block at each place, and the place where the block begins."""
        piece = np.searchsorted(self._begins, places, side="right") - 1
        within = (places - self._begins[piece]) // self._block
        turns: Int64 = self._turns[piece] + within
        return turns, self._begins[piece] + within * self._block


class _Sizes:
    """The sizes of the blocks in their order."""

    def __init__(self, order: BlockOrder, blocks: Blocks) -> None:
        self._order, self._blocks = order, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, places: Any) -> Int64:
        turns = places
        if isinstance(places, slice):
            turns = np.arange(*places.indices(len(self)))
        numbers = self._order.numbers(turns.reshape(-1))
        return self._blocks.sizes(numbers)[2].reshape(turns.shape)
