"""Batches from the worker processes of a DataLoader, and the error when a worker fails or dies.

The main process sends the requests of `PassRequests` to the workers. There an `ErrorAsValueDataset`
makes a batch for each, or returns the error. The main process receives them by `WorkerBatches`.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import recipe_of
from twinfeed.loaders.batches.meter import Meter
from twinfeed.loaders.errors import (
    ADVISE_IMPORTABLE,
    LoaderError,
    WorkerDiedError,
    pickled,
    sendable,
)
from twinfeed.loaders.feed.arguments import Batch, stored_fields
from twinfeed.loaders.loop.feed_loader import FeedLoader
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.reading.reader import Reader, plan_of_pass
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import end_with_parent
from twinfeed.loaders.support.system import describe_exit
from twinfeed.loaders.torch._copier import each_tensor
from twinfeed.loaders.torch._sharing import (
    ADVISE_FEWER_BATCHES,
    MAX_BYTES_BY_VALUE,
    share_memory,
    shared_memory_advice,
)
from twinfeed.loaders.torch.dataset import as_unjoined_tensors

T = TypeVar("T")

# How long the system may take to report that a process has ended, in seconds.
_EXIT_TIMEOUT = 2.0


class _WorkerError(NamedTuple):
    """An error that a worker sends in place of a batch, with its traceback as a string."""

    error: Exception
    traceback: str


class _WorkerBatch(NamedTuple):
    """A batch that a worker sends, with the times of its stages."""

    batch: Batch
    times: dict[str, int]


class _WorkerTraceback(Exception):  # noqa: N818 - shown as a cause, never raised
    """Show, as the cause of an error, where in the worker it was raised."""


class _RequestWithValues(NamedTuple):
    """A request as a worker receives it, with the values that the main process has read for it."""

    request: Request
    values: Mapping[str, Sequence[Any]] | Exception


class PrefetchedRequest(NamedTuple):
    """A request for a worker, whose records are read in the main process while it is pickled."""

    request: Request
    read: Callable[[Int64s], Mapping[str, Sequence[Any]]]  # of record ids: the values of each field

    def __reduce__(self) -> tuple[type[_RequestWithValues], tuple[Request, Any]]:
        """Pickle as a `_RequestWithValues`: with the values of the records, or an error."""
        # On the feeder thread of the worker's queue, where an error would be lost.
        try:
            return _RequestWithValues, (self.request, self.read(_distinct_records(self.request)))
        except Exception as error:
            return _RequestWithValues, (self.request, sendable(error))


class RequestValuesReader:
    """A reader in a worker, which returns the values that came with the latest request."""

    latest: _RequestWithValues

    def read_values(self, ids: Int64s, fields: Sequence[str], /) -> Mapping[str, Sequence[Any]]:
        """Return the values of records by field that came with the request, or raise its error."""
        request, values = self.latest
        if isinstance(values, Exception):
            raise values
        positions = np.searchsorted(_distinct_records(request), ids).tolist()
        return {name: [values[name][position] for position in positions] for name in fields}

    def close(self) -> None:
        """Do nothing: no file is open."""


def _distinct_records(request: Request) -> Int64s:
    """Return the distinct record ids of a request, sorted."""
    return np.unique(request.records)


def parent_reads(loader: FeedLoader[Any], /) -> bool:
    """Return whether the main process reads the records for its workers: those of remote shards."""
    return isinstance(loader.reader, Reader) and loader.reader.index.remote


class PassRequests:
    """The sampler of the workers' DataLoader: it yields the requests of an epoch from `start` on,
    and with `goes_on` of all after it.
    """

    def __init__(self, loader: FeedLoader[Any]) -> None:
        # No reference to the loader, or the workers would end only by the garbage collector.
        self._feed, self._reader, self._meter = loader.feed, loader.reader, loader.meter
        self._schedule, self._readahead = loader.schedule, loader.readahead
        self._parent_reads, self._goes_on = parent_reads(loader), loader._goes_on
        self.start = (0, 0)  # epoch and step
        self.cancelled = False

    def __iter__(self) -> Iterator[Request | PrefetchedRequest]:
        """Yield the requests, and prefetch the bytes of coming steps; if local, only advise."""
        feed, (epoch, step) = self._feed, self.start
        schedule, fields = self._schedule, stored_fields(feed.index, feed.fields)
        plan: ReadPlan | None = None

        def start_epoch(epoch: int, step: int, *, running: bool = True) -> None:
            nonlocal plan
            start, readahead = epoch * len(self) + step, self._readahead
            plan = plan_of_pass(self._reader, schedule, fields, start, readahead, running=running)

        start_epoch(epoch, step, running=False)
        for request in schedule.requests(
            epoch, step, goes_on=self._goes_on, seeds=feed.seeded, start_epoch=start_epoch
        ):
            global_step = request.epoch * len(self) + request.step
            # The context of a step prefetches when it is entered, and releases bytes when it is
            # left. It is entered here, so that the steps are entered in their order. If this
            # process reads the records, `_read` leaves it, on another thread.
            opened_step = ExitStack()
            if plan is not None:
                opened_step.enter_context(plan.step(global_step))
            if self._parent_reads:
                yield PrefetchedRequest(request, partial(self._read, opened_step))
            else:
                opened_step.close()
                yield request

    def _read(self, opened_step: ExitStack, records: Int64s) -> Mapping[str, Sequence[Any]]:
        """Return the values of records by field, and leave the context of their step."""
        with opened_step:  # at its end, leaves the context
            if self.cancelled:  # nobody receives the error: the pass has ended
                raise LoaderError("the pass was cancelled")
            return self._meter.timed(
                "reading", self._reader.read_values, records, self._feed.fields
            )

    def __len__(self) -> int:
        return len(self._feed.sampler)


class ErrorAsValueDataset(Dataset[Any]):
    """The dataset of the workers: it makes a batch for each request, or returns an error."""

    def __init__(self, loader: FeedLoader[Any], /, *, threads: int) -> None:
        self._values_reader = RequestValuesReader()
        reader = self._values_reader if parent_reads(loader) else loader.reader
        self._batcher = Batcher(recipe_of(loader.feed), reader=reader, threads=threads)

    def __getitem__(self, request: Request | _RequestWithValues, /) -> _WorkerBatch | _WorkerError:
        """Return the batch for a request with its times; or, if this fails, the error."""
        try:
            if isinstance(request, _RequestWithValues):
                self._values_reader.latest, request = request, request.request
            batch = as_unjoined_tensors(self._batcher(request))
            batch = share_memory(batch, by_value=MAX_BYTES_BY_VALUE)
            return _WorkerBatch(batch, self._batcher.meter.take())
        except Exception as error:
            # Not raised: torch would replace its text.
            text = traceback.format_exc()  # before `sendable`, which drops the traceback
            return _WorkerError(sendable(error), text)


def identity(batch: T, /) -> T:
    """Return the batch as it is: the `collate_fn` of batches that are collated already."""
    return batch


def init_worker(function: Callable[[int], None] | None, number: int, /) -> None:
    """Let a worker end with its parent, and call the user's `worker_init_fn` with its number."""
    end_with_parent()
    if function is not None:
        function(number)


