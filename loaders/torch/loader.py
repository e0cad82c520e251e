"""The loader for PyTorch: batches made ahead, on threads or workers, and copied to the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sized
from contextlib import closing
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from typing import Any, NoReturn, cast
from weakref import ref

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.loop.adapter import Adapter, adapter_of
from twinfeed.loaders.loop.feed_loader import PREFETCH, ThreadedLoader
from twinfeed.loaders.loop.loader import B
from twinfeed.loaders.support.temporary import socket_folder
from twinfeed.loaders.torch._copier import Copier, Sent, copier_for, torch_device
from twinfeed.loaders.torch._sharing import check_descriptors
from twinfeed.loaders.torch._workers import (
    ErrorAsValueDataset,
    PassRequests,
    WorkerBatches,
    detach_workers,
    identity,
    init_worker,
    without_fork,
)
from twinfeed.loaders.torch.dataset import NO_CACHE_IN_WORKERS, as_unjoined_tensors
from twinfeed.samplers import ExactOnceBatchSampler, validate


class _Adapter(Adapter):
    """Adapt a TorchLoader to Keras, which takes a DataLoader on torch."""

    def dataset(self, backend: str, arrange: Any, model: Any) -> Any:
        """Return a DataLoader over the batches, or None on Keras's TensorFlow backend."""
        # There Keras would draw batches of a DataLoader to infer their shapes, and lose them.
        if backend == "tensorflow" or not callable(arrange):
            return None
        return self.loader.dataloader(arrange)


