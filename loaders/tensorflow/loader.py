"""The loader for TensorFlow: batches of tensors, and a dataset for `fit` and `tf.distribute`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal, get_args

import tensorflow as tf

from twinfeed.loaders import _checks
from twinfeed.loaders._loader import Loader
from twinfeed.loaders._making import ahead
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.tensorflow._choose import ChooseIds
from twinfeed.loaders.tensorflow._files import ChooseFiles, readers_for
from twinfeed.loaders.tensorflow._gather import Gather
from twinfeed.loaders.tensorflow._pipeline import Engine, batches_of
from twinfeed.loaders.tensorflow._serve import Server
from twinfeed.loaders.tensorflow.device import chosen_device, prefetch_to_device
from twinfeed.loaders.tensorflow.errors import originals_of

EngineName = Literal["gather", "choose_from_datasets"]


class TensorFlowLoader(Loader, tf.train.experimental.PythonState):
    """Iterate over the batches of `feed` as tensors on `device`.

    Where a pass begins, and what the state counts: see `Loader`. Errors are raised as they were
    raised. The loader is the place in a checkpoint: `tf.train.Checkpoint(loader=loader)`.

    - `engine`: "gather" reads each batch by its ids. "choose_from_datasets" lets the sampler choose
      from datasets. The batches are the same. The datasets are TensorFlow's own sequential readers
      where the stream meets local TFRecord shards in stored order, no record is left out, and the
      process may open enough files at once. Otherwise, and for P×K over several ranks, there is a
      dataset of ids for each shard.
    - `device` gets the tensors; strings stay on the host. Default: the first GPU that TensorFlow
      sees, else the CPU.
    - `prefetch`: batches kept ready ahead of the step, on the host and on the device. Where records
      are short and nothing is decoded, up to 16 batches are read at once, and up to 31 more than
      `prefetch` are ready. With 0, each batch is read by itself.
    - `threads`: threads that make one batch each. If the sampler reuses decoded images, the threads
      share one batch, and as many others decode one image each for coming batches, beside the live
      images. Default: the processors this process may use, at most 8; one thread if short records
      are read and nothing is decoded.

    `dataset` is for `fit`, `map` and `tf.distribute`, `dataset_for` for several replicas, and
    `counted` for loops over what is made of either.

    TensorFlow cannot save iterators over Python: `tf.train.Checkpoint(iterator)` of a dataset of
    this loader fails. The loader itself is what a checkpoint holds.

    The tf.data service runs a pipeline in processes of its own. Other processes cannot call this
    one, so a dataset of this loader fails there.

    `dataset.cache()` keeps the batches of one epoch, and gives the same batches in later epochs.
    This is right for an evaluation. In a training the loader does not hear of later epochs, and
    `ResumeCallback` refuses such a `fit`.

    Raises ValueError for an unknown engine and for a device that TensorFlow does not see.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> loader = TensorFlowLoader(Feed(index, ExactOnceBatchSampler(3, batch_size=2)))
    >>> for batch in loader:
    ...     print(batch["word"].numpy(), loader.step)
    [b'to' b'be'] 1
    [b'or'] 0
    >>> len(loader.dataset)
    2
    """

    _counts = "loop over loader.counted(dataset)"

    def __init__(
        self,
        feed: Feed,
        /,
        *,
        engine: EngineName = "gather",
        device: str | None = None,
        prefetch: int = 2,
        threads: int | None = None,
    ) -> None:
        super().__init__(feed)
        self.engine = _checks.choice("engine", engine, get_args(EngineName))
        self.device = device if device is None else chosen_device(device)
        self.prefetch, known = ahead(feed, prefetch, threads)
        # None stays None: where nothing is decoded, the server knows whether threads help.
        self.threads = None if threads is None and not feed.alone else known

    @cached_property
    def dataset(self) -> tf.data.Dataset:
        """Batches as a `tf.data.Dataset`, for `fit`, `map` and `tf.distribute`. Nothing is counted.

        Its length is always that of a whole epoch, and shapes are static where they can be. A pass
        runs from where the loader stands to the end of the epoch. An evaluation always runs whole,
        except in the first pass after `load_state_dict`. A pass begins when its first batch is
        drawn, and a pass that is given up costs nothing. When a pass has delivered its last batch,
        the loader stands at the next epoch. Within `counted`, or with a `ResumeCallback`, the
        loader follows what was received.

        A `map` or `prefetch` after the dataset may draw a whole short epoch at once. A look at one
        batch is then a whole pass, and the next pass begins the next epoch. `fit` looks at a batch
        under a strategy. So take `counted` or a `ResumeCallback` there.

        Warns where passes begin one training epoch a third time: the same batches come again.
        """
        return self._dataset_of([self.feed])

    def dataset_for(self, context: tf.distribute.InputContext, /) -> tf.data.Dataset:
        """Make the dataset of the replicas of one input pipeline: each gets its rank's batch.

        For `strategy.distribute_datasets_from_function(loader.dataset_for)`: whole classes of a
        P×K batch, and each record of an evaluation exactly once. Its length is the number of steps
        of an epoch, as Keras expects. Each step has a batch for every replica. All else is as
        `dataset` says.

        Raises ValueError where the replicas cannot be shared out evenly over the pipelines.
        """
        replicas, pipelines = context.num_replicas_in_sync, context.num_input_pipelines
        own, over = divmod(replicas, pipelines)
        if over:
            raise ValueError(
                f"the replicas must be shared out evenly over the input pipelines, got {replicas} "
                f"replicas and {pipelines} pipelines"
            )
        first = context.input_pipeline_id * own
        return self._dataset_of([self.feed.shard(first + n, replicas) for n in range(own)])

    def counted(self, dataset: Iterable[Any], /) -> Iterator[Any]:
        """Iterate over what was made of `dataset`, and count what the loop receives.

        `dataset` may be mapped, cut by `take`, prefetched to a device, or distributed. Each of its
        elements is a batch. The pass is one of the loader's: the same rules hold as for iterating
        over the loader itself.
        """
        self._stop()
        epoch, start = self._cursor.begin()
        self._arm(epoch, start)
        self._meter.begin(start)
        running = _Pass(self, dataset)
        yield from self._deliver(running, self._received)

    def serialize(self) -> str:
        """Give the state to `tf.train.Checkpoint`."""
        return json.dumps(self.state_dict())

    def deserialize(self, state: str | bytes, /) -> None:
        """Take the state from `tf.train.Checkpoint`."""
        self.load_state_dict(json.loads(state))

    def _begin(self, epoch: int, start: int) -> _Pass:
        self._arm(epoch, start)
        return _Pass(self, self._on_device)

    @cached_property
    def _on_device(self) -> tf.data.Dataset:
        """The dataset that the loader itself iterates over."""
        device = chosen_device(self.device)
        if device == "/CPU:0":
            return self.dataset
        return prefetch_to_device(self.dataset, device=device, buffer_size=self.prefetch)

    def _dataset_of(self, feeds: list[Feed]) -> tf.data.Dataset:
        engine = self._engine_for(Server(self, feeds, self._reader))
        return batches_of(engine, self.prefetch)

    def _engine_for(self, server: Server) -> Engine:
        """Make the engine that serves the stream."""
        if self.engine == "gather":
            return Gather(server)
        if len(server.ranks) > 1:
            raise ValueError(
                f"engine='choose_from_datasets' serves one replica for each input pipeline, "
                f"got {len(server.ranks)}: use engine='gather'"
            )
        readers = readers_for(server)
        return ChooseFiles(server, readers) if readers else ChooseIds(server)


class _Pass(Iterator[Any]):
    """Iterate once, with errors as they were raised."""

    def __init__(self, loader: TensorFlowLoader, dataset: Iterable[Any]) -> None:
        self._loader = loader
        self._dataset = dataset
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        with originals_of(self._loader):
            if self._batches is None:
                self._batches = iter(self._dataset)
            return next(self._batches)

    def close(self) -> None:
        """Give up the iterator, with the batches drawn ahead, and count no more."""
        self._loader._disarm()
        self._dataset, self._batches = (), iter(())