def without_fork(context: Any, /) -> Any:
    """Return the user's `multiprocessing_context`, or "spawn"; raise ValueError if it is "fork"."""
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if method == "fork":
        raise ValueError(
            "the source says fork_safe=False, and forked workers may hang: "
            "give multiprocessing_context='spawn', or leave it out"
        )
    return context or "spawn"


class WorkerBatches(Iterator[Batch]):
    """The batches that the workers of a DataLoader make, from a step of an epoch on.

    A worker that died is an error: torch may wait for ever for the other half of its message.
    """

    def __init__(self, dataloader: DataLoader[Any], meter: Meter, epoch: int, step: int, /) -> None:
        self._dataloader: DataLoader[Any] | None = dataloader
        self._requests = cast(PassRequests, dataloader.sampler)
        self._requests.start, self._requests.cancelled = (epoch, step), False
        self._meter = meter
        self._iterator: Any = dataloader._iterator  # an iterator of persistent workers
        self._started = self.any_died = False

    @property
    def _workers(self) -> list[Any]:
        """The processes of the workers; an empty list before they start."""
        return list(getattr(self._iterator, "_workers", ()))

    def __next__(self) -> Batch:
        """Return the next batch as tensors, or raise the error that a worker has sent."""
        if self._dataloader is None:
            raise StopIteration
        try:
            if not self._started:
                with pickled():
                    self._iterator = iter(self._dataloader)
                self._started = True
                _unregister(self._iterator)
            batch: Any = next(self._iterator)
        except (RuntimeError, EOFError, OSError) as error:
            # The error of a worker that died may come before the system reports its end.
            unreported = not str(error).startswith("DataLoader worker (pid")
            self.check(error, _EXIT_TIMEOUT if unreported else 0)
            raise
        if isinstance(batch, _WorkerError):
            # An error keeps this frame alive, by its traceback, and the frame the workers. So end
            # them here: the garbage collector would wait for them until a timeout.
            self.close()
            try:
                raise batch.error from _WorkerTraceback(batch.traceback)
            finally:
                del batch
        self._meter.add(batch.times)
        return each_tensor(torch.as_tensor, batch.batch)

    def cancel(self) -> None:
        """Stop the main process from reading records for the workers' coming batches."""
        self._requests.cancelled = True

    def close(self) -> None:
        """Drop torch's iterator. The workers end, unless they are persistent."""
        # The traceback of an error may keep torch's iterator alive, and the iterator the workers.
        self.end_all_if_one_died()
        self._iterator = self._dataloader = None

    def check(self, error: Exception | None = None, seconds: float = 0) -> None:
        """If a worker dies within `seconds`, end all workers, and raise WorkerDiedError."""
        workers = self._workers
        for number in range(len(workers)):
            workers[number].join(seconds / len(workers))
            # `_shutdown`: torch has ended the workers.
            if workers[number].exitcode is not None and not self._iterator._shutdown:
                for worker in workers:
                    worker.terminate()
                raise _worker_died(number, workers) from error

    def end_all_if_one_died(self) -> None:
        """If a worker has ended, end all workers, and wake up the thread that waits for a batch."""
        workers = self._workers  # torch looks only every five seconds whether they are alive
        if any(worker.exitcode is not None for worker in workers):
            self.any_died = True
            for worker in workers:
                worker.terminate()
                worker.join(_EXIT_TIMEOUT / len(workers))
            self._iterator._worker_result_queue._writer.close()


