"""All that the questions of an audit ask of: the streams that were drawn, and what was declared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twinfeed.loaders.audit.maker import Maker, method_of
from twinfeed.loaders.audit.promises import Promises
from twinfeed.loaders.audit.streams import NotAskedError, Pass
from twinfeed.samplers.types import Int64s

_MOST_EPOCHS = 24  # that are drawn, before it cannot be chance that all are equal
_MOST_IDS = 2_000_000  # that are drawn for it


@dataclass(frozen=True)
class Evidence:
    """The drawn streams, by number of ranks: `streams[world_size][rank][epoch]`.

    An endless stream has been divided into epochs.
    """

    maker: Maker
    promises: Promises
    streams: Mapping[int, list[list[Pass]]]
    endless: bool
    num_records: int

    def expects(self, *names: str) -> bool:
        """Return whether one of these was declared."""
        return self.promises.expect in names

    @cached_property
    def world_size(self) -> int:
        """The smallest number of ranks that was drawn."""
        return min(self.streams)

    @property
    def passes(self) -> list[Pass]:
        """The epochs of rank 0, of the smallest number of ranks."""
        return self.streams[self.world_size][0]

    @cached_property
    def all_ids(self) -> Int64s:
        """The ids of all ranks and epochs."""
        ranks = [passes for ranks in self.streams.values() for passes in ranks]
        return np.concatenate([drawn.ids for passes in ranks for drawn in passes])

    def draw(self, epochs: list[int], *, salt: int = 0, **arguments: object) -> list[Pass]:
        """Draw the epochs of rank 0 again, from a new sampler."""
        self.need_one_process()
        return self.maker.passes(epochs, 0, self.world_size, salt=salt, **arguments)

    def need_one_process(self) -> None:
        """Raise NotAskedError if all ranks were drawn by processes."""
        if self.promises.processes and self.world_size > 1:
            raise NotAskedError("ranks run in processes: add 1 to world_size")

    def has(self, *names: str) -> bool:
        """Return whether the sampler, or a part of it, has all of these methods."""
        self.need_one_process()
        with self.maker.running("make", 0, self.world_size):
            sampler = self.maker.build(rank=0, world_size=self.world_size, epoch=0)
            return all(method_of(sampler, name) for name in names)

    @cached_property
    def is_stored_order(self) -> bool:
        """Whether the ids of rank 0 ascend, in each epoch."""
        return all((np.diff(drawn.ids) >= 0).all() for drawn in self.passes)

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether two samplers that are built alike give the same ids."""
        return np.array_equal(self.passes[0].ids, self._first_epoch(salt=0))

    @cached_property
    def ignores_global_state(self) -> bool:
        """Whether the ids are the same under another global random state."""
        return self.is_repeatable and np.array_equal(self.passes[0].ids, self._first_epoch(salt=1))

    def _first_epoch(self, salt: int) -> Int64s:
        """Return the ids of epoch 0, drawn again."""
        ids = self.draw([0], salt=salt)[0].ids
        return ids[: len(self.passes[0].ids)] if self.endless else ids

    def more_epochs(self) -> range:
        """Return as many epochs as are drawn before "always equal" is no chance."""
        most = _MOST_IDS // max(1, self.num_records)
        return range(max(self.promises.epochs, 3, min(_MOST_EPOCHS, most)))

    def counts(self, world_size: int) -> Iterator[Int64s]:
        """Yield for each epoch how often each record came, over all ranks."""
        ranks = self.streams[world_size]
        for epoch in range(min(map(len, ranks))):
            ids = np.concatenate([passes[epoch].ids for passes in ranks])
            inside = ids[(ids >= 0) & (ids < self.num_records)]
            yield np.bincount(inside, minlength=self.num_records)


def of_ranks(world_size: int) -> str:
    """Return "1 rank" or such as "4 ranks"."""
    return f"{world_size} rank{'' if world_size == 1 else 's'}"
