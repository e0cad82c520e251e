"""All epochs of a sampler as one sequence of ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from twinfeed.samplers import validate
from twinfeed.samplers.batch_stream import BatchStream
from twinfeed.samplers.drawing.fifo_cache import FifoCache
from twinfeed.samplers.orders import Sampler
from twinfeed.samplers.stream import MAX_IDS, growing_ranges
from twinfeed.samplers.traits import check_record_ids
from twinfeed.samplers.types import Array, Int64s

_CHUNK = 256  # consecutive ids that are drawn to give one of them: a draw of one costs as much


class IdSequence(Sequence[int]):
    """The ids of all epochs of a sampler, one epoch after the other, as one read-only sequence.

    For what takes a list of ids and keeps the position itself: `torch.utils.data.Subset`,
    `datasets.Dataset.select`, `grain.MapDataset`. No id is stored: an id is drawn when it is asked
    for. Memory and the size of a pickle do not grow with the epochs. A batch sampler gives its
    batches one after the other, without a mark between them: all batches must have one size.

    - An integer gives an int. The id at position p of epoch e is at `e * epoch_length + p`.
    - A slice gives an `IdSequence` of these ids.
    - An array or a list of integers gives an array of the same shape, drawn at once.

    Args:
        sampler: a sampler or a batch sampler whose ids are record ids; one rank's too, of
            `sampler.shard(…)`.
        epochs: how many epochs.

    Raises:
        TypeError: ids are of views or uses, not of records.
        ValueError: the batches have several sizes.

    >>> import numpy as np
    >>> from twinfeed.samplers import IdSequence, RandomSampler
    >>> ids = IdSequence(RandomSampler(3, seed=0), epochs=90)
    >>> len(ids), ids[0], ids[-1], list(ids[3:6])
    (270, 0, 0, [1, 2, 0])
    >>> ids[np.array([[0, 1], [3, 4]])]
    array([[0, 2],
           [1, 2]])
    >>> from twinfeed.samplers import PKBatchSampler
    >>> batches = PKBatchSampler([0, 0, 1, 1, 2, 2], p=2, k=2, seed=0)
    >>> batches.batch(0, 0).tolist(), [*IdSequence(batches, epochs=2)[:4]]
    ([3, 2, 0, 1], [3, 2, 0, 1])
    """

    # tf.data passes a list of all ids here, as it would rebuild any sequence that is no array.
    @validate.show_call("IdSequence(sampler, epochs=90), and np.asarray(ids) for tf.data")
    def __init__(self, sampler: Sampler | BatchStream, *, epochs: SupportsIndex) -> None:
        if not isinstance(sampler, (Sampler, BatchStream)):
            found = type(sampler).__name__
            raise TypeError(f"sampler must be one such as twinfeed.RandomSampler, got a {found}")
        check_record_ids(sampler, "sampler.ids(epoch, positions)")
        self._sampler, self._batch_size = sampler, _batch_size_of(sampler)
        #: The number of ids of an epoch.
        self.epoch_length = len(sampler) * self._batch_size
        limit = validate.LIMIT // max(1, self.epoch_length)
        self._epochs = validate.integer("epochs", epochs, minimum=1, below=limit)
        self._range = range(self._epochs * self.epoch_length)  # indices into all epochs
        # Whole batches, so that none is drawn for two chunks.
        self._chunk_size = -(-_CHUNK // self._batch_size) * self._batch_size
        self._chunks: FifoCache[list[int]] = FifoCache(2)

    def __repr__(self) -> str:
        whole = self._range == range(self._epochs * self.epoch_length)
        part = "" if whole else f"[{self._range!r}]"
        return f"IdSequence({self._sampler!r}, epochs={self._epochs}){part}"

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> IdSequence: ...
    @overload
    def __getitem__(self, index: ArrayLike, /) -> Int64s: ...

    def __getitem__(self, index: SupportsIndex | slice | ArrayLike, /) -> int | IdSequence | Int64s:
        if isinstance(index, slice):
            part, numbers_of_part = object.__new__(IdSequence), self._range[index]
            if len(numbers_of_part) < 2:  # its step may be above int64
                start = numbers_of_part.start
                numbers_of_part = range(start, start + len(numbers_of_part))
            vars(part).update(vars(self), _range=numbers_of_part)
            return part
        if type(index) is int and -len(self) <= index < len(self):  # fast, for loops
            return self._id(index)
        numbers = validate.unmasked("indices", index)
        if numbers.size and numbers.dtype.kind not in "iu":
            raise TypeError(f"an index must be integers or a slice, got {index!r}")
        outside = numbers[(numbers < -len(self)) | (numbers >= len(self))]
        if outside.size:
            raise IndexError(f"an index must be in [-{len(self)}, {len(self)}), got {outside[0]}")
        if numbers.ndim:
            numbers = numbers.astype(np.int64)
            from_start = numbers + len(self) * (numbers < 0)
            return self._draw(self._range.start + self._range.step * from_start)
        return self._id(int(numbers))

    def __iter__(self) -> Iterator[int]:
        for start, stop in growing_ranges(0, len(self), MAX_IDS):
            yield from self._draw(_as_array(self._range[start:stop])).tolist()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Return all ids as an array, drawn at once: numpy would ask for one after the other."""
        return self._draw(_as_array(self._range)).astype(dtype or np.int64, copy=False)

    def _id(self, index: int) -> int:
        """Return one id, from a chunk of ids that may have been drawn before."""
        chunk, offset = divmod(self._range[index], self._chunk_size)
        start = chunk * self._chunk_size
        stop = min(start + self._chunk_size, self._epochs * self.epoch_length)
        ids = self._chunks.get(chunk, lambda: self._draw(np.arange(start, stop)).tolist())
        return ids[offset]

    def _draw(self, numbers: Int64s) -> Int64s:
        """Return the ids at these indices into the ids of all epochs, an epoch at a time."""
        epochs, positions = np.divmod(numbers, max(1, self.epoch_length))
        ids = np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            ids[of_epoch] = self._draw_epoch(epoch, positions[of_epoch])
        return ids

    def _draw_epoch(self, epoch: int, positions: Int64s) -> Int64s:
        """Return the ids at these positions of one epoch; of a batch sampler by whole batches."""
        if isinstance(self._sampler, Sampler):
            return self._sampler.ids(epoch, positions)
        steps, step_index = np.unique(positions // self._batch_size, return_inverse=True)
        runs = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)  # of consecutive steps
        drawn = [
            batch for run in runs for batch in self._sampler.batches(epoch, run[0], run[-1] + 1)
        ]
        return np.stack(drawn)[step_index, positions % self._batch_size]


def _batch_size_of(sampler: Sampler | BatchStream) -> int:
    """Return the one size of all batches, 1 of a sampler of ids; ValueError for several sizes."""
    if isinstance(sampler, Sampler) or not len(sampler):
        return 1
    if sampler.fixed_size is None:
        lows, highs = sampler.rank_slices(0, 0, min(len(sampler), MAX_IDS))
        last_low, last_high = sampler.rank_slices(0, max(0, len(sampler) - 1), len(sampler))
        sizes = np.unique(np.concatenate([highs - lows, last_high - last_low])).tolist()
        raise ValueError(
            f"batches must have one size, got sizes {sizes} in epoch 0 of {sampler!r}: take "
            f"last_batch='drop', or a loader, or a DataLoader(batch_sampler=…)"
        )
    return sampler.fixed_size


def _as_array(numbers: range) -> Int64s:
    """Return the numbers of a range as an array."""
    return np.arange(numbers.start, numbers.stop, numbers.step)
