"""Several samplers interleaved in exact proportion."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import gcd, lcm
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import distinct_pairs
from twinfeed.samplers.drawing.interleave_schedule import InterleaveSchedule
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.orders import GroupSampler, Sampler, check_order, checked_draw
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Int64s

_MAX_PERIOD = 1 << 24  # samples of a period, which are kept as a table
_MAX_SHOWN = 8  # samplers that `repr` lists
_CHUNK = 64  # consecutive samples of a sampler, drawn at once: a call for each is too slow


class MixtureSampler(Sampler):
    """Mix samplers by integer weights, exactly so in every period of `sum(weights)` samples.

    Weights are divided by their common divisor: 50 and 50 are 1 and 1. Fractions are taken as the
    decimals that they are printed as: 0.7 and 0.3 are 7 and 3. The periods follow each other
    through all epochs of the mixture. So after k periods the proportion is exact. Each period has
    the samplers at other places: no rank gets the same sampler in all batches. The divided weights
    sum to at most 2^24, as the mixture keeps a table of that many entries, of some bytes each.

    Weights may change: `{0: [3, 1], 12_000: [1, 1]}` is 3 to 1, and 1 to 1 from training step
    12,000 on (`epoch * len + step` of the batch sampler). Each sampler goes on where it was, and
    the periods begin anew. A sampler that joins later has weight 0 before, and comes last: the ids
    of the others, and states that were saved before it joins, stay valid.

    Each sampler goes through epochs of its own, one after the other. An epoch of the mixture has
    `num_samples`, and the next epoch goes on after them. Ids are numbered sampler by sampler, like
    the records of a joined index: the ids of the second sampler begin after those of the first.

    A sampler may begin again in the middle of a batch. No record comes twice in the batch then, if
    the sampler has twice as many samples as a batch may take from it. The records that are in the
    batch already move back, after the next records.

    Args:
        orders: what is mixed. The ids are numbered in this order.
        weights: the weight of each sampler, int or float, or `{training step: weights}`.
        num_samples: samples of an epoch of the mixture.
        seed: the only source of chance.

    Raises:
        ValueError: an empty sampler, one that is never drawn, one that reuses records, and one
            that itself changes with the training step.

    Weights 2 and 1, three records (0 1 2) and two (3 4), nine samples an epoch. Two of
    three samples are of the first sampler, which begins again after three of its own::

        stream    3 0 2  4 1 1  4 2 0

    >>> import numpy as np
    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> first, second = RandomSampler(3, seed=0), RandomSampler(2, seed=1)
    >>> order = MixtureSampler([first, second], weights=[2, 1], num_samples=9, seed=0)
    >>> order.ids(0, np.arange(9)).tolist()
    [3, 0, 2, 4, 1, 1, 4, 2, 0]

    With weights 1 and 1 from step 2 on, in batches of three:

    >>> weights = {0: [2, 1], 2: [1, 1]}
    >>> order = MixtureSampler([first, second], weights=weights, num_samples=9, seed=0)
    >>> [ids.tolist() for ids in BatchSampler(order, batch_size=3)]
    [[3, 0, 2], [4, 1, 1], [2, 4, 3]]
    """

    def __init__(
        self,
        orders: Sequence[Sampler],
        /,
        *,
        weights: ArrayLike | Mapping[int, ArrayLike],
        num_samples: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        self._samplers = [_check_mixable(order) for order in orders]
        if not self._samplers:
            raise ValueError(f"orders must hold one at least, got {orders!r}")
        check = partial(_smallest_integers, count=len(self._samplers))
        self._weights = StepSchedule.parse("weights", weights, check)
        never = np.flatnonzero(np.max(self._weights.values, axis=0) == 0)
        if len(never) and not isinstance(weights, Mapping):
            raise ValueError(
                f"weights must be above 0 for each sampler, got 0 for {never[0]}: one that joins "
                f"later needs a schedule, weights={{0: weights}}"
            )
        self._samples = validate.integer("num_samples", num_samples, minimum=1)
        self.seed = validate.seed(seed)
        self.parameters = {
            "num_samples": self._samples,
            **_fingerprint_fields(self._weights, self._samplers),
        }
        self._key = root_key(self.seed, "mixture")
        first_weights = StepSchedule([0], self._weights.values[:1])
        self._interleave = InterleaveSchedule(first_weights, [self._key])
        self._lengths = np.array([len(order) for order in self._samplers])
        self._max_reordered = np.zeros((1, len(self._lengths)), np.int64)  # see `for_batches`
        self._cache: list[FifoCache[Int64s]] = [FifoCache(1) for _ in self._samplers]  # chunks
        self._id_bounds = _bounds([order.num_ids for order in self._samplers])
        self._record_bounds = _bounds([order.num_records for order in self._samplers])
        self.num_records = int(self._record_bounds[-1])
        views = any(order.traits.num_ids is not None for order in self._samplers)
        self.traits = SamplerTraits(
            num_ids=int(self._id_bounds[-1]) if views else None,
            repeats=True,
            reads_blocks=any(order.traits.reads_blocks for order in self._samplers),
            num_groups=len(self._samplers),
            needs_steps=len(self._weights.starts) > 1,
        )

    def __len__(self) -> int:
        return self._samples

    def __repr__(self) -> str:
        first, *later = self._weights.values
        pairs = zip(first[:_MAX_SHOWN].tolist(), self._samplers, strict=False)
        mixed = ", ".join(f"{weight} x {order!r}" for weight, order in pairs)
        if len(self._samplers) > _MAX_SHOWN:
            mixed += f", … {validate.counted(len(self._samplers), 'sampler')}"
        if later:
            mixed += f", {validate.counted(len(later), 'change')} of weights"
        return f"MixtureSampler({mixed}, {validate.counted(self._samples, 'sample')})"

    def records(self, ids: Int64s) -> Int64s:
        """Return the record of each sample id; records are numbered sampler by sampler."""
        out = np.empty(np.shape(ids), np.int64)
        for number, mask, own_ids in _by_sampler(self._id_bounds, ids):
            out[mask] = self._record_bounds[number] + self._samplers[number].records(own_ids)
        return out

    def views(self, ids: Int64s) -> Int64s:
        out = np.empty(np.shape(ids), np.int64)
        for number, mask, own_ids in _by_sampler(self._id_bounds, ids):
            out[mask] = self._samplers[number].views(own_ids)
        return out

    def spans(self, records: Int64s, epoch: int | None = None) -> tuple[Int64s, Int64s]:
        """Return for each record a range of records that are read around the same time: its span.

        A loader prefetches a span as a whole. The span of `records[i]` is `first[i]` to
        `stop[i] - 1`. It is the span of the record in its own sampler. Records are numbered sampler
        by sampler, so the numbers of a sampler's own records are shifted.
        """
        records = np.asarray(records, dtype=np.int64)
        first, stop = np.empty_like(records), np.empty_like(records)
        for number, mask, own_records in _by_sampler(self._record_bounds, records):
            own_first, own_stop = self._samplers[number].spans(own_records)
            offset = self._record_bounds[number]
            first[mask], stop[mask] = own_first + offset, own_stop + offset
        return first, stop

    @property
    def by_group(self) -> tuple[int, Sampler]:
        number = len(self._samplers)
        return number, GroupSampler(self, number, lambda *at: self.group_of(self.draw(*at)))

    def group_of(self, ids: Int64s) -> Int64s:
        """Return the sampler of each sample id, by its number."""
        return np.searchsorted(self._id_bounds, ids, side="right") - 1

    def for_batches(self, batch_size: int, num_steps: int) -> MixtureSampler:
        """Return a copy of this mixture for `num_steps` batches an epoch, each of `batch_size`.

        Two things depend on the batches: the positions at which the weights change, as users give
        them by training step; and which samples are reordered, so that no batch has a record twice
        when a sampler starts its next epoch within the batch. `_max_reordered` is the most
        of each sampler in a batch, after each change of the weights: so many samples at the start
        of an epoch may have to be reordered. It is 0 for samplers that are never reordered.
        """
        mixture = copy.copy(self)
        mixture._batch_size = batch_size
        starts, values = self._weights.starts, self._weights.values
        epochs = [divmod(step, max(1, num_steps)) for step in starts]
        positions = [epoch * self._samples + step * batch_size for epoch, step in epochs]
        changes_key = root_key(self.seed, "mixture changes")
        keys = [self._key, *(derive(changes_key, step) for step in starts[1:])]
        mixture._interleave = InterleaveSchedule(StepSchedule(positions, values), keys)
        max_counts = np.array([_max_samples_in_batch(weights, batch_size) for weights in values])
        # A mixture in a mixture starts its next epoch as a whole, like any other sampler.
        is_mixture = [isinstance(order, MixtureSampler) for order in self._samplers]
        repeats_records = np.array([order.traits.repeats for order in self._samplers])
        is_long = self._lengths >= 2 * max_counts - 1  # enough records to move duplicates back
        reorders = (~repeats_records | is_mixture) & is_long
        mixture._max_reordered = np.where(reorders, max_counts, 0)
        repeats = bool(repeats_records.any() or not reorders.all())
        mixture.traits = replace(self.traits, repeats=repeats)
        return mixture

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the sample ids at these positions of an epoch, int64[positions] both.

        An id of the mixture is a sampler's own id plus the number of ids of the samplers before it.
        """
        if not len(positions):
            return positions
        # The sampler of each position, and the index of the sample over all epochs of the sampler.
        sampler, index = self._interleave.elements_at(epoch * self._samples + positions)
        self._move_duplicates_back(sampler, index)
        # A sampler is drawn in chunks of consecutive samples. Draw each chunk that is needed once
        # (or take it from the cache): sample i is in chunk `chunks[row[i]]`.
        chunk, offset = np.divmod(index, _CHUNK)
        first, row = distinct_pairs(sampler, chunk)
        chunks = [
            self._cache[i].get(number, lambda: _draw_chunk(self._samplers[i], number))  # noqa: B023
            for i, number in zip(sampler[first].tolist(), chunk[first].tolist(), strict=True)
        ]
        own_ids: Int64s = np.stack(chunks)[row, offset]
        return self._id_bounds[sampler] + own_ids

    def _move_duplicates_back(self, sampler: Int64s, index: Int64s) -> None:
        """Reorder the samples at the start of a sampler's epoch, so that no batch repeats a record.

        A sampler of a mixture may start its next epoch within a batch, which then has the end of
        the previous epoch, too. Sample i of a draw is of sampler `sampler[i]`, and `index[i]` is
        its number, counted over all epochs of this sampler. `index` is changed in place.
        """
        epoch, position = np.divmod(index, self._lengths[sampler])
        # The head is the part of an epoch that may be in the batch in which the epoch starts.
        longest_head = self._max_reordered.max(axis=0)
        in_head = np.flatnonzero((epoch > 0) & (position < longest_head[sampler]))
        if not len(in_head):
            return
        # For each (sampler, epoch), look up the new position of its samples.
        first, row = distinct_pairs(sampler[in_head], epoch[in_head])
        for number, sample in enumerate(in_head[first].tolist()):
            samples = in_head[row == number]
            new_order = self._order_at_start(int(sampler[sample]), int(epoch[sample]))
            samples = samples[position[samples] < len(new_order)]
            index[samples] += new_order[position[samples]] - position[samples]

    def _order_at_start(self, sampler: int, epoch: int) -> Int64s:
        """Return a new order of the samples at the start of a sampler's epoch, as positions.

        The batch of the mixture in which the epoch starts may already have some of their records,
        from the end of the previous epoch. These samples move back, after the next samples: if four
        samples of the batch are of this sampler, of which two are the records 1 and 2 of the
        previous epoch, and the epoch starts with 2 0 3 4, this becomes 0 3 2 4. The result is empty
        if the batch has no samples of the previous epoch, or if this sampler is not reordered.
        """
        order, length = self._samplers[sampler], int(self._lengths[sampler])
        position = self._interleave.position_of(sampler, epoch * length)
        # The batch in which the sampler's epoch starts: its first position, and where it stops.
        offset = position % self._samples  # in the epoch of the mixture
        start = position - offset % self._batch_size
        stop = min(start + self._batch_size, position - offset + self._samples)
        # The samples of this sampler before the batch and up to its end. From these, how many are
        # in the batch of the previous epoch, and in all.
        before, after = (int(self._interleave.num_before(p)[sampler]) for p in (start, stop))
        num_old, num_in_batch = epoch * length - before, after - before
        if not num_old or not self._max_reordered[self._interleave.num_changes(position), sampler]:
            return np.empty(0, np.int64)
        old = order.records(checked_draw(order, epoch - 1, np.arange(length - num_old, length)))
        new = order.records(checked_draw(order, epoch, np.arange(num_in_batch)))
        is_new = ~np.isin(new, old)
        # The first samples of new records complete the batch. All others follow, in their order.
        completes_batch = is_new & (np.cumsum(is_new) <= num_in_batch - num_old)
        return np.argsort(~completes_batch, kind="stable")


