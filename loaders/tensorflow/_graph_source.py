"""Passes of a dataset: what the graph knows of a pass, and the base class of their batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from twinfeed.loaders.loop.external_passes import PassStart
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._processes import check_divisible
from twinfeed.samplers import BatchStream

_PASS_NUMBERS = count()


class PassState(NamedTuple):
    """What the graph knows of a pass: an int64[5] tensor there, and this tuple here.

    `start` is the first step, `generation` that of `PassStart`, and `num_chunks` the number of
    calls that read several batches each.
    """

    number: int
    epoch: int
    start: int
    generation: int
    num_chunks: int

    @classmethod
    def of(cls, tensor: Any) -> PassState:
        """Return the named values of a tensor, or of the array that a Python function gets."""
        return cls(*(tensor.tolist() if isinstance(tensor, np.ndarray) else tf.unstack(tensor, 5)))


class GraphSource(ABC):
    """The batches of a stream for the graph, pass by pass, of one rank or several ranks in turn.

    A *slot* is the number of a batch in its epoch: `step * ranks + rank`. Each pass has a number.
    """

    def __init__(
        self,
        loader: Loader[Any],
        sampler: BatchStream,
        *,
        ranks: int = 1,
        by_rank: bool = False,
    ) -> None:
        self.sampler, self.ranks = sampler, ranks
        self.external_passes, self.meter = loader.external_passes, loader.meter
        self.steps = len(sampler)
        self.num_batches = self.steps * ranks
        self._by_rank = by_rank  # whether each replica of a strategy gets the batches of its rank

    @abstractmethod
    def epoch(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (slot, batch) of a pass; `pass_state`: see `passes`."""

    def passes(self) -> Iterator[Int64s]:
        """Start a pass, and yield its `PassState` as int64[5].

        TensorFlow closes the generator when the iterator of the pass has ended or is destroyed.
        This ends the pass.
        """
        if not self._by_rank and self.external_passes.reshardable:
            check_divisible(self.sampler)
        self.meter.start_external()
        epoch, start, generation = self.external_passes.start()
        number = next(_PASS_NUMBERS)
        with self._open_pass(number, epoch, start) as num_chunks:
            yield np.array(PassState(number, epoch, start, generation, num_chunks))

    @contextmanager
    def _open_pass(self, number: int, epoch: int, start: int) -> Iterator[int]:
        """Open what a pass needs, and yield the number of its groups of batches."""
        yield 0

    def delivered(self, pass_state: Int64s, batch_number: np.int64) -> bool:
        """Move the position to the next epoch: the last batch of a pass has left the pipeline."""
        _, epoch, start, generation, _ = PassState.of(pass_state)
        self.external_passes.finished(PassStart(epoch, start, generation))
        return True
