"""Properties of a sampler's samples, which samplers declare and loaders rely on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twinfeed.samplers.types import Bools, Int64s, Integers


@dataclass(frozen=True, eq=False)
class SamplerTraits:
    """Properties of the samples of a sampler, on which loaders rely.

    A batch consists of samples, and a sample has an id. By default it is a record, no batch holds a
    record twice, and nothing is read in blocks. A sampler may also give *views* (variants of a
    record, such as one of its captions) or *uses* (a decoded record is used several times in an
    epoch): then a record has several sample ids.

    >>> from twinfeed.samplers import BatchSampler, ReuseSampler
    >>> BatchSampler(ReuseSampler(4, reuse=2, live=2, seed=0), batch_size=2).traits.num_ids
    8
    """

    #: Number of sample ids, if they are views or uses of records; None if they are record ids.
    num_ids: int | None = None
    #: Whether a batch may hold a record several times. The record is then decoded once for all its
    #: samples.
    repeats: bool = False
    #: Whether batches may hold -1, for which loaders give a mask.
    padded: bool = False
    #: How many decoded records are kept at most; None if a record is decoded for each use.
    max_cached: int | None = None
    #: Uses of a record while it is kept. The last use has the view `uses - 1`.
    uses: int = 1
    #: Whether consecutive records are read around the same time. `spans` gives their ranges.
    reads_blocks: bool = False
    #: The ids of the records that are drawn; None if all records are.
    record_ids: Integers | None = None
    #: The number of classes or data sets, if `group_of` returns one for each sample id.
    num_groups: int | None = None
    #: Whether the sampler draws certain records for another reason than padding, blocks and views.
    needs_records: bool = False
    #: Whether ids depend on the training step: only a batch sampler can compute the step, so ids
    #: cannot be drawn by position.
    needs_steps: bool = False


class SampleSpace:
    """A space of sample ids: the record, view and group of each id, and traits of all ids."""

    #: Version of the stream. A change that draws other records from a seed has a new version.
    stream_version: int = 1
    #: Size of the record id space.
    num_records: int = 0
    #: What loaders rely on.
    traits: SamplerTraits = SamplerTraits()

    @property
    def num_ids(self) -> int:
        """Number of sample ids: that of the records, unless samples are views or uses of them."""
        return self.num_records if self.traits.num_ids is None else self.traits.num_ids

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return for each record a range of records that are read around the same time: its span.

        A loader prefetches and caches a span as a whole, such as a block of a shuffle by blocks.
        Samplers that read blocks override this: by default a span is only the record. `records` are
        record ids without padding, int64[n]. The span of `records[i]` is `first[i]` to
        `stop[i] - 1`. Both are int64[n].

        In a shuffle by blocks, an epoch may start in the middle of a block. It reads the second
        part of the block first, and the first part at its end: with `epoch`, the span is only the
        part of the block in which the record is.
        """
        records = np.array(records, dtype=np.int64)
        return records, records + 1

    def records(self, ids: Int64s) -> Int64s:
        """Return the record id of each sample id, -1 for padding: int64 of the shape of `ids`."""
        return np.array(ids, dtype=np.int64)

    def views(self, ids: Int64s) -> Int64s:
        """Return which view or use of its record each sample id is, from 0 on.

        A view is a variant of a record, such as one of its captions. A sampler may also use a
        record several times an epoch. Here each record has only view 0. The result is int64 of the
        shape of `ids`.
        """
        return np.zeros(np.shape(ids), dtype=np.int64)

    def group_of(self, ids: Int64s) -> Int64s:
        """Return the class or data set of each sample id, if `traits.num_groups` are declared."""
        return np.asarray(ids)

    def _are_drawn(self, ids: Int64s) -> Bools:
        """Return whether the record of each sample id is ever drawn."""
        drawn = self.traits.record_ids
        return np.ones(len(ids), bool) if drawn is None else np.isin(self.records(ids), drawn)

    def _are_alike(self, bad: Int64s, good: Int64s) -> Bools:
        """Return whether each good id may replace the bad one: if both are of the same group."""
        if self.traits.num_groups is None:
            return np.ones(len(bad), bool)
        return np.equal(self.group_of(bad), self.group_of(good))


def draws_certain_records(traits: SamplerTraits) -> bool:
    """Return whether a sample is a certain record, so that a reader which only gives the next
    record of a class or data set cannot read it.
    """
    is_plain = traits.num_ids is None and traits.max_cached is None
    return traits.needs_records or traits.padded or traits.reads_blocks or not is_plain


def check_record_ids(samples: SampleSpace, source: str) -> None:
    """Raise TypeError unless the ids of a sampler are record ids, so that `dataset[id]` is right.
    `source` is the call that returns the ids, for the error.
    """
    check_independent_of_steps(samples)
    if samples.traits.padded or samples.traits.num_ids is not None:
        raise TypeError(
            f"ids of {samples!r} are not record ids, but have padding (-1), views or uses:\n"
            f"iterate over a loader of a Feed, such as TorchLoader(feed), give a DataLoader "
            f"batch_sampler=RequestSampler(feed), or take sampler.records(ids) of {source}"
        )


def check_independent_of_steps(samples: SampleSpace) -> None:
    """Raise TypeError if the ids of a sampler depend on the training step, which only a batch
    sampler has.
    """
    if samples.traits.needs_steps:
        raise TypeError(
            f"{samples!r} changes at training steps, which depend on the batch size: take "
            f"BatchSampler(sampler, batch_size=…)"
        )
