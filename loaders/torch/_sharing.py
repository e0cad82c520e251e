"""Pass the tensors of a worker to its parent: through memory that both can see, or by value."""

from __future__ import annotations

import os
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.errors import LoaderError, WorkerDiedError
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.reading.prefetch.schedule import Request
from twinfeed.loaders.reading.source import FieldReader
from twinfeed.loaders.support.system import SHARED_MEMORY, file_limit, open_files, shared_memory
from twinfeed.loaders.torch._copier import each_tensor

# The advice of errors: fewer batches at once need less memory and fewer descriptors.
ADVISE_FEWER_BATCHES = "lower num_workers or prefetch_factor, or decode on threads (num_workers=0)"

MAX_BYTES_BY_VALUE = 1 << 14
"""Tensors of at most this many bytes are pickled; a larger one takes a file descriptor in each
process that has it.
"""


def share_memory(batch: Batch, /, *, by_value: int = 0) -> Batch:
    """In a worker process, move the tensors of a batch to shared memory; elsewhere do nothing."""
    worker = get_worker_info()
    if worker is None:
        return batch

    def share(tensor: torch.Tensor) -> Any:
        if tensor.nbytes <= by_value and tensor.dtype != torch.bfloat16:
            return tensor.numpy()
        return tensor.share_memory_()  # type: ignore[no-untyped-call]

    try:  # here, since an error of torch's own feeder thread would drop the batch
        return each_tensor(share, batch)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise WorkerDiedError(
            f"worker {worker.id} of {worker.num_workers} (process {os.getpid()}) cannot share its "
            f"batch: {why}",
            advice="raise `ulimit -n`" if "Too many open files" in why else shared_memory_advice(),
        ) from None


def check_descriptors(feed: Feed, reader: FieldReader, batches: int, /) -> None:
    """Raise LoaderError if this process may not open a file descriptor for each shared tensor.

    Up to `batches` batches exist at once. torch could wait for ever.
    """
    row_bytes: list[int] = []  # of each tensor, by a batch of no samples
    empty = Batcher(recipe_of(feed), reader=reader)(Request.plain(np.zeros(0, np.int64)))
    each_tensor(lambda array: row_bytes.append(array.itemsize * prod(array.shape[1:])), empty)
    tensors = sum(feed.sampler.batch_size * size > MAX_BYTES_BY_VALUE for size in row_bytes)
    limit, needed = file_limit(), tensors * batches + open_files()
    if limit is not None and needed > limit:
        raise LoaderError(
            f"workers pass each of the {tensors} large tensors of a batch by a descriptor, about "
            f"{needed} at once, and this process may have {limit}",
            advice=f"raise `ulimit -n`, {ADVISE_FEWER_BATCHES}",
        )


def shared_memory_advice() -> str:
    """Return the advice of an error for a process that may have run out of shared memory."""
    return (
        f"workers pass batches through {SHARED_MEMORY}, which may be full ({shared_memory()}): "
        f"enlarge it (in a container `--shm-size`), {ADVISE_FEWER_BATCHES}"
    )
