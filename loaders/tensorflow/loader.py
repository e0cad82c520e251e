"""The loader for TensorFlow: batches of tensors, and a dataset for `fit` and `tf.distribute`."""

from __future__ import annotations

import tensorflow as tf

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.loop.feed_loader import FeedLoader, resolve_prefetch
from twinfeed.loaders.loop.loader import B
from twinfeed.loaders.tensorflow._batch_source import BatchSource
from twinfeed.loaders.tensorflow._datasets import DatasetLoader
from twinfeed.loaders.tensorflow._pipeline import dataset_of
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.samplers import validate


class TensorFlowLoader(DatasetLoader[B], FeedLoader[B]):
    """Iterate over the batches of `feed` as tensors on `device`.

    A pass (a loop over the loader) runs from its position to the end of the epoch; see `Loader`.
    Errors of reading and decoding are raised as they are, not as TensorFlow wraps them.
    `tf.train.Checkpoint(loader=loader)` saves the position.

    `dataset` is for `fit`, `map` and `tf.distribute`, `dataset_for` for several replicas, and
    `track` for loops over datasets that are made of either.

    TensorFlow cannot save iterators over Python: `tf.train.Checkpoint(iterator)` of a dataset of
    this loader fails. Save the loader itself.

    The tf.data service runs a pipeline in processes of its own. They cannot call this process, so a
    dataset of this loader fails there.

    `dataset.cache()` and `snapshot()` repeat the batches of one epoch in later epochs. This is
    right for an evaluation. For a training, `track` and `ResumeCallback` refuse it.

    Args:
        feed: the records, their order, and how samples are made of them.
        device: gets the tensors; strings stay on the host. Default: the first GPU that TensorFlow
            sees, else the CPU.
        prefetch: batches kept ready ahead of the step, on the host and on the device. Where records
            are short and nothing is decoded, up to 16 batches are read at once, and up to 31 more
            than `prefetch` are ready. With 0, each batch is read by itself.
        threads: the number of threads, each of which makes one batch at a time. If the sampler
            reuses decoded images, all make one batch together, and as many more threads decode
            images for coming batches. Default: the processors that this process may use, at most 8;
            one thread if records are short and nothing is decoded.
        checksums: whether the bytes of each field are compared with the index's CRC-32C.
        readahead: bytes to read before their batches need them. Default: 64 MiB while reading waits
            for a disk or a network, and 0 while all pages are in memory. 0 reads nothing ahead.

    Raises:
        ValueError: a device that TensorFlow does not see.

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

    @validate.show_call("TensorFlowLoader(feed)")
    def __init__(
        self,
        feed: Feed,
        *,
        device: str | None = None,
        prefetch: int = 2,
        threads: int | None = None,
        checksums: bool = True,
        readahead: int | None = None,
    ) -> None:
        super().__init__(feed, checksums=checksums, readahead=readahead)
        self.device = device if device is None else chosen_device(device)
        self.prefetch, resolved = resolve_prefetch(feed, prefetch, threads)
        # None stays None: where nothing is decoded, `BatchSource` decides whether threads help.
        self.threads = None if threads is None and not feed.sets_global_state else resolved

    def dataset_for(self, context: tf.distribute.InputContext, /) -> tf.data.Dataset:
        """Make the dataset of one input pipeline of a `tf.distribute` strategy.

        Pass this method to `strategy.distribute_datasets_from_function(loader.dataset_for)`. Each
        replica is a rank, and gets the batches of its rank. So the classes of a P×K batch are not
        divided, and an evaluation has each record exactly once.

        In each step, the dataset yields a batch for every replica of the pipeline: with 2 replicas
        and 100 steps, it yields 200 batches. Its length is still 100, the number of steps of an
        epoch, as Keras expects. An iteration starts at the loader's position and changes it at its
        end, as that of `dataset` does.
        """
        replicas, pipelines = context.num_replicas_in_sync, context.num_input_pipelines
        per_pipeline = replicas // pipelines  # in every strategy, all have equally many
        self._by_rank = True  # for `track`: each process has its own batches
        first = context.input_pipeline_id * per_pipeline
        ranks = range(first, first + per_pipeline)
        return self._dataset_of([self.feed.shard(rank, replicas) for rank in ranks], by_rank=True)

    def _make_dataset(self) -> tf.data.Dataset:
        return self._dataset_of([self.feed])

    def _dataset_of(self, feeds: list[Feed], *, by_rank: bool = False) -> tf.data.Dataset:
        """Return the dataset of the batches of feeds, one for each rank, for step 0, then step 1.

        With `by_rank`, each replica of a strategy gets the batches of its rank.
        """
        return dataset_of(BatchSource(self, feeds, by_rank=by_rank), self.prefetch)