def _check_mixable(order: Sampler) -> Sampler:
    """Return a sampler for a mixture; ValueError if it cannot be mixed with others."""
    reasons = {  # {what is wrong: whether it is so}
        "be empty": not len(check_order(order, name="each of orders")),
        "reuse records, as other samples come between the uses": order.traits.max_cached
        is not None,
        "change at training steps, as a mixture draws it at others": order.traits.needs_steps,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"each of orders must not {reason}, got {order!r}")
    return order


def _by_sampler(bounds: Int64s, ids: Int64s) -> Iterator[tuple[int, NDArray[np.bool_], Int64s]]:
    """Yield (sampler number, mask, own ids) for each sampler of a mixture that some ids are of.

    `ids[mask]` are the ids of this sampler in the mixture, which are numbered sampler by sampler:
    those of sampler i are `bounds[i]` to `bounds[i + 1] - 1`. Its own ids start at 0.
    """
    ids = np.asarray(ids, dtype=np.int64)
    sampler = np.searchsorted(bounds, ids, side="right") - 1
    for number in np.unique(sampler).tolist():
        mask = sampler == number
        yield number, mask, ids[mask] - bounds[number]


def _draw_chunk(order: Sampler, chunk: int) -> Int64s:
    """Return chunk number `chunk` of the ids of all epochs of a sampler, int64[_CHUNK].

    A sampler is drawn for one epoch at a time, and a chunk may be in several epochs.
    """
    epoch, position = np.divmod(chunk * _CHUNK + np.arange(_CHUNK), len(order))
    epoch_starts = np.flatnonzero(np.diff(epoch)) + 1
    parts = zip(np.split(epoch, epoch_starts), np.split(position, epoch_starts), strict=True)
    return np.concatenate([checked_draw(order, int(e[0]), positions) for e, positions in parts])


