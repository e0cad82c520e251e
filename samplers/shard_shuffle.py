"""A shuffle that reads shards block by block, and is as well mixed at the end as at the start."""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.blocks import BlockOrder, Blocks
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.drawing.round_robin import MAX_SEGMENTS, RoundRobin, desynchronized_bounds
from twinfeed.samplers.orders import Sampler
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Int64s
from twinfeed.samplers.validate import counted

_BLOCKS_KEY, _RECORDS_KEY, _SEGMENTS_KEY = range(3)  # the random orders of an epoch: each has a key


class ShardShuffleSampler(Sampler):
    """Shuffle blocks of consecutive records over all shards, `window` of them open at once.

    The blocks of an epoch are permuted. The records of a block are permuted within the block. This
    sequence is divided into `window` segments, which are read side by side (round-robin). Every
    record comes exactly once. A block is read once. Only the `window - 1` blocks at most in which a
    segment ends and the next starts are read in two parts: the end of the block when an epoch
    begins, its beginning when the epoch ends.

    Any `window` records in a row are of nearly as many blocks, at the end of an epoch too. All
    segments end together; with 16 segments or more, a single one may end early. There must be
    enough blocks: with fewer than three for each segment, or blocks longer than a segment, some
    segments read the same block.

    Args:
        shard_lengths: the records of each shard, int[shards]. An array that is mapped from a file,
            such as that of a large index, is pickled as the path. Other arrays are copied.
        seed: the only source of chance.
        block: records of a block. A block as long as the data makes the order sequential. A block
            of 1 makes the order uniform.
        window: blocks that are open at once.
        sections: the blocks are divided into so many sections of as many records, each with a
            shuffle of its own and its share of the window's segments. A batch is a part of each
            section. Where world_size divides `sections`, no two ranks read the same block, except
            the `sections - 1` blocks at most that are in two sections, and in a smaller last batch.
        order_within: `"stored"` keeps the records of a block in stored order.

    Raises:
        ValueError: `sections` does not divide `window`, or there are fewer blocks than sections.

    Shards of 6 and 4 records, blocks of 2, two segments, of which both have a part of block 8 9::

        blocks    5 4 | 3 2 | 8 * 9 | 7 6 | 1 0
        segment 0    5   4   3   2   8
        segment 1      9   7   6   1   0
        stream    5 9 4 7 3 6 2 1 8 0

    >>> import numpy as np
    >>> order = ShardShuffleSampler([6, 4], block=2, window=2, seed=0)
    >>> order.ids(0, np.arange(10)).tolist()
    [5, 9, 4, 7, 3, 6, 2, 1, 8, 0]
    """

    #: Records of a block; the last block of a shard may have fewer.
    block: int
    #: Blocks that are open at once.
    window: int

    @validate.show_call("ShardShuffleSampler(index.shard_lengths, seed=0, block=64, window=32)")
    def __init__(
        self,
        shard_lengths: ArrayLike,
        *,
        seed: SupportsIndex,
        block: SupportsIndex,
        window: SupportsIndex,
        sections: SupportsIndex = 1,
        order_within: Literal["random", "stored"] = "random",
    ) -> None:
        self._lengths = validate.counts("shard_lengths", shard_lengths, minimum=0)
        self.block = validate.integer("block", block, minimum=1)
        self.window = validate.integer("window", window, minimum=1, below=MAX_SEGMENTS)
        self._sections = validate.integer("sections", sections, minimum=1)
        self._within = validate.choice("order_within", order_within, ("random", "stored"))
        self.seed = validate.seed(seed)
        if self.window % self._sections:
            raise ValueError(
                f"window must be divisible by sections, got window={self.window}, "
                f"sections={self._sections}"
            )
        self.num_records = int(self._lengths.sum())
        self._blocks = Blocks(self._lengths, self.block)
        self.traits = SamplerTraits(reads_blocks=self._blocks.block > 1)
        if self._sections > max(1, len(self._blocks)):
            raise ValueError(
                f"sections must be at most the number of blocks, {len(self._blocks)}, "
                f"got {self._sections}: take smaller blocks"
            )
        self.parameters = {
            "shard_lengths": self._lengths,
            "block": self.block,
            "window": self.window,
            "sections": self._sections,
            "order_within": order_within,
        }
        self._key = root_key(self.seed, "shard shuffle")
        self._batch_size = self._sections
        self._section_size = self.num_records // self._sections  # records of a section
        size = self._blocks.commonest_size
        # A segment must be longer than a block. Otherwise it would enter a block that the next
        # segment is still reading.
        segments = max(1, min(self.window // self._sections, self._section_size // (size + 2)))
        self._segment_bounds = desynchronized_bounds(self._section_size, segments, size)
        self._cache: FifoCache[_EpochTables] = FifoCache(2)

    def __repr__(self) -> str:
        return (
            f"ShardShuffleSampler({counted(self.num_records, 'record')} in "
            f"{counted(len(self._lengths), 'shard')}, {counted(len(self._blocks), 'block')} of "
            f"{self.block:,}, window={self.window:,}, "
            f"sections={self._sections}, order_within={self._within!r}, seed={self.seed})"
        )

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return for each record a range of records that are read around the same time: its span.

        A loader prefetches a span as a whole. The span of `records[i]` is `first[i]` to
        `stop[i] - 1`: the block of consecutive records that contains it.

        In each epoch, a few blocks are read in two parts at different times. If `epoch` is passed,
        the span is only the part that contains the record: if the block 4 5 6 7 is read in the
        parts 4 5 and 6 7, the span of record 7 is 6 to 7.

        >>> order = ShardShuffleSampler([6, 4], block=4, window=2, seed=0)
        >>> order.spans(np.array([5, 9, 0]))
        (array([4, 6, 0]), array([ 6, 10,  4]))
        """
        first, stop = self._blocks.bounds_around(records)
        if epoch is not None:
            # `split_records` are the records before which blocks are split, such as 6.
            first, stop = _part_at(records, first, stop, self._tables(epoch).split_records)
        return first, stop

    def for_batches(self, batch_size: int, num_steps: int) -> ShardShuffleSampler:
        """Return a copy of this sampler for `num_steps` batches an epoch, each of `batch_size`.

        Raises: ValueError: `batch_size` is not a multiple of the number of sections.
        """
        if batch_size % self._sections:
            raise ValueError(
                f"batch_size must be divisible by the order's sections={self._sections}, "
                f"got {batch_size}"
            )
        sampler = copy.copy(self)
        sampler._batch_size, sampler._num_steps = batch_size, num_steps
        return sampler

    @property
    def num_groups(self) -> int:
        """The number of segments: a loader may read each as a tf.data dataset of its own."""
        return len(self._segment_starts)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the record id at each of these positions of an epoch. Both are int64[n]."""
        tables = self._tables(epoch)
        index = self._indices_at(tables.round_robin, positions)  # into the sequence
        # The first record of the block, the offset of the record in it, and the size of the block.
        first_record, offset, size = tables.locate(index)
        if self._within == "random":
            keys = random_words(derive(self._key, epoch, _RECORDS_KEY), first_record)
            offset = permute_rows(size, keys, offset[:, None])[:, 0]
        return first_record + offset

    def _indices_at(self, round_robin: RoundRobin, positions: Int64s) -> Int64s:
        """Return the index into the sequence of all blocks that is read at each position of an
        epoch.
        """
        if self._sections == 1:
            return round_robin.indices_at(0, positions)
        section, section_position = self._positions_in_sections(positions)
        index = section * self._section_size + round_robin.indices_at(section, section_position)
        # If the sections cannot have equal size, the last records are in no section. They come last
        # in an epoch, in the order of the sequence.
        return np.where(positions < self._sections * self._section_size, index, positions)

    def _positions_in_sections(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the section of each position of an epoch, and its position within the section; of
        positions after the sections, that of the last. With two sections of 5 records, and batches
        of 4::

            position            0 1 2 3   4 5 6 7   8 9
            section             0 0 1 1   0 0 1 1   0 1
            section position    0 1 0 1   2 3 2 3   4 4
        """
        positions = np.minimum(positions, self._sections * self._section_size - 1)
        # The comments have the values for the positions 6 to 9.
        step, index_in_batch = np.divmod(positions, self._batch_size)  # [1, 1, 2, 2], [2, 3, 0, 1]
        # The records of each section that are in a batch, and that are in earlier batches.
        num_per_batch = self._batch_size // self._sections  # 2
        num_earlier = step * num_per_batch  # [2, 2, 4, 4]
        # The last batch has fewer: [2, 2, 1, 1].
        num_in_batch = np.minimum(num_per_batch, self._section_size - num_earlier)
        section, offset = np.divmod(index_in_batch, num_in_batch)  # [1, 1, 0, 1], [0, 1, 0, 0]
        return section, num_earlier + offset  # [1, 1, 0, 1], [2, 3, 4, 4]

    def draw_groups(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the number of the segment that is read at each position of an epoch, int64[n].
        They are numbered section by section, and within it as rounds read them.
        """
        section, section_position = self._positions_in_sections(positions)
        index_in_round = self._tables(epoch).round_robin.indices_in_round(section_position)
        num_per_section = len(self._segment_bounds) - 1  # the last bound is an end
        return section * num_per_section + index_in_round

    def _tables(self, epoch: int) -> _EpochTables:
        """Return the tables of an epoch, from the cache if they are there."""
        return self._cache.get(epoch, lambda: self._compute_tables(epoch))

    def _compute_tables(self, epoch: int) -> _EpochTables:
        """Return the tables of an epoch: its order of blocks, and where segments split blocks."""
        block_order = BlockOrder(self._blocks, derive(self._key, epoch, _BLOCKS_KEY))
        split_indices, split_records = self._block_splits(block_order)
        # Each section reads its segments in an order of its own, and so has a key.
        keys = random_words(derive(self._key, epoch, _SEGMENTS_KEY), np.arange(self._sections))
        round_robin = RoundRobin(self._segment_bounds, keys)
        return _EpochTables(block_order, split_indices, split_records, round_robin)

    @property
    def _segment_starts(self) -> Int64s:
        """The start of each segment in the sequence of all records, int64[segments], sorted."""
        section_starts = np.arange(self._sections) * self._section_size
        return np.add.outer(section_starts, self._segment_bounds[:-1]).reshape(-1)

    def _block_splits(self, block_order: BlockOrder) -> tuple[Int64s, Int64s]:
        """Return where segments start in the middle of a block: as indices and as records, sorted.
        Here segments start at the indices 0 and 6::

            4 5 6 7 | 8 9   10 11 | 0 1 2 3    blocks
            4 5 6 7   8 9 | 10 11   0 1 2 3    segments
        """
        segment_starts = self._segment_starts  # [0, 6]
        # The block in which each segment starts: its first index, [0, 4], and record, [4, 8].
        block_start, first_record, _size = block_order.locate(segment_starts)
        offset_in_block = segment_starts - block_start  # [0, 2]
        is_split = offset_in_block > 0  # at 0, a segment starts with a whole block
        split_records = first_record[is_split] + offset_in_block[is_split]  # [10]
        # Segments start at ascending indices, but the blocks there are in random order.
        return segment_starts[is_split], np.sort(split_records)  # [6], [10]


def _part_at(index: Int64s, start: Int64s, stop: Int64s, splits: Int64s) -> tuple[Int64s, Int64s]:
    """Return the start and the stop of the part of a range that contains an index, if the range is
    split at the sorted points `splits`, int64[n] each.
    """
    num_splits = np.searchsorted(splits, index, side="right")  # how many are at most the index
    previous_split = np.append(-1, splits)[num_splits]  # -1: there is none
    next_split = np.append(splits, validate.LIMIT)[num_splits]  # LIMIT: there is none
    return np.maximum(start, previous_split), np.minimum(stop, next_split)


class _EpochTables(NamedTuple):
    """The tables of an epoch: its order of blocks, and the segments that split some of them."""

    block_order: BlockOrder
    split_indices: Int64s  # where segments split blocks: sorted indices into the block sequence
    split_records: Int64s  # the records at these indices, sorted
    round_robin: RoundRobin  # of the segments

    def locate(self, index: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the part of a block that contains each index: its first record, the offset of the
        index in it, and its size. The comments have the indices 5 and 6, and a segment that starts
        at 6::

            4 5 6 7 | 8 9   10 11 | 0 1 2 3    blocks
            4 5 6 7   8 9 | 10 11   0 1 2 3    segments
        """
        # The whole block: its first index, [4, 4]; its first record, [8, 8]; its size, [4, 4].
        block_start, block_record, block_size = self.block_order.locate(index)
        # The part of the block: its first index, [4, 6]; and the index after its last, [6, 8].
        start, stop = _part_at(index, block_start, block_start + block_size, self.split_indices)
        part_record = block_record + (start - block_start)  # its first record: [8, 10]
        return part_record, index - start, stop - start
