"""The batches of worker processes, and what to say when one of them dies."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from twinfeed.loaders.errors import WorkerDiedError
from twinfeed.loaders.feed import Batch

MEMORY = Path("/dev/shm")


class WorkerBatches(Iterator[Batch]):
    """Iterate over a DataLoader with workers, which start with the first batch.

    A worker that died is a WorkerDiedError, from the iteration or from `check`, which another
    thread may call: a worker killed while it sends leaves a torn message, which torch waits upon
    for ever.
    """

    def __init__(self, dataloader: DataLoader[Any], /) -> None:
        self._dataloader = dataloader
        self._iterator: Iterator[Batch] | None = None

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = iter(self._dataloader)
        try:
            return next(self._iterator)
        except RuntimeError as error:
            self.explain(error)
            raise

    def check(self) -> None:
        """Raise WorkerDiedError where a worker was killed, or ended with an error."""
        workers = list(getattr(self._iterator, "_workers", ()))
        for number, worker in enumerate(workers):
            # torch itself terminates workers, and does so while an iteration ends.
            if worker.exitcode not in (None, 0, -signal.SIGTERM):
                for other in workers:
                    other.terminate()
                raise died(number, len(workers), worker.pid, worker.exitcode)

    def explain(self, error: RuntimeError, /) -> None:
        """Raise WorkerDiedError where `error` is torch's word for it."""
        workers = list(getattr(self._iterator, "_workers", ()))
        if str(error).startswith("DataLoader worker (pid"):
            for number, worker in enumerate(workers):
                if worker.exitcode is not None:
                    raise died(number, len(workers), worker.pid, worker.exitcode) from error


def died(number: int, workers: int, pid: int | None, exitcode: int) -> WorkerDiedError:
    """Say how a worker ended, and what most often ends workers so.

    >>> print(died(1, 4, 321, -9))
    worker 1 of 4 (process 321) was killed by SIGKILL
      what to do: the system may have run out of memory (see `dmesg`): ...
    """
    how = f"ended with exit code {exitcode}"
    if exitcode < 0:
        how = f"was killed by {signal.Signals(-exitcode).name}"
    return WorkerDiedError(
        f"worker {number} of {workers} (process {pid}) {how}", advice=_advice(-exitcode)
    )


def _advice(number: int) -> str:
    fewer = "lower num_workers or prefetch_factor, or decode on threads (num_workers=0)"
    if number == signal.SIGKILL:
        return f"the system may have run out of memory (see `dmesg`): {fewer}"
    if number == signal.SIGBUS:
        room = "not there"
        if MEMORY.exists():
            usage = shutil.disk_usage(MEMORY)
            room = f"{usage.total >> 20} MiB, {usage.free >> 20} MiB of them free"
        return (
            f"workers pass batches through {MEMORY}, which may be full ({room}): enlarge it "
            f"(in a container `--shm-size`), {fewer}"
        )
    return "run with num_workers=0 (and `python -X faulthandler`) to see where it happens"
