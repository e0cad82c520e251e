"""The shard-aware shuffle, with a block and a window for the records of an index."""

from __future__ import annotations

import warnings
from typing import Literal

import numpy as np

from twinfeed.loaders.index.index import Index, check_index
from twinfeed.loaders.index.sizes import record_bytes
from twinfeed.loaders.support import checks, system
from twinfeed.loaders.support.argument_hints import SHUFFLED_HINTS, hint_arguments
from twinfeed.loaders.support.array_types import Ids
from twinfeed.samplers import ShardShuffleSampler, SubsetSampler, validate

_BLOCK, _LANES = 1 << 22, 128  # bytes of a block; most blocks open at once


@hint_arguments(**SHUFFLED_HINTS)
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

    The block and the window depend on the index and on `memory` alone. So every machine has the
    same stream. The order's `repr` shows both numbers. The number of records in a block is a power
    of two. Small data have smaller blocks, so that there is a block for each lane.

    Warns if the blocks take more than a tenth of the memory that this process may use, since pages
    may then be dropped before they are read.

    Args:
        index: where the records lie.
        seed: as of `ShardShuffleSampler`.
        records: shuffle these records alone, such as one side of `split`. A block is then of these
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
    each = max(1.0, record_bytes(index))
    lengths, part = index.shard_lengths, None
    if records is not None:
        part = np.sort(checks.check_ids(records, len(index)))
        lengths = np.diff(part.searchsorted(np.cumsum(lengths)), prepend=0)
    block = block_of(index, int(lengths.sum()))
    window = min(_LANES, int(memory / (block * each)))
    window = max(window, sections) // sections * sections
    least = int(block * sections * each)
    if memory < least and block > 1:
        raise ValueError(f"memory must be at least a block for each section, {least}, got {memory}")
    held, allowed = int(block * window * each), system.memory()
    if held > allowed / 10:
        warnings.warn(
            f"the open blocks take {held >> 20} MiB, more than a tenth of the {allowed >> 20} MiB "
            f"that this process may use: give shuffled() less memory (which is another stream)",
            stacklevel=3,
        )
    order = ShardShuffleSampler(
        lengths,
        seed=seed,
        block=block,
        window=window,
        sections=sections,
        order_within=order_within,
    )
    return order if part is None else SubsetSampler(part, of=len(index), order=order)


def block_of(index: Index, records: int, /) -> int:
    """Return how many records a block has if `shuffled` shuffles this many records."""
    most = min(_BLOCK / max(1.0, record_bytes(index)), records / _LANES)
    return 1 << max(0, int(most).bit_length() - 1)