class TorchLoader(ThreadedLoader[B]):
    """Iterate over the batches of `feed` as tensors on `device`.

    Where a pass begins, and what the state counts: see `Loader`.

    On a GPU, the memory of a batch is free when the steps that read the batch have run. A loop that
    never waits for the device may be far ahead of these steps. Capture CUDA graphs before the loop,
    or with `capture_error_mode="thread_local"`, as other threads use the device.

    Args:
        feed: what is fed.
        device: gets the tensors. Default: the current CUDA device, or the CPU without CUDA.
        prefetch: batches kept ready on the device, ahead of the step. With 0, the calling thread
            does all the work. Default: 2, or 0 for a source of your own that is `in_memory`, on a
            CPU.
        threads: threads that make one batch each. If the sampler reuses decoded images, the threads
            share one batch, and as many others decode one image each for coming batches, beside the
            live images. Default: the processors this process may use, at most 8; no threads if
            nothing is decoded. Reads and image decoders release the interpreter lock.
        num_workers: processes that make the batches, for a transform that keeps the interpreter
            lock. They are workers of a real `DataLoader`. `threads` (default 0) are then threads
            within each worker.
        prefetch_factor: batches that each worker makes ahead, as in a `DataLoader`.
        persistent_workers: whether the workers stay from pass to pass, and make the first batches
            of the next epoch in time.
        multiprocessing_context: how the workers are started, such as "spawn". Default: as
            everywhere in Python, or "spawn" for a source of your own that is not `fork_safe`.
        timeout: seconds to wait for a worker's batch. 0 waits without end.
        worker_init_fn: a function that each worker calls with its number when it starts.
        readahead: bytes to read before their batches need them. Default: 64 MiB while reading waits
            for a disk or a network, and 0 while all pages are in memory. 0 reads nothing ahead.

    Raises:
        ValueError: options contradict each other, or torch cannot use the device.

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

    _adapter = _Adapter
    _not_copied = ("_current_pass", "_continued_pass", "_workers")

    @validate.show_call("TorchLoader(feed)")
    def __init__(
        self,
        feed: Feed,
        *,
        device: torch.device | str | None = None,
        prefetch: int | None = None,
        threads: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        readahead: int | None = None,
    ) -> None:
        self.device = torch_device(device)
        self.num_workers = validate.integer("num_workers", num_workers, minimum=0)
        if prefetch is None and (num_workers or self.device.type != "cpu"):
            prefetch = PREFETCH
        threads = threads or 0 if num_workers else threads
        super().__init__(feed, prefetch=prefetch, threads=threads, readahead=readahead)
        if num_workers:
            if not prefetch:
                raise ValueError(f"prefetch=0 needs num_workers=0, got num_workers={num_workers}")
            if feed.sampler.traits.max_cached is not None:
                raise ValueError(NO_CACHE_IN_WORKERS)
            if not getattr(feed.index, "fork_safe", True):
                multiprocessing_context = without_fork(multiprocessing_context)
            self.prefetch = prefetch  # also where a transform sets global states: of its worker
        if not persistent_workers:  # workers end with their epoch
            self._goes_on = self._goes_on and not num_workers
        self._worker_options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "timeout": timeout,
            "worker_init_fn": partial(init_worker, worker_init_fn),
        }
        # A DataLoader checks the options.
        DataLoader(_BatchCount(self), batch_size=None, **self._worker_options)

    def _reset_after_fork(self) -> None:
        """In a forked child, forget the running pass without ending the parent's workers."""
        for batches in (self._current_pass, self._continued_pass and self._continued_pass[0]):
            detach_workers(getattr(getattr(batches, "_workers", None), "_iterator", None))
        detach_workers(getattr(vars(self).get("_workers"), "_iterator", None))
        super()._reset_after_fork()

    @cached_property
    def _workers(self) -> DataLoader[Any]:
        """The DataLoader whose workers make a batch, or return an error, for each request."""
        socket_folder()  # choose the folder for sockets here, since workers inherit it
        # Each tensor in shared memory needs a file descriptor. At most so many batches exist at
        # once: those that workers make, those that are ready, one being copied, one in the loop.
        in_workers = self.num_workers * (self._worker_options["prefetch_factor"] or 2)
        check_descriptors(self.feed, self.reader, in_workers + self.prefetch + 2)
        return DataLoader(
            ErrorAsValueDataset(self, threads=self.threads),
            sampler=PassRequests(self),
            batch_size=None,  # the dataset returns whole batches
            collate_fn=identity,
            # Without it, torch draws the workers' seeds from the global random state.
            generator=torch.Generator(),
            **self._worker_options,
        )

    def _start_pass(self, epoch: int, start: int) -> _DevicePass:
        """Start to make the batches of an epoch, from step `start` on, and to copy them."""
        if get_worker_info() is not None:  # each worker has a copy of the loader
            raise RuntimeError(
                "each worker of a DataLoader would give every batch of the TorchLoader: iterate "
                "over TorchLoader(feed, num_workers=…) itself"
            )
        copier = copier_for(self.device)
        if not self.num_workers:  # stages 1 and 2 on the threads of `_batches`
            prepared = lambda batch: copier.prepare(as_unjoined_tensors(batch))  # noqa: E731
            batches = self._batches(epoch, start, prepared, empty=copier.empty)
            return _DevicePass(self, copier, self._prefetched(_send_each(batches, copier)))
        workers = WorkerBatches(self._workers, self.meter, epoch, start)
        sent = Prefetcher(
            (copier.send(copier.prepare(batch)) for batch in workers),
            depth=self.prefetch,
            # A worker that dies may leave the thread waiting for ever. So the loop, while it waits
            # for the thread, checks the workers, and `close` ends them.
            while_waiting=workers.check,
            while_closing=workers.end_all_if_one_died,
        )
        return _DevicePass(self, copier, sent, workers)

    @property
    def sampler(self) -> TorchLoader[B] | SequentialSampler:
        """An object with `set_epoch`, which trainers call as `loader.sampler.set_epoch(epoch)`.

        This is the loader itself. For an evaluation it is a `SequentialSampler`, whose `set_epoch`
        is that of the loader: Lightning would replace a sampler of any other class.
        """
        return _EvaluationSampler(self) if self.feed.sampler.evaluation else self

    @property
    def batch_sampler(self) -> TorchLoader[B]:
        """This loader: trainers may call `loader.batch_sampler.sampler.set_epoch(epoch)`."""
        return self

    @property
    def dataset(self) -> Dataset[Any]:
        """For an evaluation, an object with the number of samples as its length, and nothing else.

        Trainers read the length of an evaluation from it.

        Raises:
            AttributeError: the loader is for training. Trainers that resume by skipping batches
                read `dataset`, and this loader resumes by itself.
        """
        if isinstance(self.feed.sampler, ExactOnceBatchSampler):  # each record once: an evaluation
            return _SampleCount(self.feed.sampler.num_samples)
        raise AttributeError(
            "a TorchLoader has no dataset: it resumes by load_state_dict and skips no batches, so "
            "turn the trainer's skipping off (ignore_data_skip=True, no skip_first_batches)"
        )

    def dataloader(self, arrange: Callable[[Batch], Any] | None = None, /) -> DataLoader[Any]:
        """Return a `DataLoader` over the batches of this loader, for Keras on torch.

        Its length is the number of batches of an epoch. It yields the batches from the loader's
        position to the end of the epoch, and of an evaluation all. The position moves to the next
        epoch when the last batch was yielded, and not before. So nothing is lost if Keras looks at
        the first batch to build a model, unless an epoch has a single batch: build the model before
        `fit`, or use a `ResumeCallback`.

        Lightning, Accelerate and transformers take the loader itself. A DataLoader that they make
        from this DataLoader raises TypeError.

        Args:
            arrange: turns a batch into what a model is given, such as `(inputs, targets)`.
        """
        return _PassDataLoader(self, arrange or identity)

    def close(self) -> None:
        """Stop the running pass and the workers, and close the files; a later pass opens them."""
        super().close()
        vars(self).pop("_workers", None)  # a cached property: a later pass makes other workers


