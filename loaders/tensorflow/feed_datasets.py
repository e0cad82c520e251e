"""Datasets of the samples of a feed: one for each class, set or segment of its sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of, require_feed
from twinfeed.loaders.feed.collate import mode_of
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule
from twinfeed.loaders.reading.source import reader_of
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import generator_dataset
from twinfeed.loaders.tensorflow._datasets import check_process
from twinfeed.loaders.tensorflow._iterators import set_owner
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.loaders.tensorflow._pipeline import read_joined
from twinfeed.samplers import BatchStream
from twinfeed.samplers.stream import growing_ranges

PASS_START_SPEC = tf.TensorSpec([3], tf.int64)

# One read of a dataset has its samples of up to 4 batches. All datasets together read at most
# 1,024 samples (or one batch) ahead.
_BATCHES_PER_READ, _MAX_PREFETCHED = 4, 1 << 10

# The requests of this many ranges of steps are cached, as a rarely drawn class needs them later.
_CACHED_RANGES = 64


def source_datasets(feed: Feed, /) -> Sequence[tf.data.Dataset]:
    """Make one dataset for each class, each set or each segment that a feed's sampler draws from.

    `choose(feed.sampler, source_datasets(feed))` has the same batches as `TensorFlowLoader(feed)`,
    of any rank, and continues at its position without `replay`. The records may be mixed in any
    number of shards. One dataset by itself has the samples that epoch 0 draws from its class.

    Each dataset reads its samples of up to 4 batches at once, and all together at most 1,024
    samples, or one larger batch, ahead. They start no threads for reading.

    Args:
        feed: its sampler draws classes (P×K), mixes sets (`MixtureSampler`), or reads several
            segments, the parts of a shuffled sequence, side by side (`ShardShuffleSampler`).

    Returns:
        a sequence of datasets of samples. Each sample is a dict of the fields that a batch has.

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
    return SourceDatasets(require_feed(feed))


class SourceDatasets(Sequence[tf.data.Dataset]):
    """The datasets of the groups of a feed's sampler. A group is a class, a set or a segment."""

    def __init__(self, feed: Feed) -> None:
        sampler, group_sampler = feed.sampler, feed.sampler.group_sampler
        shaped = [name for name, field in feed.spec.items() if field.shape]
        padded = any(mode_of(feed.collate, name) == "pad" for name in shaped)
        if group_sampler is None or padded or feed.batch_transform is not None:
            raise ValueError(
                "source_datasets needs a sampler with classes, sets or segments, a feed without "
                "batch_transform, and no padding of records or batches, "
                f"got {sampler!r}: take TensorFlowLoader(feed), which serves every feed"
            )
        self._feed, reader = feed, reader_of(feed.index)
        self._batcher = Batcher(recipe_of(feed), reader=reader)
        self._layout = Layout(feed, None, reader)
        self._group_schedule = Schedule(group_sampler)
        requests_of = partial(_requests_by_group, Schedule(sampler), self._group_schedule)
        self._requests_by_group = lru_cache(_CACHED_RANGES)(requests_of)

    def __reduce__(self) -> tuple[type[SourceDatasets], tuple[Feed]]:
        return SourceDatasets, (self._feed,)

    def checked_group_schedule(self, sampler: BatchStream, source: Any) -> Schedule:
        """Check the arguments of `choose`; return the schedule of the dataset of each sample."""
        if source is not None or sampler is not self._feed.sampler:
            raise ValueError(
                f"these datasets have the samples of the feed of {self._feed.sampler!r}: call "
                f"choose(feed.sampler, source_datasets(feed))"
            )
        return self._group_schedule

    def __len__(self) -> int:
        return self._group_schedule.sampler.num_records

    def __getitem__(self, group: Any) -> Any:
        check_process()
        pass_start = tf.zeros(3, tf.int64)  # a `PassStart` of epoch 0, from step 0 on
        # `range` raises IndexError if there is no such group, and makes -1 the last group.
        return set_owner(self.of_pass(pass_start, range(len(self))[group]), self)

    def of_pass(self, pass_start: tf.Tensor, group: Any) -> tf.data.Dataset:
        """Return the dataset of the samples, dicts of fields, that a pass draws from one group."""
        # Each element is the arrays of several samples: `samples` reads them at once.
        specs = tuple(self._layout.flat_specs)
        samples = generator_dataset(self.samples, specs, (pass_start, group))
        return samples.map(lambda *flat: self._layout.restore(flat)).unbatch()

    def samples(self, pass_start: Int64s, group: np.int64) -> Iterator[tuple[Array, ...]]:
        """Read the samples that a pass draws from one group, several at once as stacked arrays."""
        (epoch, start, _), sampler = pass_start.tolist(), self._feed.sampler
        max_steps = max(1, _MAX_PREFETCHED // max(1, sampler.batch_size))
        for first, stop in growing_ranges(start, len(sampler), max_steps):
            # One request for each batch that has samples of the group.
            requests = self._requests_by_group(epoch, first, stop).get(int(group), [])
            for offset in range(0, len(requests), _BATCHES_PER_READ):
                yield from read_joined(self._read, requests[offset : offset + _BATCHES_PER_READ])

    def _read(self, *to_read: Request) -> tuple[Array, ...]:
        """Read the samples of several requests at once, and return the arrays of all fields."""
        # Its epoch and step are those of the first: only the message of an error has them.
        return tuple(self._layout.flatten(self._batcher(Request.joined(to_read))))


def _requests_by_group(
    id_schedule: Schedule, group_schedule: Schedule, epoch: int, first: int, stop: int
) -> dict[int, list[Request]]:
    """Divide the batches of the steps [first, stop) by group, such as the class of a sample."""
    requests_by_group = defaultdict(list)
    for request in islice(id_schedule.requests(epoch, first), stop - first):
        # The group of each sample of the batch: [2, 0, 2].
        (sample_groups,) = group_schedule.batches(epoch, request.step, request.step + 1)
        for group in np.unique(sample_groups).tolist():
            requests_by_group[group].append(request.where(sample_groups == group))
    return requests_by_group
