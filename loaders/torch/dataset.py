"""What a `torch.utils.data.DataLoader` needs to serve twinfeed's batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from twinfeed.loaders import _checks
from twinfeed.loaders._batcher import Batch, Batcher
from twinfeed.loaders._samples import Sample
from twinfeed.loaders.collate import Ragged
from twinfeed.loaders.feed import Feed, check_feed
from twinfeed.loaders.index._paths import is_url
from twinfeed.loaders.request import Request
from twinfeed.loaders.torch._device import JaggedParts, joined


def as_tensors(batch: Mapping[str, Any], /) -> Batch:
    """Turn the arrays of a batch into tensors, without a copy; byte strings stay a list.

    A `Ragged` becomes a jagged nested tensor.

    >>> as_tensors({"id": np.array([3, 1]), "name": [b"x", b"y"]})
    {'id': tensor([3, 1]), 'name': [b'x', b'y']}
    """
    return joined(as_parts(batch))


def as_parts(batch: Mapping[str, Any], /) -> Batch:
    """Turn arrays into tensors, and each `Ragged` into the parts of a jagged tensor."""
    return {name: _as_parts(value) for name, value in batch.items()}


def _as_parts(value: Any) -> Any:
    if isinstance(value, Ragged):
        offsets = np.concatenate([[0], np.cumsum(value.lengths)])
        some = len(value.lengths) > 0
        return JaggedParts(
            torch.from_numpy(value.values),
            torch.from_numpy(offsets),
            shortest=int(value.lengths.min()) if some else None,
            longest=int(value.lengths.max()) if some else None,
        )
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.require(value, requirements="W"))
    return value


class RecordDataset(Dataset[Any]):
    """Serve whole batches to a `DataLoader`: one for each `Request` of a `RequestSampler`.

    For a `DataLoader` of your own, with every option that torch has:
    `DataLoader(RecordDataset(feed), batch_sampler=RequestSampler(feed), collate_fn=as_tensors)`.

    Asked for plain record numbers, the dataset is map-style like any other: `dataset[3]` is one
    sample. A DataLoader with a `batch_size` or with torch's own samplers collates such samples.
    There is no step then, and the seed of a transform comes from torch's random numbers.

    The dataset does not know which batch comes next. So nothing is read ahead, and of shards at a
    URL each record is a request. There is a warning where no disk cache keeps what is read.

    Raises ValueError in a worker process for a sampler that reuses decoded images: they stay in
    the process that decoded them.

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

    def __init__(self, feed: Feed, /, *, threads: int = 0) -> None:
        check_feed(feed)
        if is_url(feed.index.root) and feed.index.cache is None:
            warnings.warn(
                f"each record of {feed.index.root} will be a request, since a RecordDataset does "
                f"not know what comes next: take TorchLoader(feed, num_workers=…), which asks for "
                f"whole blocks ahead, or open the index with cache=DiskCache(…)",
                stacklevel=2,
            )
        self._records = len(feed.index)
        # The feed is not kept: workers do not need its sampler. The callables are tried here, once.
        threads = _checks.count("threads", threads, minimum=0)
        self._batcher = Batcher(feed, threads=threads)

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, record: int, /) -> Sample:
        """Read one sample."""
        return self.__getitems__([record])[0]  # type: ignore[no-any-return]

    def __getitems__(self, wanted: Request | Sequence[int], /) -> Any:
        """Read the batch of one request, or a list of samples for a list of records."""
        if not isinstance(wanted, Request):
            seeds = torch.randint(2**63 - 1, (len(wanted),)).numpy().astype(np.uint64)
            return self._batcher.plain(np.asarray(wanted, np.int64), seeds)
        if self._batcher.samples.cache is not None and get_worker_info() is not None:
            raise ValueError(NO_CACHE_IN_WORKERS)
        return _Whole(self._batcher(wanted))


class _Whole(dict[str, Any]):
    """A batch that is collated already. torch's own collation would look for its first sample."""

    def __missing__(self, name: object) -> NoReturn:
        if name == 0:
            raise TypeError("a RecordDataset gives whole batches: give collate_fn=as_tensors")
        raise KeyError(name)


NO_CACHE_IN_WORKERS = (
    "a sampler that reuses decoded images needs num_workers=0, "
    "because they stay in the process that decoded them: decode on threads instead"
)


class RequestSampler:
    """Yield the requests of a feed's batches, for `DataLoader(batch_sampler=…)`.

    The sampler cannot know what a training loop received. So a pass is an epoch, as for any sampler
    in a DataLoader of your own:

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

    def __init__(self, feed: Feed, /) -> None:
        self._stream = copy.copy(feed.sampler)
        self._stream._passes = None  # a place of its own, whatever the feed's sampler has drawn
        self._seeded = feed.seeded

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[Request]:
        for epoch, step, ids in self._stream.steps():
            yield Request.of(self._stream, epoch, step, ids, seeds=self._seeded)

    def set_epoch(self, epoch: int, /) -> None:
        """Begin `epoch` with the next pass. A state that was loaded in that epoch still counts."""
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say which batch is drawn next."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go to where `state` was taken."""
        self._stream.load_state_dict(state)

    @property
    def sampler(self) -> RequestSampler:
        """Itself: trainers look for a sampler in one of two places when they set the epoch."""
        return self

    batch_sampler = sampler

    @property
    def drop_last(self) -> bool:
        """What the sampler says; see `BatchStream.drop_last`."""
        return self._stream.drop_last

    @property
    def batch_size(self) -> NoReturn:
        """Refuse to be sharded a second time: trainers ask for `batch_size` before they shard."""
        if self._stream.world_size > 1:
            rank, world_size = self._stream.rank, self._stream.world_size
            raise TypeError(
                f"this sampler already is rank {rank} of {world_size}, and sharding it again would "
                f"lose records: iterate over a TorchLoader, or over the DataLoader unprepared "
                f"(Lightning: Trainer(use_distributed_sampler=False))"
            )
        raise AttributeError("requests are whole batches, of any size")
