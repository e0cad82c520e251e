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
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.drawing.int_arrays import distinct_pairs, new_entries_first
from twinfeed.samplers.drawing.interleave_schedule import InterleaveSchedule
from twinfeed.samplers.drawing.random_words import derive, root_key
from twinfeed.samplers.orders import Sampler, checked_draw, require_sampler
from twinfeed.samplers.step_schedule import StepSchedule
from twinfeed.samplers.traits import SamplerTraits
from twinfeed.samplers.types import Bools, Int64s

_MAX_PERIOD = 1 << 24  # samples of a period, which are kept as a table
_MAX_SHOWN = 8  # samplers that `repr` lists
_CHUNK = 64  # consecutive samples of a sampler, drawn at once: a call for each is too slow


class MixtureSampler(Sampler):
    """Mix samplers by integer weights, exactly so in every period of `sum(weights)` samples.

    Weights are divided by their common divisor: 50 and 50 are 1 and 1. Fractions are taken as the
    decimals that they are printed as: 0.7 and 0.3 are 7 and 3. The periods follow each other
    through all epochs of the mixture. So after k periods the proportion is exact. Each period has
    the samplers at other positions: no rank gets the same sampler in all batches. The divided
    weights sum to at most 2^24, as the mixture keeps a table of that many entries, of some bytes
    each.

    Weights may change: `{0: [3, 1], 12_000: [1, 1]}` is 3 to 1, and 1 to 1 from training step
    12,000 on (`epoch * len + step` of the batch sampler). Each sampler continues where it was,
    and a new period starts. A sampler that joins later has weight 0 before, and comes last: the ids
    of the others, and states that were saved before it joins, stay valid.

    Each sampler goes through epochs of its own, one after the other. An epoch of the mixture has
    `num_samples`, and the next epoch continues after them. Ids are numbered sampler by sampler, as
    the records of a joined index: the ids of the second sampler begin after those of the first.

    A sampler may start its next epoch in the middle of a batch. No record comes twice in the batch
    then, if the sampler has twice as many samples as a batch may take from it. The records that are
    in the batch already move back, after the next records.

    Args:
        orders: what is mixed. The ids are numbered in this order.
        weights: the weight of each sampler, int or float, or `{training step: weights}`.
        num_samples: samples of an epoch of the mixture.
        seed: the only source of chance.

    Raises:
        ValueError: an empty sampler, one that reuses records, one that itself changes with the
            training step, and one of weight 0, unless weights are a schedule, by which it may join
            later.

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
    >>> list(BatchSampler(order, batch_size=3))
    [[3, 0, 2], [4, 1, 1], [2, 4, 3]]
    """

    @validate.show_call("MixtureSampler([a, b], weights=[3, 1], num_samples=10_000, seed=0)")
    def __init__(
        self,
        orders: Sequence[Sampler],
        *,
        weights: ArrayLike | Mapping[int, ArrayLike],
        num_samples: SupportsIndex,
        seed: SupportsIndex,
    ) -> None:
        self._samplers = [_check_mixable(order) for order in orders]
        if not self._samplers or isinstance(orders, (set, frozenset)):
            raise ValueError(f"orders must be a list of at least one sampler, got {orders!r}")
        check = partial(_smallest_integers, count=len(self._samplers))
        self._weights = StepSchedule.parse("weights", weights, check)
        never = np.flatnonzero(np.max(self._weights.values, axis=0) == 0)
        if len(never) and not isinstance(weights, Mapping):
            raise ValueError(
                f"weights must be above 0 for each sampler, got 0 for sampler {never[0]}: a "
                f"sampler that joins later needs a schedule, weights={{0: …, step: …}}"
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
        # How many samples at the start of an epoch of each sampler may be reordered, with a row for
        # each set of weights: int64[sets of weights, samplers]. `for_batches` sets it.
        self._max_reordered = np.zeros((1, len(self._lengths)), np.int64)
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

    def _are_drawn(self, ids: Int64s) -> Bools:
        out = np.empty(np.shape(ids), bool)
        for number, mask, own_ids in _by_sampler(self._id_bounds, ids):
            out[mask] = self._samplers[number]._are_drawn(own_ids)
        return out

    def _are_alike(self, bad: Int64s, good: Int64s) -> Bools:
        """Return whether each good id is of the bad one's sampler, and may replace it there."""
        out = np.equal(self.group_of(bad), self.group_of(good))
        pairs = np.flatnonzero(out)
        for number, mask, own_bad in _by_sampler(self._id_bounds, bad[pairs]):
            own_good = good[pairs[mask]] - self._id_bounds[number]
            out[pairs[mask]] = self._samplers[number]._are_alike(own_bad, own_good)
        return out

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

        `epoch` has no effect: an epoch of the mixture has parts of several epochs of its samplers.
        So the samplers are asked for the spans that hold in all of their epochs.
        """
        records = np.asarray(records, dtype=np.int64)
        first, stop = np.empty_like(records), np.empty_like(records)
        for number, mask, own_records in _by_sampler(self._record_bounds, records):
            own_first, own_stop = self._samplers[number].spans(own_records)
            offset = self._record_bounds[number]
            first[mask], stop[mask] = own_first + offset, own_stop + offset
        return first, stop

    def group_of(self, ids: Int64s) -> Int64s:
        """Return the sampler of each sample id, by its number."""
        return np.searchsorted(self._id_bounds, ids, side="right") - 1

    def for_batches(self, batch_size: int, num_steps: int) -> MixtureSampler:
        """Return a copy of this mixture for batches, in which no batch has a record twice where
        possible: the first samples of each sampler's epoch may be reordered.
        """
        mixture = copy.copy(self)
        mixture._batch_size = batch_size
        mixture._interleave = self._interleave_for(batch_size, num_steps)
        # The most samples of each sampler in a batch, with a row for each set of weights.
        max_counts = np.array([_max_samples_in_batch(w, batch_size) for w in self._weights.values])
        can_reorder = self._can_reorder(max_counts)
        mixture._max_reordered = np.where(can_reorder, max_counts, 0)
        any_repeats = any(sampler.traits.repeats for sampler in self._samplers)
        mixture.traits = replace(self.traits, repeats=any_repeats or not can_reorder.all())
        return mixture

    def _can_reorder(self, max_counts: Int64s) -> Bools:
        """Return whether the start of a sampler's epochs can be reordered: unless a sampler repeats
        records, or an epoch is too short for the most samples of a batch, `max_counts`.
        """
        # The first `max_counts` samples of an epoch are reordered. Before them, a batch may have up
        # to `max_counts - 1` samples of the previous epoch, which must stay where they are. So an
        # epoch needs as many samples as both numbers together.
        is_long_enough: Bools = self._lengths >= max_counts + (max_counts - 1)
        # A sampler that is itself a mixture `repeats` a record in few batches, if at all. So its
        # start is reordered, too: this prevents most of the repeats.
        repeats = np.array([sampler.traits.repeats for sampler in self._samplers])
        is_mixture = [isinstance(sampler, MixtureSampler) for sampler in self._samplers]
        return is_long_enough & (~repeats | is_mixture)

    def _interleave_for(self, batch_size: int, num_steps: int) -> InterleaveSchedule:
        """Return the number of the sampler of each sample of all epochs, as an endless sequence."""
        # A random key for the first weights, and for the weights from each change on.
        changes_key = root_key(self.seed, "mixture changes")
        keys = [self._key, *(derive(changes_key, step) for step in self._weights.starts[1:])]
        starts = []  # the positions at which the weights change
        for global_step in self._weights.starts:
            epoch, step = divmod(global_step, max(1, num_steps))
            starts.append(epoch * self._samples + step * batch_size)
        return InterleaveSchedule(StepSchedule(starts, self._weights.values), keys)

    def draw(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the sample id at each of these positions of an epoch. Both are int64[n].

        An id of the mixture is a sampler's own id plus the number of ids of the samplers before it.
        Samples at the start of a sampler's epoch may come in another order, so that no batch has a
        record twice.
        """
        if not len(positions):
            return positions
        mixture_positions = epoch * self._samples + positions  # counted over all epochs
        # The number of the sampler at each position, and the index of the sample over all epochs of
        # this sampler.
        number, sample_index = self._interleave.elements_at(mixture_positions)
        sample_index = self._reorder_starts(number, sample_index)
        return self._id_bounds[number] + self._own_ids(number, sample_index)

    def _own_ids(self, sampler_number: Int64s, sample_index: Int64s) -> Int64s:
        """Return the ids that samplers give to their samples, counted over all epochs, int64[n]."""
        chunk, offset = np.divmod(sample_index, _CHUNK)
        # Draw each distinct pair (sampler, chunk) once: `first` has the index of a sample of each
        # pair, and `pair` the number of the pair of each sample.
        first, pair = distinct_pairs(sampler_number, chunk)
        chunks = [
            self._cache[n].get(c, lambda: _draw_chunk(self._samplers[n], c))  # noqa: B023
            for n, c in zip(sampler_number[first].tolist(), chunk[first].tolist(), strict=True)
        ]
        return np.stack(chunks)[pair, offset]

    def _reorder_starts(self, sampler_number: Int64s, sample_index: Int64s) -> Int64s:
        """Return the indices of samples in their samplers, without a record twice in a batch where
        an epoch starts.
        """
        lengths = self._lengths[sampler_number]
        epoch, position = np.divmod(sample_index, lengths)
        max_reordered = self._max_reordered.max(axis=0)[sampler_number]
        # The indices of the samples whose position in the epoch may change.
        candidates = np.flatnonzero((epoch > 0) & (position < max_reordered))
        numbers, epochs = sampler_number[candidates], epoch[candidates]
        for number, own_epoch in {*zip(numbers.tolist(), epochs.tolist(), strict=True)}:
            # Say [2, 0, 1]: position 0 becomes 2, position 1 becomes 0, and position 2 becomes 1.
            order = self._reordered_start(number, own_epoch)
            i = candidates[(numbers == number) & (epochs == own_epoch)]  # of this epoch
            position[i] = order[position[i]]
        new_index: Int64s = epoch * lengths + position
        return new_index

    def _reordered_start(self, sampler_number: int, epoch: int) -> Int64s:
        """Return a new order of the first samples of a sampler's epoch, as positions: those whose
        records are in the batch already move back. In the comments, record 3 ends the old epoch,
        and 3 2 5 begin the new one.
        """
        sampler, length = self._samplers[sampler_number], int(self._lengths[sampler_number])
        # `_max_reordered` has a row for each set of weights. The result has the largest number of
        # all rows, as the caller reads so many entries, whatever the weights are at this time.
        order = np.arange(self._max_reordered[:, sampler_number].max())  # [0, 1, 2]: no new order
        # The samples of the sampler in the batch, `first` to `stop - 1`. Samples before sample
        # `epoch * length` are of the previous epoch.
        position = self._interleave.position_of(sampler_number, epoch * length)
        first, stop = self._samples_in_batch(sampler_number, position)
        num_old, num_new = epoch * length - first, stop - epoch * length  # 1, 1
        # The entry for the weights at this time is 0 if the sampler must not be reordered then.
        weights_index = self._interleave.weights.index_at(position)
        if num_old and self._max_reordered[weights_index, sampler_number]:
            old_ids = checked_draw(sampler, epoch - 1, np.arange(length - num_old, length))  # [3]
            # At most `num_old` of these have old records, so there are `num_new` others.
            first_ids = checked_draw(sampler, epoch, np.arange(num_old + num_new))  # [3, 2]
            is_new = ~np.isin(sampler.records(first_ids), sampler.records(old_ids))  # [False, True]
            order[: len(is_new)] = new_entries_first(is_new, num_new)  # [1, 0]
        return order

    def _samples_in_batch(self, sampler_number: int, position: int) -> tuple[int, int]:
        """Return the first sample of a sampler in the batch around this position, and the stop."""
        epoch, position_in_epoch = divmod(position, self._samples)
        start = position - position_in_epoch % self._batch_size
        stop = min(start + self._batch_size, (epoch + 1) * self._samples)
        before, after = self._interleave.num_before(start), self._interleave.num_before(stop)
        return int(before[sampler_number]), int(after[sampler_number])


def _check_mixable(sampler: Sampler) -> Sampler:
    """Return a sampler if it can be mixed with others; otherwise raise ValueError."""
    problem = ""
    if not len(require_sampler(sampler, name="each of orders")):
        problem = "be empty"
    elif sampler.traits.max_cached is not None:
        problem = "reuse records, since samples of other samplers would come between the uses"
    elif sampler.traits.needs_steps:
        problem = "change at training steps, since a mixture draws its samples at other steps"
    if problem:
        raise ValueError(f"each of orders must not {problem}, got {sampler!r}")
    return sampler


def _by_sampler(bounds: Int64s, ids: Int64s) -> Iterator[tuple[int, Bools, Int64s]]:
    """Yield (sampler number, mask, own ids) for each sampler of a mixture that has any of the ids:
    `bounds[i]` to `bounds[i + 1] - 1` are of sampler i, and its own ids count from 0.
    """
    ids = np.asarray(ids, dtype=np.int64)
    sampler = np.searchsorted(bounds, ids, side="right") - 1
    for number in np.unique(sampler).tolist():
        mask = sampler == number
        yield number, mask, ids[mask] - bounds[number]


def _draw_chunk(sampler: Sampler, chunk: int) -> Int64s:
    """Return chunk number `chunk` of the ids of all epochs of a sampler, int64[_CHUNK]."""
    epoch, position = np.divmod(chunk * _CHUNK + np.arange(_CHUNK), len(sampler))
    epoch_starts = np.flatnonzero(np.diff(epoch)) + 1
    parts = zip(np.split(epoch, epoch_starts), np.split(position, epoch_starts), strict=True)
    return np.concatenate([checked_draw(sampler, int(e[0]), positions) for e, positions in parts])


def _fingerprint_fields(weights: StepSchedule[Int64s], samplers: list[Sampler]) -> dict[str, Any]:
    """Return the weights and the samplers of a mixture as fields of its fingerprint.

    States saved before step 9 stay valid for a sampler B that joins there: only the fields from
    step 9 on mention it. For A and B with the weights {0: [1, 0], 9: [1, 2]}, the fields are::

        {"weights": [1], "weights from step 9": [1, 2], "orders": [A], "orders from step 9": [B]}
    """
    # How many samplers are used after each change of the weights: those up to the last one that has
    # had a weight above 0.
    nums_used = np.maximum.accumulate([np.flatnonzero(w)[-1] + 1 for w in weights.values])  # [1, 2]
    used_weights = [w[:n].tolist() for w, n in zip(weights.values, nums_used, strict=True)]
    added_samplers = [samplers[old:new] for old, new in pairwise([0, *nums_used])]  # [[A], [B]]
    # `parameters` names the fields by the steps of the changes, as in the example.
    weight_fields = StepSchedule(weights.starts, used_weights).parameters("weights")
    sampler_fields = StepSchedule(weights.starts, added_samplers).parameters("orders")
    return {**weight_fields, **{name: value for name, value in sampler_fields.items() if value}}


def _max_samples_in_batch(weights: Int64s, batch_size: int) -> Int64s:
    """Return the most samples of each sampler that a batch of a mixture may have, int64[samplers]:
    those of its complete periods, and at most all of two periods, which it has in part.
    """
    period = int(weights.sum())
    max_periods = batch_size // period
    max_counts = np.zeros_like(weights)
    # The number of complete periods depends on where the batch starts: all that fit, or one less.
    for num_periods in range(max(0, max_periods - 1), max_periods + 1):
        size_of_parts = batch_size - num_periods * period
        counts = num_periods * weights + np.minimum(size_of_parts, 2 * weights)
        max_counts = np.maximum(max_counts, counts)
    return max_counts


def _smallest_integers(weights: ArrayLike, count: int) -> Int64s:
    """Return the smallest integers in proportion to weights, as exact decimals: 0.7 and 0.3 are 7
    and 3.
    """
    if np.asarray(weights).dtype.kind != "f":
        weights = validate.counts("weights", weights, minimum=0)
    decimals = validate.decimals("weights", weights)
    if len(decimals) != count:
        raise ValueError(f"weights must be {count}, one for each sampler, got {len(decimals)}")
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
