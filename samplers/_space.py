"""What orders and batch samplers say alike of the samples that they give."""

from __future__ import annotations

import numpy as np

from twinfeed.samplers._bits import Int64


class SampleSpace:
    """Say which records sample ids stand for. By default a sample is a record."""

    #: Size of the record id space.
    num_records: int = 0
    #: Whether a batch may hold a record several times.
    repeats: bool = False
    #: How many decoded images may be live at once; None where there is no bound.
    live: int | None = None
    #: How many uses in a row a record is live for; the last use has the view reuse - 1.
    reuse: int = 1
    #: Whether consecutive records are read around the same time; `spans` says which.
    in_blocks: bool = False
    _num_ids: int | None = None

    @property
    def num_ids(self) -> int:
        """Size of the sample id space: that of the records, unless samples are something else."""
        return self.num_records if self._num_ids is None else self._num_ids

    def spans(self, records: Int64) -> tuple[Int64, Int64]:
        """Return the range of records that is read around the same time as each record.

        `records` are record ids without padding, int64[n]. The record ids of a range are `first`
        to `stop - 1`, int64[n] both. By default a range is the record alone.
        """
        records = np.array(records, dtype=np.int64)
        return records, records + 1

    def records(self, ids: Int64) -> Int64:
        """Return the record id of each sample id, -1 for padding, int64 as `ids`."""
        return np.array(ids, dtype=np.int64)

    def views(self, ids: Int64) -> Int64:
        """Return the view or use number of each sample id, int64 as `ids`."""
        return np.zeros(np.shape(ids), dtype=np.int64)