class _PassDataLoader(DataLoader[Any]):
    """A DataLoader that yields a loader's batches: the result of `TorchLoader.dataloader`."""

    def __init__(self, loader: TorchLoader[Any], arrange: Callable[[Batch], Any]) -> None:
        super().__init__(_BatchCount(loader), batch_size=None, collate_fn=identity)
        self._loader, self._arrange = loader, arrange

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return adapter_of(self._loader).batches(self._arrange)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


class _BatchCount(IterableDataset[Any]):
    """A dataset that gives a DataLoader its length in batches, and cannot be iterated over."""

    def __init__(self, loader: TorchLoader[Any]) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "a trainer has made another DataLoader from TorchLoader.dataloader(): give the trainer "
            "the TorchLoader itself, of feed.shard(rank, world_size), and do not prepare it"
        )


class _SampleCount(Dataset[Any]):
    """A dataset without items: its length is the number of samples of an evaluation."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, record: object) -> NoReturn:
        raise TypeError("the dataset of a TorchLoader has only a length: read by a RecordDataset")


class _EvaluationSampler(SequentialSampler):
    """The sampler of an evaluation that trainers see. Lightning keeps a `SequentialSampler`."""

    def __init__(self, loader: TorchLoader[Any]) -> None:
        super().__init__(cast(Sized, loader.dataset))
        self.set_epoch = loader.set_epoch


class _DevicePass(Iterator[Batch]):
    """Iterate over the batches on the device: `sent` has those whose copies have started."""

    def __init__(
        self,
        loader: TorchLoader[Any],
        copier: Copier,
        sent: Generator[Sent, None, None] | Prefetcher[Sent],
        workers: WorkerBatches | None = None,
    ) -> None:
        # A pass that the loader holds must not keep it alive.
        self._loader, self._copier, self._sent, self._workers = ref(loader), copier, sent, workers

    def __next__(self) -> Batch:
        return self._copier.receive(next(self._sent))

    def close(self) -> None:
        """Stop the threads and workers of the pass."""
        if self._workers is None:
            self._sent.close()  # a generator or a thread
            return
        self._workers.cancel()  # first: no more records are read for the batches under way
        self._sent.close()  # stops the thread, but waits for only a few seconds
        self._workers.close()
        # Worker processes may stay for the next pass. But not if one has died, or if the thread
        # still uses them. `_workers` of the loader is a cached property: deleted here, it is
        # computed again when the next pass needs workers.
        if self._workers.any_died or cast(Prefetcher[Sent], self._sent).busy:
            loader = self._loader()
            if loader is not None:
                vars(loader).pop("_workers", None)


def _send_each(
    batches: Generator[Batch, None, None], copier: Copier
) -> Generator[Sent, None, None]:
    """Yield each batch after starting its copy to the device."""
    with closing(batches):
        for batch in batches:
            yield copier.send(batch)
