"""Datasets of the samples of a feed: one for each class, set or lane of its sampler."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from twinfeed.loaders.tensorflow._callbacks import generated
from twinfeed.loaders.tensorflow._datasets import check_process
from twinfeed.loaders.tensorflow._iterators import guarded
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.loaders.tensorflow._passes import PassState
from twinfeed.samplers import BatchStream

# Samples that a dataset reads at once, and those that are drawn before they are read.
_READ, _DRAWN = 32, 1 << 10

_Row = tuple[Request, int]
"""A sample: a place in the request of its batch."""


def source_datasets(feed: Feed, /) -> Sequence[tf.data.Dataset]:
    """Make a dataset of each class, set or lane of a feed's sampler.

    `choose(sampler, source_datasets(feed))` gives the batches of `TensorFlowLoader(feed)`, of any
    shards and rank. Passes of `choose` begin at its position, `replay` or not. A dataset that you
    iterate over by itself gives the samples of its class in epoch 0, in the order of the stream.

    Each dataset reads up to 32 samples at once, and all together read at most some 2,000 samples
    before the batches need them. Nothing is read by other threads.

    Args:
        feed: its sampler draws classes (P×K), mixes sets (`MixtureSampler`), or shuffles by lanes
            (`ShardShuffleSampler`).

    Returns:
        a sequence of datasets of samples, each a dict as a batch of the feed has it.

    Raises:
        ValueError: a sampler without classes, sets and lanes, or with padding; a feed with a
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
    """Make the datasets of the classes, sets or lanes of a feed's sampler."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self.sampler, groups = feed, feed.sampler, feed.sampler.by_group
        shaped = [name for name, field in feed.spec.items() if field.shape]
        padded = any(mode_of(feed.collate, name) == "pad" for name in shaped)
        if groups is None or padded or feed.batch_transform is not None:
            raise ValueError(
                "source_datasets needs a sampler with classes, sets or lanes, a feed without "
                "batch_transform, and no padding of records or batches, "
                f"got {feed.sampler!r}: take TensorFlowLoader(feed), which serves every feed"
            )
        reader = reader_of(feed.index)
        self._batcher = Batcher(compile_feed(feed), reader=reader)
        self._layout = Layout(feed, None, reader)
        self._ids, self._seeded = Schedule(feed.sampler), feed.seeded
        self._count, self.groups = groups[0], Schedule(groups[1])
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[type[SourceDatasets], tuple[Feed]]:
        return SourceDatasets, (self._feed,)

    def groups_for(self, sampler: BatchStream, source: Any) -> Schedule:
        """Return the schedule of groups, for `sampler`; ValueError if it draws other samples."""
        streams = [(one.fingerprint, one.rank, one.world_size) for one in (sampler, self.sampler)]
        if source is not None or streams[0] != streams[1]:
            raise ValueError(
                f"these datasets have the samples of {self.sampler!r}, rank {self.sampler.rank} of "
                f"{self.sampler.world_size}: call choose(feed.sampler, source_datasets(feed))"
            )
        return self.groups

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        check_process()
        alone = tf.constant(PassState(-1, 0, 0, 0, 0), tf.int64)
        dataset = self._dataset(alone, range(self._count)[number])
        dataset.twinfeed_sources = self  # the graph calls it, so it must live as long
        return guarded(dataset)

    def variants(self, pass_state: tf.Tensor) -> tf.Tensor:
        """Make the datasets of a pass, in the graph: a variant tensor of shape [datasets]."""
        return tf.map_fn(
            lambda number: tf.data.experimental.to_variant(self._dataset(pass_state, number)),
            tf.range(self._count, dtype=tf.int64),
            fn_output_signature=tf.TensorSpec([], tf.variant),
        )

    def _dataset(self, pass_state: tf.Tensor, number: Any) -> tf.data.Dataset:
        pieces = generated(self.pieces, tuple(self._layout.flat), (pass_state, number))
        return pieces.map(lambda *parts: self._layout.restore(parts)).unbatch()

    def pieces(self, pass_state: Int64s, number: np.int64) -> Iterator[tuple[Array, ...]]:
        """Read the samples of a group from the beginning of a pass to the end of its epoch.

        The number of a pass that shares its draws with no other dataset is -1.
        """
        key, epoch, start, *_ = PassState.of(pass_state)
        coming = requests(self._ids, epoch, start, seeds=self._seeded)
        own = self._passes.get(key) or _Pass(coming, self.groups)
        if key >= 0:
            self._passes[key] = own
        while rows := own.take(int(number)):
            try:
                read = iter([self._read(rows)])
            except Exception:  # then the samples before the bad one come before the error
                read = map(self._read, [[row] for row in rows])
            yield from read

    def _read(self, rows: list[_Row]) -> tuple[Array, ...]:
        first = rows[0][0]
        names = ["ids", "records", "views", *(["seeds"] if self._seeded else [])]
        parts: Any = {
            name: np.array([getattr(one, name)[at] for one, at in rows]) for name in names
        }
        return tuple(self._layout.flatten(self._batcher(first._replace(**parts))))


class _Pass:
    """Draw the rest of an epoch as its groups ask for their samples."""

    def __init__(self, coming: Iterator[Request], groups: Schedule) -> None:
        self._coming, self._groups, self._waiting = coming, groups, 0
        self._rows: defaultdict[int, list[_Row]] = defaultdict(list)

    def take(self, group: int) -> list[_Row]:
        """Return the next samples of a group; none at the end of the epoch."""
        rows = self._rows[group]
        while not rows or self._waiting < _DRAWN:
            request = next(self._coming, None)
            if request is None:
                break
            (groups,) = self._groups.batches(request.epoch, request.step, request.step + 1)
            for at, number in enumerate(groups.tolist()):
                self._rows[number].append((request, at))
            self._waiting += len(groups)
        taken, self._rows[group] = rows[:_READ], rows[_READ:]
        self._waiting -= len(taken)
        return taken