def _fingerprint_fields(weights: StepSchedule[Int64s], samplers: list[Sampler]) -> dict[str, Any]:
    """Return weights and samplers of a mixture as fields of its fingerprint, which states compare.

    The weights change at training steps, and a sampler whose weight is 0 at first joins later. It
    is a field of the step at which it joins, and is not compared with states of earlier steps: so
    a state that was saved before samplers were added to the end of the mixture stays valid.
    """
    # How many samplers have joined at each change: those up to the last that had a weight so far.
    joined = [int(np.flatnonzero(values)[-1]) + 1 for values in weights.values]
    joined = np.maximum.accumulate(joined).tolist()
    shown = [values[:count].tolist() for values, count in zip(weights.values, joined, strict=True)]
    new = StepSchedule(weights.starts, [samplers[a:b] for a, b in pairwise([0, *joined])])
    orders = {field: joining for field, joining in new.parameters("orders").items() if joining}
    return {**StepSchedule(weights.starts, shown).parameters("weights"), **orders}


def _max_samples_in_batch(weights: Int64s, batch_size: int) -> Int64s:
    """Return the most samples of each sampler that a batch of a mixture may have, int64[samplers].

    In each period of `sum(weights)` samples, sampler i has `weights[i]`, in any order. A batch is
    some complete periods, and at either end a part of a period, which may have all of a sampler's
    samples. With weights 2 and 1, a batch of 4 samples has up to 4 of the first sampler (the end of
    a period and the start of the next), or up to 2 of the second.
    """
    period = int(weights.sum())
    num_complete = batch_size // period
    # The parts at the two ends are shorter than a period together. Or they are a period longer, and
    # there is one complete period less.
    num_fewer = max(0, num_complete - 1)
    return np.maximum(
        num_fewer * weights + np.minimum(batch_size - num_fewer * period, 2 * weights),
        num_complete * weights + np.minimum(batch_size % period, 2 * weights),
    )


