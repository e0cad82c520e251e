"""Pass the tensors of a worker to its parent: through memory that both can see."""

from __future__ import annotations

import os

import torch
from torch.utils.data import get_worker_info

from twinfeed.loaders.errors import WorkerDiedError
from twinfeed.loaders.feed.definition import Batch
from twinfeed.loaders.support.system import SHARED_MEMORY, shared_memory
from twinfeed.loaders.torch._copier import each_tensor

FEWER = "lower num_workers or prefetch_factor, or decode on threads (num_workers=0)"


def shared(batch: Batch, /) -> Batch:
    """In a worker, move tensors to shared memory; elsewhere return the batch as it is.

    torch does so by itself, in a thread of the worker's queue. An error in this thread drops the
    batch, and the loop waits for the batch for ever.

    Raises:
        WorkerDiedError: there is no shared memory left.
    """
    worker = get_worker_info()
    if worker is None:
        return batch
    try:
        return each_tensor(torch.Tensor.share_memory_, batch)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        many = "Too many open files" in why
        raise WorkerDiedError(
            f"worker {worker.id} of {worker.num_workers} (process {os.getpid()}) cannot share its "
            f"batch: {why}",
            advice="raise `ulimit -n`" if many else full(),
        ) from None


def full() -> str:
    """Say what to do where shared memory may be full."""
    return (
        f"workers pass batches through {SHARED_MEMORY}, which may be full ({shared_memory()}): "
        f"enlarge it (in a container `--shm-size`), {FEWER}"
    )
