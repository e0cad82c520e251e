"""The loader for PyTorch: batches made ahead, on threads or in workers, and on to the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cached_property
from itertools import count
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset

from twinfeed.loaders import _checks
from twinfeed.loaders._batcher import Batch, planner_for, stored_fields
from twinfeed.loaders._loader import Loader
from twinfeed.loaders._making import ahead, making
from twinfeed.loaders._prefetch import Prefetcher, in_order
from twinfeed.loaders.errors import WorkerDiedError
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.index._paths import is_url
from twinfeed.loaders.reading._asking import Answering
from twinfeed.loaders.request import Request
from twinfeed.loaders.torch._device import Copier, Sent, chosen_device, copier_for
from twinfeed.loaders.torch._workers import CatchingDataset, WorkerBatches, as_served
from twinfeed.loaders.torch.dataset import NO_CACHE_IN_WORKERS, as_parts


class TorchLoader(Loader):
    """Iterate over the batches of `feed` as tensors on `device`.

    Where a pass begins, and what the state counts: see `Loader`.

    - `device` gets the tensors. Default: the current CUDA device, or the CPU where there is none.
    - `prefetch`: batches kept ready on the device, ahead of the step. With 0, the calling thread
      does all the work.
    - `threads`: threads that make one batch each. If the sampler reuses decoded images, the threads
      share one batch, and as many others decode one image each for coming batches, beside the live
      images. Default: the processors this process may use, at most 8; no threads if nothing is
      decoded. Reads and image decoders release the interpreter lock.
    - `num_workers`: processes that make the batches, for a transform that holds the lock. They are
      those of a real `DataLoader`. `threads` (default 0) are then threads within each worker.
    - `prefetch_factor`: batches that each worker makes ahead, as in a `DataLoader`.
    - `persistent_workers`: whether the workers stay from pass to pass.
    - `multiprocessing_context`: how the workers are started, such as "spawn".
    - `timeout`: seconds to wait for a worker's batch. 0 waits for ever.
    - `worker_init_fn`: a function that each worker calls with its number when it starts.

    On a GPU, the memory of a batch is free when the steps that read the batch have run. A loop that
    never waits for the device may be far ahead of these steps. Capture CUDA graphs before the loop,
    or with `capture_error_mode="thread_local"`, as other threads use the device.

    Raises ValueError where options contradict each other, and for a device that torch cannot use.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> feed = Feed(index, ExactOnceBatchSampler(3, batch_size=2))
    >>> with TorchLoader(feed, device="cpu") as loader:
    ...     for batch in loader:
    ...         print(batch["id"], batch["word"], loader.step)
    tensor([0, 1]) [b'to', b'be'] 1
    tensor([2]) [b'or'] 0
    """

    def __init__(
        self,
        feed: Feed,
        /,
        *,
        device: torch.device | str | None = None,
        prefetch: int = 2,
        threads: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(feed)
        self.device = chosen_device(device)
        self.num_workers = _checks.count("num_workers", num_workers, minimum=0)
        if num_workers:
            self.prefetch = _checks.count("prefetch", prefetch, minimum=0)
            wanted = _checks.count("threads", threads or 0, minimum=0)
            self.threads = 0 if feed.alone else wanted
        else:
            self.prefetch, self.threads = ahead(feed, prefetch, threads)
        if num_workers and not prefetch:
            raise ValueError(f"prefetch=0 needs num_workers=0, got num_workers={num_workers}")
        if num_workers and feed.sampler.live is not None:
            raise ValueError(NO_CACHE_IN_WORKERS)
        self._worker_options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
        }
        self._place = _Place(self)
        # A DataLoader checks the options.
        DataLoader(_NotIterated(self), batch_size=None, **self._worker_options)

    @cached_property
    def _workers(self) -> DataLoader[Any]:
        """The DataLoader whose workers make the batches."""
        reader = None if self._answering is None else self._answering.reader()
        dataset = CatchingDataset(self.feed, reader, threads=self.threads)
        serve: dict[str, Any] = {"batch_sampler": self._place, "collate_fn": as_served}
        # Else torch draws the workers' seeds from the global state, and the loop's dropout changes.
        serve["generator"] = torch.Generator()
        return DataLoader(dataset, **serve, **self._worker_options)

    @cached_property
    def _answering(self) -> Answering | None:
        """What reads remote shards for the workers: this process, since it plans what is read."""
        remote = is_url(self.feed.index.root)
        return Answering(self, self._reader, self.threads) if remote else None

    def _begin(self, epoch: int, start: int) -> _Pass:
        return _Pass(self, epoch, start)

    @property
    def sampler(self) -> TorchLoader:
        """Itself: trainers look for `loader.batch_sampler.sampler` when they set the epoch."""
        return self

    batch_sampler = sampler

    @property
    def dataset(self) -> NoReturn:
        """Refuse to let batches be skipped: trainers that skip batches ask for the dataset."""
        raise AttributeError(
            "a TorchLoader has no dataset, and batches are not skipped: load_state_dict goes on "
            "where a run stopped, so turn off the trainer's own skipping (ignore_data_skip=True in "
            "transformers; leave skip_first_batches of Accelerate out)"
        )

    def dataloader(self, arrange: Callable[[Batch], Any] | None = None, /) -> DataLoader[Any]:
        """Make a `DataLoader` of the batches, for Keras on torch. The DataLoader counts nothing.

        - `arrange` turns a batch into what a model is given, such as `(inputs, targets)`.

        The DataLoader has the length of an epoch. A pass runs from the loader's place to the end of
        the epoch. An evaluation is whole, except in the first pass after `load_state_dict`. A pass
        that is given up changes nothing: Keras looks at a batch to build a model. After the last
        batch the loader stands at the next epoch. So where an epoch is a single batch, a look is a
        whole pass: build the model first, or take a `ResumeCallback`.

        Lightning, Accelerate and transformers take the loader itself. If one of them makes another
        DataLoader from this DataLoader, the other DataLoader raises TypeError.
        """
        return _Lent(self, arrange or as_served)

    def _lent(self) -> Iterator[Batch]:
        """Yield the batches of a pass, of which only the last is counted."""
        self._end()
        epoch, start, turn = self._pass_begins()
        self._meter.begin(start)
        running, left = self._begin(epoch, start), count(len(self) - start - 1, -1)

        def received() -> bool:
            last = next(left) == 0
            if last:
                self._pass_delivered(epoch, turn)
            return last

        yield from self._deliver(running, received, batches=len(self) - start)

    def close(self) -> None:
        """Stop the running pass and the workers, and close the files; a later pass starts anew."""
        super().close()
        self.__dict__.pop("_workers", None)
        answering = self.__dict__.pop("_answering", None)
        if answering is not None:
            answering.close()


class _Lent(DataLoader[Any]):
    """The lent passes of a loader, as a DataLoader without workers."""

    def __init__(self, loader: TorchLoader, arrange: Callable[[Batch], Any]) -> None:
        super().__init__(_NotIterated(loader), batch_size=None, collate_fn=as_served)
        self._loader, self._arrange = loader, arrange

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in self._loader._lent():
            yield self._arrange(batch)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class _NotIterated(IterableDataset[Any]):
    """The dataset of a lent DataLoader. Only another DataLoader would iterate over the dataset."""

    def __init__(self, loader: TorchLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a trainer has made another DataLoader of TorchLoader.dataloader(), and might read "
            "ahead, skip or share out batches that the loader counts: give the trainer the "
            "TorchLoader itself, unprepared, over feed.shard(rank, world_size)"
        )


class _Place:
    """What the DataLoader of the workers draws from: the requests of the pass that begins."""

    def __init__(self, loader: TorchLoader) -> None:
        self._loader = loader
        self.begins = (0, 0)

    def __iter__(self) -> Iterator[Request]:
        # The workers share the page cache, and this process reads remote shards for them. So this
        # process tells, once, what they will read.
        feed, reader = self._loader.feed, self._loader._reader
        planner = planner_for(feed, reader, *self.begins)
        stored = stored_fields(feed)
        for request in feed.requests(*self.begins):
            place, planned = (request.epoch, request.step), planner is not None
            reader.follow(feed.sampler, stored, *place, planned=planned)
            if planner is not None:
                planner.reached(request.step)
            yield request

    def __len__(self) -> int:
        return len(self._loader)


class _Pass(Iterator[Batch]):
    """One pass over the rest of an epoch."""

    def __init__(self, loader: TorchLoader, epoch: int, start: int) -> None:
        self._loader = loader
        self._died = False
        self._workers: WorkerBatches | None = None
        self._copier = copier_for(loader.device)
        self._sent: Generator[Sent, None, None] | Prefetcher[Sent]
        if loader.num_workers:
            loader._place.begins = epoch, start
            workers = WorkerBatches(loader._workers, loader._meter, start)
            self._workers = workers
            sent = _sent(in_order(self._copier.prepare, workers, threads=0), self._copier)
            self._sent = Prefetcher(
                sent,
                depth=loader.prefetch,
                while_waiting=workers.check,
                while_closing=workers.release,
            )
            return
        made = making(
            loader.feed,
            loader._reader,
            epoch,
            start,
            threads=loader.threads,
            meter=loader._meter,
            then=lambda batch: self._copier.prepare(as_parts(batch)),
            empty=self._copier.empty,
        )
        self._sent = _sent(made, self._copier)
        if loader.prefetch:
            self._sent = Prefetcher(self._sent, depth=loader.prefetch)

    def __next__(self) -> Batch:
        try:
            return self._copier.receive(next(self._sent))
        except RuntimeError as error:
            # Where a DataLoader was used before, torch raises in the main thread when a child dies.
            self._died = self._workers is not None
            if self._workers is not None and not isinstance(error, WorkerDiedError):
                self._workers.explain(error)
            raise

    def close(self) -> None:
        """Stop what runs ahead. A later pass cannot use workers that have ended."""
        self._sent.close()
        ended = self._died or (isinstance(self._sent, Prefetcher) and self._sent.busy)
        if self._workers is not None:
            self._workers.close()
            ended |= self._workers.ended
        if ended:
            self._loader.__dict__.pop("_workers", None)


def _sent(batches: Generator[Batch, None, None], copier: Copier) -> Generator[Sent, None, None]:
    """Start the copy of each batch; closing it closes `batches`."""
    with closing(batches):
        for batch in batches:
            yield copier.send(batch)
