"""The loader: batches made ahead, with state that counts what the training loop received."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from typing import Any, SupportsIndex

import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from twinfeed.loaders._system import processors
from twinfeed.loaders.closing import Closing
from twinfeed.loaders.collate import Collate, FieldSpec
from twinfeed.loaders.errors import WorkerDiedError
from twinfeed.loaders.feed import Batch, Decode, Feed
from twinfeed.loaders.index import Index
from twinfeed.loaders.prefetch import Prefetcher, in_order
from twinfeed.loaders.request import Request, check_fit
from twinfeed.loaders.torch.dataset import (
    NO_CACHE_IN_WORKERS,
    RequestSampler,
    as_parts,
    go_to_epoch,
)
from twinfeed.loaders.torch.device import Copier, Sent, copier_for, default_device
from twinfeed.loaders.torch.workers import CatchingDataset, WorkerBatches, as_served
from twinfeed.samplers import BatchStream


class TorchLoader(Closing):
    """Iterate over the batches of `sampler`, read from `index`, as tensors on `device`.

    A pass yields the rest of the current epoch and leaves the loader at the start of the next.
    After a `break` the next pass goes on with what the loop has not received; `set_epoch` starts
    the epoch again. There is one pass at a time: another one, `set_epoch`, `load_state_dict` or
    `close` within a loop ends it with RuntimeError. `state_dict` counts the batches that the loop
    has received, however far workers and prefetch have run ahead, and is restored at any step in
    O(1), by any number of ranks. The sampler's own cursor follows at the end of a pass, however it
    ended; where the loop has moved that itself, it stays there.

    `fields`, `decode`, `transform`, `collate`, `side`, `spec` and `verify` are those of `Feed`.
    `device` (default: the current CUDA device, or the CPU where there is none) gets the tensors;
    `prefetch` batches are ready there ahead of the step; 0 leaves all to the calling thread. On a
    GPU a batch's memory is free once the steps that read it have run, which a loop that never waits
    for the device may be far ahead of. CUDA graphs are captured before the loop, or with
    `capture_error_mode="thread_local"`, as other threads use the device.
    The system is told to bring the bytes of the next `readahead` batches into memory: worth it
    where shards are larger than that, a small loss where they are in memory already.

    `threads` (default: the processors this process may use, at most 8; none where nothing is
    decoded) make a batch each; where a sampler reuses decoded images, they share one batch. Reads
    and image decoders leave the interpreter lock alone. A transform that holds it is for
    `num_workers` processes: then a real `DataLoader` takes `prefetch_factor`,
    `persistent_workers`, `multiprocessing_context`, `timeout` and `worker_init_fn`, and `threads`
    (default 0) are threads within each worker. For its other options, or none of the above, give a
    `RecordDataset` and a `RequestSampler` to a `DataLoader` of your own.

    Raises ValueError where options contradict each other.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> with TorchLoader(index, ExactOnceBatchSampler(3, batch_size=2), device="cpu") as loader:
    ...     for batch in loader:
    ...         print(batch["id"], batch["word"], loader.state_dict()["step"])
    tensor([0, 1]) [b'to', b'be'] 1
    tensor([2]) [b'or'] 0
    """

    def __init__(
        self,
        index: Index,
        sampler: BatchStream,
        /,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode | None = None,
        transform: Decode | None = None,
        collate: Collate = "stack",
        side: Mapping[str, npt.NDArray[Any]] | None = None,
        spec: Mapping[str, FieldSpec] | None = None,
        verify: bool = True,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        readahead: int = 0,
        threads: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        check_fit(index, sampler)
        _check_counts(
            prefetch=prefetch, readahead=readahead, threads=threads or 0, num_workers=num_workers
        )
        if num_workers and not prefetch:
            raise ValueError(f"prefetch=0 needs num_workers=0, got num_workers={num_workers}")
        if num_workers and sampler.live is not None:
            raise ValueError(NO_CACHE_IN_WORKERS)
        if threads is None:
            decoding = decode is not None or transform is not None
            alone = num_workers or not prefetch or not decoding
            threads = 0 if alone else min(8, processors())
        # Each thread makes whole batches, unless they come in turn, from a cache or in a worker.
        shared = bool(num_workers) or sampler.live is not None
        self._threads = 0 if shared else threads
        self.feed = Feed(
            index,
            sampler,
            fields=fields,
            decode=decode,
            transform=transform,
            collate=collate,
            side=side,
            spec=spec,
            verify=verify,
            threads=threads if shared else 0,
        )
        self.stream = sampler
        self.device = default_device() if device is None else torch.device(device)
        self.prefetch = prefetch
        self._requests = _Ahead(sampler, self.feed, readahead)
        self.num_workers = num_workers
        self._worker_options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
        }
        _ = self.dataloader  # checks the options
        self._running: _Pass | None = None
        self._left: tuple[int, int] | None = None

    @cached_property
    def dataloader(self) -> DataLoader[Any]:
        """The DataLoader whose workers make the batches; unused without workers."""
        serve: dict[str, Any] = {"batch_sampler": self._requests, "collate_fn": as_served}
        return DataLoader(CatchingDataset(self.feed), **serve, **self._worker_options)

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Batch]:
        self._settle()
        running = self._running = _Pass(self, self._threads)
        try:
            yield from running
            if self._running is not running and running.step < len(self):
                raise RuntimeError(
                    "this pass was ended before its last batch, by another pass over the same "
                    "loader, or by its set_epoch, load_state_dict or close: leave the loop first, "
                    "or give each loop a loader and a sampler of its own"
                )
        finally:
            if self._running is running:  # else a later pass has taken over
                self._settle()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that the loop receives."""
        return int(self.state_dict()["epoch"])

    @property
    def step(self) -> int:
        """Step of the next batch that the loop receives."""
        return int(self.state_dict()["step"])

    @property
    def sampler(self) -> TorchLoader:
        """Itself: trainers look for `loader.batch_sampler.sampler` when they set the epoch."""
        return self

    batch_sampler = sampler

    def set_epoch(self, epoch: int, /) -> None:
        """Go to the start of `epoch`; a state that was loaded in that epoch stays where it is."""
        self._settle()
        go_to_epoch(self.stream, epoch, left=self._left)

    def state_dict(self) -> dict[str, Any]:
        """Say where the training loop stands: a JSON-able dict that any world size accepts."""
        if self._running is None:
            return self.stream.state_dict()
        return self.stream.state_at(self._running.epoch, self._running.step)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue after the batches that `state` counts; StateMismatchError for other data."""
        self._settle()
        self.stream.load_state_dict(state)
        self._left = None

    def close(self) -> None:
        """Stop the running pass, the workers and the files; a later pass starts them anew."""
        self._settle()
        self.__dict__.pop("dataloader", None)
        self.feed.close()

    def _settle(self) -> None:
        """End the running pass, and put the sampler's cursor where the loop stands."""
        if self._running is not None:
            state = self.state_dict()
            running, self._running = self._running, None
            if (self.stream.epoch, self.stream.step) == running.began:  # else somebody moved it
                self.stream.load_state_dict(state)
            self._left = (self.stream.epoch, self.stream.step)
            if not running.stop():
                self.__dict__.pop("dataloader", None)  # its workers are of no use to a later pass


