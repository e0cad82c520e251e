"""The shard-aware shuffle, with a block and a window for the records of an index."""

from __future__ import annotations

from typing import Literal

import numpy as np

from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.index.sizes import record_bytes
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.array_types import Ids
from twinfeed.samplers import ShardShuffleSampler, SubsetSampler, validate

_MAX_BLOCK_BYTES = 1 << 22
_MAX_OPEN_BLOCKS = 128


@validate.show_call("shuffled(index, seed=0)")
def shuffled(
    index: Index,
    /,
    *,
    seed: int,
    records: Ids | None = None,
    memory: int = 1 << 29,
    sections: int = 1,
    order_within: Literal["random", "stored"] = "random",
) -> ShardShuffleSampler | SubsetSampler:
    """Make a shard-aware shuffle of the records of `index`, in blocks of about 4 MiB.

    A block of 4 MiB is read as fast as the whole shard. Up to 128 blocks are open at once. Together
    they take at most `memory` bytes.

    The block and the window only depend on the index and on `memory`. So every machine has the
    same stream. The order's `repr` shows both numbers. The number of records in a block is a power
    of two. Small data have smaller blocks, so that 128 blocks can be open.

    Args:
        index: where the records lie.
        seed: as of `ShardShuffleSampler`.
        records: shuffle only these records, such as one part of `split`. A block is then of these
            records. If they are less than half of the records in their range, each is read by
            itself.
        memory: in bytes. The default, 512 MiB, is a tenth of a machine of 5 GiB.
        sections: as of `ShardShuffleSampler`.
        order_within: as of `ShardShuffleSampler`.

    Raises:
        ValueError: `memory` is less than one block for each section, or `records` has an id twice.
        IndexError: `records` has an id outside the index.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> shuffled(pack([{"x": bytes(1000)} for _ in range(1000)], mkdtemp())["data"], seed=0)
    ShardShuffleSampler(1,000 records in 1 shard, 250 blocks of 4, window=128, sections=1, ...)
    """
    check_index(index)
    memory = validate.integer("memory", memory, minimum=1)
    sections = validate.integer("sections", sections, minimum=1)
    nbytes = max(1.0, record_bytes(index))  # of a record, on average
    lengths, subset = index.shard_lengths, None
    if records is not None:
        subset = np.sort(checks.check_ids(records, len(index)))
        lengths = np.diff(subset.searchsorted(np.cumsum(lengths)), prepend=0)
    block = records_per_block(index, int(lengths.sum()))
    window = min(_MAX_OPEN_BLOCKS, int(memory / (block * nbytes)))
    window = max(window, sections) // sections * sections  # a multiple of `sections`
    minimum = int(block * sections * nbytes)
    if memory < minimum and block > 1:
        problem = f"memory must be at least a block for each section, {minimum}, got {memory}"
        raise ValueError(problem)
    order = ShardShuffleSampler(
        lengths, seed=seed, block=block, window=window, sections=sections, order_within=order_within
    )
    return order if subset is None else SubsetSampler(subset, of=len(index), order=order)


def records_per_block(index: Index, num_records: int, /) -> int:
    """Return the number of records in each block, for a shuffle of `num_records` of the index.

    It is the largest power of two for which a block has at most `_MAX_BLOCK_BYTES`, and there are
    enough blocks for `_MAX_OPEN_BLOCKS` to be open at once; or 1, if there is none. For example,
    1,000 small records have blocks of 4, since 1,000 / 128 is 7.8.
    """
    fit_in_block = _MAX_BLOCK_BYTES / max(1.0, record_bytes(index))
    limit = int(min(fit_in_block, num_records / _MAX_OPEN_BLOCKS))
    return 1 << max(0, limit.bit_length() - 1)
