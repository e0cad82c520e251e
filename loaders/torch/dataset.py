"""A dataset and a sampler for a `torch.utils.data.DataLoader` of your own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, get_worker_info

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of, require_feed
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import Ragged
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.reading.source import reader_of
from twinfeed.loaders.support.array_types import Array
from twinfeed.loaders.support.checks import check_ids
from twinfeed.loaders.support.fork import PerProcess, end_with_parent
from twinfeed.loaders.support.temporary import socket_folder
from twinfeed.loaders.torch._copier import JaggedParts, join_jagged
from twinfeed.loaders.torch._sharing import share_memory
from twinfeed.samplers import BatchStream, Sampler, validate
from twinfeed.samplers.types import UInt64s


def as_tensors(batch: Mapping[str, Any], /) -> Batch:
    """Turn the arrays of a batch into tensors; strings stay a list.

    A tensor shares the memory of its array; in a worker process it is copied to shared memory. A
    `Ragged` becomes a jagged nested tensor; a `Ragged` of strings becomes a list of lists.

    >>> as_tensors({"id": np.array([3, 1]), "name": [b"x", b"y"]})
    {'id': tensor([3, 1]), 'name': [b'x', b'y']}
    """
    return join_jagged(share_memory(as_unjoined_tensors(batch)))


def as_unjoined_tensors(batch: Mapping[str, Any], /) -> Batch:
    """Turn the arrays of a batch into tensors, but do not make jagged tensors yet."""
    if isinstance(batch, list):
        raise TypeError(
            "as_tensors takes a batch, got a list of samples: leave collate_fn out, or give the "
            "DataLoader batch_sampler=RequestSampler(feed)"
        )
    return {name: _as_unjoined_tensor(value) for name, value in batch.items()}


def _as_unjoined_tensor(value: Any) -> Any:
    """Turn an array into a tensor, a `Ragged` into `JaggedParts`, and strings into lists."""
    if isinstance(value, Ragged) and value.values.dtype == object:  # lists of strings
        return [row.tolist() for row in np.split(value.values, np.cumsum(value.lengths))[:-1]]
    if isinstance(value, Ragged):
        lengths = value.lengths
        offsets = np.concatenate([[0], np.cumsum(lengths)])  # lengths [2, 1] give offsets [0, 2, 3]
        shortest = int(lengths.min()) if len(lengths) else None
        longest = int(lengths.max()) if len(lengths) else None
        return JaggedParts(_from_numpy(value.values), torch.from_numpy(offsets), shortest, longest)
    if isinstance(value, np.ndarray):
        return _from_numpy(value if value.flags.writeable else value.copy())
    return value


def _from_numpy(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array."""
    if array.dtype.kind == "V":  # bfloat16 of ml_dtypes, which torch does not support
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class RecordDataset(Dataset[Any]):
    """Serve whole batches to a `DataLoader`: a batch for each `Request` of a `RequestSampler`.

    For a `DataLoader` of your own, with every option that torch has:
    `DataLoader(RecordDataset(feed), batch_sampler=RequestSampler(feed), collate_fn=as_tensors)`, or
    with `sampler=RequestSampler(feed), batch_size=None` in place of `batch_sampler`.

    With plain record numbers, the dataset is map-style like any other: `dataset[3]` is one sample.
    A DataLoader with a `batch_size`, with torch's own samplers, or with
    `batch_sampler=feed.sampler` collates such samples. There is no step then. So the seed of a
    transform comes from torch's random numbers, and a warning says so. Another warning is for
    records that are not among the `records=` of the feed's sampler, which torch's samplers ignore.

    The dataset cannot tell which batch comes next. So nothing is prefetched, and for shards at a
    URL each record is a request. There is a warning if no disk cache keeps what is read.

    Args:
        feed: what is fed.
        threads: share the decoding of a batch.

    Raises:
        ValueError: in a worker process, a sampler that reuses decoded images: they stay in the
            process that decoded them.

    >>> from tempfile import mkdtemp
    >>> from torch.utils.data import DataLoader
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, BatchSampler(SequentialSampler(3), batch_size=2))
    >>> dataset, requests = RecordDataset(feed), RequestSampler(feed)
    >>> next(iter(DataLoader(dataset, batch_sampler=requests, collate_fn=as_tensors)))
    {'id': tensor([0, 1]), 'word': [b'to', b'be']}
    >>> dataset[2]
    {'id': 2, 'word': b'or'}
    """

    def __init__(self, feed: Feed, *, threads: int = 0) -> None:
        require_feed(feed)
        socket_folder()  # workers inherit the folder
        self._records = len(feed.index)
        self._seeded = feed.seeded
        self._excluded: Array | None = None  # by record, whether the sampler leaves it out
        if feed.sampler.traits.record_ids is not None:
            self._excluded = np.ones(self._records, bool)
            self._excluded[feed.sampler.traits.record_ids] = False
        # The feed itself is not an attribute, since workers do not need its sampler. `recipe_of`
        # tries the feed's functions with the first record, here in the main process.
        threads = validate.integer("threads", threads, minimum=0)
        recipe, reader = recipe_of(feed), reader_of(feed.index)
        self._batcher = PerProcess(partial(Batcher, recipe, reader=reader, threads=threads))

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, record: int | Request, /) -> Sample:
        """Return one sample, or the batch of a request (a DataLoader with `batch_size=None`)."""
        if isinstance(record, Request):
            return self.__getitems__(record)  # type: ignore[no-any-return]
        return self.__getitems__([record])[0]  # type: ignore[no-any-return]

    def __getitems__(self, wanted: Request | Sequence[int], /) -> Any:
        """Return the batch of one request, or a list of samples for a list of record ids."""
        in_worker = get_worker_info() is not None
        if in_worker:
            end_with_parent()
        if isinstance(wanted, Request):
            if wanted.num_records not in (None, self._records):
                raise ValueError(
                    f"the request is for one of {wanted.num_records} records, and the dataset has "
                    f"{self._records}: give RequestSampler the feed of the RecordDataset"
                )
            if in_worker and self._batcher().cache is not None:
                raise ValueError(NO_CACHE_IN_WORKERS)
            return _CollatedBatch(self._batcher()(wanted))
        if isinstance(next(iter(wanted), None), Request):
            raise TypeError(
                "a request is a whole batch: give batch_sampler=RequestSampler(feed), or "
                "sampler=RequestSampler(feed) with batch_size=None"
            )
        seeds = torch.randint(2**63 - 1, (len(wanted),)).numpy().astype(np.uint64)
        samples = self.samples(wanted, seeds)
        if self._seeded:  # whether the feed has a transform with a seed
            self._seeded = False  # warn once
            self._warn("the seeds of samples by record id are torch's random numbers")
        if self._excluded is not None and self._excluded[wanted].any():
            self._excluded = None  # warn once
            self._warn("the feed's sampler leaves records out that are read here")
        return samples

    def _warn(self, problem: str) -> None:
        advice = "give the DataLoader batch_sampler=RequestSampler(feed), collate_fn=as_tensors"
        warnings.warn(f"{problem}: {advice}", stacklevel=3)

    def samples(self, records: ArrayLike, seeds: UInt64s, /) -> list[Sample]:
        """Return the samples of these records, with the seed of each for the transform."""
        ids = check_ids(np.asarray(records), self._records)
        return self._batcher().samples_of_records(ids, seeds)


