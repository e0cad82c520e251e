"""`Selector`: the number of the source that gives the next record, by a sampler."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.feed.config import check_batches
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.drawing.chunks import growing_ranges, steps_per_draw

SourceOf = Callable[[Int64s], npt.ArrayLike] | npt.ArrayLike
"""The number of the source of each sample id: a function of ids, int64[n], or an array by id."""


class Choices:
    """For each sample of the batches of a sampler, the number of the source that it comes from."""

    def __init__(
        self,
        sampler: BatchStream,
        sources: int,
        source: SourceOf | None,
        groups: Schedule | None = None,
    ) -> None:
        check_batches(sampler)
        # With `groups`, a schedule of the numbers themselves, no function of ids is needed.
        self.sampler, self.sources = sampler, sources
        self._schedule = Schedule(sampler) if groups is None else groups
        self._source_of = (
            _source_function(sampler, sources, source) if groups is None else np.asarray
        )
        self._draw_counts = (0, 0), np.zeros(sources, np.int64)

    def source_numbers(self, epoch: int, start: int, stop: int) -> list[Int64s]:
        """Return for each of the steps [start, stop) the source number of each sample.

        A list of arrays, int64[batch].
        """
        batches = self._schedule.batches(epoch, start, stop)
        return np.split(
            self._sources_of_ids(batches), np.cumsum([len(ids) for ids in batches])[:-1]
        )

    def chunks(self, epoch: int, start: int, stop: int) -> Iterator[list[Int64s]]:
        """Yield `numbers` for chunks of the steps [start, stop): of 1, 2, 4, … steps each."""
        for first, last in growing_ranges(start, stop, steps_per_draw(self.sampler.batch_size)):
            yield self.source_numbers(epoch, first, last)

    def drawn(self, epoch: int, step: int) -> Int64s:
        """Return how often each source was drawn before a position, int64[sources].

        The count goes on from the last call's position, if that is earlier, or else from the start.
        """
        (first_epoch, first_step), counts = self._draw_counts
        counts = counts.copy()
        if (first_epoch, first_step) > (epoch, step):
            first_epoch, first_step = 0, 0
            counts[:] = 0
        for past_epoch in range(first_epoch, epoch + 1):
            start = first_step if past_epoch == first_epoch else 0
            stop = step if past_epoch == epoch else len(self.sampler)
            for chunk in self.chunks(past_epoch, start, stop):
                counts += np.bincount(np.concatenate(chunk), minlength=self.sources)
        self._draw_counts = (epoch, step), counts
        return counts.copy()

    def _sources_of_ids(self, batches: list[Int64s]) -> Int64s:
        """Return the source number of each id of batches, as int64[ids].

        Raises:
            ValueError: the user's function does not return a valid number for each id.
        """
        ids = np.concatenate(batches)
        numbers = np.asarray(self._source_of(ids))
        if numbers.shape != ids.shape or numbers.dtype.kind not in "iu":
            found = f"{numbers.dtype} of shape {numbers.shape}"
            raise ValueError(f"source must give an int for each of {len(ids)} ids, got {found}")
        invalid = np.flatnonzero((numbers < 0) | (numbers >= self.sources))
        if invalid.size:
            found = f"{numbers[invalid[0]]} for id {ids[invalid[0]]}"
            raise ValueError(f"source must give numbers in [0, {self.sources}), got {found}")
        return numbers.astype(np.int64)


class Selector(Loader[Int64s]):
    """Iterate over the numbers of the sources that the records of each batch come from.

    The sampler decides which class or set comes next. You read the next record of this class or
    set: from an iterator of torch or webdataset, or from a queue. A batch is int64[batch]: the
    number of a source for each place of the sampler's batch.

    Position, state and passes are those of every `Loader`. The state says nothing of positions in
    the sources. `drawn` says how many records of each source came before the position.
    `twinfeed.loaders.tensorflow.selector_dataset` gives the same numbers as a `tf.data.Dataset`.

    Args:
        sampler: draws classes (`PKBatchSampler.of_classes`) or sets (`MixtureSampler`).
        sources: the number of sources.
        source: the number of the source of each sample id, as a function of ids (int64[n]) or an
            array by id, such as labels from 0. Classes and mixtures have this by themselves.
        ledger: a file that says which steps the loop has received: see `Ledger`.

    Raises:
        ValueError: a sampler that needs to know each record: `ShardShuffleSampler`, views, reuse,
            padding, and of `PKBatchSampler` coverage, several ranks, and options that leave out
            records.

    >>> from twinfeed.samplers import PKBatchSampler
    >>> files = [iter(["a0", "a1", "a2"]), iter(["b0", "b1", "b2"]), iter(["c0", "c1", "c2"])]
    >>> sampler = PKBatchSampler.of_classes(3, p=2, k=1, seed=0, batches_per_epoch=3)
    >>> selector = Selector(sampler, 3)
    >>> for numbers in selector:
    ...     print(numbers, [next(files[number]) for number in numbers])
    [1 0] ['b0', 'a0']
    [2 1] ['c0', 'b1']
    [2 0] ['c1', 'a1']
    >>> selector.epoch, selector.drawn()
    (1, array([2, 2, 2]))
    """

    def __init__(
        self,
        sampler: BatchStream,
        sources: SupportsIndex,
        /,
        *,
        source: SourceOf | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        number = validate.integer("sources", sources, minimum=1)
        self.choices = Choices(sampler, number, source)
        super().__init__(sampler, ledger=ledger)

    def drawn(self) -> Int64s:
        """Return how often each source was drawn before this position, int64[sources].

        All epochs before are counted. The stream is drawn again for it, some millions of ids a
        second.
        """
        return self.choices.drawn(self.epoch, self.step)

    def _start_pass(self, epoch: int, start: int) -> Generator[Int64s, None, None]:
        for chunk in self.choices.chunks(epoch, start, len(self)):
            yield from chunk


def _source_function(
    sampler: BatchStream, sources: int, source: SourceOf | None
) -> Callable[[Int64s], npt.ArrayLike]:
    """Return a function from sample ids, int64[n], to the numbers of their sources.

    By default it is the sampler's, if that draws classes or sets.

    Raises:
        ValueError: the sampler needs to know records, or `source` does not fit its ids.
    """
    if why := sampler.traits.why_records_matter:
        raise ValueError(
            f"sources give their next record only, and {why} of {sampler!r} needs "
            f"to know the records: index them, and take a loader such as TensorFlowLoader, or "
            f"choose(sampler, source_datasets(feed))"
        )
    if source is None:
        groups = sampler.traits.num_groups
        if groups is None:
            raise ValueError(f"source must be given, as ids of {sampler!r} do not say their source")
        if groups != sources:
            raise ValueError(f"sources must be {groups}, one a class or set, got {sources}")
        return sampler.group_of
    if callable(source):
        return source
    numbers = np.asarray(source)
    if numbers.shape != (sampler.num_ids,):
        found = f"an array of shape {numbers.shape} for {sampler.num_ids} ids"
        raise ValueError(f"source must be a function of ids or an array by id, got {found}")
    return numbers.__getitem__
