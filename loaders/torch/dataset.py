"""What a `torch.utils.data.DataLoader` needs to serve twinfeed's batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from twinfeed.loaders.collate import Ragged
from twinfeed.loaders.feed import Batch, Feed, Sample
from twinfeed.loaders.request import Request, check_sampler, request_of
from twinfeed.loaders.torch.device import JaggedParts, joined
from twinfeed.samplers import BatchStream


def as_tensors(batch: Mapping[str, Any], /) -> Batch:
    """Turn the arrays of a batch into tensors, without a copy; byte strings stay a list.

    A `Ragged` becomes a jagged nested tensor.

    >>> as_tensors({"id": np.array([3, 1]), "name": [b"x", b"y"]})
    {'id': tensor([3, 1]), 'name': [b'x', b'y']}
    """
    return joined(as_parts(batch))


def as_parts(batch: Mapping[str, Any], /) -> Batch:
    """Do the same, but leave a `Ragged` in its parts.

    >>> as_parts({"x": Ragged(np.arange(3), np.array([1, 2]))})["x"].offsets
    tensor([0, 1, 3])
    """
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

    Use it with `batch_sampler=RequestSampler(sampler)` and `collate_fn=as_tensors`; every other
    option of the DataLoader is free.

    Asked for plain record numbers it is a map-style dataset like any other: `dataset[3]` is one
    sample, and a DataLoader with a `batch_size` or torch's own samplers collates such samples.
    Those know no step, so that the seed of a transform comes from torch's random numbers then.

    Raises ValueError in a worker process for a sampler that reuses decoded images: they stay in
    the process that decoded them.

    >>> from tempfile import mkdtemp
    >>> from torch.utils.data import DataLoader
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> sampler = BatchSampler(SequentialSampler(3), batch_size=2)
    >>> dataset, requests = RecordDataset(Feed(index, sampler)), RequestSampler(sampler)
    >>> next(iter(DataLoader(dataset, batch_sampler=requests, collate_fn=as_tensors)))
    {'id': tensor([0, 1]), 'word': [b'to', b'be']}
    >>> dataset[2]
    {'id': 2, 'word': b'or'}
    """

    def __init__(self, feed: Feed, /) -> None:
        if not isinstance(feed, Feed):
            raise TypeError(f"feed must be a Feed, got {type(feed).__name__}: Feed(index, sampler)")
        self.feed = feed

    def __len__(self) -> int:
        return len(self.feed.index)

    def __getitem__(self, record: int, /) -> Sample:
        """Read one sample."""
        return self.__getitems__([record])[0]  # type: ignore[no-any-return]

    def __getitems__(self, wanted: Request | Sequence[int], /) -> Any:
        """Read the batch of one request, or a list of samples for a list of records."""
        if not isinstance(wanted, Request):
            seeds = torch.randint(2**63 - 1, (len(wanted),)).numpy().astype(np.uint64)
            return self.feed.samples(np.asarray(wanted, np.int64), seeds)
        if self.feed.cache is not None and get_worker_info() is not None:
            raise ValueError(NO_CACHE_IN_WORKERS)
        return self.feed(wanted)


NO_CACHE_IN_WORKERS = (
    "a sampler that reuses decoded images needs num_workers=0, "
    "because they stay in the process that decoded them: decode on threads instead"
)


class RequestSampler:
    """Yield the requests of a batch sampler, for `DataLoader(batch_sampler=…)`.

    A pass is an epoch from its first step, as when iterating over the sampler itself. The passes
    are those of a copy of the sampler, which stays as it is. The state counts what was drawn.
    torchdata's `StatefulDataLoader` keeps the state of each batch, and resumes exactly.
    `TorchLoader` counts what was received, with any workers.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> requests = RequestSampler(ExactOnceBatchSampler(3, batch_size=2))
    >>> [request.records.tolist() for request in requests]
    [[0, 1], [2]]
    """

    def __init__(self, stream: BatchStream, /) -> None:
        check_sampler(stream)
        # Of its own: torchdata copies and restores it beside the stream of the feed.
        self.stream = copy.copy(stream)

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Request]:
        for epoch, step, ids in self.stream.steps():
            yield request_of(self.stream, ids, epoch=epoch, step=step)

    def set_epoch(self, epoch: int, /) -> None:
        """Say which epoch the next pass is, as `BatchStream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say which batch is drawn next."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go to where `state` was taken."""
        self.stream.load_state_dict(state)

    @property
    def sampler(self) -> RequestSampler:
        """Itself: trainers look for `batch_sampler.sampler` when they set the epoch."""
        return self

    @property
    def batch_size(self) -> NoReturn:
        """Refuse to be sharded a second time; trainers ask for it before they do so."""
        if self.stream.world_size > 1:
            rank, world_size = self.stream.rank, self.stream.world_size
            raise TypeError(
                f"this sampler already is rank {rank} of {world_size}, and sharding it again would "
                f"lose records: iterate over the DataLoader itself, or over a TorchLoader"
            )
        raise AttributeError("requests are whole batches, of any size")


def go_to_epoch(stream: BatchStream, epoch: int, /, *, left: tuple[int, int] | None) -> None:
    """Set the epoch; start it again where a pass was broken off, at `left` (epoch, step).

    A trainer says which epoch is next before each pass. After its sanity check of two validation
    batches, say, that is the epoch begun already, of which no record may be missing.
    """
    stream.set_epoch(epoch)
    if (stream.epoch, stream.step) == left:
        stream.load_state_dict(stream.state_at(epoch, 0))