def _unregister(iterator: Any) -> None:
    """Stop torch's signal handler from raising the death of workers in the body of the loop."""
    if iterator._worker_pids_set:
        iterator._worker_pids_set = False
        _remove_worker_pids(id(iterator))


def detach_workers(iterator: Any, /) -> None:
    """In a forked child, keep torch's iterator, or None, from ending the parent's workers."""
    if iterator is not None:
        iterator._shutdown = True
        multiprocessing.process._children.difference_update(iterator._workers)  # type: ignore[attr-defined]


def _worker_died(number: int, workers: Sequence[Any]) -> WorkerDiedError:
    """Return the error for a worker that has ended, with its exit status and the likely reason."""
    worker, exit_code = workers[number], workers[number].exitcode
    was_forked = (worker._start_method or multiprocessing.get_start_method()) == "fork"
    advice = "run with num_workers=0 (and `python -X faulthandler`) to see where it happens"
    if exit_code == -signal.SIGKILL:
        advice = f"the system may have run out of memory (see `dmesg`): {ADVISE_FEWER_BATCHES}"
    elif exit_code == -signal.SIGBUS:  # the access to a page that no memory is left for
        advice = shared_memory_advice()
    elif exit_code > 0 and not was_forked:  # it may have failed to import the main script
        advice = ADVISE_IMPORTABLE
    return WorkerDiedError(
        f"worker {number} of {len(workers)} (process {worker.pid}) {describe_exit(exit_code)}",
        advice=advice,
    )
