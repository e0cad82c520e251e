"""The batches of worker processes, and the error when a worker fails or dies."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader

from twinfeed.loaders.errors import IMPORTABLE, WorkerDiedError, pickled, sendable
from twinfeed.loaders.feed.config import Batch
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.feed import Feed, compile_feed
from twinfeed.loaders.making.meter import Meter, Spent
from twinfeed.loaders.reading.source import Reads
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.fork import end_with_parent
from twinfeed.loaders.support.system import describe_exit
from twinfeed.loaders.torch._copier import each_tensor
from twinfeed.loaders.torch._sharing import FEWER, SMALL, full, shared
from twinfeed.loaders.torch.dataset import RecordDataset, as_parts

# How long the system may take to report that a process has ended, in seconds.
_PATIENCE = 2.0


class _Failed(NamedTuple):
    """What a worker sends in place of a batch."""

    error: Exception
    trace: str


class _Made(NamedTuple):
    """What a worker sends: a batch, and where its time went."""

    batch: Batch
    spent: Spent


class _WorkerTraceback(Exception):  # noqa: N818 - shown as a cause, never raised
    """Show, as the cause of an error, where in the worker it was raised."""


class _Arrived(NamedTuple):
    """What a worker gets if the main process reads: a request, and its values or their error."""

    request: Request
    values: Mapping[str, Sequence[Any]] | Exception


class Sending:
    """A request whose values are read by `read` (of distinct records) while it is sent.

    The thread of the queue of a worker pickles the request. So the loop does not wait, and as many
    requests are read at once as there are workers. An error that is raised there would be lost.
    """

    def __init__(
        self, request: Request, read: Callable[[Int64s], Mapping[str, Sequence[Any]]], /
    ) -> None:
        self._request, self._read = request, read

    def __reduce__(self) -> tuple[type[_Arrived], tuple[Request, Any]]:
        try:
            return _Arrived, (self._request, self._read(_distinct(self._request)))
        except Exception as error:
            return _Arrived, (self._request, sendable(error))


class ArrivedReader:
    """Read, in a worker, the values that came with the request."""

    arrived: _Arrived

    def read(self, ids: Int64s, fields: Sequence[str], /) -> Mapping[str, Sequence[Any]]:
        """Return the values of each field for each id."""
        request, values = self.arrived
        if isinstance(values, Exception):
            raise values
        places = np.searchsorted(_distinct(request), ids).tolist()
        return {name: [values[name][place] for place in places] for name in fields}

    def close(self) -> None:
        """Do nothing: no file is open."""


def _distinct(request: Request) -> Int64s:
    """Return the records of a request, sorted, without padding."""
    return np.unique(request.records[request.ids >= 0])


class CatchingDataset(RecordDataset):
    """Serve batches of tensors, jagged tensors in their parts, and errors as values.

    torch would replace the words of an error that is raised. Use `collate_fn=as_served`. The
    workers read with `reader`, of which each has a copy.
    """

    def __init__(self, feed: Feed, reader: Reads, /, *, threads: int) -> None:
        self._records = len(feed.index)
        self._reader = reader
        self._batcher = Batcher(compile_feed(feed), reader=reader, threads=threads)

    def __getitems__(self, wanted: Any, /) -> Any:
        """Read the batch of one request."""
        try:
            if isinstance(wanted, _Arrived):
                assert isinstance(self._reader, ArrivedReader)
                self._reader.arrived, wanted = wanted, wanted.request
            batch = shared(as_parts(super().__getitems__(wanted)), small=SMALL)
            return _Made(batch, self._batcher.meter.take())
        except Exception as error:
            trace = traceback.format_exc()
            return _Failed(sendable(error), trace)


def as_served(batch: Any, /) -> Any:
    """Return the batch as it is."""
    return batch


def init_worker(function: Callable[[int], None] | None, number: int, /) -> None:
    """Start a worker: it ends with its parent. Then call the user's `worker_init_fn`, if any."""
    end_with_parent()
    if function is not None:
        function(number)


def not_forked(context: Any, /) -> Any:
    """Return how to start workers of a source that is not safe to fork: by spawn by default."""
    method = context if isinstance(context, str) or context is None else context.get_start_method()
    if method == "fork":
        raise ValueError(
            "the source says fork_safe=False, and forked workers may hang: "
            "give multiprocessing_context='spawn', or leave it out"
        )
    return context or "spawn"


