"""Where the passes of a dataset begin and end, whoever makes their batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from twinfeed.loaders.loop.external_passes import PassStart
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._processes import check_cut
from twinfeed.samplers import BatchStream

_NUMBERS = count()  # of passes


class PassState(NamedTuple):
    """A pass as its steps know it: in the graph an int64[5] tensor, in Python this tuple.

    `start` is the first step, `generation` that of `PassStart`, and `calls` the number of calls
    that serve several batches each.
    """

    number: int
    epoch: int
    start: int
    generation: int
    calls: int

    @classmethod
    def of(cls, array: Int64s) -> PassState:
        """Return the state that the graph hands to a Python function."""
        return cls(*array.tolist())


START, CALLS = 2, 4
"""Where the tensor of a `PassState` has these values."""


class PassServer(ABC):
    """Make the batches of a stream of one rank, or of several ranks in turn, pass by pass.

    A *place* is the number of a batch in its epoch: `step * ranks + rank`. Each pass has a number.
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
        self.places = self.steps * ranks
        self._by_rank = by_rank  # whether a strategy is given each replica's own batches

    @abstractmethod
    def epoch(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of a pass; `pass_state`: see `passes`."""

    def passes(self) -> Iterator[Int64s]:
        """Begin a pass, and yield its `PassState` as int64[5].

        TensorFlow closes the generator when the iterator of the pass has ended or is destroyed.
        This ends the pass.
        """
        if not self._by_rank and self.external_passes.reshardable:
            check_cut(self.sampler)
        self.meter.start_external()
        epoch, start, generation = self.external_passes.start()
        number = next(_NUMBERS)
        with self._serving(number, epoch, start) as calls:
            yield np.array(PassState(number, epoch, start, generation, calls))

    @contextmanager
    def _serving(self, number: int, epoch: int, start: int) -> Iterator[int]:
        """Open what a pass needs, and yield the number of calls that serve several batches each."""
        yield 0

    def delivered(self, pass_state: Int64s, place: np.int64) -> bool:
        """Note that the last batch of a pass has left the pipeline."""
        state = PassState.of(pass_state)
        self.external_passes.finished(PassStart(state.epoch, state.start, state.generation))
        return True

    @staticmethod
    def mapped(
        dataset: tf.data.Dataset, function: Callable[..., Any], parallel: int
    ) -> tf.data.Dataset:
        """Map in order, `parallel` elements at once; with 1, no element is made ahead."""
        if parallel < 2:
            return dataset.map(function)
        return dataset.map(function, num_parallel_calls=parallel, deterministic=True)
