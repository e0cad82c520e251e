"""Put batches on to the device ahead of the step that asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from twinfeed.loaders.feed import Batch

# Streams and events have no types in torch.
cuda: Any = torch.cuda


class Sent(NamedTuple):
    """A batch on its way: its tensors on the device, and when they are there."""

    batch: Batch
    there: Any = None


class Copier(Protocol):
    """Carry batches to the device: prepared by who makes them, sent ahead, received."""

    def prepare(self, batch: Mapping[str, Any], /) -> Batch:
        """Put a batch where its copy can start from."""
        ...

    def send(self, batch: Batch, /) -> Sent:
        """Start the copy."""
        ...

    def receive(self, sent: Sent, /) -> Batch:
        """Make the batch safe to compute on."""
        ...

    def close(self) -> None:
        """Wait for the copies under way."""
        ...


class HostCopier:
    """Leave a batch where it is, or copy it to a device that has no streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, batch: Mapping[str, Any], /) -> Batch:
        return dict(batch)

    def send(self, batch: Batch, /) -> Sent:
        return Sent(each_tensor(lambda tensor: tensor.to(self.device), batch))

    def receive(self, sent: Sent, /) -> Batch:
        return sent.batch

    def close(self) -> None:
        return


class CudaCopier:
    """Copy on a stream of its own, so that copies and computation overlap.

    Four rules keep it free of races. Copies start from pinned memory, because one from pageable
    memory may still read its source when the call returns. A source is held until the copy's event
    has passed. The computing stream waits for that event before it touches the batch. And the
    tensors, which belong to the copying stream, are recorded on the computing stream, so that
    their memory is not given to a later copy while a step still reads them.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = cuda.Stream(device)
        self.device: torch.device = self.stream.device  # with its number, as other threads need it
        self._under_way: deque[tuple[Any, Batch]] = deque()

    def prepare(self, batch: Mapping[str, Any], /) -> Batch:
        with cuda.device(self.device):
            return each_tensor(lambda tensor: tensor.pin_memory(), batch)

    def send(self, batch: Batch, /) -> Sent:
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        # The device first: leaving a stream must not wake another device's context.
        with cuda.device(self.device), cuda.stream(self.stream):
            moved = each_tensor(lambda tensor: tensor.to(self.device, non_blocking=True), batch)
            there = self.stream.record_event()
        self._under_way.append((there, batch))
        return Sent(moved, there)

    def receive(self, sent: Sent, /) -> Batch:
        computing = cuda.current_stream(self.device)
        computing.wait_event(sent.there)

        def recorded(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(computing)
            return tensor

        return each_tensor(recorded, sent.batch)

    def close(self) -> None:
        self.stream.synchronize()
        self._under_way.clear()


def copier_for(device: torch.device, /) -> Copier:
    """Choose the copier that fits the device.

    >>> copier_for(torch.device("cpu")).send({"x": torch.ones(1)}).batch
    {'x': tensor([1.])}
    """
    return CudaCopier(device) if device.type == "cuda" else HostCopier(device)


def default_device() -> torch.device:
    """Give the current CUDA device, or the CPU where there is none.

    >>> default_device() if torch.cuda.is_available() else torch.device("cpu")
    device(type='cpu')
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def each_tensor(
    function: Callable[[torch.Tensor], torch.Tensor], batch: Mapping[str, Any], /
) -> Batch:
    """Apply `function` to every tensor of a batch, to the two parts of a jagged one; keep the rest.

    >>> each_tensor(lambda tensor: tensor + 1, {"x": torch.ones(1), "name": [b"cat"]})
    {'x': tensor([2.]), 'name': [b'cat']}
    """

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        nested: Any = value if value.is_nested else None
        if nested is not None:
            return jagged(function(nested.values()), function(nested.offsets()))
        return function(value)

    return {name: one(value) for name, value in batch.items()}


def jagged(values: torch.Tensor, offsets: torch.Tensor, /) -> torch.Tensor:
    """Make the jagged tensor whose rows lie in `values` between `offsets`.

    >>> jagged(torch.arange(3), torch.tensor([0, 1, 3])).unbind()
    (tensor([0]), tensor([1, 2]))
    """
    return torch.nested.nested_tensor_from_jagged(values, offsets)
