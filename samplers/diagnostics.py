"""Statistics of how well a stream is shuffled, compared with a uniform shuffle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, lgamma, sqrt
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from twinfeed.samplers import validate
from twinfeed.samplers.batch import BatchSampler
from twinfeed.samplers.batch_stream import BatchStream
from twinfeed.samplers.drawing.random_words import random_words, root_key, uniform_below
from twinfeed.samplers.label_arrays import as_labels
from twinfeed.samplers.orders import Sampler
from twinfeed.samplers.types import Int64s
from twinfeed.samplers.verdict import Verdict

_FLAGGED_RATIO = 0.5  # share of the uniform value below which a measure is flagged
_MAX_DEVIATIONS = 6.0  # standard deviations that a uniform shuffle keeps within


@dataclass(frozen=True)
class Measure:
    """A statistic of a stream, compared with uniform shuffles.

    Attributes:
        value: the statistic of the stream.
        uniform: its mean in uniform shuffles.
        deviation: its standard deviation in uniform shuffles.

    >>> Measure(25.0, 100.0, 10.0).ratio
    0.25
    """

    value: float
    uniform: float
    deviation: float

    @property
    def ratio(self) -> float:
        """The value as a share of the uniform value: 1 is as good as uniform."""
        return self.value / self.uniform if self.uniform else 1.0

    @property
    def low(self) -> bool:
        """Whether the stream is badly shuffled: the statistic is too low to be due to chance.

        The statistic, such as the number of distinct classes in a batch, is then below half of the
        mean in uniform shuffles, and more than six standard deviations below the mean.
        """
        below = self.uniform - self.value
        return self.ratio < _FLAGGED_RATIO and below > _MAX_DEVIATIONS * self.deviation

    def __str__(self) -> str:
        return f"{self.value:,.1f} of {self.uniform:,.1f} ({self.ratio:.0%})"


@dataclass(frozen=True)
class Diagnosis(Verdict):
    """Statistics of one epoch of a stream, as `diagnose` returns them.

    `findings` names each value below half of the uniform value, and a correlation above one half,
    if chance cannot explain the difference (six standard deviations). Fewer than 1 in 100 uniform
    shuffles have a finding. With few records, even stored order may have no finding.

    Attributes:
        displacement: the mean distance between a record's position in the stream and its position
            in storage, in records.
        rank_correlation: Spearman's, of position and record id. Stored order has 1, a uniform
            shuffle near 0.
        head_distinct: the classes, shards or blocks in the first tenth.
        distinct: the mean number of distinct classes, shards or blocks in a full batch.
        worst: of all windows of `batch_size` consecutive samples, the one with the fewest distinct
            classes, shards or blocks: how many, and the position of its first sample. It finds an
            end of an epoch that is mixed badly.
        order: the record ids in the order of the stream, without padding, int64 [samples].

    >>> import numpy as np
    >>> diagnose(np.arange(100), batch_size=10).findings[0]
    'records move 0% as far as in a uniform shuffle'
    """

    records: int
    samples: int
    batch_size: int
    displacement: Measure
    rank_correlation: float
    head_distinct: Mapping[str, Measure]
    distinct: Mapping[str, Measure]
    worst: Mapping[str, tuple[Measure, int]]
    order: Int64s = field(repr=False, compare=False)

    @property
    def findings(self) -> list[str]:
        """The ways in which the stream is worse than a uniform shuffle, as phrases.

        There is a phrase for each of these: records move less than half as far from their stored
        positions; the order correlates with the stored order by more than one half; and fewer than
        half as many distinct classes, shards or blocks are in the first tenth, in an average batch,
        or in the worst window of consecutive samples. Which records come, and how often, says
        `twinfeed.testing.audit`.

        Differences that may be due to chance are left out. `Measure.low` is whether a value is
        below half of its mean in uniform shuffles, by more than chance explains.
        """
        random, move = "in a uniform shuffle", self.displacement
        phrases = [(move, f"records move {move.ratio:.0%} as far as {random}")]
        for name, mean in self.distinct.items():
            head, (least, position) = self.head_distinct[name], self.worst[name]
            where = f"{self.batch_size:,} samples from position {position:,} on"
            phrases += [
                (head, f"the first tenth has {head.value:.0f} {name}, {head.uniform:.0f} {random}"),
                (mean, f"a batch holds {mean.value:.1f} {name}, {mean.uniform:.1f} {random}"),
                (least, f"{where} hold {least.value:.0f} {name}, {least.uniform:.1f} {random}"),
            ]
        findings = [phrase for measure, phrase in phrases if measure.low]
        # The correlation of a random order has a standard deviation of 1 / sqrt(samples).
        if abs(self.rank_correlation) > max(_FLAGGED_RATIO, _MAX_DEVIATIONS / self.samples**0.5):
            text = f"position and record number correlate by {self.rank_correlation:.2f}"
            findings.insert(move.low, text)
        return findings

    def __str__(self) -> str:
        """Return the numbers as lines, then the findings."""
        lines = [
            f"{validate.counted(self.samples, 'sample')} of "
            f"{validate.counted(self.records, 'record')}, batches of {self.batch_size:,}",
            f"mean displacement           {self.displacement}",
            f"rank correlation            {self.rank_correlation:.3f}",
            *(
                f"{f'{name} per batch':27} {measure}, fewest in a row "
                f"{self.worst[name][0].value:,.0f} from position {self.worst[name][1]:,} on"
                for name, measure in self.distinct.items()
            ),
            *(f"! {finding}" for finding in self.findings),
        ]
        return "\n".join(lines)


def diagnose(
    stream: BatchStream | Sampler | ArrayLike,
    /,
    *,
    epoch: SupportsIndex = 0,
    batch_size: SupportsIndex | None = None,
    num_records: SupportsIndex | None = None,
    labels: ArrayLike | None = None,
    shard_lengths: ArrayLike | None = None,
    block: SupportsIndex | None = None,
) -> Diagnosis:
    """Measure one epoch of a sampler, or any stream of record ids, int [samples].

    Args:
        stream: a batch sampler, a sampler, or ids. Padding (-1) is left out.
        epoch: the epoch of a sampler.
        batch_size: the samples of a batch, needed unless `stream` is a batch sampler.
        num_records: the number of records, if ids are given; by default the highest id plus 1.
        labels: the label of each record, to count the distinct classes of a batch.
        shard_lengths: the records of each shard, to count the distinct shards of a batch.
        block: records in a block, to count the distinct blocks of a batch.

    Raises:
        ValueError: a stream without a record, and sizes that do not agree.

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> import numpy as np
    >>> good = diagnose(BatchSampler(RandomSampler(1000, seed=0), batch_size=50))
    >>> good.displacement.uniform, good.ok
    (333.333, True)
    """
    ids, batch_index, records = _samples_of(stream, epoch, batch_size, num_records)
    groups = {}  # the class, shard and block of each record
    if labels is not None:
        groups["classes"] = np.unique(as_labels(labels), return_inverse=True)[1]
    if shard_lengths is not None:
        lengths = validate.integers("shard_lengths", shard_lengths, minimum=0)
        groups["shards"] = np.repeat(np.arange(len(lengths)), lengths)
    if block is not None:
        groups["blocks"] = np.arange(records) // validate.integer("block", block, minimum=1)
    for name, group in groups.items():
        if len(group) != records:
            argument = {"classes": "labels", "shards": "shard_lengths"}[name]
            advice = "pass num_records=, if the stream does not have the last records"
            rule = f"{argument} must be given for {records} records, got {len(group)}"
            raise ValueError(f"{rule}: {advice}")
    return _measure(ids, batch_index, records, groups)


def _samples_of(
    stream: BatchStream | Sampler | ArrayLike,
    epoch: SupportsIndex,
    batch_size: SupportsIndex | None,
    num_records: SupportsIndex | None,
) -> tuple[Int64s, Int64s, int]:
    """Return the record id and the batch index of each sample, without padding, and how many
    records there are; the arguments are those of `diagnose`.
    """
    # A loader, which has `set_epoch`, defines `__array__`, only to explain why it is no array.
    is_ids = validate.is_array_like(stream) and not hasattr(stream, "set_epoch")
    if not is_ids and not isinstance(stream, Sampler | BatchStream):
        found = validate.a_type(stream)
        raise TypeError(f"stream must be a sampler or ids, got {found}: pass feed.sampler")
    if (batch_size is None) != isinstance(stream, BatchStream):
        rule = "batch_size must be given for a sampler or ids, but not for a batch sampler"
        raise ValueError(f"{rule}, got {batch_size}")
    if isinstance(stream, Sampler):
        stream, batch_size = BatchSampler(stream, batch_size=batch_size or 0), None
    if isinstance(stream, BatchStream):
        batches = stream.batches(validate.integer("epoch", epoch, minimum=0), 0, len(stream))
        ids = stream.records(np.concatenate([np.empty(0, np.int64), *batches]))
        batch_index = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        num_records = stream.num_records
    else:
        ids = validate.integers("stream", stream, minimum=-1)
        size = validate.integer("batch_size", batch_size or 0, minimum=1)
        batch_index = np.arange(len(ids)) // size
        num_records = int(ids.max(initial=-1)) + 1 if num_records is None else num_records
    num_records = validate.integer("num_records", num_records, minimum=0)
    if ids.max(initial=-1) < 0:
        raise ValueError("stream must have at least one record, got none")
    if ids.max() >= num_records:
        raise ValueError(f"stream must have ids below num_records={num_records}, got {ids.max()}")
    return ids[ids >= 0], batch_index[ids >= 0], num_records


def _measure(ids: Int64s, batch: Int64s, records: int, groups: Mapping[str, Int64s]) -> Diagnosis:
    """Return all statistics of a stream of record ids in batches; `groups` has the class, shard or
    block of each record.
    """
    first_tenth = ids[: -(-len(ids) // 10)]  # rounded up
    batch_sizes = np.bincount(batch)
    size = int(batch_sizes.max())  # of a full batch
    starts = (np.cumsum(batch_sizes) - batch_sizes)[batch_sizes == size]  # of full batches
    head_distinct, distinct, worst = {}, {}, {}
    for name, group in groups.items():
        in_first_tenth = np.array([len(np.unique(group[first_tenth]))])
        head_distinct[name] = _distinct_measure(in_first_tenth, group, len(first_tenth))
        in_windows = _distinct_in_windows(group[ids], size)  # of consecutive samples
        distinct[name] = _distinct_measure(in_windows[starts], group, size)
        start = int(in_windows.argmin())  # of the window with the fewest groups
        worst[name] = _distinct_measure(in_windows[[start]], group, size), start
    numbers = _displacement(ids, records), _correlation(ids)
    return Diagnosis(records, len(ids), size, *numbers, head_distinct, distinct, worst, ids)


def _displacement(ids: Int64s, records: int) -> Measure:
    """Return the mean distance of ids from stored order, compared with random permutations:
    Spearman's footrule, with its mean and variance by Diaconis and Graham (1977).
    """
    n = len(ids)
    # The positions in stored order are the ids from 0 to `records - 1`, scaled to positions from 0
    # to n - 1, as n samples may be a part of the records, or repeat some.
    distance = np.abs(np.arange(n) - ids * n // records)
    mean_sum, variance_of_sum = (n**2 - 1) / 3, (n + 1) * (2 * n**2 + 7) / 45
    return Measure(float(distance.mean()), mean_sum / n, sqrt(variance_of_sum) / n)


def _distinct_in_windows(group: Int64s, size: int) -> Int64s:
    """Return the number of distinct groups in each window of `size` consecutive samples. A sample
    counts in the windows in which it is the first of its group. With the groups 5 7 7 7 5, and
    windows of 2::

        sample               0    1    2    3    4
        counts in windows    0    0 1  2    3    3 4
    """
    samples = np.arange(len(group))
    # Sample i counts in consecutive windows. The first of them starts after the previous sample of
    # its group, and less than `size` samples before sample i. The last one is window i.
    first_window = np.maximum(_previous_of_group(group), samples - size) + 1  # [0, 0, 2, 3, 3]
    # By how much the number of samples that count changes from window to window.
    change = np.bincount(first_window, minlength=len(group))  # those that are new: [2, 0, 1, 2, 0]
    change[1:] -= 1  # sample i no longer counts in window i + 1: [2, -1, 0, 1, -1]
    return np.cumsum(change)[: len(group) - size + 1]  # [2, 1, 1, 2]


def _previous_of_group(group: Int64s) -> Int64s:
    """Return for each sample the previous sample of the same group, or -1, int64[samples]."""
    # Samples of the same group become neighbours: [0, 4, 1, 2, 3].
    by_group = np.argsort(group, kind="stable")
    before, after = by_group[:-1], by_group[1:]
    previous = np.full(len(group), -1)
    previous[after] = np.where(group[before] == group[after], before, -1)
    return previous


def _distinct_measure(counts: Int64s, group: Int64s, size: int) -> Measure:
    """Return the mean number of distinct groups in batches, compared with random batches."""
    n = len(group)
    # Groups of the same size are equally likely: how many groups there are of each size.
    group_sizes, num_groups = np.unique(np.bincount(group), return_counts=True)
    # For each size of a group, the probability that a random batch has no record of the group.
    p_missing = np.array([_probability_missing(n, count, size) for count in group_sizes.tolist()])
    expected = float((num_groups * (1 - p_missing)).sum())
    # The variance of the number of groups in one batch, if groups were independent. This is an
    # upper bound: a batch with records of one group has less room for other groups, so they are
    # negatively correlated.
    variance = (num_groups * p_missing * (1 - p_missing)).sum()
    # The mean of n batches has 1 / n of the variance of one batch.
    return Measure(float(counts.mean()), expected, float(np.sqrt(variance / len(counts))))


def _probability_missing(n: int, group_size: int, batch_size: int) -> float:
    """Return the probability that a random batch of n records has no record of a group: C(n -
    group_size, batch_size) / C(n, batch_size).
    """
    if group_size + batch_size > n:
        return 0.0
    log_ratio = lgamma(n - group_size + 1) - lgamma(n - group_size - batch_size + 1)
    return exp(log_ratio - lgamma(n + 1) + lgamma(n - batch_size + 1))


def _correlation(ids: Int64s) -> float:
    """Return Spearman's rank correlation of position and id; equal ids share their mean rank."""
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    if len(counts) < 2:
        return 0.0
    mean_rank = np.cumsum(counts) - (counts + 1) / 2  # of each distinct id
    return float(np.corrcoef(np.arange(len(ids)), mean_rank[inverse])[0, 1])