def _smallest_integers(weights: ArrayLike, count: int) -> Int64s:
    """Return the smallest integers in proportion to weights: 0.5 and 0.25 become 2 and 1.

    Decimals are exact: 0.7 and 0.3 become 7 and 3. ValueError if there are not `count` weights, or
    if the sum of the integers is too large, as a mixture has a table of so many entries.
    """
    if np.asarray(weights).dtype.kind != "f":
        weights = validate.counts("weights", weights, minimum=0)
    decimals = validate.decimals("weights", weights)
    if len(decimals) != count:
        raise ValueError(f"weights must be one for each sampler, {count}, got {len(decimals)}")
    if min(decimals, default=0) < 0 or not sum(decimals):
        raise ValueError(
            f"weights must be at least 0, and not all 0, got {np.asarray(weights).tolist()}"
        )
    scale = lcm(*(decimal.denominator for decimal in decimals))
    integers = [int(decimal * scale) for decimal in decimals]
    divisor = gcd(*integers)
    total = sum(integers) // max(divisor, 1)
    if total > _MAX_PERIOD:
        raise ValueError(
            f"weights must sum to at most {_MAX_PERIOD:,} without their common divisor, got "
            f"{total:,}: round them"
        )
    return np.array([integer // divisor for integer in integers], np.int64)


def _bounds(sizes: list[int]) -> Int64s:
    """Return where the ids of each sampler start, and where those of the last sampler stop."""
    return np.cumsum([0, *validate.counts("sizes of orders", sizes, minimum=0)])
