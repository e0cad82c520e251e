"""What orders and batch samplers say alike of the samples that they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from twinfeed.samplers.drawing.bits import Int64


class Sources(NamedTuple):
    """How many classes or sets there are, and which one each sample id is of."""

    number: int
    of: Callable[[Int64], Int64]


class SampleSpace:
    """Say which records sample ids stand for. By default a sample is a record."""

    #: Version of the stream. A change that draws other records from a seed has a new version.
    stream_version: int = 1
    #: Size of the record id space.
    num_records: int = 0
    #: Whether a batch may hold a record several times.
    _repeats: bool = False
    #: How many decoded images may be live at once; None where there is no bound.
    _live: int | None = None
    #: How many uses in a row a record is live for; the last use has the view reuse - 1.
    _reuse: int = 1
    #: Whether consecutive records are read around the same time; `_spans` says which.
    _in_blocks: bool = False
    #: The ids of the records that may come; None where these are not a part by choice.
    _part: NDArray[np.integer[Any]] | None = None
    _num_ids: int | None = None

    @property
    def num_ids(self) -> int:
        """Size of the sample id space: that of the records, unless samples are something else."""
        return self.num_records if self._num_ids is None else self._num_ids

    def _spans(self, records: Int64, epoch: int | None = None) -> tuple[Int64, Int64]:
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
    def _by_record(self) -> str:
        """What needs to know which record a sample is, not its class or set alone; or nothing."""
        if self._in_blocks:
            return "a shuffle by blocks"
        if self._live is not None:
            return "reuse"
        return "a stream of views" if self.num_ids != self.num_records else ""

    @property
    def _sources(self) -> Sources | None:
        """The classes or the sets that samples are of, where the sampler knows them."""
        return None