class WorkerBatches(Iterator[Batch]):
    """Iterate over a DataLoader with workers, which start with the first batch.

    The iteration and `check` raise WorkerDiedError for a worker that died. Another thread may call
    `check` meanwhile: a worker that is killed while it sends leaves half a message, and torch waits
    for the other half for ever. `ended` says that `release` found workers that had ended. The
    DataLoader cannot be used again then.
    """

    def __init__(self, dataloader: DataLoader[Any], meter: Meter, start: int, /) -> None:
        self._dataloader: DataLoader[Any] | None = dataloader
        self.meter, self._step = meter, start
        self._iterator: Any = dataloader._iterator  # an iterator of persistent workers
        self._begun = self.ended = False

    @property
    def _workers(self) -> list[Any]:
        """The processes of the workers, none before they start."""
        return list(getattr(self._iterator, "_workers", ()))

    def __next__(self) -> Batch:
        if self._dataloader is None:
            raise StopIteration
        try:
            if not self._begun:
                with pickled():
                    self._iterator = iter(self._dataloader)
                self._begun = True
                _unregister(self._iterator)
            batch: Any = next(self._iterator)
        except (RuntimeError, EOFError, OSError) as error:
            self.explain(error)
            raise
        if isinstance(batch, _Failed):
            # Whoever keeps the error keeps this frame, and the frame keeps the workers. Left to the
            # garbage collector, workers end after a timeout.
            self.close()
            try:
                raise batch.error from _WorkerTraceback(batch.trace)
            finally:
                del batch
        made: _Made = batch
        self.meter.add(self._step, made.spent)
        self._step += 1
        return each_tensor(torch.as_tensor, made.batch)

    def close(self) -> None:
        """End the workers, unless another object keeps the DataLoader and with it the workers."""
        # The traceback of an error may keep torch's iterator. The iterator would keep the workers.
        self.release()
        self._iterator = self._dataloader = None

    def check(self) -> None:
        """Raise WorkerDiedError if a worker has ended before torch ended the workers."""
        workers = self._workers
        dead = [number for number, worker in enumerate(workers) if worker.exitcode is not None]
        if dead and not self._iterator._shutdown:
            for worker in workers:
                worker.terminate()
            raise _died(dead[0], workers)

    def release(self) -> None:
        """If a worker has ended, end all workers, and the wait for their batches.

        torch looks only every five seconds whether the workers live. Closing the pipe wakes torch
        at once.
        """
        workers = self._workers
        if any(worker.exitcode is not None for worker in workers):
            self.ended = True
            for worker in workers:
                worker.terminate()
                worker.join(_PATIENCE / len(workers))
            self._iterator._worker_result_queue._writer.close()

    def explain(self, error: Exception, /) -> None:
        """Raise WorkerDiedError if a worker that died caused `error`.

        torch's own message says so, unless torch was about to fetch a tensor from the dead worker.
        """
        workers = self._workers
        said = str(error).startswith("DataLoader worker (pid")
        if said or isinstance(error, (EOFError, OSError)):
            for number, worker in enumerate(workers):
                worker.join(0 if said else _PATIENCE / len(workers))
                if worker.exitcode is not None:
                    raise _died(number, workers) from error


def _unregister(iterator: Any) -> None:
    """Remove workers from the list of workers whose death torch reports by a signal.

    If another DataLoader has installed torch's signal handler, the handler would raise torch's
    error in the body of the loop.
    """
    if iterator._worker_pids_set:
        iterator._worker_pids_set = False
        _remove_worker_pids(id(iterator))


def disown(iterator: Any, /) -> None:
    """In a forked child, keep torch and multiprocessing from ending the parent's workers."""
    if iterator is not None:
        iterator._shutdown = True
        multiprocessing.process._children.difference_update(iterator._workers)  # type: ignore[attr-defined]


def _died(number: int, workers: Sequence[Any]) -> WorkerDiedError:
    """Return the error of a worker, which has ended: how it ended, and the likely reason."""
    worker = workers[number]
    how = describe_exit(worker.exitcode)
    forked = (worker._start_method or multiprocessing.get_start_method()) == "fork"
    return WorkerDiedError(
        f"worker {number} of {len(workers)} (process {worker.pid}) {how}",
        advice=_advice(-worker.exitcode, forked),
    )


def _advice(number: int, forked: bool) -> str:
    if number == signal.SIGKILL:
        return f"the system may have run out of memory (see `dmesg`): {FEWER}"
    if number == signal.SIGBUS:
        return full()
    if not forked and number < 0:  # the worker may have ended before its work began
        return IMPORTABLE
    return "run with num_workers=0 (and `python -X faulthandler`) to see where it happens"
