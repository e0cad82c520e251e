"""Where a training loop stands: counted at the loop, kept in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from twinfeed.loaders.tensorflow.errors import original_errors
from twinfeed.samplers import BatchStream


class Position(tf.train.experimental.PythonState):
    """Count the batches that a loop of one's own receives; put it into a `tf.train.Checkpoint`.

    `counted(dataset)` iterates over any dataset made of `sampler` (mapped, prefetched to a device
    or distributed too) and raises errors as they were raised. The state counts what the loop has
    received, however far the dataset has run ahead. Restoring it moves the sampler, of which the
    next dataset is made: in mid-epoch, of the remainder. A checkpoint of other data or another
    sampler is refused with StateMismatchError.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.loaders.tensorflow import make_dataset
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> def begin():
    ...     sampler = ExactOnceBatchSampler(3, batch_size=1)
    ...     return sampler, Position(sampler)
    >>> sampler, position = begin()
    >>> for batch in position.counted(make_dataset(index, sampler)):
    ...     path = tf.train.Checkpoint(position=position).save(mkdtemp() + "/checkpoint")
    ...     break
    >>> sampler, position = begin()
    >>> status = tf.train.Checkpoint(position=position).restore(path)
    >>> [batch["id"].numpy().tolist() for batch in position.counted(make_dataset(index, sampler))]
    [[1], [2]]
    >>> position.epoch, position.step
    (1, 0)
    """

    def __init__(self, sampler: BatchStream, /) -> None:
        self.sampler = sampler
        self._within: tuple[int, int] | None = None
        self._running: object = None

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that the loop will receive."""
        return int(self.state_dict()["epoch"])

    @property
    def step(self) -> int:
        """Step of the next batch that the loop will receive."""
        return int(self.state_dict()["step"])

    def counted(self, dataset: Iterable[Any], /) -> Iterator[Any]:
        """Yield the batches of one pass, counting them.

        The sampler follows when the pass ends, also by `break`, by `take`, or before what
        `prefetch_to_device` had drawn: the next dataset is made of what the loop has not received.
        """
        epoch, step = self.sampler.epoch, self.sampler.step
        here = self._running = object()
        self._within = epoch, step
        try:
            with original_errors():
                batches = iter(dataset)
            while True:
                try:
                    with original_errors():
                        batch = next(batches)
                except StopIteration:
                    break
                step += 1
                if step == len(self.sampler):
                    epoch, step = epoch + 1, 0
                if self._running is here:
                    self._within = epoch, step
                yield batch
        finally:
            if self._running is here:
                self.load_state_dict(self.sampler.state_at(epoch, step))

    def state_dict(self) -> dict[str, Any]:
        """Say where the loop stands: a JSON-able dict that any world size accepts."""
        if self._within is None:
            return self.sampler.state_dict()
        return self.sampler.state_at(*self._within)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Move the sampler to a state; StateMismatchError for other data."""
        self.sampler.load_state_dict(state)
        self._within = self._running = None

    def serialize(self) -> str:
        """Give the state to `tf.train.Checkpoint`."""
        return json.dumps(self.state_dict())

    def deserialize(self, state: str | bytes) -> None:
        """Take the state from `tf.train.Checkpoint`."""
        self.load_state_dict(json.loads(state))
