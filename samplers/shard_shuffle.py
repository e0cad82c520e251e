"""A shuffle that reads shards block by block, and is as well mixed at the end as at the start."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.blocks import BlockOrder, Blocks
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.random_words import derive, random_words, root_key
from twinfeed.samplers.drawing.round_robin import MAX_SEGMENTS, RoundRobin, desynchronized_bounds
from twinfeed.samplers.exclusion import Exclusion
from twinfeed.samplers.orders import GroupSampler, Sampler
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
            shuffle of its own and its share of the window's segments. A batch is a piece of each
            section. Where world_size divides `sections`, no two ranks read the same block, except
            the `sections - 1` blocks at most that are in two sections, and in a smaller last batch.
        order_within: `"stored"` keeps the records of a block in stored order.
        exclude: `{training step: ids}`, as of `RandomSampler`: records that never come from this
            step on. What comes in their place is of any block.

    Raises:
        ValueError: `sections` does not divide `window`, there are fewer blocks than sections, or
            `exclude` leaves less than half of the records.

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
        exclude: Mapping[int, ArrayLike] | None = None,
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
        self._exclusion = Exclusion(exclude, self.num_records, self.seed)
        self.traits = self._exclusion.declare(SamplerTraits(reads_blocks=self.block > 1))
        self._blocks = Blocks(self._lengths, self.block)
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
            **self._exclusion.parameters,
        }
        self._key = root_key(self.seed, "shard shuffle")
        self._batch_size = self._sections
        self._section_size = self.num_records // self._sections  # records of a section
        size = self._blocks.commonest_size
        # A segment must be longer than a block. Otherwise it would enter a block that the next
        # segment is still reading.
        segments = max(1, min(self.window // self._sections, self._section_size // (size + 2)))
        self._segment_bounds = desynchronized_bounds(self._section_size, segments, size)
        self._cache: FifoCache[_EpochTable] = FifoCache(2)

    def __repr__(self) -> str:
        return (
            f"ShardShuffleSampler({counted(self.num_records, 'record')} in "
            f"{counted(len(self._lengths), 'shard')}, {counted(len(self._blocks), 'block')} of "
            f"{self.block:,}, window={self.window:,}, "
            f"sections={self._sections}, order_within={self._within!r}, seed={self.seed})"
        )

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return for each record a range of records that are read around the same time: its span.

        A loader prefetches a span as a whole. Here it is the block of consecutive records that has
        the record, from `first[i]` to `stop[i] - 1`. Segments of the shuffled blocks are read side
        by side, and a few blocks are divided by the end of a segment and the start of the next.
        Such a block is read in two parts: its end when the epoch begins, and its beginning when the
        epoch ends. With `epoch`, the span is the part that has the record.

        >>> order = ShardShuffleSampler([6, 4], block=4, window=2, seed=0)
        >>> order.spans(np.array([5, 9, 0]))
        (array([4, 6, 0]), array([ 6, 10,  4]))
        """
        first, stop = self._blocks.bounds_around(records)
        if epoch is not None:
            # `split_records` are the records at which blocks are divided.
            first, stop = _parts(first, stop, self._table(epoch).split_records, records)
        return first, stop

    def for_batches(self, batch_size: int, num_steps: int) -> ShardShuffleSampler:
        """Return a copy of this sampler for `num_steps` batches an epoch, each of `batch_size`.

        The shuffled blocks are divided into `sections` sections of as many records, and each batch
        has the same number of records of every section. With two sections and batches of 6, these
        are 3 and 3.

        Raises:
            ValueError: `batch_size` is not a multiple of the number of sections.
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
    def by_group(self) -> tuple[int, Sampler]:
        """The number of segments, and a sampler whose ids are segment numbers, not record ids.

        All blocks in random order are one sequence of records. It is divided into `sections` parts
        of as many records, and each section into segments, which are read side by side. A loader
        can read each segment as one tf.data dataset, and choose between them by this sampler.
        """
        num_segments = self._sections * (len(self._segment_bounds) - 1)
        return num_segments, GroupSampler(self, num_segments, self._segments_at)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the record ids at these positions of an epoch: int64[n], as `positions`.

        They are the shuffle, `_permutation(epoch, positions)`, in which excluded records are
        replaced by others.
        """
        # With many shards, the order of the blocks has a large table. `prepare` computes a part of
        # that of the next epoch, so that the next epoch does not start with a long computation.
        if self._blocks.has_many_shards:
            fraction = int(positions.max(initial=-1) + 1) / max(1, self.num_records)
            self._blocks.order(self._blocks_key(epoch + 1)).prepare(fraction)
        return self._exclusion.draw(self, epoch, positions)

    def _permutation(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the records at these positions of an epoch: int64[n], as `positions`.

        The blocks of all shards in random order are one sequence of records. It is divided into
        segments, which are read side by side. The records of a block are permuted within the block.
        """
        table = self._table(epoch)
        entries = self._indices_at(table.round_robin, positions)  # indices into the sequence
        # The first record of the block, the offset of the record in it, and the size of the block.
        first_record, offset, size = table.locate(entries)
        if self._within == "random":
            keys = random_words(derive(self._key, epoch, _RECORDS_KEY), first_record)
            offset = permute_rows(size, keys, offset[:, None])[:, 0]
        return first_record + offset

    def _indices_at(self, round_robin: RoundRobin, positions: Int64s) -> Int64s:
        """Return which entry of the sequence of blocks comes at each position of an epoch.

        All blocks in random order are one sequence of records. It is divided into sections of equal
        size, and each section into segments, which are read side by side (round-robin). An entry is
        an index into the sequence.
        """
        if self._sections == 1:
            return round_robin.indices_at(0, positions)
        section, section_position = self._positions_in_sections(positions)
        entries = section * self._section_size + round_robin.indices_at(section, section_position)
        # The last positions are those of the records in no section: they keep their indices.
        return np.where(positions < self._sections * self._section_size, entries, positions)

    def _positions_in_sections(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the section of each position of an epoch, and its position within the section.

        Each batch has the next records of section 0, then as many of section 1, and so on. The last
        batch has what remains of each section, then the records that are in no section. With 11
        records, two sections of 5, and batches of 4::

            position            0 1 2 3   4 5 6 7   8 9 10
            section             0 0 1 1   0 0 1 1   0 1 (1)
            section position    0 1 0 1   2 3 2 3   4 4 (4)

        Callers ignore the results for records in no section, here those in parentheses. They are
        valid indices all the same.
        """
        num_per_batch = self._batch_size // self._sections  # records of a section in a batch
        last_step, num_in_last = divmod(self._section_size, num_per_batch)
        step, index = np.divmod(positions, self._batch_size)
        # The last batch may have no records of sections: divide by 1 then, not by 0.
        num_in_batch = np.where(step == last_step, max(1, num_in_last), num_per_batch)
        section, offset = np.divmod(index, num_in_batch)
        section_position = (step * num_per_batch + offset).clip(max=self._section_size - 1)
        return section.clip(max=self._sections - 1), section_position

    def _segments_at(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the segment of each position of an epoch, numbered section by section.

        Each section has `len(_segment_bounds) - 1` segments, which are read side by side: the index
        in a round (slot) is the number of the segment in its section.
        """
        section, section_position = self._positions_in_sections(positions)
        slots = self._table(epoch).round_robin.slots_at(section_position)
        return section * (len(self._segment_bounds) - 1) + slots

    def _table(self, epoch: int) -> _EpochTable:
        """Return the tables of an epoch, from the cache if they are there."""
        return self._cache.get(epoch, lambda: self._compute_table(epoch))

    def _blocks_key(self, epoch: int) -> int:
        """Return the key of the order of the blocks in an epoch."""
        return derive(self._key, epoch, _BLOCKS_KEY)

    def _compute_table(self, epoch: int) -> _EpochTable:
        """Return the tables of an epoch: the order of its blocks, and where segments divide blocks.

        All blocks in random order are a sequence of records. It is divided into sections of equal
        size, and each section into segments, which are read side by side. A segment may start in
        the middle of a block, and so split the block into two parts. If the blocks are the records
        8 9, 4 5 6 7 and so on, and a segment starts at index 3 of this sequence, then it splits the
        block 4 5 6 7, which starts at index 2. The first record of the segment is 5.
        """
        order = self._blocks.order(self._blocks_key(epoch))
        section_starts = np.arange(self._sections)[:, None] * self._section_size
        segment_starts = (section_starts + self._segment_bounds[:-1]).reshape(-1)
        block_start, first_record, _ = order.locate(segment_starts)
        split_offset = segment_starts - block_start  # 0: the segment starts with a whole block
        splits_block = split_offset > 0
        split_records = np.sort((first_record + split_offset)[splits_block])
        # The key of each section's order of segments.
        keys = random_words(derive(self._key, epoch, _SEGMENTS_KEY), np.arange(self._sections))
        round_robin = RoundRobin(self._segment_bounds, keys)
        return _EpochTable(order, segment_starts[splits_block], split_records, round_robin)


def _parts(starts: Int64s, stops: Int64s, points: Int64s, index: Int64s) -> tuple[Int64s, Int64s]:
    """Return the start and the stop of the part of each range that contains an index, int64[n].

    Range i is `starts[i]` to `stops[i] - 1`, and contains `index[i]`. Sorted `points` split all
    ranges into parts: with points 5 and 8, the part of the range 4 5 6 that contains 6 is 5 6.
    """
    # The points around the index: the last that is at most the index, and the next.
    number = np.searchsorted(points, index, side="right")
    previous_point = np.append(-1, points)[number]
    next_point = np.append(points, validate.LIMIT)[number]
    return np.maximum(starts, previous_point), np.minimum(stops, next_point)


class _EpochTable(NamedTuple):
    """The tables of an epoch: its order of blocks, and the segments that split some of them."""

    order: BlockOrder
    split_points: Int64s  # where segments split blocks: sorted indices into the block sequence
    split_records: Int64s  # the records at these indices, sorted
    round_robin: RoundRobin  # of the segments

    def locate(self, entries: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the block of each record, and its offset in it, by its index into the epoch.

        All blocks in random order are one sequence of records, and `entries` are indices into it.
        Segments of the sequence are read side by side, so a block in which a segment starts is read
        in two parts, at different times, as if it were two blocks. If the sequence starts with the
        blocks 8 9 and 4 5 6 7, and a segment starts at index 3, then the second block is the blocks
        4 and 5 6 7. Index 4 has record 6: its block has the first record 5, the offset of the
        record is 1, and the size is 3.

        Returns:
            The first record of the block, the offset of the record in the block, and the number of
            records of the block, int64[n] each.
        """
        # Without the division: where the block starts in the sequence, its first record, its size.
        block_start, first_record, block_size = self.order.locate(entries)
        start, stop = _parts(block_start, block_start + block_size, self.split_points, entries)
        return first_record + start - block_start, entries - start, stop - start