class _CollatedBatch(dict[str, Any]):
    """A batch that is collated already. If torch looks for its first sample, raise TypeError."""

    def __missing__(self, name: object) -> NoReturn:
        """Raise TypeError for `batch[0]`, which torch's default collation looks up."""
        if name == 0:
            raise TypeError("a RecordDataset returns whole batches: give collate_fn=as_tensors")
        raise KeyError(name)


NO_CACHE_IN_WORKERS = (
    "a sampler that reuses decoded images needs num_workers=0: decode on threads instead"
)


class TorchSampler(torch.utils.data.Sampler[Any]):
    """A sampler of this library as a `torch.utils.data.Sampler`, for code that asks for this class.

    A `DataLoader` takes any sampler as it is, but some trainers ask `isinstance(sampler, Sampler)`.
    Ids, passes and states are the sampler's own.

    The class is neither torch's `RandomSampler` nor `SequentialSampler`, which Lightning and
    Accelerate replace by samplers of their own.

    Args:
        sampler: what is iterated over; its position is this object's.

    Raises:
        TypeError: for anything but a sampler of this library. In a pass: ids are of padding, views
            or uses, not of records.

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> order = RandomSampler(5, seed=0)
    >>> list(TorchSampler(order)), list(TorchSampler(BatchSampler(order, batch_size=3)))
    ([4, 0, 2, 1, 3], [[4, 0, 2], [1, 3]])
    """

    @validate.show_call("TorchSampler(sampler)")
    def __init__(self, sampler: Sampler | BatchStream) -> None:
        if not isinstance(sampler, (Sampler, BatchStream)):
            found = validate.a_type(sampler)
            raise TypeError(f"sampler must be one of twinfeed.samplers, got {found}")
        self._sampler: Any = sampler

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._sampler!r}>"

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    @property
    def sampler(self) -> TorchSampler:
        """This sampler. Trainers set the epoch of `sampler` or of `batch_sampler`."""
        return self

    @property
    def epoch(self) -> int:
        """Epoch of the next id or batch that iterating draws."""
        return int(self._sampler.epoch)

    def set_epoch(self, epoch: int, /) -> None:
        """Set the epoch of the next pass."""
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next id or batch that will be drawn."""
        state: dict[str, Any] = self._sampler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Set the position to that of a state."""
        self._sampler.load_state_dict(state)

    @property
    def batch_size(self) -> int:
        """The `batch_size` of a batch sampler."""
        return int(self._sampler.batch_size)

    @property
    def drop_last(self) -> bool:
        """The `drop_last` of a batch sampler; see `BatchStream.drop_last`."""
        return bool(self._sampler.drop_last)


