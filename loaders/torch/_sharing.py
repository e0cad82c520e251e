"""Pass the tensors of a worker to its parent: through memory that both can see, or by value."""

from __future__ import annotations

import multiprocessing
import os
from math import inf, prod
from typing import Any

import torch
from torch.utils.data import get_worker_info

from twinfeed.loaders.batches.feed import Feed, recipe_of
from twinfeed.loaders.errors import LoaderError, WorkerDiedError
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import dtype_of, is_string, mode_of
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.reading.side_table import ByRecord
from twinfeed.loaders.support.system import SHARED_MEMORY, file_limit, open_files, shared_memory
from twinfeed.loaders.torch._copier import each_tensor

# The advice of errors: fewer batches at once need less memory and fewer descriptors.
ADVISE_FEWER_BATCHES = "lower num_workers or prefetch_factor, or decode on threads (num_workers=0)"

MAX_BYTES_BY_VALUE = 1 << 14
"""Tensors of at most this many bytes are pickled; a larger one takes a file descriptor in each
process that has it.
"""


def share_memory(batch: Batch, /, *, by_value: int = 0) -> Batch:
    """In a worker process, move the tensors of a batch to shared memory; elsewhere do nothing.

    An error of torch's own feeder thread would drop the batch. Tensors of at most `by_value` bytes
    become numpy arrays, which are pickled.
    """
    worker = get_worker_info()
    if worker is None:
        return batch

    def share(tensor: torch.Tensor) -> Any:
        if tensor.nbytes <= by_value and tensor.dtype != torch.bfloat16:
            return tensor.numpy()
        return tensor.share_memory_()  # type: ignore[no-untyped-call]

    try:
        return each_tensor(share, batch)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise WorkerDiedError(
            f"worker {worker.id} of {worker.num_workers} (process {os.getpid()}) cannot share its "
            f"batch: {why}",
            advice="raise `ulimit -n`" if "Too many open files" in why else shared_memory_advice(),
        ) from None


def check_descriptors(feed: Feed, batches: int, /) -> None:
    """Raise LoaderError if this process may not open a file descriptor for each shared tensor.

    Up to `batches` batches exist at once. torch could wait for ever.
    """
    tensors = _max_large_tensors(feed)
    limit, needed = file_limit(), tensors * batches + open_files()
    if limit is not None and needed > limit:
        raise LoaderError(
            f"workers pass each of the {tensors} large tensors of a batch by a descriptor, about "
            f"{needed} at once, and this process may have {limit}",
            advice=f"raise `ulimit -n`, {ADVISE_FEWER_BATCHES}",
        )


def _max_large_tensors(feed: Feed) -> int:
    """Return how many tensors of a batch may have more than `MAX_BYTES_BY_VALUE`."""
    spec, collate = recipe_of(feed).shapes
    sizes: list[float] = []  # for each tensor, the bytes of a sample
    for name, field in spec.items():
        if is_string(field.dtype):  # strings are no tensors
            continue
        if None in field.shape or mode_of(collate, name) != "stack":
            sizes += [inf, inf]  # of any size: its values, and their lengths, offsets or shapes
        else:
            shape: tuple[Any, ...] = field.shape
            sizes.append(prod(shape) * dtype_of(field).itemsize)
    for table in (*feed.index.columns.values(), *feed.side.values()):
        rows = table.table if isinstance(table, ByRecord) else table
        if not isinstance(rows, StringColumn):
            sizes.append(prod(rows.shape[1:]) * rows.dtype.itemsize)
    return sum(feed.sampler.batch_size * size > MAX_BYTES_BY_VALUE for size in sizes)


def check_semaphores() -> None:
    """Raise LoaderError if no semaphore can be created, since the queues of workers need them."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise LoaderError(
            f"workers need semaphores in {SHARED_MEMORY}: {error.strerror}",
            advice="mount it writable, or decode on threads (num_workers=0)",
        ) from error


def shared_memory_advice() -> str:
    """Return the advice of an error for a process that may have run out of shared memory."""
    return (
        f"workers pass batches through {SHARED_MEMORY}, which may be full ({shared_memory()}): "
        f"enlarge it (in a container `--shm-size`), {ADVISE_FEWER_BATCHES}"
    )
