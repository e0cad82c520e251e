"""Datasets of the samples of a feed: one for each class, set or segment of its sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.feed.collate import mode_of
from twinfeed.loaders.feed.request import Request, requests
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.feed import Feed, check_feed, compile_feed
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.source import reader_of
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import generator_dataset
from twinfeed.loaders.tensorflow._datasets import check_process
from twinfeed.loaders.tensorflow._graph_source import PassState
from twinfeed.loaders.tensorflow._iterators import destroy_in_thread
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.chunks import growing_ranges

# The number of batches whose samples a dataset reads at once, and the number of samples that all
# datasets together read ahead.
_BATCHES_AT_ONCE, _READAHEAD = 4, 1 << 10

# Chunks of a stream whose requests are cached, since a rarely drawn class needs them later.
_CACHED_CHUNKS = 64


def source_datasets(feed: Feed, /) -> Sequence[tf.data.Dataset]:
    """Make a dataset of each class, set or segment of a feed's sampler.

    `choose(sampler, source_datasets(feed))` gives the batches of `TensorFlowLoader(feed)`, of any
    shards and rank. Passes of `choose` begin at its position, `replay` or not. A dataset that you
    iterate over by itself gives the samples of its class in epoch 0, in the order of the stream.

    Each dataset reads its samples of up to 4 batches at once. All together read at most some 1,000
    samples before the batches need them. Nothing is read by other threads.

    Args:
        feed: its sampler draws classes (P×K), mixes sets (`MixtureSampler`), or reads segments of a
            shuffle side by side (`ShardShuffleSampler`).

    Returns:
        a sequence of datasets of samples, each a dict as a batch of the feed has it.

    Raises:
        ValueError: a sampler without classes, sets and segments, or with padding; a feed with a
            `batch_transform`, or with fields that are padded to the longest of a batch.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.loaders.tensorflow import choose, source_datasets
    >>> from twinfeed.samplers import PKBatchSampler
    >>> index = pack([{"word": b"%d" % n, "label": n % 3} for n in range(9)], mkdtemp())["data"]
    >>> feed = Feed(index, PKBatchSampler(index.labels, p=2, k=2, seed=0))
    >>> for batch in choose(feed.sampler, source_datasets(feed)):
    ...     print(batch["word"].numpy(), batch["label"].numpy())
    [b'4' b'7' b'0' b'6'] [1 1 0 0]
    [b'2' b'8' b'1' b'7'] [2 2 1 1]
    """
    return SourceDatasets(check_feed(feed))


class SourceDatasets(Sequence[tf.data.Dataset]):
    """The datasets of the groups of a feed's sampler: of its classes, sets or segments."""

    def __init__(self, feed: Feed) -> None:
        sampler, by_group = feed.sampler, feed.sampler.by_group
        shaped = [name for name, field in feed.spec.items() if field.shape]
        padded = any(mode_of(feed.collate, name) == "pad" for name in shaped)
        if by_group is None or padded or feed.batch_transform is not None:
            raise ValueError(
                "source_datasets needs a sampler with classes, sets or segments, a feed without "
                "batch_transform, and no padding of records or batches, "
                f"got {sampler!r}: take TensorFlowLoader(feed), which serves every feed"
            )
        self._feed, reader = feed, reader_of(feed.index)
        self._batcher = Batcher(compile_feed(feed), reader=reader)
        self._layout = Layout(feed, None, reader)
        self._num_groups, self._groups = by_group[0], Schedule(by_group[1])
        requests_of = partial(_requests_by_group, Schedule(sampler), self._groups)
        self._requests_by_group = lru_cache(_CACHED_CHUNKS)(requests_of)

    def __reduce__(self) -> tuple[type[SourceDatasets], tuple[Feed]]:
        return SourceDatasets, (self._feed,)

    def checked_group_schedule(self, sampler: BatchStream, source: Any) -> Schedule:
        """Return a schedule that has, in place of each sample id, its group: class, set or segment.

        Raises:
            ValueError: `sampler` draws other samples than the feed's sampler, or the caller has a
                `source` function of its own.
        """
        own = self._feed.sampler
        streams = {
            (str(stream.fingerprint), stream.rank, stream.world_size) for stream in (sampler, own)
        }
        if source is not None or len(streams) > 1:
            raise ValueError(
                f"these datasets have the samples of {own!r}, rank {own.rank} of "
                f"{own.world_size}: call choose(feed.sampler, source_datasets(feed))"
            )
        return self._groups

    def __len__(self) -> int:
        return self._num_groups

    def __getitem__(self, group: Any) -> Any:
        check_process()
        first_epoch = tf.constant(PassState(0, 0, 0, 0, 0), tf.int64)
        dataset = self._dataset(first_epoch, range(len(self))[group])
        dataset.twinfeed_owner = self  # the graph calls it, so it must live as long
        return destroy_in_thread(dataset)

    def variants(self, pass_state: tf.Tensor) -> tf.Tensor:
        """Make the datasets of a pass, in the graph: a variant tensor of shape [groups]."""
        return tf.map_fn(
            lambda group: tf.data.experimental.to_variant(self._dataset(pass_state, group)),
            tf.range(len(self), dtype=tf.int64),
            fn_output_signature=tf.TensorSpec([], tf.variant),
        )

    def _dataset(self, pass_state: tf.Tensor, group: Any) -> tf.data.Dataset:
        """Return the dataset of the samples of a group (a class, set or segment) in a pass."""
        samples = generator_dataset(self.samples, tuple(self._layout.flat), (pass_state, group))
        return samples.map(lambda *flat: self._layout.restore(flat)).unbatch()

    def samples(self, pass_state: Int64s, group: np.int64) -> Iterator[tuple[Array, ...]]:
        """Yield the samples of a group (a class, set or segment) from the start of a pass on.

        Each item has the group's samples in up to `_BATCHES_AT_ONCE` batches, as stacked arrays.
        """
        sampler, (_, epoch, start, *_) = self._feed.sampler, PassState.unpack(pass_state)
        steps = max(1, _READAHEAD // max(1, sampler.batch_size))
        for first, stop in growing_ranges(start, len(sampler), steps):
            group_requests = self._requests_by_group(epoch, first, stop).get(int(group), [])
            for offset in range(0, len(group_requests), _BATCHES_AT_ONCE):
                several = group_requests[offset : offset + _BATCHES_AT_ONCE]
                try:
                    arrays = self._read(*several)
                except Exception:  # read one by one, to yield the batches before the error
                    yield from map(self._read, several)
                else:
                    yield arrays

    def _read(self, *parts: Request) -> tuple[Array, ...]:
        """Read the samples of several requests at once, and return their arrays."""
        # The first two fields of a request are its epoch and step, and the others are arrays.
        columns: Any = map(np.concatenate, list(zip(*parts, strict=True))[2:])
        batch = self._batcher(Request(parts[0].epoch, parts[0].step, *columns))
        return tuple(self._layout.flatten(batch))


def _requests_by_group(
    ids: Schedule, groups: Schedule, epoch: int, first: int, stop: int
) -> dict[int, list[Request]]:
    """Return by group (class, set or segment) the requests for its samples in steps [first, stop).

    `ids` and `groups` are the schedules of the sample ids and of the group of each sample.
    """
    by_group = defaultdict(list)
    for request in islice(requests(ids, epoch, first), stop - first):
        (numbers,) = groups.batches(epoch, request.step, request.step + 1)
        for group in np.unique(numbers).tolist():
            by_group[group].append(request.where(numbers == group))
    return by_group
