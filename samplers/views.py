"""Many views (captions, annotations) of a record that is stored once."""

from __future__ import annotations

from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import _validate
from twinfeed.samplers._bits import Int64, root_key, words
from twinfeed.samplers._permutation import permute_rows
from twinfeed.samplers.orders import InnerOrder, Order


class ViewSampler(InnerOrder):
    """Give samples that are (record, view) pairs, numbered record by record.

    `views` is the number of views of each record, int[records]. `per_epoch` says what an epoch has:

    - `"one"`: each record with one of its views. The inner order is over records. After V epochs a
      record of V views has shown each of them.
    - `"all"`: every pair. The inner order is over pairs.

    `records` and `views` take a sample id apart. A side table (captions) is joined by sample id.

    Two captions of record 0, none of record 1 (only with "all"), three of record 2::

        sample id    0    1    2    3    4
        record       0    0    2    2    2
        view         0    1    0    1    2

    >>> import numpy as np
    >>> from twinfeed.samplers import SequentialSampler
    >>> order = ViewSampler(SequentialSampler(5), [2, 0, 3], per_epoch="all", seed=0)
    >>> order.records(np.arange(5)).tolist(), order.views(np.arange(5)).tolist()
    ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
    >>> order = ViewSampler(SequentialSampler(2), [2, 3], per_epoch="one", seed=0)
    >>> [order.ids(epoch, np.arange(2)).tolist() for epoch in range(3)]
    [[1, 2], [0, 3], [0, 4]]
    """

    def __init__(
        self,
        order: Order,
        views: ArrayLike,
        /,
        *,
        per_epoch: Literal["one", "all"],
        seed: SupportsIndex,
    ) -> None:
        self._per_epoch = _validate.choice("per_epoch", per_epoch, ("one", "all"))
        one = self._per_epoch == "one"
        self._counts = _validate.counts("views", views, minimum=1 if one else 0)
        self._bounds = np.concatenate([[0], np.cumsum(self._counts)])
        self.num_records, self._num_ids = len(self._counts), int(self._bounds[-1])
        places = self.num_records if one else self._num_ids
        units = "records" if one else "(record, view) pairs"
        self._take(order, places, f"{places} {units} with per_epoch={per_epoch!r}")
        self.seed = _validate.seed(seed)
        self._parameters = {"views": self._counts, "per_epoch": per_epoch, "order": order}
        self._key = root_key(self.seed, "views")

    def __repr__(self) -> str:
        return (
            f"ViewSampler({_validate.counted(self.num_records, 'record')}, "
            f"{_validate.counted(self.num_ids, 'view')}, "
            f"{self._per_epoch} per epoch, {self._order!r})"
        )

    def spans(self, records: Int64) -> tuple[Int64, Int64]:
        """Return the records in the range, of records or pairs, that the inner order returns."""
        if self._per_epoch == "one":
            return self._order.spans(records)
        begin, end = self._order.spans(self._bounds[records])
        return self.records(begin), self.records(end - 1) + 1

    def _ids(self, epoch: int, positions: Int64) -> Int64:
        inner = self._order._ids(epoch, positions)
        if self._per_epoch == "all":
            return inner
        lap, turn = np.divmod(epoch, self._counts[inner])
        keys = words(words(self._key, inner), lap)
        view = permute_rows(self._counts[inner], keys, turn[:, None])[:, 0]
        first: Int64 = self._bounds[inner]
        return first + view

    def records(self, ids: Int64) -> Int64:
        return np.searchsorted(self._bounds, ids, side="right") - 1

    def views(self, ids: Int64) -> Int64:
        """Return the view number of each sample id within its record."""
        first: Int64 = self._bounds[self.records(ids)]
        return ids - first
