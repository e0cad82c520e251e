"""Samples that are (record, view) pairs: several captions or annotations of a stored record."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute_rows
from twinfeed.samplers.drawing.prefix_sums import PrefixSums
from twinfeed.samplers.drawing.random_words import random_words, root_key
from twinfeed.samplers.orders import InnerSampler, Sampler, checked_draw
from twinfeed.samplers.types import Int64s


class ViewSampler(InnerSampler):
    """Samples that are (record, view) pairs, numbered record by record.

    A *view* is one of several variants of a record, such as one of its captions or annotations.

    Numbers that are mapped from a file (`np.load(path, mmap_mode="r")`) stay there, and are pickled
    as the path. Other numbers are copied.

    `records` and `views` take a sample id apart. A side table (captions) is joined by sample id.

    Args:
        order: over records or pairs, as `per_epoch` says.
        views: the number of views of each record, int[records].
        per_epoch: what an epoch has. `"one"`: each record with one of its views. The inner sampler
            is over records. After V epochs a record of V views has shown each of them. `"all"`:
            every pair. The inner sampler is over pairs.
        seed: the only source of chance.

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

    @validate.show_call("ViewSampler(order, views, per_epoch='one', seed=0)")
    def __init__(
        self,
        order: Sampler,
        views: ArrayLike,
        *,
        per_epoch: Literal["one", "all"],
        seed: SupportsIndex,
    ) -> None:
        self._per_epoch = validate.choice("per_epoch", per_epoch, ("one", "all"))
        one_view = self._per_epoch == "one"
        self._counts = validate.counts("views", views, minimum=1 if one_view else 0)
        self._view_sums = PrefixSums(self._counts)
        self.num_records, num_ids = len(self._counts), self._view_sums.total
        size = self.num_records if one_view else num_ids
        units = "records" if one_view else "(record, view) pairs"
        self._set_inner_sampler(order, size, f"{size} {units} with per_epoch={per_epoch!r}")
        self.traits = replace(
            order.traits,
            num_ids=num_ids,
            record_ids=order.traits.record_ids if one_view else None,  # otherwise ids of pairs
            repeats=order.traits.repeats or (not one_view and int(self._counts.max(initial=0)) > 1),
            num_groups=None,
        )
        self.seed = validate.seed(seed)
        self.parameters = {"views": self._counts, "per_epoch": per_epoch, "order": order}
        self._key = root_key(self.seed, "views")

    def __repr__(self) -> str:
        return (
            f"ViewSampler({validate.counted(self.num_records, 'record')}, "
            f"{validate.counted(self.num_ids, 'view')}, "
            f"{self._per_epoch} per epoch, {self._inner_sampler!r})"
        )

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return the span of records that are read around the same time, for each record. That of
        pairs has the records of the span of its first pair. In the comments, the records 0 and 1
        have 2 and 3 views, and the pairs 0 to 3 are a span.
        """
        if self._per_epoch == "one":
            return self._inner_sampler.spans(records, epoch)
        first_pair = self._view_sums.before(records)  # of each record: [0, 2]
        span_start, span_stop = self._inner_sampler.spans(first_pair, epoch)  # [0, 0], [4, 4]
        last_pair = span_stop - 1  # of the span: [3, 3]
        return self.records(span_start), self.records(last_pair) + 1  # [0, 0], [2, 2]

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the sample id at each of these positions of an epoch. Both are int64[n]. With one
        view an epoch, the views of a record come in a random order, then in another one. The
        comments follow epoch 4, with 2 and 3 views.
        """
        inner_ids = checked_draw(self._inner_sampler, epoch, positions)
        if self._per_epoch == "all":  # the inner sampler is over pairs
            return inner_ids
        # The inner sampler is over records, such as [1, 0].
        num_views = np.asarray(self._counts)[inner_ids].astype(np.int64)  # [3, 2]
        # Record 1 is in its random order number 1 (after number 0), at index 1 of this order.
        order_number, index = np.divmod(epoch, num_views)  # [1, 2] and [1, 0]
        # Each order has a random key: hash the record with the key of this sampler, then the number
        # of the order. Take only the view at `index` of each order, such as [2, 1].
        keys = random_words(random_words(self._key, inner_ids), order_number)
        view = permute_rows(num_views, keys, index[:, None])[:, 0]
        first_id = self._view_sums.before(inner_ids)  # the id of view 0 of each record: [2, 0]
        return first_id + view  # [4, 1]

    def _inner_ids(self, ids: Int64s) -> Int64s:
        return self.records(ids) if self._per_epoch == "one" else ids

    def records(self, ids: Int64s) -> Int64s:
        """Return the record id of each sample id, which is the index of a (record, view) pair."""
        ids = np.asarray(ids, dtype=np.int64)
        records, _ = self._view_sums.locate(ids.reshape(-1))
        return records.reshape(ids.shape)

    def views(self, ids: Int64s) -> Int64s:
        """Return the view of each sample id: its index among the views of its record."""
        first_id_of_record = self._view_sums.before(self.records(ids).reshape(-1))
        return ids - first_id_of_record.reshape(np.shape(ids))
