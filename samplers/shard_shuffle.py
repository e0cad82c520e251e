"""A shuffle that reads shards in large pieces, is a permutation, and has no seam."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Literal, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, below, derive, root_key, spread, words
from twinfeed.samplers._lanes import MAX_LANES, Lanes
from twinfeed.samplers._memo import Recent
from twinfeed.samplers._permutation import permute, permute_rows
from twinfeed.samplers._validate import counted
from twinfeed.samplers.orders import Order


class ShardShuffleSampler(Order):
    """Shuffle blocks of consecutive records over all shards, `window` of them open at once.

    The blocks of an epoch are permuted. The records of a block are permuted within the block. This
    sequence is cut into `window` lanes, which are emitted side by side. Every record comes exactly
    once. A block is read once, except the `window - 1` blocks at most that a lane boundary cuts.

    - `shard_lengths`: the records of each shard, int[shards].
    - `seed`: the only source of chance.
    - `block`: records of a block. A block as long as the data makes the order sequential. A block
      of 1 makes the order uniform. An epoch's table takes memory in proportion to the blocks.
    - `window`: blocks that are open at once.
    - `sections`: the blocks are divided into so many sections, each with a shuffle of its own and
      its share of the window's lanes. A batch is a piece of each section. Where world_size
      divides `sections`, no two ranks read the same block, except at the end of an epoch. There,
      when the shortest section has run out, at most two blocks a section are dealt out to all.
    - `order_within`: `"stored"` keeps the records of a block in stored order.

    Raises ValueError where `sections` does not divide `window`, and for fewer blocks than sections.

    Shards of 6 and 4 records, blocks of 2, two lanes; block 8 9 is cut by the lane boundary::

        blocks    5 4 | 2 3 | 9 8 | 6 7 | 1 0
        lane 0    5   4   2   3   9
        lane 1      8   6   7   1   0
        stream    5 8 4 6 2 7 3 1 9 0

    >>> import numpy as np
    >>> order = ShardShuffleSampler([6, 4], block=2, window=2, seed=0)
    >>> order.ids(0, np.arange(10)).tolist()
    [5, 8, 4, 6, 2, 7, 3, 1, 9, 0]
    """

    #: Records of a block; the last block of a shard may have fewer.
    block: int = 1024
    #: Blocks that are open at once.
    window: int = 64

    def __init__(
        self,
        shard_lengths: ArrayLike,
        /,
        *,
        seed: SupportsIndex,
        block: SupportsIndex = 1024,
        window: SupportsIndex = 64,
        sections: SupportsIndex = 1,
        order_within: Literal["random", "stored"] = "random",
    ) -> None:
        self._lengths = _validate.counts("shard_lengths", shard_lengths, minimum=0)
        self.block = _validate.integer("block", block, minimum=1)
        self.window = _validate.integer("window", window, minimum=1, below=MAX_LANES)
        self._sections = _validate.integer("sections", sections, minimum=1)
        self._within = _validate.choice("order_within", order_within, ("random", "stored"))
        self.seed = _validate.seed(seed)
        if self.window % self._sections:
            raise ValueError(
                f"window must be divisible by sections, got window={self.window}, "
                f"sections={self._sections}"
            )
        self.num_records = int(self._lengths.sum())
        self.in_blocks = self.block > 1
        shard, number = spread(-(-self._lengths // self.block))
        within = number * self.block
        self._begins = (np.cumsum(self._lengths) - self._lengths)[shard] + within
        self._sizes = np.minimum(self._lengths[shard] - within, self.block)
        if len(self._sizes) < self._sections > 1:
            raise ValueError(
                f"sections must be at most the number of blocks, {len(self._sizes)}, "
                f"got {self._sections}: take smaller blocks"
            )
        self._parameters = {
            "shard_lengths": self._lengths,
            "block": self.block,
            "window": self.window,
            "sections": self._sections,
            "order_within": order_within,
        }
        self._key = root_key(self.seed, "shard shuffle")
        self._batch_size = self._sections
        self._recent: Recent[_Table] = Recent(2)

    def __repr__(self) -> str:
        return (
            f"ShardShuffleSampler({counted(self.num_records, 'record')} in "
            f"{counted(len(self._lengths), 'shard')}, {counted(len(self._sizes), 'block')} of "
            f"{self.block:,}, window={self.window:,}, "
            f"sections={self._sections}, order_within={self._within!r}, seed={self.seed})"
        )

    def spans(self, records: Int64) -> tuple[Int64, Int64]:
        """Return the block of each record: where the block begins and stops.

        >>> order = ShardShuffleSampler([6, 4], block=4, window=2, seed=0)
        >>> order.spans(np.array([5, 9, 0]))
        (array([4, 6, 0]), array([ 6, 10,  4]))
        """
        number = np.searchsorted(self._begins, records, side="right") - 1
        first: Int64 = self._begins[number]
        return first, first + self._sizes[number]

    def for_batches(self, batch_size: int) -> ShardShuffleSampler:
        """Return this order with batches of this size divided into its sections."""
        if batch_size % self._sections:
            raise ValueError(
                f"batch_size must be divisible by the order's sections={self._sections}, "
                f"got {batch_size}"
            )
        other = copy.copy(self)
        other._batch_size = batch_size
        return other

    def _ids(self, epoch: int, positions: Int64) -> Int64:
        table = self._recent.get(epoch, lambda: self._table(epoch))
        place = self._places(table, positions)
        turn = np.searchsorted(table.bounds, place, side="right") - 1
        block, member = table.blocks[turn], place - table.bounds[turn]
        if self._within == "random":
            keys = words(derive(self._key, epoch, 1), block)
            member = permute_rows(self._sizes[block], keys, member[:, None])[:, 0]
        return self._begins[block] + member

    def _places(self, table: _Table, positions: Int64) -> Int64:
        """Return the places in the permuted sequence of blocks that these outputs take."""
        section, index = self._in_sections(np.diff(table.sections), positions)
        out = np.empty_like(index)
        for number in np.unique(section).tolist():
            mine = section == number
            out[mine] = table.sections[number] + table.lanes[number].places(index[mine])
        return out

    def _in_sections(self, sizes: Int64, positions: Int64) -> tuple[Int64, Int64]:
        """Return the section of each output and its position in that section's own shuffle."""
        share = self._batch_size // self._sections
        full = int(sizes.min()) // share
        step, slot = np.divmod(positions, self._batch_size)
        left = np.cumsum(sizes - full * share)
        rest = positions - full * self._batch_size
        last = np.searchsorted(left, rest, side="right")
        last_index = full * share + rest - np.concatenate([[0], left])[last]
        whole = step < full
        return (
            np.where(whole, slot // share, last),
            np.where(whole, step * share + slot % share, last_index),
        )

    def _table(self, epoch: int) -> _Table:
        """Permute the blocks of an epoch, and divide them into sections and lanes."""
        key = derive(self._key, epoch)
        blocks = permute(len(self._sizes), derive(key, 0), np.arange(len(self._sizes)))
        bounds = np.concatenate([[0], np.cumsum(self._sizes[blocks])])
        goals = np.arange(self._sections + 1) * self.num_records // self._sections
        first = np.searchsorted(bounds, goals - self.block // 2)  # the nearest block bound
        first[[0, -1]] = 0, len(blocks)
        lanes = [
            self._lanes(int(bounds[b] - bounds[a]), b - a, derive(key, 2, number))
            for number, (a, b) in enumerate(pairwise(first.tolist()))
        ]
        return _Table(blocks, bounds, bounds[first], lanes)

    def _lanes(self, size: int, blocks: int, key: int) -> Lanes:
        """Cut a section into lanes at jittered places, so that they change blocks one by one."""
        width = max(1, min(self.window // self._sections, blocks))
        jitter = min(self.block, size // width // 4 + 1)
        bounds = np.arange(width + 1) * size // width
        bounds[1:-1] += below(words(derive(key, 0), np.arange(1, width)), jitter) - jitter // 2
        return Lanes(bounds, np.zeros(width, np.int64), key=derive(key, 1), renew=False)


class _Table(NamedTuple):
    """The permuted blocks of an epoch: their bounds, the bounds of the sections, their lanes."""

    blocks: Int64
    bounds: Int64
    sections: Int64
    lanes: list[Lanes]
