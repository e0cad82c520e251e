"""What the tests of Keras share."""

from __future__ import annotations

from typing import Any

import keras


class Interrupt(keras.callbacks.Callback):
    """End `fit` within a batch, as Ctrl-C or a killed job does."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
