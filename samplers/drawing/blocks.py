"""The blocks of shards in a new random order each epoch, by tables that do not grow with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from twinfeed.samplers.drawing.permutation import inverse_permute, permute
from twinfeed.samplers.drawing.prefix_sums import PrefixSums
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Array, Int64s

_MAX_ENTRIES = 1 << 17  # of a table


class Blocks:
    """Shards cut into *blocks* of `block` consecutive records, numbered in stored order.

    The last block of a shard may have fewer records: a short block.
    """

    def __init__(self, lengths: Array, block: int) -> None:
        self._lengths, self.block = lengths, block
        self._record_sums = PrefixSums(lengths, _MAX_ENTRIES)
        self._block_sums = PrefixSums(_BlockCounts(lengths, block), _MAX_ENTRIES)

    def __len__(self) -> int:
        return self._block_sums.total

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._lengths)

    def short(self) -> tuple[Int64s, Int64s]:
        """Return the numbers of the short blocks, and how many records are missing in each."""
        lengths = self._lengths_of(np.arange(self.num_shards))
        rest = lengths % self.block
        shard = np.flatnonzero(rest)
        return np.cumsum(-(-lengths // self.block))[shard] - 1, self.block - rest[shard]

    @property
    def commonest_size(self) -> int:
        """The size that most blocks have; of several such sizes, the largest."""
        counts: dict[int, int] = {}  # blocks of each size
        for chunk in slices(len(self._lengths)):
            lengths = np.asarray(self._lengths[chunk]).astype(np.int64)
            sizes, times = np.unique(lengths % self.block, return_counts=True)
            for size, count in zip(sizes.tolist(), times.tolist(), strict=True):
                counts[size] = counts.get(size, 0) + count
            counts[self.block] = counts.get(self.block, 0) + int((lengths // self.block).sum())
        counts.pop(0, None)  # these shards have no short block
        most = max(counts.values(), default=0)
        return max(size for size, count in counts.items() if count == most) if most else 1

    def of_records(self, records: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first record and the stop of the block that contains each record."""
        shard, shard_start = self._record_sums.locate(records)
        first = records - (records - shard_start) % self.block
        stop: Int64s = np.minimum(first + self.block, shard_start + self._lengths_of(shard))
        return first, stop

    def spans(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first record and the size of these blocks."""
        shard, offset, sizes = self.sizes(numbers)
        return self._record_sums.before(shard) + offset, sizes

    def sizes(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the shard of these blocks, the offset of each in its shard, and their sizes."""
        shard, before = self._block_sums.locate(numbers)
        offset = (numbers - before) * self.block
        return shard, offset, np.minimum(self._lengths_of(shard) - offset, self.block)

    def _lengths_of(self, shard: Int64s) -> Int64s:
        return np.asarray(self._lengths[shard]).astype(np.int64, copy=False)


class _BlockCounts:
    """The number of blocks of each shard, computed when it is asked for."""

    def __init__(self, lengths: Array, block: int) -> None:
        self._lengths, self._block = lengths, block

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Int64s:
        lengths: Int64s = np.asarray(self._lengths[index]).astype(np.int64)
        return -(-lengths // self._block)


class BlockOrder:
    """A random permutation of blocks under a key, and their records laid end to end.

    The *rank* of a block is its position in the permutation. A *place* is a position in the
    sequence of all records, block after block.
    """

    def __init__(self, blocks: Blocks, key: int) -> None:
        self._blocks, self._key, self._count = blocks, key, len(blocks)
        self._table: Array | None = None
        if self._count <= _MAX_ENTRIES:
            self._table = permute(self._count, key, np.arange(self._count)).astype(np.int32)
        few_shards = self._table is None and blocks.num_shards <= _MAX_ENTRIES
        self._sums = (
            _ShortBlockTable(blocks, key)
            if few_shards
            else PrefixSums(_BlockSizes(self, blocks), _MAX_ENTRIES)
        )

    def block_at(self, ranks: Int64s) -> Int64s:
        """Return the number of the block at each rank."""
        if self._table is None:
            return permute(self._count, self._key, ranks)
        return self._table[ranks].astype(np.int64)

    def locate(self, places: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the block at each place: the place of its first record, that record, its size."""
        ranks, start = self._sums.locate(places)
        return start, *self._blocks.spans(self.block_at(ranks))


class _ShortBlockTable:
    """The search for the block at a place, by a table of the short blocks alone.

    All blocks between two short blocks are full, so their ranks follow by division. The table has
    at most one entry a shard, and does not grow with the number of blocks.
    """

    def __init__(self, blocks: Blocks, key: int) -> None:
        numbers, missing = blocks.short()
        ranks = inverse_permute(len(blocks), key, numbers)
        order = np.argsort(ranks)
        self._block = blocks.block
        # The block after each short block: its rank and the place where it starts.
        self._ranks = np.append(0, ranks[order] + 1)
        self._starts = self._ranks * self._block - np.append(0, np.cumsum(missing[order]))

    def locate(self, places: Int64s) -> tuple[Int64s, Int64s]:
        """Return the rank of the block at each place, and the place where the block starts."""
        entry = np.searchsorted(self._starts, places, side="right") - 1
        full_blocks = (places - self._starts[entry]) // self._block
        ranks: Int64s = self._ranks[entry] + full_blocks
        return ranks, self._starts[entry] + full_blocks * self._block


class _BlockSizes:
    """The size of the block at each rank, computed when it is asked for."""

    def __init__(self, order: BlockOrder, blocks: Blocks) -> None:
        self._order, self._blocks = order, blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Int64s:
        ranks = index
        if isinstance(index, slice):
            ranks = np.arange(*index.indices(len(self)))
        numbers = self._order.block_at(ranks.reshape(-1))
        return self._blocks.sizes(numbers)[2].reshape(ranks.shape)
