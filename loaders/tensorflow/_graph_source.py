"""`GraphSource`: the batches that a graph reads from Python; `PassState` is known to both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.loop.run import PassStart
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.tensorflow._processes import check_auto_shard
from twinfeed.samplers import BatchStream

_PASS_IDS = count()


class PassState(NamedTuple):
    """The state of a pass (an iteration of a dataset) inside a graph, as a tensor: int64[5].

    Attributes:
        pass_id: the number of the pass in this process.
        epoch: the epoch that is read.
        start: the first step that is read.
        generation: how often a caller (a Keras callback, or a loop over `track`) had started or
            stopped to set the loader's position when the pass started. If the number has risen
            when the pass ends, the end of the pass does not change the position.
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
        self.run, self.meter = loader.run, loader.meter
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
        """Run a pass, which is one iteration of the dataset: open it, yield its state, close it.

        This is a generator of one item, the `PassState` as int64[5]. The graph takes the item, and
        reads the batches of the pass by it. TensorFlow closes the generator when the iteration has
        ended or is abandoned. Then the `with` block here closes the files of the pass.
        """
        # `reshardable` is False in a loop over the loader itself. Elsewhere, a `tf.distribute`
        # strategy may divide the batches among its processes, unless each replica has a dataset
        # with the batches of its own rank (`_by_rank`).
        if self.run.reshardable and not self._by_rank:
            check_auto_shard(self.sampler)
        self.meter.start_external()  # measures how long the loop waits for batches
        # The pass starts at this epoch and step. `end_pass` compares the generation, which rises
        # when a Keras callback or `track` begins or stops to set the loader's position. If it has
        # risen by the end of the pass, this pass is out of date, and does not set the position.
        epoch, start, generation = self.run.start_external()
        pass_id = next(_PASS_IDS)
        # The number of calls into Python that read several batches each; 0 if a call reads one.
        with self._open_pass(pass_id, epoch, start) as num_chunks:
            yield np.array(PassState(pass_id, epoch, start, generation, num_chunks))

    def _open_pass(self, pass_id: int, epoch: int, start: int) -> AbstractContextManager[int]:
        """Return a context manager that opens what a pass reads, and closes it at the end.

        It returns `PassState.num_chunks`, which is 0 if each call into Python reads one batch. A
        subclass that opens files overrides this method.
        """
        return nullcontext(0)

    def end_pass(self, pass_state: Int64s, batch_number: np.int64) -> bool:
        """Move the loader's position to the next epoch, at the end of a pass.

        A pass is one iteration of the dataset. The graph calls this when the last batch of the pass
        leaves the pipeline. Only a subclass needs the number of this batch. The result is always
        True: TensorFlow cannot call a function without a result.

        The position does not move while a Keras callback or a loop over `track` sets it: they count
        the batches that were trained on, and set the position by this count.
        """
        state = PassState.unpack(pass_state)
        # `finish` decides whether the position moves. It stays if a Keras callback or `track` sets
        # it now. It also stays if one of the two has begun or stopped since this pass started: the
        # generation, which counts these events, has then risen.
        self.run.finish_external(PassStart(state.epoch, state.start, state.generation))
        return True
