"""A shuffle that reads shards block by block, and is as well mixed at the end as at the start."""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.blocks import BlockOrder, Blocks
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.lanes import MAX_LANES, ConstantLanes, desynchronized_bounds
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.orders import GroupSampler, Sampler
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Int64s
from twinfeed.samplers.validate import counted


class ShardShuffleSampler(Sampler):
    """Shuffle blocks of consecutive records over all shards, `window` of them open at once.

    The blocks of an epoch are permuted. The records of a block are permuted within the block. This
    sequence is cut into `window` lanes, which are emitted side by side. Every record comes exactly
    once. A block is read once. Only the `window - 1` blocks at most that a bound cuts are read in
    two parts: the end of the block when an epoch begins, its beginning when the epoch ends.

    Any `window` records in a row are of nearly as many blocks, at the end of an epoch too. All
    lanes end together; with 16 lanes or more, a single lane may end early. There must be enough
    blocks: with fewer than three for each lane, or blocks longer than a lane, some lanes read the
    same block.

    Args:
        shard_lengths: the records of each shard, int[shards]. An array that is mapped from a file,
            such as that of a large index, is pickled as the path. Other arrays are copied.
        seed: the only source of chance.
        block: records of a block. A block as long as the data makes the order sequential. A block
            of 1 makes the order uniform.
        window: blocks that are open at once.
        sections: the blocks are divided into so many sections of as many records, each with a
            shuffle of its own and its share of the window's lanes. A batch is a piece of each
            section. Where world_size divides `sections`, no two ranks read the same block, except
            the `sections - 1` blocks at most that a section's bound cuts, and in a smaller last
            batch.
        order_within: `"stored"` keeps the records of a block in stored order.

    Raises:
        ValueError: `sections` does not divide `window`, or there are fewer blocks than sections.

    Shards of 6 and 4 records, blocks of 2, two lanes; the bound of the lanes cuts block 8 9::

        blocks    5 4 | 3 2 | 8 * 9 | 7 6 | 1 0
        lane 0    5   4   3   2   8
        lane 1      9   7   6   1   0
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

    def __init__(
        self,
        shard_lengths: ArrayLike,
        /,
        *,
        seed: SupportsIndex,
        block: SupportsIndex,
        window: SupportsIndex,
        sections: SupportsIndex = 1,
        order_within: Literal["random", "stored"] = "random",
    ) -> None:
        self._lengths = validate.counts("shard_lengths", shard_lengths, minimum=0)
        self.block = validate.integer("block", block, minimum=1)
        self.window = validate.integer("window", window, minimum=1, below=MAX_LANES)
        self._sections = validate.integer("sections", sections, minimum=1)
        self._within = validate.choice("order_within", order_within, ("random", "stored"))
        self.seed = validate.seed(seed)
        if self.window % self._sections:
            raise ValueError(
                f"window must be divisible by sections, got window={self.window}, "
                f"sections={self._sections}"
            )
        self.num_records = int(self._lengths.sum())
        self.traits = SamplerTraits(reads_blocks=self.block > 1)
        self._blocks = Blocks(self._lengths, self.block)
        self._count = len(self._blocks)
        if self._count < self._sections > 1:
            raise ValueError(
                f"sections must be at most the number of blocks, {self._count}, "
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
        # A lane must be longer than a block. Otherwise it would enter a block that the next lane is
        # still reading.
        lanes = max(1, min(self.window // self._sections, self._section_size // (size + 2)))
        self._bounds = desynchronized_bounds(self._section_size, lanes, size)
        self._cache: FifoCache[_EpochTable] = FifoCache(2)

    def __repr__(self) -> str:
        return (
            f"ShardShuffleSampler({counted(self.num_records, 'record')} in "
            f"{counted(len(self._lengths), 'shard')}, {counted(self._count, 'block')} of "
            f"{self.block:,}, window={self.window:,}, "
            f"sections={self._sections}, order_within={self._within!r}, seed={self.seed})"
        )

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return the first record and the stop of the block of each record, int64 as `records`.

        In an epoch a few blocks are read in two parts, at different times. With `epoch`, the range
        of a record of such a block is the part.

        >>> order = ShardShuffleSampler([6, 4], block=4, window=2, seed=0)
        >>> order.spans(np.array([5, 9, 0]))
        (array([4, 6, 0]), array([ 6, 10,  4]))
        """
        first, stop = self._blocks.bounds_around(records)
        if epoch is not None:
            first, stop = _clip(first, stop, self._table(epoch).cut_records, records)
        return first, stop

    def for_batches(self, batch_size: int) -> ShardShuffleSampler:
        """Return a copy of this sampler for batches of this size.

        A batch has `batch_size // sections` records of each section.
        """
        if batch_size % self._sections:
            raise ValueError(
                f"batch_size must be divisible by the order's sections={self._sections}, "
                f"got {batch_size}"
            )
        sampler = copy.copy(self)
        sampler._batch_size = batch_size
        return sampler

    @property
    def by_group(self) -> tuple[int, Sampler]:
        lanes = self._sections * (len(self._bounds) - 1)
        return lanes, GroupSampler(self, lanes, self._lanes)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the records at these positions of an epoch, int64[positions] both.

        All blocks in a random order are one sequence of records. It is cut into segments (lanes),
        which are read side by side. The records of a block are permuted within the block.
        """
        table = self._table(epoch)
        entry = self._entries(table.lanes, positions)  # the index in the sequence
        block_start, block_record, size = table.order.locate(entry)
        # If a bound cuts the block, its two parts are shuffled separately.
        start, stop = _clip(block_start, block_start + size, table.cuts, entry)
        first_record, offset = block_record + start - block_start, entry - start
        if self._within == "random":
            keys = random_words(derive(self._key, epoch, 1), first_record)
            offset = permute_rows(stop - start, keys, offset[:, None])[:, 0]
        ids: Int64s = first_record + offset
        return ids

    def _entries(self, lanes: ConstantLanes, positions: Int64s) -> Int64s:
        """Return the index of each position in the sequence of all blocks, one after the other.

        The sequence is cut into sections, and a section into lanes, which are read side by side.
        """
        if self._sections == 1:
            return lanes.entries(0, positions)
        section, section_position = self._section_positions(positions)
        entries = section * self._section_size + lanes.entries(section, section_position)
        # The last positions are those of the records in no section, in the order of the sequence.
        return np.where(positions < self._sections * self._section_size, entries, positions)

    def _section_positions(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the section of each position, and the position in the order of this section.

        Each batch has the next records of section 0, then those of section 1, and so on.
        """
        sections, size = self._sections, self._section_size
        count = self._batch_size // sections  # records of a section in a batch
        step, index = np.divmod(positions, self._batch_size)
        # The last batch has the end of each section, then the records that are in no section.
        is_last = step == size // count
        section, offset = np.divmod(index, np.where(is_last, max(1, size % count), count))
        section_position = (step * count + offset).clip(max=size - 1)
        return np.minimum(section, sections - 1), section_position

    def _lanes(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the lane of each position; the lanes are numbered section by section."""
        section, section_position = self._section_positions(positions)
        return section * (len(self._bounds) - 1) + self._table(epoch).lanes.slots(section_position)

    def _table(self, epoch: int) -> _EpochTable:
        return self._cache.get(epoch, lambda: self._compute_table(derive(self._key, epoch)))

    def _compute_table(self, key: int) -> _EpochTable:
        """Return the random order of blocks under a key, its lanes, and the blocks that they cut.

        The sequence of blocks is cut into sections, and each section into lanes.
        """
        order = BlockOrder(self._blocks, derive(key, 0))
        section_starts = np.arange(self._sections)[:, None] * self._section_size
        cuts = (section_starts + self._bounds[:-1]).reshape(-1)  # where lanes start
        block_start, block_record, _ = order.locate(cuts)
        in_block = block_start < cuts  # a bound between two blocks cuts none
        cut_records = np.sort((block_record + cuts - block_start)[in_block])
        keys = random_words(derive(key, 2), np.arange(self._sections))
        return _EpochTable(order, cuts[in_block], cut_records, ConstantLanes(self._bounds, keys))


def _clip(starts: Int64s, stops: Int64s, cuts: Int64s, index: Int64s) -> tuple[Int64s, Int64s]:
    """Return each range clipped to the part between two cuts that contains its index.

    The cuts are sorted. The ranges, from `starts` to `stops`, and their indices are int64[n].
    """
    part = np.searchsorted(cuts, index, side="right")
    lowest, highest = np.append(-1, cuts)[part], np.append(cuts, validate.LIMIT)[part]
    return np.maximum(starts, lowest), np.minimum(stops, highest)


class _EpochTable(NamedTuple):
    """The order of blocks of an epoch, its lanes, and where bounds of lanes cut blocks."""

    order: BlockOrder
    cuts: Int64s  # where bounds cut blocks, as indices into the sequence of blocks, sorted
    cut_records: Int64s  # records of the cuts, sorted
    lanes: ConstantLanes
