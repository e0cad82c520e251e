"""`GraphSource`: the batches that a graph reads from Python; `PassState` is known to both."""

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
from twinfeed.loaders.tensorflow._processes import check_auto_shard
from twinfeed.samplers import BatchStream

_PASS_IDS = count()


class PassState(NamedTuple):
    """What the graph knows of a pass (one iteration of a dataset), as int64[5].

    `start` is the first step of `epoch` that is read, `generation` is that of `PassStart`, and
    `num_chunks` the number of calls of Python that read several batches each.
    """

    number: int
    epoch: int
    start: int
    generation: int
    num_chunks: int

    @classmethod
    def unpack(cls, tensor: Any) -> PassState:
        """Return the five values of an int64[5] tensor, or array, by name."""
        values = tensor.tolist() if isinstance(tensor, np.ndarray) else tf.unstack(tensor, 5)
        return cls(*values)


class GraphSource(ABC):
    """The batches of a stream that a graph reads from Python, of one rank or of several in turn.

    The number of a batch in its epoch is `step * ranks + rank`. A pass is one iteration of the
    dataset, from the loader's position to the end of the epoch.
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
    def batches_of(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of (batch number, batch) of a pass; `pass_state` is a `PassState`."""

    def run_pass(self) -> Iterator[Int64s]:
        """Start a pass, and yield its `PassState` as int64[5], the only item.

        TensorFlow closes this generator when the iterator of the pass has ended or is destroyed.
        This ends the pass.
        """
        if not self._by_rank and self.external_passes.reshardable:
            check_auto_shard(self.sampler)
        self.meter.start_external()
        epoch, start, generation = self.external_passes.start()
        number = next(_PASS_IDS)
        with self._open_pass(number, epoch, start) as num_chunks:
            yield np.array(PassState(number, epoch, start, generation, num_chunks))

    @contextmanager
    def _open_pass(self, number: int, epoch: int, start: int) -> Iterator[int]:
        """Open what a pass reads from, for the `with` block, and yield its number of chunks.

        A subclass may read chunks of several batches; here there are none.
        """
        yield 0

    def end_pass(self, pass_state: Int64s, batch_number: np.int64) -> bool:
        """Set the loader's position to the next epoch.

        The graph calls this when the last batch of a pass has left the pipeline.
        """
        _, epoch, start, generation, _ = PassState.unpack(pass_state)
        self.external_passes.finish(PassStart(epoch, start, generation))
        return True
