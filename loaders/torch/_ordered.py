"""A dataset in the order of a sampler, for trainers that take a dataset and read it in sequence."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, Literal, SupportsIndex

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, DistributedSampler, get_worker_info

from twinfeed import __version__
from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.torch.dataset import RecordDataset
from twinfeed.samplers import BatchSampler, BatchStream, IdSequence, Sampler, validate
from twinfeed.samplers.processes import num_processes

ENDLESS = 1 << 62
"""The length without epochs=: a host that shuffles so many indices fails at once."""

_DRAWN_AT_ONCE = 4096  # ids, for the next calls
_MIN_SHARED = 1 << 16  # bytes of an array that worker processes share


class Ordered(Dataset[Any]):
    """A map-style dataset whose item i is record `start + i` of a sampler's stream.

    `ordered` makes one. The host reads in sequence, and keeps the position itself: that of its own
    checkpoint, or `start`. There is no state here, and every call with an index has one result.

    What would break the order is an error, if it is within a batch, or else warns once: a host that
    shuffles, that begins again at an index which it has read, or that skips by itself although
    `start` is set; and a host whose batches are no parts of the sampler's batches.

    Attributes:
        dataset: the dataset that is read.
        start: the number of records, of all ranks, before item 0.
        epoch_length: the number of items of an epoch, on this rank.

    >>> from twinfeed.samplers import RandomSampler
    >>> data = ordered(["a", "b", "c"], RandomSampler(3, seed=0))
    >>> [data[i] for i in range(6)], data.epoch_length
    (['a', 'c', 'b', 'b', 'c', 'a'], 3)
    >>> ordered(["a", "b", "c"], RandomSampler(3, seed=0), start=4)[0]
    'c'
    >>> [data.shard(rank, 2)[0] for rank in range(2)]
    ['a', 'c']
    """

    def __init__(
        self, dataset: Any, sampler: Sampler | BatchStream, ids: IdSequence, start: int, length: int
    ) -> None:
        self.dataset, self.start = dataset, start
        self._stream = _Shared((sampler, ids))
        size = sampler.fixed_size if isinstance(sampler, BatchStream) else 1
        self._batch_size = size or 1
        self.epoch_length, self._length = ids.epoch_length, length
        self._set_rank(0, 1)

    def _set_rank(self, rank: int, world_size: int) -> None:
        """Set what depends on the rank, of which nothing is read yet."""
        self._rank, self._world_size = rank, world_size
        self.epoch_length //= world_size
        if self._length != ENDLESS:
            self._length //= world_size
        self._limit = min(self._length, (len(self._stream.value[1]) - self.start) // world_size)
        self._part = max(1, self._batch_size // world_size)  # of a batch, for this rank
        self._reads = _Reads()
        self._drawn = (0, np.empty(0, np.int64))  # ids of consecutive indices, from the first on

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle and copies, without the ids that were drawn."""
        return {**vars(self), "_drawn": (0, np.empty(0, np.int64)), "_version": __version__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        version = state.pop("_version")
        if version != __version__:  # whose samplers may draw other ids
            raise ValueError(
                f"this was pickled by twinfeed {version}, and this is {__version__}: "
                f"make ordered(…) anew"
            )
        vars(self).update(state)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        rank = f", rank {self._rank} of {self._world_size}" if self._world_size > 1 else ""
        return f"<Ordered by {self._stream.value[0]!r}, start={self.start}{rank}>"

    @property
    def column_names(self) -> Any:
        """The names of the columns, of a dataset that has them."""
        return self.dataset.column_names

    @property
    def features(self) -> Any:
        """The features, of a dataset that has them."""
        return self.dataset.features

    def shard(self, rank: SupportsIndex, world_size: SupportsIndex) -> Ordered:
        """Return the dataset of one rank, for a host that deals no records to its ranks.

        A rank has a contiguous slice of each batch of a batch sampler, and every `world_size`-th
        record of another sampler. `start` still counts the records of all ranks.

        Raises:
            ValueError: this is the dataset of a rank already, `rank` is not in `[0, world_size)`,
                or the ranks do not divide a batch, or the records that `epochs=` leaves.
        """
        if self._world_size > 1:
            raise ValueError(f"this is rank {self._rank} of {self._world_size}: shard only once")
        sampler, _ = self._stream.value
        world_size = validate.integer("world_size", world_size, minimum=1)
        rank = validate.integer("rank", rank, minimum=0, below=world_size)
        if isinstance(sampler, BatchStream):
            sampler.shard(rank, world_size)  # raises, as for the ranks of P x K
            if self._batch_size % world_size:
                raise ValueError(f"{world_size} ranks cannot divide batches of {self._batch_size}")
        if self._length != ENDLESS and self._length % world_size:
            raise ValueError(
                f"{world_size} ranks cannot divide {self._length} records: leave epochs= out"
            )
        part = copy.copy(self)
        part._set_rank(rank, world_size)
        return part

    def ids(self, indices: ArrayLike, /) -> Int64s:
        """Return the record ids of these indices, int64[n]; nothing is read.

        Raises:
            IndexError: an index outside `[-len(self), len(self))`.
        """
        ids: Int64s = self._stream.value[1][self._numbers(self._checked(indices))]
        return ids

    def __getitem__(self, index: Any, /) -> Any:
        """Return one item; for a list of indices, a list of items."""
        if not hasattr(index, "__index__") or np.ndim(index):
            return self.__getitems__(index)
        checked = self._checked([validate.as_int("an index", index)])
        self._reads.add_single(int(checked[0]))
        return self._read(checked, self.ids(checked).tolist())[0]

    def __getitems__(self, indices: ArrayLike, /) -> list[Any]:
        """Return the items of these indices, which a DataLoader reads as one batch.

        Raises:
            ValueError: the indices do not ascend.
        """
        index = np.asarray(indices)
        if not index.size:
            return []
        if index.dtype != np.int64 or index[0] < 0 or index[-1] >= self._limit:
            index = self._checked(index)
        self._reads.add_batch(index, self)
        return self._read(index, self._ids(index))

    def _checked(self, indices: ArrayLike) -> Int64s:
        """Return indices that count from the first item, int64[n]."""
        index = np.asarray(indices)
        if index.size and index.dtype.kind not in "iu":
            raise TypeError(f"an index must be an integer, got {indices!r}")
        if index.size and not -self._length <= index.min() <= index.max() < self._limit:
            raise IndexError(
                f"an index must be in [-{self._length}, {self._limit}), got {indices!r}"
            )
        index = index.astype(np.int64)
        checked: Int64s = np.where(index < 0, index + self._length, index)
        return checked

    def _numbers(self, index: Int64s) -> Int64s:
        """Return the position of each index in the stream of all ranks, int64[n]."""
        if self._world_size == 1:
            return self.start + index
        step, offset = np.divmod(index, self._part)
        return self.start + (step * self._world_size + self._rank) * self._part + offset

    def _ids(self, index: Int64s) -> list[int]:
        """Return the record ids of ascending indices: many are drawn at once, for later calls."""
        first, last = int(index[0]), int(index[-1])
        start, drawn = self._drawn
        if not start <= first <= last < start + len(drawn):
            count = min(2 * (len(index) + len(drawn)), _DRAWN_AT_ONCE)  # few for the first batch
            start, stop = first, min(max(first + count, last + 1), self._limit)
            if stop - start > 2 * _DRAWN_AT_ONCE:  # these indices are far from each other
                far: list[int] = self.ids(index).tolist()
                return far
            drawn = self.ids(np.arange(start, stop))
            self._drawn = start, drawn
        ids: list[int] = drawn[index - start].tolist()
        return ids

    def _read(self, index: Int64s, ids: list[int]) -> list[Any]:
        """Return the items of these indices, which are these records."""
        if isinstance(self.dataset, RecordDataset):
            return self.dataset.samples(ids, self._seeds(self._numbers(index)))
        try:
            if hasattr(self.dataset, "__getitems__"):
                items: list[Any] = self.dataset.__getitems__(ids)
                return items
            return [self.dataset[id_] for id_ in ids]
        except IndexError as error:  # which would end a loop over this dataset in silence
            size = len(self.dataset) if hasattr(self.dataset, "__len__") else "unknown"
            raise LoaderError(
                f"the dataset raised {error!r} for one of the records {ids}: its length is {size} "
                f"now, and the sampler has {self._stream.value[0].num_records} records"
            ) from error

    def _seeds(self, numbers: Int64s) -> Any:
        """Return the seed of each sample of a feed, as its loaders have it, uint64[n]."""
        sampler = self._stream.value[0]
        if isinstance(sampler, Sampler):
            sampler = BatchSampler(sampler, batch_size=1)
        steps, offsets = np.divmod(numbers, self._batch_size)
        distinct, row = np.unique(steps, return_inverse=True)
        seeds = [sampler.seeds(*divmod(step, len(sampler))) for step in distinct.tolist()]
        return np.array([seeds[i][j] for i, j in zip(row, offsets, strict=True)], np.uint64)


class _Shared:
    """A value that is pickled with its large arrays in shared memory, once for all workers."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._pickled: tuple[bytes, list[torch.Tensor]] | None = None

    def __reduce__(self) -> Any:
        if self._pickled is None:
            arrays: list[torch.Tensor] = []

            def share(buffer: pickle.PickleBuffer) -> bool:
                """Move an array to shared memory; return whether it is too small for that."""
                values = np.frombuffer(buffer.raw(), np.uint8)
                if len(values) >= _MIN_SHARED:
                    arrays.append(_in_shared_memory(torch.from_numpy(values.copy())))
                return len(values) < _MIN_SHARED

            data = pickle.dumps(self.value, protocol=5, buffer_callback=share)
            self._pickled = data, arrays
        return _unpickled, self._pickled


def _in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in memory that worker processes share."""
    shared: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared


def _unpickled(data: bytes, arrays: list[torch.Tensor]) -> _Shared:
    """Return the value of a pickle, with these arrays, which stay where they are."""
    shared = _Shared(pickle.loads(data, buffers=[array.numpy() for array in arrays]))
    shared._pickled = data, arrays
    return shared


class _Reads:
    """The indices that one process has read, to warn once each of a host that breaks the order."""

    _last = _last_single = -1
    _in_sequence = _backwards = 0  # single items in sequence, and not

    def __init__(self) -> None:
        self._warned: set[str] = set()
        # Workers share the base seed of the latest pass, and the highest index that was read: those
        # that are started anew for each pass know of no other.
        self._pass = _in_shared_memory(torch.zeros(2, dtype=torch.int64))

    def __reduce__(self) -> Any:
        return _reads_of, (self._pass,)

    def add_single(self, index: int) -> None:
        """Note one item, read alone; a user may look at a few in any order."""
        if index == self._last_single + 1:
            self._in_sequence += 1
        elif index <= self._last_single:
            self._backwards += 1
            if self._in_sequence >= 8 or self._backwards > 2:
                self._warn_again(index, self._last_single)
        self._last_single = index

    def add_batch(self, indices: Int64s, data: Ordered) -> None:
        """Note a batch; ValueError if its indices do not ascend."""
        first, last, size = int(indices[0]), int(indices[-1]), len(indices)
        if np.diff(indices).min(initial=1) < 1:
            raise ValueError(
                f"the host reads the indices {indices[:4].tolist()} … in one batch: turn its "
                f"shuffle off"
            )
        worker = get_worker_info()
        self._check_start(first, size, data, worker.num_workers if worker else 1)
        if first <= self._last:
            self._warn_again(first, self._last)
        if worker is not None:  # torch draws one base seed for each pass
            seed, highest = self._pass.tolist()
            if seed not in (0, worker.seed - worker.id) and first <= highest:
                self._warn_again(first, highest)
            self._pass[0], self._pass[1] = worker.seed - worker.id, max(last, highest)
        self._check_batch(first, last, data._part)
        self._last = last

    def _check_start(self, first: int, size: int, data: Ordered, workers: int) -> None:
        """Warn if the first batch of this process is not among the first batches of all."""
        if self._last >= 0 or not data.start:
            return
        ranks = num_processes() if data._world_size == 1 else 1
        if first >= size * workers * ranks:
            self._warn(
                "skip",
                f"the host begins at index {first}, and start={data.start} skips records already: "
                f"give start=0, or turn the skipping of the host off",
            )

    def _check_batch(self, first: int, last: int, size: int) -> None:
        """Warn if a batch is neither a part of one batch of the sampler nor several of them."""
        is_whole = first % size == 0 and (last + 1) % size == 0
        if size > 1 and first // size != last // size and not is_whole:
            self._warn(
                "size",
                f"the host's batch of {last - first + 1} is no part of a batch of {size} of the "
                f"sampler: give the host a batch size that divides it",
            )

    def _warn_again(self, first: int, last: int) -> None:
        self._warn(
            "again",
            f"the host reads index {first} after {last}, so records come twice: it shuffles, or "
            f"makes a new pass. Let one pass go on, or make ordered(…, start=…) anew",
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=5)


def _reads_of(shared: torch.Tensor) -> _Reads:
    """Return the reads of a new process."""
    reads = _Reads.__new__(_Reads)
    reads._warned, reads._pass = set(), shared
    return reads


@validate.show_call("ordered(dataset, sampler, start=0)")
def ordered(
    dataset: Any,
    sampler: Sampler | BatchStream | None = None,
    *,
    start: SupportsIndex = 0,
    epochs: SupportsIndex | None = None,
) -> Ordered:
    """Put a dataset into the order of a sampler, for a trainer that only takes a dataset.

    The trainer reads in sequence, without a shuffle, and so every batch is that of the sampler: in
    one process, or over ranks that the trainer deals the batches to. A resumed trainer that skips
    what it has read needs nothing else. Where it does not skip, `start` does.

    Args:
        dataset: a dataset with items, as a list, a dataset of torch or of Hugging Face; or an
            index, a dict of arrays, or a `Feed`, whose samples are decoded, with the seeds that its
            loaders have. A sampler of ids gives each position a seed, as batches of one would.
        sampler: a sampler of record ids, of all ranks, or a batch sampler whose batches have one
            size. Of a feed, the default is its own.
        start: how many records were trained on before, by all ranks together. With a batch sampler,
            a multiple of its batch size.
        epochs: after how many epochs the dataset ends. By default it has no end, and its length is
            2^62: a host that draws or lists so many indices fails at once.

    Returns:
        A dataset, of which `.shard(rank, world_size)` is the part of a rank.

    Raises:
        TypeError: `sampler` is none of this library, ids are no record ids, or the dataset has no
            items.
        ValueError: the dataset has another length than the sampler; the sampler is that of a rank,
            has no id, or batches of several sizes; `start` is outside of the stream, or within a
            batch.

    >>> from torch.utils.data import DataLoader
    >>> from twinfeed.samplers import PKBatchSampler
    >>> labels = [0, 0, 1, 1, 2, 2]
    >>> data = ordered(labels, PKBatchSampler(labels, p=2, k=2, seed=0))
    >>> next(iter(DataLoader(data, batch_size=4)))
    tensor([1, 1, 0, 0])
    """
    if sampler is None and isinstance(dataset, Feed):
        sampler = dataset.sampler
    if not isinstance(sampler, (Sampler, BatchStream)):
        found = validate.a_type(sampler)
        raise TypeError(f"sampler must be one of twinfeed.samplers, got {found}: {_CALL}")
    if sampler.sharded and getattr(sampler, "world_size", 2) > 1:
        raise ValueError(
            f"sampler must be that of all ranks, got {sampler!r}: call shard(rank, world_size) on "
            f"the result of ordered"
        )
    one_epoch = IdSequence(sampler, epochs=1)
    if not len(one_epoch):
        raise ValueError(f"an epoch must have an id, got {sampler!r}")
    length = one_epoch.epoch_length
    if epochs is None:
        ids = IdSequence(sampler, epochs=validate.LIMIT // length - 1)
    else:
        ids = IdSequence(sampler, epochs=epochs)
    start = validate.integer("start", start, minimum=0, below=len(ids))
    size = sampler.fixed_size if isinstance(sampler, BatchStream) else 1
    if size and start % size:
        raise ValueError(f"start={start} is within a batch of {size}: give a multiple of {size}")
    data = _with_items(dataset, sampler)
    return Ordered(data, sampler, ids, start, ENDLESS if epochs is None else len(ids) - start)


_CALL = "write ordered(dataset, sampler)"


def _with_items(dataset: Any, sampler: Sampler | BatchStream) -> Any:
    """Return a dataset with items of each record; of what a feed takes, its decoded samples."""
    is_source = sum(hasattr(dataset, name) for name in ("describe", "digests", "reader")) >= 2
    if is_source or isinstance(dataset, (Feed, Mapping)) or _is_table(dataset):
        stream = sampler
        if isinstance(stream, Sampler):
            stream = BatchSampler(stream, batch_size=1)
        is_feed = isinstance(dataset, Feed)
        feed = dataset.with_sampler(stream) if is_feed else Feed(dataset, stream)
        if feed.batch_transform is not None:
            raise ValueError("batch_transform needs whole batches: give the trainer a TorchLoader")
        return RecordDataset(feed)
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, (str, bytes)) or not has_items or validate.is_stream(dataset):
        raise TypeError(f"dataset must have items, got {validate.a_type(dataset)}: {_CALL}")
    if hasattr(dataset, "__len__") and len(dataset) != sampler.num_records:
        raise ValueError(
            f"the dataset has {validate.counted(len(dataset), 'record')}, and the sampler "
            f"{sampler.num_records:,}: make the sampler of this dataset"
        )
    return dataset


def _is_table(dataset: Any) -> bool:
    """Return whether `dataset[0]` would be a column, not a record."""
    return type(dataset).__module__.partition(".")[0] in {"pandas", "polars", "pyarrow"}


class EndlessSampler(torch.utils.data.Sampler[int]):
    """The ids of all epochs without an end, for a host that makes one iterator of `sampler=`.

    So fast-reid, YOLOX and detectron2 do. A batch sampler gives its batches one after the other,
    and the host's batch has to be of the size of a rank's. `len` is that of a rank's epoch.

    Args:
        sampler: a sampler of record ids, of all ranks, or a batch sampler whose batches have one
            size.
        start: how many records were trained on before, by all ranks together.
        rank: this rank.
        world_size: the number of ranks. The slices are those of `ordered(…).shard`.

    Raises:
        TypeError: `sampler` is none of this library, or ids are no record ids.
        ValueError: as of `ordered`.

    >>> from itertools import islice
    >>> from twinfeed.samplers import RandomSampler
    >>> list(islice(EndlessSampler(RandomSampler(3, seed=0), start=1), 5))
    [2, 1, 1, 2, 0]
    """

    @validate.show_call("EndlessSampler(sampler, start=0)")
    def __init__(
        self,
        sampler: Sampler | BatchStream,
        *,
        start: SupportsIndex = 0,
        rank: SupportsIndex = 0,
        world_size: SupportsIndex = 1,
    ) -> None:
        numbers = range(getattr(sampler, "num_records", 0))
        self._order = ordered(numbers, sampler, start=start).shard(rank, world_size)
        self._passes = 0

    def __len__(self) -> int:
        return self._order.epoch_length

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        if self._passes == 2:
            warnings.warn(
                f"a second iterator of an EndlessSampler begins at start={self._order.start} "
                f"again: let one iterator go on, or make EndlessSampler(…, start=…) anew",
                stacklevel=2,
            )
        for first in count(0, 1024):
            yield from self._order.ids(range(first, first + 1024)).tolist()


class TorchDistributedSampler(DistributedSampler[Any]):
    """One rank of a sampler of ids, as the class of torch that some hosts ask for.

    open_clip calls `set_epoch` of a `DistributedSampler` alone. Fabric puts its own sampler in the
    place of any other, which shards once more. With Fabric, count epochs yourself all the same: its
    prepared loader sets the epoch to the number of its passes, from 0 on in a resumed run too.

    Args:
        sampler: a sampler of ids, of all ranks.
        rank: this rank.
        world_size: the number of ranks.
        uneven: as of `Sampler.shard`.

    Raises:
        TypeError: `sampler` is no sampler of ids of this library.
        ValueError: as of `Sampler.shard`.

    >>> from twinfeed.samplers import RandomSampler
    >>> sampler = TorchDistributedSampler(RandomSampler(5, seed=0), 1, 2)
    >>> sampler.set_epoch(1)
    >>> list(sampler)
    [3, 2]
    """

    @validate.show_call("TorchDistributedSampler(sampler, rank, world_size)")
    def __init__(
        self,
        sampler: Sampler,
        rank: SupportsIndex,
        world_size: SupportsIndex,
        *,
        uneven: Literal["raise", "drop", "keep"] = "drop",
    ) -> None:
        if not isinstance(sampler, Sampler):
            found = validate.a_type(sampler)
            raise TypeError(
                f"sampler must be a Sampler such as twinfeed.RandomSampler, got {found}"
            )
        self._sampler = sampler.shard(rank, world_size, uneven=uneven)
        ranks = validate.as_int("world_size", world_size)
        super().__init__(
            range(sampler.num_records),  # type: ignore[arg-type]
            num_replicas=ranks,
            rank=validate.as_int("rank", rank),
            drop_last=uneven == "drop",
        )
        self.num_samples = len(self._sampler)
        self.total_size = self.num_samples * ranks

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        super().set_epoch(epoch)
        self._sampler.set_epoch(epoch)
