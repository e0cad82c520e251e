"""Batches of consecutive positions of a sampler."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.batch_stream import BatchStream
from twinfeed.samplers.distinct_groups import group_numbers, may_replace, with_distinct_groups
from twinfeed.samplers.drawing.int_arrays import ranges
from twinfeed.samplers.orders import Sampler, checked_draw, require_sampler
from twinfeed.samplers.types import Bools, Int64s, Integers


class BatchSampler(BatchStream):
    """Cut a sampler into batches of `batch_size` consecutive positions.

    Args:
        sampler: the sampler to cut.
        batch_size: ids of a global batch.
        last_batch: what happens if `batch_size` does not divide the sampler's length. `"smaller"`:
            the last batch is smaller, and a rank may get an empty batch, int64[0]. `"pad"`: the
            last batch is filled with -1, and loaders give a mask, as `ExactOnceBatchSampler` says.
            `"drop"`: the last batch is left out, and its records are not visited in that epoch.
        batches_per_epoch: cuts the endless stream of these batches into epochs of another length:
            epoch k is batches `k * n` to `(k + 1) * n - 1`, with n = `batches_per_epoch`. The
            sampler is repeated endlessly, so an epoch of batches may end in the middle of an epoch
            of the sampler. By default both end together.
        apart: a group for each record (integers or strings; -1, None or "" is no group): no two
            records of a group come in a batch, for contrastive training. Every record still comes
            once in an epoch, in an order as random as groups allow. With `last_batch="drop"`, other
            records are left out in each epoch. The sampler must be a `RandomSampler`, or a
            `SubsetSampler` or `ViewSampler` over one.

    Raises:
        ValueError: the sampler cannot be cut so: `sections` of a shuffle that do not divide
            `batch_size`, for reuse a `live` that is no multiple of `batch_size`,
            `last_batch="drop"`, or a `batches_per_epoch` that does not divide an epoch, or there is
            no batch, as of fewer records than `batch_size` with
            `last_batch="drop"`. With `apart`, a group has more records than there are batches, or
            more groups have one in each batch than the last batch has records.

    Seven records, batches of three; over two ranks the longer slices take turns::

        step      0          1          2
        global    0 1 2      3 4 5      6
        rank 0    0 1        3          6
        rank 1        2        4 5      (empty)

    >>> from twinfeed.samplers import SequentialSampler
    >>> stream = BatchSampler(SequentialSampler(7), batch_size=3)
    >>> list(stream.shard(1, 2))
    [[2], [4, 5], []]
    >>> BatchSampler(SequentialSampler(4), batch_size=3, last_batch="pad").batch(0, 1).tolist()
    [3, -1, -1]
    >>> len(BatchSampler(SequentialSampler(7), batch_size=3, last_batch="drop"))
    2
    >>> stream = BatchSampler(SequentialSampler(7), batch_size=3, batches_per_epoch=2)
    >>> [[ids.tolist() for ids in stream.batches(epoch, 0, 2)] for epoch in range(2)]
    [[[0, 1, 2], [3, 4, 5]], [[6], [0, 1, 2]]]

    Records 0 and 1, and 2 and 3, are never in one batch:

    >>> from twinfeed.samplers import RandomSampler
    >>> list(BatchSampler(RandomSampler(5, seed=0), batch_size=3, apart=["a", "a", "b", "b", ""]))
    [[4, 1, 2], [0, 3]]
    """

    _draws_groups = False  # whether group numbers are drawn in place of ids
    _groups: Integers | None = None  # the group of each record; no two of a group are in a batch

    @validate.show_call("BatchSampler(sampler, batch_size=32, last_batch='drop')")
    def __init__(
        self,
        sampler: Sampler,
        *,
        batch_size: SupportsIndex,
        last_batch: Literal["smaller", "pad", "drop"] = "smaller",
        batches_per_epoch: SupportsIndex | None = None,
        apart: ArrayLike | None = None,
    ) -> None:
        batch_size = validate.integer("batch_size", batch_size, minimum=1)
        self._last_batch = validate.choice("last_batch", last_batch, ("smaller", "pad", "drop"))
        order = require_sampler(sampler, name="sampler")
        if order.traits.needs_steps and self.evaluation:
            raise ValueError(f"an evaluation must not change at training steps, got {order!r}")
        if order.traits.max_cached is not None and last_batch == "drop":
            raise ValueError(
                "last_batch must be 'smaller' or 'pad' for a sampler that reuses records, so that "
                "each record has all its uses, got 'drop'"
            )
        remainder = len(order) % batch_size
        added = {"smaller": 0, "pad": -len(order) % batch_size, "drop": -remainder}
        self._inner_size = len(order) + added[last_batch]
        largest = min(batch_size, self._inner_size) or batch_size
        steps, size = -(-self._inner_size // largest), self._inner_size
        self._inner_steps = steps
        if apart is not None:
            self._groups = group_numbers(apart, order.num_records)
            order = with_distinct_groups(order, self._groups, largest, last_batch == "drop")
        order = self._inner_sampler = order.for_batches(batch_size, steps)
        self.num_records = order.num_records
        self.traits = replace(order.traits, padded=last_batch == "pad", needs_steps=False)
        self.size_divisor = 1 if self._inner_size % largest else largest
        self.parameters = {"batch_size": largest, "final": last_batch, "order": order}
        if batches_per_epoch is not None and steps:
            steps = validate.integer("batches_per_epoch", batches_per_epoch, minimum=1)
            # A loader drops its cache between epochs. Within an epoch, records of two epochs of the
            # sampler would be kept at once, more than its `live`.
            if order.traits.max_cached is not None and self._inner_steps % steps:
                raise ValueError(
                    f"batches_per_epoch must divide the {self._inner_steps:,} batches of the "
                    f"epoch of a sampler that reuses records, got {steps:,}"
                )
            self.parameters["batches_per_epoch"] = steps
            size = steps * largest
        super().__init__(num_steps=steps, size=size, batch_size=largest, seed=order.seed)

    def _describe(self) -> str:
        last_batch = "" if self._last_batch == "smaller" else f", last_batch={self._last_batch!r}"
        batches = f"{validate.counted(self._steps, 'batch')} of {self._largest_batch:,}"
        return f"{type(self).__name__}({self._inner_sampler!r}, {batches}{last_batch})"

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        # With `batches_per_epoch` an epoch has parts of several epochs of the inner sampler, each
        # with an order of its own: then return what holds for all epochs.
        inner_epoch = epoch if self._inner_steps == self._steps else None
        return self._inner_sampler.spans(records, inner_epoch)

    def records(self, ids: Int64s) -> Int64s:
        ids = np.asarray(ids, dtype=np.int64)
        return np.where(ids < 0, -1, self._inner_sampler.records(np.maximum(ids, 0)))

    def views(self, ids: Int64s) -> Int64s:
        ids = np.asarray(ids, dtype=np.int64)
        return np.where(ids < 0, 0, self._inner_sampler.views(np.maximum(ids, 0)))

    def group_of(self, ids: Int64s) -> Int64s:
        return self._inner_sampler.group_of(ids)

    def _are_drawn(self, ids: Int64s) -> Bools:
        return self._inner_sampler._are_drawn(ids)

    def _are_alike(self, bad: Int64s, good: Int64s) -> Bools:
        """Return whether each good id may replace the bad one: for `apart`, if its group may."""
        is_alike = self._inner_sampler._are_alike(bad, good)
        if self._groups is None:
            return is_alike
        return is_alike & may_replace(self._groups, self.records(bad), self.records(good))

    @property
    def group_sampler(self) -> BatchSampler | None:
        num_groups = self._inner_sampler.num_groups
        if self.traits.padded or num_groups is None:
            return None
        sampler = copy.copy(self)
        sampler._draws_groups, sampler._replacements = True, None
        sampler.num_records = num_groups
        return sampler

    def _inner_position(self, epoch: int, step: int) -> tuple[int, int]:
        """Return the epoch of the inner sampler in which a step is, and its step in this epoch."""
        return divmod(epoch * self._steps + step, max(1, self._inner_steps))

    def _sizes(self, epoch: int, start: int, stop: int) -> Int64s:
        _, first = self._inner_position(epoch, start)
        steps = (first + np.arange(stop - start)) % max(1, self._inner_steps)
        return np.minimum(self._inner_size - steps * self._largest_batch, self._largest_batch)

    def _samples_before(self, epoch: int, step: int) -> int:
        inner_epoch, inner_step = self._inner_position(epoch, step)
        return inner_epoch * self._inner_size + inner_step * self._largest_batch

    def _draw(self, epoch: int, start: int, lows: Int64s, highs: Int64s) -> Int64s:
        """Return the ids of one rank in the batches from step `start` on, concatenated: drawn in
        parts, one for each epoch of the inner sampler. In the comments, epochs have 2 batches and
        inner epochs 3::

            epoch, step          0, 0   0, 1   1, 0   1, 1
            inner epoch, step    0, 0   0, 1   0, 2   1, 0
        """
        inner_epoch, inner_step = self._inner_position(epoch, start)  # 0, 2
        parts = []
        while len(lows):
            count = self._inner_steps - inner_step  # steps up to the end of the inner epoch: 1
            parts.append(self._draw_inner(inner_epoch, inner_step, lows[:count], highs[:count]))
            lows, highs = lows[count:], highs[count:]  # of the steps after it
            inner_epoch, inner_step = inner_epoch + 1, 0  # 1, 0
        return np.concatenate(parts)

    def _draw_inner(self, inner_epoch: int, start: int, lows: Int64s, highs: Int64s) -> Int64s:
        """Return the ids of one rank in batches of one inner epoch. The comments are for rank 1 of
        2, 7 ids in 2 batches of 4.
        """
        # Where each batch starts in the epoch: all batches but the last have `_largest_batch` ids.
        batch_starts = (start + np.arange(len(lows))) * self._largest_batch  # [0, 4]
        # The positions of all slices: 0 + 2 to 0 + 4, and 4 + 2 to 4 + 4.
        positions = ranges(batch_starts + lows, batch_starts + highs)  # [2, 3, 6, 7]
        real = positions[positions < len(self._inner_sampler)]  # without the padding: [2, 3, 6]
        if self._draws_groups:  # there is no padding then
            return self._inner_sampler.draw_groups(inner_epoch, real)
        ids = np.full(len(positions), -1)
        # `checked_draw` draws ids at positions, and calls `_step_text` for an error message.
        ids[: len(real)] = checked_draw(self._inner_sampler, inner_epoch, real, self._step_text)
        return ids

    def _step_text(self, inner_epoch: int, position: int) -> str:
        """Return the epoch and the step of this stream, as text, at a position of an inner epoch.
        The comments have position 5 of inner epoch 1, of 10 ids in batches of 4, and epochs of 2.
        """
        # All batches but the last of an inner epoch have `_largest_batch` ids.
        batch_number = inner_epoch * self._inner_steps + position // self._largest_batch  # 3 + 1
        epoch, step = divmod(batch_number, self._steps)  # 2, 0
        return f"epoch {epoch}, step {step}"
