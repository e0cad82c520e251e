"""The shard-aware shuffle with a block and a window that fit the records of an index."""

from __future__ import annotations

import warnings
from typing import Literal

from twinfeed.loaders import _checks, _system
from twinfeed.loaders.index.opened import Index, check_index
from twinfeed.loaders.reading._ahead import record_bytes
from twinfeed.samplers import ShardShuffleSampler

_BLOCK, _LANES = 1 << 22, 128  # bytes of a block; most blocks open at once


def shuffled(
    index: Index,
    /,
    *,
    seed: int,
    memory: int = 1 << 29,
    sections: int = 1,
    order_within: Literal["random", "stored"] = "random",
) -> ShardShuffleSampler:
    """Make a shard-aware shuffle of all records of `index`, in blocks of about 4 MiB.

    A block of 4 MiB is read as fast as the whole shard. Up to 128 blocks are open at once. Together
    they take at most `memory` bytes. The default, 512 MiB, is a tenth of a machine of 5 GiB.

    The block and the window depend on the index and on `memory` alone. So every machine has the
    same stream. The order's `repr` shows both numbers. The number of records in a block is a power
    of two. Small data have smaller blocks, so that there is a block for each lane.

    `seed`, `sections` and `order_within` are those of `ShardShuffleSampler`. Raises ValueError
    where `memory` is less than one block for each section. Warns where the blocks take more than a
    tenth of what this process may use, since pages may then be dropped before they are read.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> shuffled(pack([{"x": bytes(1000)} for _ in range(1000)], mkdtemp())["data"], seed=0)
    ShardShuffleSampler(1,000 records in 1 shard, 250 blocks of 4, window=128, sections=1, ...)
    """
    check_index(index)
    memory = _checks.count("memory", memory)
    sections = _checks.count("sections", sections)
    each = max(1.0, record_bytes(index))
    most = min(_BLOCK / each, len(index) / _LANES)
    block = 1 << max(0, int(most).bit_length() - 1)
    window = min(_LANES, int(memory / (block * each)))
    window = max(window, sections) // sections * sections
    if memory < block * sections * each and block > 1:
        raise ValueError(
            f"memory must be at least a block for each section, "
            f"{int(block * sections * each)} bytes, got {memory}"
        )
    held, allowed = int(block * window * each), _system.memory()
    if held > allowed / 10:
        warnings.warn(
            f"the {window} open blocks of {block} records take {held >> 20} MiB, more than a tenth "
            f"of the {allowed >> 20} MiB that this process may use: give shuffled() less memory "
            f"(which is another stream)",
            stacklevel=2,
        )
    return ShardShuffleSampler(
        index.shard_lengths,
        seed=seed,
        block=block,
        window=window,
        sections=sections,
        order_within=order_within,
    )
