"""Properties of a sampler's samples, which samplers declare and loaders rely on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from twinfeed.samplers.types import Int64s, Integers


@dataclass(frozen=True, eq=False)
class SamplerTraits:
    """Properties of the samples of a sampler, on which loaders rely.

    By default a sample is a record, no batch holds a record twice, and nothing is read in blocks.

    >>> from twinfeed.samplers import BatchSampler, ReuseSampler
    >>> BatchSampler(ReuseSampler(4, reuse=2, live=2, seed=0), batch_size=2).traits.num_ids
    8
    """

    #: Size of the space of sample ids, if these are no record ids, but views or uses of records.
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
    #: The number of classes or data sets of which `group_of` gives one for each id; None if it
    #: gives none.
    num_groups: int | None = None
    #: What else needs the record of a sample, and not its group alone.
    needs_records: str | None = None
    #: Whether ids depend on the training step: only a batch sampler knows it, so ids cannot be
    #: drawn by position.
    needs_steps: bool = False

    @property
    def why_records_matter(self) -> str:
        """Why a loader needs the record of each sample, not only its group; "" if it does not.

        A group is a class or a data set. A loader such as tf.data's `choose_from_datasets` has one
        data set for each group, and takes the next record of the group's data set for each sample.
        It cannot serve a stream that decides which record comes.
        """
        reasons = {
            "padding": self.padded,
            "a shuffle by blocks": self.reads_blocks,
            "reuse": self.max_cached is not None,
            "a stream of views": self.num_ids is not None,
        }
        reason = next((reason for reason, is_given in reasons.items() if is_given), "")
        return self.needs_records or reason


class Samples:
    """A space of sample ids: the record, view and group of each id, and traits of all ids."""

    #: Version of the stream. A change that draws other records from a seed has a new version.
    stream_version: int = 1
    #: Size of the record id space.
    num_records: int = 0
    #: What loaders rely on.
    traits: SamplerTraits = SamplerTraits()

    @property
    def num_ids(self) -> int:
        """Size of the sample id space: that of the records, unless samples are something else."""
        return self.num_records if self.traits.num_ids is None else self.traits.num_ids

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return for each record a range of records that are read around the same time: its span.

        A loader prefetches and caches a span as a whole, such as a block of a shuffle by blocks. By
        default a span is the record alone. `records` are record ids without padding, int64[n]. The
        span of `records[i]` is `first[i]` to `stop[i] - 1`, int64[n] both. An epoch may read the
        first part of a block at its end, and the other part at its start: with `epoch`, the span
        is the part that has the record.
        """
        records = np.array(records, dtype=np.int64)
        return records, records + 1

    def records(self, ids: Int64s) -> Int64s:
        """Return the record id of each sample id, -1 for padding, int64 as `ids`."""
        return np.array(ids, dtype=np.int64)

    def views(self, ids: Int64s) -> Int64s:
        """Return the view or use number of each sample id, int64 as `ids`."""
        return np.zeros(np.shape(ids), dtype=np.int64)

    def group_of(self, ids: Int64s) -> Int64s:
        """Return the class or data set of each sample id, if `traits.num_groups` are declared."""
        return np.asarray(ids)

    @property
    def by_group(self) -> tuple[int, Any] | None:
        """The number of groups, and a copy of this sampler whose ids are group numbers.

        A group is a class, a data set or a segment of a shuffle. A loader that has one data set for
        each group, such as tf.data's `choose_from_datasets`, iterates over the copy to know which
        data set is next. By default samples have no groups: None.
        """
        return None


def check_record_ids(samples: Samples, source: str) -> None:
    """Raise TypeError unless all sample ids are record ids, by which a dataset can be indexed.

    Ids of views or uses of records, and padding (-1), are not: `dataset[id]` would be another
    record. `source` is the call that returns the ids, for the error message.
    """
    check_without_steps(samples)
    if samples.traits.padded or samples.traits.num_ids is not None:
        raise TypeError(
            f"ids of {samples!r} are no record ids, but padding (-1), views or uses:\n"
            f"iterate over a loader, as TorchLoader(feed), give a DataLoader "
            f"batch_sampler=RequestSampler(feed), or take sampler.records(ids) of {source}"
        )


def check_without_steps(samples: Samples) -> None:
    """Raise TypeError if ids depend on the training step, so that they need a batch sampler.

    A sampler that changes during the training (weights, exclusions) must know the step of each
    position, and so the batch size.
    """
    if samples.traits.needs_steps:
        raise TypeError(
            f"{samples!r} changes at training steps, which only a batch sampler knows: take "
            f"BatchSampler(sampler, batch_size=…)"
        )
