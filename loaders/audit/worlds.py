"""Draw all ranks of each number of ranks, for the questions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from warnings import catch_warnings, simplefilter

import numpy as np

from twinfeed.loaders.audit.declared import Declared
from twinfeed.loaders.audit.drawing import DrawnPass, Maker, StoppedError, Stream
from twinfeed.loaders.audit.processes import draw_by_processes

_MOST_EPOCHS = 24  # that are drawn, before it cannot be chance that all are equal
_MOST_IDS = 2_000_000  # that are drawn for it


@dataclass
class World:
    """The streams of all ranks, for one number of ranks. `counts` says how often each record came,
    int64[epochs, records], and `step` is the number of ids of a batch of all ranks.
    """

    maker: Maker
    declared: Declared
    size: int
    streams: list[Stream]
    endless: bool
    num_records: int

    def __post_init__(self) -> None:
        n, batch_size = self.num_records, self.declared.batch_size
        self.ranks = [stream.passes for stream in self.streams]
        if self.endless:
            self.ranks = [self._divided(rank, passes) for rank, (*passes,) in enumerate(self.ranks)]
        self.passes, self.first = self.ranks[0], self.streams[0]
        epochs = [
            np.concatenate([p.ids for p in drawn]) for drawn in zip(*self.ranks, strict=False)
        ]
        inside = [ids[(ids >= 0) & (ids < n)] for ids in epochs]
        self.ids = np.concatenate(epochs)
        self.counts = np.stack([np.bincount(ids, minlength=n) for ids in inside])
        self.sizes = [[p.batch_sizes(batch_size) for p in passes] for passes in self.ranks]
        self.step = self.size * max(int(sizes[0].max(initial=1)) for sizes in self.sizes)
        self.in_batches = self.passes[0].batched or batch_size is not None
        self.in_process = self.size == 1 or not self.declared.processes
        self.is_stored_order = all((np.diff(drawn.ids) >= 0).all() for drawn in self.passes)
        most = min(_MOST_EPOCHS, _MOST_IDS // max(1, n))
        self.more_epochs = range(max(self.declared.epochs, 3, most))  # equal ones are no chance

    def _divided(self, rank: int, passes: list[DrawnPass]) -> list[DrawnPass]:
        """Divide a pass into epochs: id i of a rank is number i * size + rank of all."""
        starts = np.arange(self.declared.epochs + 1) * self.num_records
        ids = np.maximum(0, -(-(starts - rank) // self.size)).tolist()
        return [passes[0].window(*pair) for pair in pairwise(ids)]

    def expects(self, *names: str) -> bool:
        """Return whether one of these was declared."""
        return self.declared.expect in names

    def draw(self, epochs: range, rank: int = 0, **arguments: int) -> list[DrawnPass]:
        """Draw epochs again, from a new sampler."""
        return self.maker.draw(epochs, rank, self.size, **arguments).passes

    @cached_property
    def again(self) -> tuple[Stream, Stream]:
        """Epoch 0 of two new samplers: under equal, and under other global random states."""
        equal, different = (self.maker.draw([0], 0, self.size, salt) for salt in range(2))
        return equal, different

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether two samplers that are built alike give the same ids."""
        return self.first.passes[0].key == self.again[0].passes[0].key

    @cached_property
    def ignores_global_state(self) -> bool:
        """Whether the ids are the same under another global random state."""
        return self.is_repeatable and self.first.passes[0].key == self.again[1].passes[0].key


def draw_worlds(maker: Maker, declared: Declared, not_asked: dict[str, str]) -> list[World]:
    """Draw each number of ranks. Those that cannot be drawn are added to `not_asked`."""
    # What `make` imports is then there, before states are compared. An error comes again below.
    with suppress(StoppedError), maker.running("make"):
        maker.build(rank=0, world_size=1, epoch=0)
    drawn: dict[int, list[Stream]] = {}
    for size in declared.world_sizes:
        if size == 1 or "rank" in maker.takes:
            drawn[size] = _draw_ranks(maker, declared, size)
            continue
        try:
            with catch_warnings():  # of samplers that notice that there are ranks
                simplefilter("ignore")
                drawn[size] = _draw_asking_ranks(maker, declared, size)
        except StoppedError as error:
            not_asked[f"{size} ranks"] = str(error)
    passes = [drawn for streams in drawn.values() for stream in streams for drawn in stream.passes]
    if not passes:
        raise StoppedError(f"ranks differ in nothing, or fail: {not_asked}")
    endless, num_records = not all(drawn.ended for drawn in passes), declared.num_records
    if num_records is None and endless:
        raise StoppedError(f"no end came after {declared.most:,} ids: pass num_records=")
    if num_records is None:
        num_records = 1 + max(int(drawn.ids.max(initial=-1)) for drawn in passes)
    return [World(maker, declared, *pair, endless, num_records) for pair in drawn.items()]


def _draw_ranks(maker: Maker, declared: Declared, size: int) -> list[Stream]:
    """Draw the epochs of each rank, in this process or in one for each."""
    epochs = range(declared.epochs)
    if declared.processes and size > 1:
        return draw_by_processes(maker, epochs, size)
    return [maker.draw(epochs, rank, size) for rank in range(size)]


def _draw_asking_ranks(maker: Maker, declared: Declared, size: int) -> list[Stream]:
    """Draw ranks if they differ, although `make` takes none, and not by chance."""
    streams, again = (_draw_ranks(maker, declared, size) for _ in range(2))
    keys, keys_again = ([[p.key for p in stream.passes] for stream in s] for s in (streams, again))
    if keys != keys_again:
        raise StoppedError("make takes no rank, and two samplers that are built alike differ")
    if all(key == keys[0] for key in keys):
        raise StoppedError("make takes no rank, and the sampler asks for none")
    return streams
