"""What samplers and batch samplers declare of the samples that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.bits import Int64


class SampleSpace:
    """Declare which record each sample id is, and how records come. Loaders rely on it.

    By default a sample is a record, no batch holds a record twice, and nothing is read in blocks.
    """

    #: Version of the stream. A change that draws other records from a seed has a new version.
    stream_version: int = 1
    #: Size of the record id space.
    num_records: int = 0
    #: Whether a batch may hold a record several times. The record is then decoded once for all its
    #: samples.
    repeats: bool = False
    #: How many decoded records are kept at most; None if a record is decoded for each use.
    live: int | None = None
    #: Uses of a record while it is kept. The last use has the view `reuse - 1`.
    reuse: int = 1
    #: Whether consecutive records are read around the same time. `spans` gives their ranges.
    in_blocks: bool = False
    #: The ids of the records that are drawn; None if all records are.
    part: NDArray[np.integer[Any]] | None = None
    _num_ids: int | None = None

    @property
    def num_ids(self) -> int:
        """Size of the sample id space: that of the records, unless samples are something else."""
        return self.num_records if self._num_ids is None else self._num_ids

    def spans(self, records: Int64, epoch: int | None = None) -> tuple[Int64, Int64]:
        """Return the range of records that is read around the same time as each record.

        `records` are record ids without padding, int64[n]. The record ids of a range are `first`
        to `stop - 1`, int64[n] both. By default a range is the record alone. A range may have two
        parts that are read apart in an `epoch`; the range is then the part.
        """
        records = np.array(records, dtype=np.int64)
        return records, records + 1

    def records(self, ids: Int64) -> Int64:
        """Return the record id of each sample id, -1 for padding, int64 as `ids`."""
        return np.array(ids, dtype=np.int64)

    def views(self, ids: Int64) -> Int64:
        """Return the view or use number of each sample id, int64 as `ids`."""
        return np.zeros(np.shape(ids), dtype=np.int64)

    @property
    def ids_are_records(self) -> bool:
        """Whether each sample id is the id of its record: any data set may be read by it."""
        own = type(self).records is not SampleSpace.records
        return not own and self.num_ids == self.num_records

    @property
    def by_record(self) -> str:
        """What needs the record of a sample, not its class or set alone; "" if nothing does."""
        if self.in_blocks:
            return "a shuffle by blocks"
        if self.live is not None:
            return "reuse"
        return "" if self.ids_are_records else "a stream of views"

    @property
    def sources(self) -> tuple[int, Callable[[Int64], Int64]] | None:
        """The number of classes or sets, and which of them each sample id is of; or None."""
        return None