def simulate_shuffle_buffer(
    n: SupportsIndex, /, *, buffer_size: SupportsIndex, seed: SupportsIndex
) -> Int64s:
    """Return the order in which `shuffle(buffer_size)` yields n stored records, int64[n].

    The buffer is filled. Then each step takes a random record of the buffer and puts the next
    stored record in its place. At the end the buffer is drained at random. This is how tf.data and
    webdataset shuffle.

    Args:
        n: number of stored records.
        buffer_size: records that the buffer holds.
        seed: the only source of chance.

    No record leaves more than `buffer_size - 1` positions early:

    >>> simulate_shuffle_buffer(10, buffer_size=3, seed=0).tolist()
    [0, 2, 4, 5, 6, 3, 7, 8, 9, 1]
    """
    total = validate.integer("n", n, minimum=0)
    capacity = min(total, validate.integer("buffer_size", buffer_size, minimum=1))
    buffer = list(range(capacity))
    num_buffered = np.minimum(capacity, total - np.arange(total))  # records in the buffer
    key = root_key(validate.seed(seed), "shuffle buffer")
    choices = uniform_below(random_words(key, np.arange(total)), num_buffered).tolist()
    out = np.empty(total, np.int64)
    for position, index in enumerate(choices):
        out[position] = buffer[index]
        # The buffer shrinks once all stored records were read.
        last = position + capacity if position + capacity < total else buffer.pop()
        if index < len(buffer):
            buffer[index] = last
    return out
