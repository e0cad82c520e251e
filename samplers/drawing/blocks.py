"""The blocks of shards in a new random order each epoch, by tables that do not grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np

from twinfeed.samplers.drawing.permutation import inverse_permute, permute
from twinfeed.samplers.drawing.prefix_sums import ComputedCounts, PrefixSums
from twinfeed.samplers.mapped import slices
from twinfeed.samplers.types import Array, Int64s

_MAX_ENTRIES = 1 << 17  # of a table
_CHUNK = 1 << 14  # shards whose short blocks are found at once


class Blocks:
    """Shards divided into *blocks* of `block` consecutive records, numbered in stored order.

    The last block of a shard may have fewer records: a short block.
    """

    def __init__(self, lengths: Array, block: int) -> None:
        self._lengths, self.num_shards = lengths, len(lengths)
        # No block is longer than the longest shard. If all shards are equal, no block is short.
        self.block = block = min(block, int(lengths.max(initial=1)))
        self._record_sums = PrefixSums(lengths, _MAX_ENTRIES)
        counts = ComputedCounts(len(lengths), partial(_num_blocks, lengths, block))
        self._block_sums = PrefixSums(counts, _MAX_ENTRIES)

    def __len__(self) -> int:
        return self._block_sums.total

    def short_blocks(self, shards: slice) -> tuple[Int64s, Int64s]:
        """Return the numbers of the short blocks of these shards, and how many records each one
        lacks.
        """
        last_size = self._lengths_of(shards) % self.block  # of the last block; 0 if it is full
        short = np.flatnonzero(last_size)
        blocks_before = self._block_sums.before(np.array([shards.start]))
        # The number of the last block of each shard, plus 1.
        block_stops = blocks_before + np.cumsum(_num_blocks(self._lengths, self.block, shards))
        return block_stops[short] - 1, self.block - last_size[short]

    @property
    def commonest_size(self) -> int:
        """The size (in records) that most blocks have; of several such sizes, the largest."""
        counts: Counter[int] = Counter()  # how many blocks have each size
        for chunk in slices(len(self._lengths)):
            lengths = np.asarray(self._lengths[chunk]).astype(np.int64)
            last_sizes, num_shards = np.unique(lengths % self.block, return_counts=True)
            counts.update(dict(zip(last_sizes.tolist(), num_shards.tolist(), strict=True)))
            counts[self.block] += int((lengths // self.block).sum())
        del counts[0]  # shards without a shorter last block
        # The size with the largest (count, size); 1 if there is no block.
        size, count = max(counts.items(), key=lambda item: item[::-1], default=(1, 0))
        return size if count else 1

    def bounds_around(self, records: Int64s) -> tuple[Int64s, Int64s]:
        """Return the block that contains each record: its first record and its last plus 1,
        int64[n].
        """
        shard, shard_start = self._record_sums.locate(records)
        first = records - (records - shard_start) % self.block
        stop: Int64s = np.minimum(first + self.block, shard_start + self._lengths_of(shard))
        return first, stop

    def first_and_size(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Return the first record and the size of blocks of these numbers, int64[n] each."""
        shard, offset, sizes = self.locate_in_shards(numbers)
        return self._record_sums.before(shard) + offset, sizes

    def locate_in_shards(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the shard of blocks of these numbers, their offsets in it, and their sizes,
        int64[n].
        """
        shard, blocks_before_shard = self._block_sums.locate(numbers)
        offset = (numbers - blocks_before_shard) * self.block
        # The last block of a shard has what remains of the shard.
        return shard, offset, np.minimum(self._lengths_of(shard) - offset, self.block)

    def _lengths_of(self, shards: Int64s | slice) -> Int64s:
        return np.asarray(self._lengths[shards]).astype(np.int64, copy=False)


def _num_blocks(lengths: Array, block: int, shards: Int64s | slice) -> Int64s:
    """Return the number of blocks of each of these shards."""
    return -(-np.asarray(lengths[shards]).astype(np.int64) // block)


class BlockOrder:
    """The records of all blocks as one sequence, block after block in a random order.

    The *position* of a block is its index in this order: the first block has position 0.
    """

    def __init__(self, blocks: Blocks, key: int) -> None:
        count = len(blocks)
        self._blocks = blocks
        # The number of the block at each position.
        self._block_at: Callable[[Int64s], Int64s] = partial(permute, count, key)
        if count <= _MAX_ENTRIES:
            table = permute(count, key, np.arange(count)).astype(np.int32)
            self._block_at = lambda block_positions: table[block_positions].astype(np.int64)
        self._sums: PrefixSums | _ShortBlockTable
        if blocks.num_shards > _MAX_ENTRIES:
            sizes = ComputedCounts(count, partial(_sizes_at, blocks, self._block_at))
            self._sums = _BlockSizeSums(sizes, blocks, key)
        else:
            self._sums = _ShortBlockTable(blocks, key)

    def locate(self, index: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Find the block that contains each index; return its start, its first record and its size.

        In a sequence that starts with the blocks 8 9 and 0 1 2, the indices 1 and 3 give the starts
        0 2, the records 8 0 and the sizes 2 3.
        """
        block_positions, first_index = self._sums.locate(index)
        first_record, size = self._blocks.first_and_size(self._block_at(block_positions))
        return first_index, first_record, size


def _sizes_at(blocks: Blocks, block_at: Callable[[Int64s], Int64s], positions: Int64s) -> Int64s:
    """Return the size of the block at each of these positions in a random order, int64[n]."""
    return blocks.locate_in_shards(block_at(positions))[2]


class _ShortBlockTable:
    """The search for the block that contains an index, by a table of the short blocks only.

    A row is the first block, or the block after a short one. The full blocks after it follow by
    division. In the comments, the blocks in random order have 4 4 1 4 4 records.
    """

    def __init__(self, blocks: Blocks, key: int) -> None:
        numbers, num_missing = blocks.short_blocks(slice(0, blocks.num_shards))
        block_positions = inverse_permute(len(blocks), key, numbers)  # [2]
        order = np.argsort(block_positions)
        self._block_size = blocks.block  # of a full block: 4
        # How many records the short blocks before each row lack: [0, 3].
        num_missing_before = np.append(0, np.cumsum(num_missing[order]))
        # The columns of the table: [0, 3] and [0, 9].
        self._row_positions = np.append(0, block_positions[order] + 1)
        self._row_first_indices = self._row_positions * self._block_size - num_missing_before

    def locate(self, index: Int64s) -> tuple[Int64s, Int64s]:
        """Find the block that contains each index; return its position and its first index."""
        row = np.searchsorted(self._row_first_indices, index, side="right") - 1
        row_position, row_first_index = self._row_positions[row], self._row_first_indices[row]
        num_full_blocks = (index - row_first_index) // self._block_size
        return row_position + num_full_blocks, row_first_index + num_full_blocks * self._block_size


class _BlockSizeSums(PrefixSums):
    """The prefix sums of the sizes of all blocks in a random order, if there are very many shards.

    The table is computed from the short blocks alone, a chunk of shards at a time. In the comments,
    the blocks in random order have 4 4 1 4 4 records, in rows of two blocks.
    """

    def __init__(self, sizes: ComputedCounts, blocks: Blocks, key: int) -> None:
        super().__init__(sizes, _MAX_ENTRIES)
        self._blocks, self._key = blocks, key

    def _compute_table(self) -> Int64s:
        """Return the number of records before each row of blocks, and of all: int64[rows + 1]."""
        num_rows = -(-len(self._counts) // self._row_size)
        num_missing = np.zeros(num_rows, np.int64)  # what the short blocks of each row lack
        for shards in slices(self._blocks.num_shards, _CHUNK):
            block_numbers, missing = self._blocks.short_blocks(shards)
            positions = inverse_permute(len(self._counts), self._key, block_numbers)
            np.add.at(num_missing, positions // self._row_size, missing)  # [0, 3, 0]
        missing_before = np.append(0, np.cumsum(num_missing))  # [0, 0, 3, 3]
        blocks_before = np.append(np.arange(num_rows) * self._row_size, len(self._counts))
        # If all blocks were full, these sums would be blocks_before * 4 = [0, 8, 16, 20].
        table: Int64s = blocks_before * self._blocks.block - missing_before
        return table  # [0, 8, 13, 17]