class RequestSampler(TorchSampler):
    """Yield a request for each batch of a feed, for `DataLoader(batch_sampler=…)`.

    The sampler does not see which batches a training loop received. So a pass is an epoch, as for
    any sampler in a DataLoader of your own:

    - Drawing the last batch moves on to the next epoch.
    - A pass that was broken off begins its epoch again.
    - `set_epoch` says where the next pass begins.

    The state counts what was drawn. torchdata's `StatefulDataLoader` keeps the state of each batch,
    and resumes exactly. `TorchLoader` counts what was received, with any workers.

    Workers draw ahead: where an epoch has no more than `prefetch_factor * num_workers` batches,
    `iter(dataloader)` alone moves on to the next epoch. Call `set_epoch` before each pass then.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> requests = RequestSampler(Feed(index, ExactOnceBatchSampler(3, batch_size=2)))
    >>> [request.records.tolist() for request in requests]
    [[0, 1], [2]]
    """

    @validate.show_call("RequestSampler(feed)")
    def __init__(self, feed: Feed) -> None:
        stream = copy.copy(require_feed(feed).sampler)
        stream._own_cursor = None  # the copy has its own position, and starts at the first batch
        super().__init__(stream)
        self._seeded = feed.seeded

    def __iter__(self) -> Iterator[Request]:
        Run.check_may_start()
        for epoch, step, ids in self._sampler.passes():
            yield Request.of(self._sampler, epoch, step, ids, seeds=self._seeded)

    @property
    def batch_sampler(self) -> RequestSampler:
        """This sampler, as `sampler` is."""
        return self

    @property
    def batch_size(self) -> NoReturn:
        """Raise an error, always: this sampler must not be replaced by a trainer.

        Lightning and Accelerate replace a batch sampler that has a `batch_size` by another, which
        divides the batches among the processes (ranks). Both first call
        `hasattr(sampler, "batch_size")`.

        Raises:
            AttributeError: there is one process. `hasattr` is then False, and the trainer goes on
                with this sampler.
            TypeError: there are several processes, and this sampler has only the batches of one of
                them. To divide these again would lose batches. `hasattr` does not catch a
                TypeError, so it stops the trainer.
        """
        if self._sampler.world_size > 1:
            rank, world_size = self._sampler.rank, self._sampler.world_size
            raise TypeError(
                f"this sampler already is rank {rank} of {world_size}: iterate over a TorchLoader, "
                f"or over the DataLoader unprepared (Trainer(use_distributed_sampler=False))"
            )
        raise AttributeError("requests are whole batches, of any size")
