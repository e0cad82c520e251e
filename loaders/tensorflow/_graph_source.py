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
    """What a graph knows of a pass, an iteration of a dataset to the end of its epoch: int64[5].

    Attributes:
        pass_id: the number of the pass in this process.
        epoch: the epoch that is read.
        start: the first step that is read.
        generation: a number of `PassStart`. If it is out of date when the pass ends, the loader's
            position stays as it is.
        num_chunks: the number of calls into Python, if each reads a chunk of several batches; or 0.
    """

    pass_id: int
    epoch: int
    start: int
    generation: int
    num_chunks: int

    @classmethod
    def unpack(cls, tensor: Any) -> PassState:
        """Return the pass state that an int64[5] tensor or array holds."""
        values = tensor.tolist() if isinstance(tensor, np.ndarray) else tf.unstack(tensor, 5)
        return cls(*values)


class GraphSource(ABC):
    """The batches of a stream that a graph reads from Python, of one rank or of several in turn.

    A pass is one iteration of the dataset, from the loader's position to the end of the epoch. The
    batch number is `step * ranks + rank`: with 2 ranks, rank 1 of step 3 has batch number 7.
    """

    def __init__(
        self, loader: Loader[Any], sampler: BatchStream, *, ranks: int = 1, by_rank: bool = False
    ) -> None:
        self.sampler, self.ranks = sampler, ranks
        self.external_passes, self.meter = loader.external_passes, loader.meter
        self.steps = len(sampler)
        self.num_batches = self.steps * ranks
        # Whether each replica of a strategy has a dataset of its rank. If not, the strategy divides
        # each batch among the replicas.
        self._by_rank = by_rank

    @abstractmethod
    def batches_of(self, pass_state: tf.Tensor) -> tf.data.Dataset:
        """Return the dataset of (batch number, batch) of a pass.

        `pass_state` is the tensor of a `PassState`.
        """

    def run_pass(self) -> Iterator[Int64s]:
        """Start a pass, an iteration of the dataset, and yield one item: its `PassState`, int64[5].

        It is a generator because the pass must be closed: TensorFlow closes the generator when the
        dataset's iterator has ended or is destroyed.
        """
        # A `tf.distribute` strategy may divide the batches among its processes, unless the loop is
        # over the loader itself, or each replica has a dataset of its rank (`_by_rank`).
        if self.external_passes.reshardable and not self._by_rank:
            check_auto_shard(self.sampler)
        self.meter.start_external()  # measures how long batches are waited for
        # The epoch and step where the pass starts. The generation shows `end_pass` whether a Keras
        # callback or `track` sets the loader's position since: then the pass no longer changes it.
        epoch, start, generation = self.external_passes.start()
        pass_id = next(_PASS_IDS)
        with self._open_pass(pass_id, epoch, start) as num_chunks:
            yield np.array(PassState(pass_id, epoch, start, generation, num_chunks))

    @contextmanager
    def _open_pass(self, pass_id: int, epoch: int, start: int) -> Iterator[int]:
        """Yield the number of chunks of a pass, which is one iteration of the dataset.

        A chunk is several batches that one call from the graph into Python reads. The number is 0
        here, which says that each call reads a single batch. A subclass that opens files for a pass
        overrides this method, and closes them after the `with` block.
        """
        yield 0

    def end_pass(self, pass_state: Int64s, batch_number: np.int64) -> bool:
        """Move the loader's position to the next epoch, at the end of a pass.

        A pass is one iteration of the dataset. The graph calls this when the last batch of a pass
        leaves the pipeline, with the number of that batch, which only a subclass needs. It returns
        True, since a graph needs a result.
        """
        state = PassState.unpack(pass_state)
        # While a Keras callback or `track` sets the position, `finish` does not. It also ignores a
        # pass that started before they began or ended, which is of an older generation.
        self.external_passes.finish(PassStart(state.epoch, state.start, state.generation))
        return True
