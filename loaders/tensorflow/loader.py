"""The loader for TensorFlow: batches of tensors, and a dataset for `fit` and `tf.distribute`."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import tensorflow as tf

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import Ragged
from twinfeed.loaders.loop.feed_loader import ThreadedLoader
from twinfeed.loaders.loop.loader import B
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.tensorflow._batch_source import BatchSource
from twinfeed.loaders.tensorflow._datasets import DatasetLoader, check_process
from twinfeed.loaders.tensorflow._layout import arrays_of
from twinfeed.loaders.tensorflow._pipeline import dataset_of
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.samplers import validate

_SHARED_BYTES = 1 << 16  # smaller arrays are copied


class TensorFlowLoader(DatasetLoader[B], ThreadedLoader[B]):
    """Iterate over the batches of `feed` as tensors on `device`.

    A pass (a loop over the loader) runs from its position to the end of the epoch; see `Loader`.
    `dataset` is for `fit`, `map` and `tf.distribute`, `dataset_for` for several replicas, and
    `track` for loops over datasets that are made of either.

    `tf.train.Checkpoint(loader=loader)` saves the position. A checkpoint of a dataset's iterator
    fails, and so does the tf.data service, whose processes cannot call this one. `cache()` and
    `snapshot()` repeat one epoch, which is right for an evaluation alone.

    Args:
        feed: the records, their order, and how samples are made of them.
        device: gets the tensors; strings stay on the host. Default: the first GPU that TensorFlow
            sees, else the CPU.
        prefetch: batches kept ready ahead of the step, on the host and on the device. With 0, each
            batch is read by itself. Of short records that nothing decodes, `dataset` reads up to 16
            batches at once, and has up to 31 more ready.
        threads: the number of threads, each of which makes one batch at a time. If the sampler
            reuses decoded images, all make one batch together, and as many more threads decode
            images for coming batches. Default: the processors that this process may use, at most 8;
            no threads if nothing is decoded.
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
        readahead: int | None = None,
    ) -> None:
        super().__init__(feed, prefetch=prefetch, threads=threads, readahead=readahead)
        self.device = device if device is None else chosen_device(device)

    def _start_pass(self, epoch: int, start: int) -> Prefetcher[Any] | Generator[Any, None, None]:
        """Start to make the batches of an epoch, from step `start` on, as tensors on the device."""
        check_process()
        to_device = partial(_on_device, chosen_device(self.device))
        return self._prefetched(self._batches(epoch, start, to_device))

    def dataset_for(self, context: tf.distribute.InputContext, /) -> tf.data.Dataset:
        """Make the dataset of one input pipeline of a `tf.distribute` strategy.

        Pass this method to `strategy.distribute_datasets_from_function(loader.dataset_for)`. Each
        replica is a rank, and gets the batches of its rank. So the classes of a P×K batch are not
        divided, and an evaluation has each record exactly once.

        In each step, the dataset yields a batch for every replica of the pipeline. Its length is
        still the number of steps of an epoch. Positions are as in `dataset`.
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
        """Return the dataset of the batches of feeds, one for each rank, step by step."""
        return dataset_of(BatchSource(self, feeds, by_rank=by_rank), self.prefetch)


def _on_device(device: str, batch: Batch) -> Any:
    """Return a batch as tensors on a device; strings stay on the host."""

    def converted(value: Any) -> Any:
        tensors = [_as_tensor(array) for array in arrays_of(value)]
        if device != "/CPU:0":
            with tf.device(device):
                tensors = [t if t.dtype == tf.string else tf.identity(t) for t in tensors]
        if isinstance(value, Ragged):
            return tf.RaggedTensor.from_row_splits(*tensors, validate=False)
        return tensors[0]

    return {name: converted(value) for name, value in batch.items()}


def _as_tensor(array: Array) -> tf.Tensor:
    """Return an array as a tensor, which shares the memory of a large one."""
    is_aligned = array.ctypes.data % 64 == 0 and array.flags.c_contiguous  # as TensorFlow needs
    is_large = array.nbytes >= _SHARED_BYTES and array.dtype.kind in "fiu"
    if is_large and is_aligned and array.flags.writeable:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)
