"""Which epoch a pass over a dataset belongs to."""

from __future__ import annotations

import numpy as np

from twinfeed.loaders.tensorflow.errors import remembered
from twinfeed.samplers import BatchStream


class Passes:
    """Begin each pass at the sampler's epoch, and move the sampler on when a pass was delivered.

    Not when an iterator is made: Keras makes more of them than it draws from, and a warm start
    fills them at once. Not when the last batch is read: that may be far ahead of the consumer.
    A sampler in mid-epoch makes passes of that epoch's remainder alone.
    """

    def __init__(self, sampler: BatchStream, /) -> None:
        self.sampler = sampler
        self.epoch, self.start = sampler.epoch, sampler.step

    @remembered
    def begin(self) -> tuple[np.int64, np.int64]:
        """Say at which (epoch, step) a pass begins."""
        epoch, step = self.sampler.epoch, self.sampler.step
        if step != self.start or (self.start and epoch != self.epoch):
            of = f"the remainder of epoch {self.epoch}" if self.start else "whole epochs"
            raise ValueError(
                f"the sampler stands at step {step} of epoch {epoch}, and this dataset was made "
                f"at step {self.start}, of {of}: make another one of the sampler as it stands"
            )
        return np.int64(epoch), np.int64(step)

    def end(self, epoch: np.int64) -> None:
        """Note that the last batch of `epoch` has reached the consumer."""
        if epoch == self.sampler.epoch:
            self.sampler.set_epoch(int(epoch) + 1)
