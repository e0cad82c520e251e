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
from twinfeed.loaders.batches.feed import Feed, check_feed, prepare_feed
from twinfeed.loaders.feed.collate import mode_of
from twinfeed.loaders.feed.request import Request, requests
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.source import reader_of
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import generator_dataset
from twinfeed.loaders.tensorflow._datasets import check_process
from twinfeed.loaders.tensorflow._graph_source import PassState
from twinfeed.loaders.tensorflow._iterators import destroy_iterators_in_thread
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.samplers import BatchStream
from twinfeed.samplers.drawing.chunks import growing_ranges

# One read of a dataset has its samples of up to 4 batches. All datasets together read at most
# 1,024 samples (or one batch) ahead.
_BATCHES_PER_READ, _MAX_SAMPLES_AHEAD = 4, 1 << 10

# The requests of this many ranges of steps are cached, as a rarely drawn class needs them later.
_CACHED_RANGES = 64


def source_datasets(feed: Feed, /) -> Sequence[tf.data.Dataset]:
    """Make one dataset for each class, each set or each segment that a feed's sampler draws from.

    The loader `choose(sampler, source_datasets(feed))` has the same batches as
    `TensorFlowLoader(feed)`. The index may have any number of shards, and the feed may be of any
    rank. An iteration over this loader starts at its position; `choose(…, replay=True)` changes
    nothing.

    If you iterate over one of the datasets, you get the samples that the sampler draws from its
    class in epoch 0, in the order in which they are drawn.

    Each dataset reads its samples of up to 4 batches at once. All together read at most 1,024
    samples, or one larger batch, before the batches need them. Only the thread that needs the
    samples reads them.

    Args:
        feed: its sampler draws classes (P×K), mixes sets (`MixtureSampler`), or takes turns between
            segments, the parts of a shuffled sequence (`ShardShuffleSampler`).

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
    return SourceDatasets(check_feed(feed))


class SourceDatasets(Sequence[tf.data.Dataset]):
    """The datasets of the groups of a feed's sampler. A group is a class, a set or a segment."""

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
        self._batcher = Batcher(prepare_feed(feed), reader=reader)
        self._layout = Layout(feed, None, reader)
        self._num_groups, group_stream = by_group
        self._group_schedule = Schedule(group_stream)
        requests_of = partial(_requests_by_group, Schedule(sampler), self._group_schedule)
        self._requests_by_group = lru_cache(_CACHED_RANGES)(requests_of)

    def __reduce__(self) -> tuple[type[SourceDatasets], tuple[Feed]]:
        return SourceDatasets, (self._feed,)

    def checked_group_schedule(self, sampler: BatchStream, source: Any) -> Schedule:
        """Check that `choose` got the feed's sampler, and return the schedule of its groups.

        A group is a class, set or segment that the sampler draws from. The schedule has the batches
        of the sampler, with the group of each sample in place of its id: if sample 7 is of group 2,
        and sample 3 of group 0, the batch of samples 7 and 3 is [2, 0].

        Args:
            sampler: the sampler that the user has given to `choose`.
            source: a function from ids to groups that the user has given to `choose`, or None.

        Raises:
            ValueError: `sampler` draws other samples than the feed's, or `source` is not None.
        """
        expected = self._feed.sampler
        is_same_rank = (sampler.rank, sampler.world_size) == (expected.rank, expected.world_size)
        is_same_stream = is_same_rank and str(sampler.fingerprint) == str(expected.fingerprint)
        if source is not None or not is_same_stream:
            raise ValueError(
                f"these datasets have the samples of {expected!r}, rank {expected.rank} of "
                f"{expected.world_size}: call choose(feed.sampler, source_datasets(feed))"
            )
        return self._group_schedule

    def __len__(self) -> int:
        return self._num_groups

    def __getitem__(self, group: Any) -> Any:
        check_process()
        pass_state = tf.zeros(5, tf.int64)  # a `PassState` of epoch 0, from step 0 on
        # `range` raises IndexError if there is no such group, and makes -1 the last group.
        dataset = self._dataset(pass_state, range(len(self))[group])
        dataset.twinfeed_owner = self  # keeps this object alive, whose method the graph calls
        return destroy_iterators_in_thread(dataset)

    def variants(self, pass_state: tf.Tensor) -> tf.Tensor:
        """Make the dataset of each group (a class, set or segment) for one pass of the loader.

        A pass is one iteration, and `pass_state` says where it starts. The result is a variant
        tensor [groups]. Each item is a dataset as a scalar, which `from_variant` turns back.
        """
        return tf.map_fn(
            lambda group: tf.data.experimental.to_variant(self._dataset(pass_state, group)),
            tf.range(len(self), dtype=tf.int64),
            fn_output_signature=tf.TensorSpec([], tf.variant),
        )

    def _dataset(self, pass_state: tf.Tensor, group: Any) -> tf.data.Dataset:
        """Return the dataset of the samples that a pass draws from one group.

        A pass is one iteration of the loader, and `pass_state` says where it starts. A group is a
        class, a set or a segment (a part of a shuffled sequence) of the feed's sampler.
        """
        specs = tuple(self._layout.flat_specs)
        samples = generator_dataset(self.samples, specs, (pass_state, group))
        # Each item has several samples in its arrays: `unbatch` makes single ones.
        return samples.map(lambda *flat: self._layout.restore(flat)).unbatch()

    def samples(self, pass_state: Int64s, group: np.int64) -> Iterator[tuple[Array, ...]]:
        """Yield the samples of a group (a class, set or segment) from the start of a pass on.

        Each item has the group's samples in up to `_BATCHES_PER_READ` batches, as stacked arrays.
        """
        state, sampler = PassState.unpack(pass_state), self._feed.sampler
        max_steps = max(1, _MAX_SAMPLES_AHEAD // max(1, sampler.batch_size))
        for first, stop in growing_ranges(state.start, len(sampler), max_steps):
            # One request for each batch that has samples of the group.
            group_requests = self._requests_by_group(state.epoch, first, stop).get(int(group), [])
            for offset in range(0, len(group_requests), _BATCHES_PER_READ):
                requests_to_read = group_requests[offset : offset + _BATCHES_PER_READ]
                try:
                    arrays = self._read(*requests_to_read)
                except Exception:  # read one by one, to yield the batches before the error
                    yield from map(self._read, requests_to_read)
                else:
                    yield arrays

    def _read(self, *to_read: Request) -> tuple[Array, ...]:
        """Read the samples of several requests at once, and return the arrays of all fields."""
        # One request with the arrays of all requests, joined. Its epoch and step are those of the
        # first one: only the message of an error has them.
        names = ("ids", "records", "views", "seeds")
        joined = [np.concatenate([getattr(part, name) for part in to_read]) for name in names]
        batch = self._batcher(Request(to_read[0].epoch, to_read[0].step, *joined))
        return tuple(self._layout.flatten(batch))


def _requests_by_group(
    id_schedule: Schedule, group_schedule: Schedule, epoch: int, first: int, stop: int
) -> dict[int, list[Request]]:
    """Return a dict with the requests for the samples of each group in the steps [first, stop).

    A group is a class, set or segment. A request says which samples of a batch to read. A batch
    that has samples of groups 0 and 2 adds a request to the list of each of the two groups.

    `id_schedule` has the batches of the sampler, as the ids of their samples. `group_schedule` has
    the same batches, as the groups of their samples: if sample 7 is of group 2, and sample 3 of
    group 0, the batch of samples 7 and 3 is [7, 3] in the first, and [2, 0] in the second.
    """
    requests_by_group = defaultdict(list)
    for request in islice(requests(id_schedule, epoch, first), stop - first):
        # The group of each sample of the batch.
        (sample_groups,) = group_schedule.batches(epoch, request.step, request.step + 1)
        for group in np.unique(sample_groups).tolist():
            requests_by_group[group].append(request.where(sample_groups == group))
    return requests_by_group