class _Ahead(RequestSampler):
    """Draw ahead of the loop, on a copy of the sampler; and tell the system what will be read."""

    def __init__(self, stream: BatchStream, feed: Feed, readahead: int) -> None:
        super().__init__(stream)
        self.stream = stream
        self._feed = feed
        self._readahead = readahead

    def __iter__(self) -> Iterator[Request]:
        copied = RequestSampler(self.stream)
        copied.load_state_dict(self.stream.state_dict())
        requests = iter(copied)
        if not self._readahead:
            yield from requests
        told: deque[Request] = deque()
        for request in requests:
            self._feed.prefetch(request)
            told.append(request)
            if len(told) > self._readahead:
                yield told.popleft()
        yield from told


class _Pass(Iterator[Batch]):
    """One pass over the rest of an epoch, at (`epoch`, `step`) as seen by the training loop."""

    def __init__(self, loader: TorchLoader, threads: int) -> None:
        self.began = self.epoch, self.step = loader.stream.epoch, loader.stream.step
        self._died = False
        self._workers: WorkerBatches | None = None
        self._copier = copier_for(loader.device)
        self._sent: Generator[Sent, None, None] | Prefetcher[Sent]
        if loader.num_workers:
            workers = self._workers = WorkerBatches(loader.dataloader)
            sent = _sent(in_order(self._copier.prepare, workers, threads=0), self._copier)
            self._sent = Prefetcher(
                sent,
                depth=loader.prefetch,
                while_waiting=workers.check,
                while_closing=workers.release,
            )
            return
        make = partial(_make, loader.feed, self._copier)
        self._sent = _sent(in_order(make, loader._requests, threads=threads), self._copier)
        if loader.prefetch:
            self._sent = Prefetcher(self._sent, depth=loader.prefetch)

    def __next__(self) -> Batch:
        try:
            batch = self._copier.receive(next(self._sent))
        except RuntimeError as error:
            # Where a DataLoader was used before, torch raises in the main thread when a child dies.
            self._died = self._workers is not None
            if self._workers is not None and not isinstance(error, WorkerDiedError):
                self._workers.explain(error)
            raise
        self.step += 1
        return batch

    def stop(self) -> bool:
        """Stop what runs ahead; say whether all of it has ended, and none of it in death."""
        self._sent.close()
        ended = self._died
        if self._workers is not None:
            self._workers.close()
            ended |= self._workers.ended
        busy = isinstance(self._sent, Prefetcher) and self._sent.busy
        return not busy and not ended


def _check_counts(**counts: Any) -> None:
    """Raise TypeError or ValueError for an option that is no count."""
    for name, number in counts.items():
        if not isinstance(number, SupportsIndex):
            raise TypeError(f"{name} must be an integer, got {number!r}")
        if number < 0:  # type: ignore[operator]
            raise ValueError(f"{name} must be at least 0, got {number}")


def _make(feed: Feed, copier: Copier, request: Request) -> Batch:
    return copier.prepare(as_parts(feed(request)))


def _sent(batches: Generator[Batch, None, None], copier: Copier) -> Generator[Sent, None, None]:
    """Start the copy of each batch; closing it closes `batches`."""
    with closing(batches):
        for batch in batches:
            yield copier.send(batch)
