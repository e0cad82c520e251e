"""`Selector`: a sampler decides from which source the next record is read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.feed.arguments import check_batches
from twinfeed.loaders.loop.loader import Loader
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.stream import growing_ranges, steps_per_draw
from twinfeed.samplers.traits import draws_certain_records

SourceOf = Callable[[Int64s], npt.ArrayLike] | npt.ArrayLike
"""The number of the source of each sample id: a function of ids, int64[n], or an array by id."""


class Choices:
    """For each sample of the batches of a sampler, the number of the source to read it from.

    A source is an iterator of records, such as those of one class; sources are numbered from 0.
    """

    def __init__(
        self,
        sampler: BatchStream,
        sources: int,
        source: SourceOf | None,
        groups: Schedule | None = None,
    ) -> None:
        check_batches(sampler)
        self.sampler, self.sources = sampler, sources
        # `groups` is a schedule whose batches have source numbers in place of sample ids, so that
        # no function from ids to sources is needed.
        self._schedule = groups or Schedule(sampler)
        self._to_sources = np.asarray if groups else _source_function(sampler, sources, source)
        # The last result of `counts_before`, and the (epoch, step) that it was for.
        self._draw_counts = (0, 0), np.zeros(sources, np.int64)

    def source_numbers(self, epoch: int, start: int, stop: int) -> list[Int64s]:
        """Return, for each of the steps [start, stop), the number of the source of each sample.

        A list of arrays, int64[batch]. Two batches, one of sources 1, 0 and one of 2, 1, are
        `[array([1, 0]), array([2, 1])]`.
        """
        batches = self._schedule.batches(epoch, start, stop)
        batch_stops = np.cumsum([len(ids) for ids in batches])
        return np.split(self._sources_of_ids(np.concatenate(batches)), batch_stops[:-1])

    def chunks(self, epoch: int, start: int, stop: int) -> Iterator[list[Int64s]]:
        """Yield the source numbers of the steps [start, stop) in chunks of 1, 2, 4, … steps.

        A chunk is a list that has an array for each of its steps: the number of the source for each
        sample of the batch. To draw many steps at once is faster, but a short first chunk gives the
        first batch without delay.
        """
        for first, last in growing_ranges(start, stop, steps_per_draw(self.sampler.batch_size)):
            yield self.source_numbers(epoch, first, last)

    def counts_before(self, epoch: int, step: int) -> Int64s:
        """Return how often each source was drawn before a position, int64[sources].

        The count continues from the position of the last call, unless that position is later.
        """
        (first_epoch, first_step), counts = self._draw_counts
        counts = counts.copy()
        if (first_epoch, first_step) > (epoch, step):  # count from the start
            first_epoch, first_step = 0, 0
            counts[:] = 0
        for past_epoch in range(first_epoch, epoch + 1):
            start = first_step if past_epoch == first_epoch else 0
            stop = step if past_epoch == epoch else len(self.sampler)
            for chunk in self.chunks(past_epoch, start, stop):
                counts += np.bincount(np.concatenate(chunk), minlength=self.sources)
        self._draw_counts = (epoch, step), counts
        return counts.copy()

    def _sources_of_ids(self, ids: Int64s) -> Int64s:
        """Return the number of the source of each sample id, as int64[ids]."""
        numbers = np.asarray(self._to_sources(ids))
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
    number of a source for each sample of the sampler's batch.

    Position, state and passes work as in every `Loader`. The state does not have the positions
    within the sources: `drawn` says how many records of each source came before the position.

    Args:
        sampler: draws classes (`PKBatchSampler.of_classes`) or sets (`MixtureSampler`).
        sources: the number of sources.
        source: the number of the source of each sample id, as a function of ids (int64[n]) or an
            array by id, such as labels from 0. Classes and mixtures have this by themselves.

    Raises:
        ValueError: a sampler that needs each record's id: `ShardShuffleSampler`, views, reuse,
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
        self, sampler: BatchStream, sources: SupportsIndex, /, *, source: SourceOf | None = None
    ) -> None:
        num_sources = validate.integer("sources", sources, minimum=1)
        self.choices = Choices(sampler, num_sources, source)
        super().__init__(sampler)

    def drawn(self) -> Int64s:
        """Return how often each source was drawn before this position, int64[sources].

        All epochs before the position count. To count them, the sampler draws its stream again, at
        some millions of ids a second.
        """
        return self.choices.counts_before(self.epoch, self.step)

    def _start_pass(self, epoch: int, start: int) -> Generator[Int64s, None, None]:
        yield from chain.from_iterable(self.choices.chunks(epoch, start, len(self)))


def _source_function(
    sampler: BatchStream, sources: int, source: SourceOf | None
) -> Callable[[Int64s], npt.ArrayLike]:
    """Return a function from sample ids, int64[n], to the number of the source of each."""
    if draws_certain_records(sampler.traits):
        raise ValueError(
            f"a source only gives its next record, but {sampler!r} draws certain records, by "
            f"blocks, views, reuse, padding, coverage, ranks, replaced() or a part: index them, "
            f"and take a loader such as TensorFlowLoader, or choose(sampler, source_datasets(feed))"
        )
    if source is None:
        num_groups = sampler.traits.num_groups  # the number of classes or sets, or None
        if num_groups is None:
            raise ValueError(f"source must be given, as ids of {sampler!r} do not say their source")
        if num_groups != sources:
            raise ValueError(f"sources must be {num_groups}, one per class or set, got {sources}")
        return sampler.group_of
    if callable(source):
        return source
    source_by_id = np.asarray(source)  # [1, 0, 1] in the example
    if source_by_id.shape != (sampler.num_ids,):
        found = f"an array of shape {source_by_id.shape} for {sampler.num_ids} ids"
        raise ValueError(f"source must be a function of ids or an array by id, got {found}")
    return source_by_id.__getitem__
