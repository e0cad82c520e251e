"""Copy batches to the device ahead of the step that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import aligned
from twinfeed.loaders.support.array_types import Array

# Streams and events have no types in torch.
cuda: Any = torch.cuda


class JaggedParts(NamedTuple):
    """The parts of a jagged tensor, and the lengths of its shortest and longest row.

    The tensor is made when the loop receives the batch. If two threads made jagged tensors at once,
    torch could mix up their lengths.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    shortest: int | None
    longest: int | None

    def to_tensor(self) -> torch.Tensor:
        """Return the jagged tensor."""
        # With the lengths, or torch would copy the offsets from the device to find them.
        # torch cannot join tensors that were made in inference mode with those that were not. So
        # switch the mode to that in which the values and offsets were made.
        with torch.inference_mode(self.values.is_inference()):
            return torch.nested.nested_tensor_from_jagged(
                self.values, self.offsets, min_seqlen=self.shortest, max_seqlen=self.longest
            )


class Sent(NamedTuple):
    """A batch that is being copied: its tensors on the device, and the event after the copy."""

    batch: Batch
    copied: Any = None


class Copier:
    """Copy batches to a device that has no streams, such as the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], /) -> Array:
        """Return an uninitialized array in memory from which `send` can copy: pinned for CUDA."""
        return aligned(shape, dtype)

    def prepare(self, batch: Batch, /) -> Batch:
        """Move tensors to memory from which `send` can copy, in the thread that makes the batch."""
        return batch

    def send(self, batch: Batch, /) -> Sent:
        """Start to copy the tensors of a batch to the device; for the CPU, nothing is copied."""
        if self.device.type == "cpu":
            return Sent(batch)
        return Sent(each_tensor(lambda tensor: tensor.to(self.device), batch))

    def receive(self, sent: Sent, /) -> Batch:
        """Return the batch on the device, which the current stream may compute on."""
        return join_jagged(sent.batch)


class CudaCopier(Copier):
    """Copy on a CUDA stream for copies alone, so that copies and computation overlap.

    - Copies start from pinned memory, into which batches are collated. A copy from other memory
      would block its caller until the copy is done. torch reuses pinned memory only after the copy
      from it is done, and identifies the memory by its first address.
    - The computing stream waits for the copy's event before it touches the batch.
    - The tensors belong to the copying stream, and are recorded on the computing stream. Otherwise
      a later copy could reuse their memory while a step still reads them.
    """

    def __init__(self, device: torch.device) -> None:
        index = cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)  # in other threads another device may be current
        self.stream = _copying_stream(self.device)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], /) -> Array:
        """Return an uninitialized array in pinned memory, from which a GPU copies by itself."""
        with cuda.device(self.device):
            memory = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8, pin_memory=True)
        return memory.numpy().view(dtype).reshape(shape)

    def prepare(self, batch: Batch, /) -> Batch:
        """Move tensors that are not in pinned memory to it, in the thread that makes the batch."""
        with cuda.device(self.device):
            return each_tensor(_pinned, batch)

    def send(self, batch: Batch, /) -> Sent:
        """Start to copy the tensors of a batch to the device, on the stream for copies."""
        # The device comes first: else leaving the stream would create another device's context.
        with cuda.device(self.device), cuda.stream(self.stream):
            copy = each_tensor(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
            return Sent(copy, self.stream.record_event())

    def receive(self, sent: Sent, /) -> Batch:
        """Return the batch on the device, and make the current stream wait for the copy."""
        computing = cuda.current_stream(self.device)
        computing.wait_event(sent.copied)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            """Keep the tensor's memory from being reused before the current stream is done."""
            tensor.record_stream(computing)
            return tensor

        return join_jagged(each_tensor(record, sent.batch))


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its memory is pinned, and else a copy in pinned memory."""
    if tensor.is_pinned():
        return tensor
    # numpy copies on this thread, and `Tensor.pin_memory` on as many as there are processors.
    copy = torch.empty_like(tensor, pin_memory=True, memory_format=torch.contiguous_format)
    _bytes_of(copy)[:] = _bytes_of(tensor.contiguous())
    return copy


def _bytes_of(tensor: torch.Tensor) -> Array:
    """Return the bytes of a contiguous tensor of any dtype, without copying them."""
    return tensor.view(-1).view(torch.uint8).numpy()


@cache
def _copying_stream(device: torch.device) -> Any:
    """Return the CUDA stream for copies to a device, the same in all passes of a process."""
    # torch reuses the memory of freed tensors only on the stream that has allocated them.
    return cuda.Stream(device)


def copier_for(device: torch.device, /) -> Copier:
    """Return the copier to a device, which for CUDA uses a stream."""
    return CudaCopier(device) if device.type == "cuda" else Copier(device)


def torch_device(device: torch.device | str | None, /) -> torch.device:
    """Return a device as a `torch.device`; None is the current CUDA device, or else the CPU."""
    if device is None:
        if not cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", cuda.current_device())
    try:
        chosen = torch.device(device.lower().lstrip("/") if isinstance(device, str) else device)
        torch.empty(0, device=chosen)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        why = str(error).splitlines()[0]
        problem = f"device must be one that torch can use here, got {device!r}: {why}"
        raise ValueError(problem) from error
    return chosen


def each_tensor(function: Callable[[Any], Any], batch: Mapping[str, Any], /) -> Batch:
    """Apply `function` to every tensor and array of a batch, and to the parts of jagged tensors."""

    def apply(value: Any) -> Any:
        if isinstance(value, JaggedParts):
            return value._replace(values=function(value.values), offsets=function(value.offsets))
        return function(value) if isinstance(value, (torch.Tensor, np.ndarray)) else value

    return {name: apply(value) for name, value in batch.items()}


def join_jagged(batch: Batch, /) -> Batch:
    """Replace the `JaggedParts` in a batch by jagged tensors, in place, and return the batch."""
    for name, value in batch.items():
        if type(value) is JaggedParts:
            batch[name] = value.to_tensor()
    return batch
