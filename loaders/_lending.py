"""Loaders that lend their batches to a training loop which does not tell what it received."""

from __future__ import annotations

import threading
import warnings

from twinfeed.loaders._loader import Loader
from twinfeed.loaders.feed import Feed

# Frameworks begin passes in threads of their own. One for all, as loaders are pickled.
_LOCK = threading.Lock()


class LendingLoader(Loader):
    """Say where a lent pass begins; lent passes count nothing but whole epochs.

    A lent pass runs from where the loader stands to the end of the epoch. A pass that is given up
    costs nothing, since those who look at a batch before they train give passes up. After the last
    batch the loader stands at the next epoch. A callback that counts says where passes begin.
    """

    _counts = "loop over the loader itself"  # as a warning advises

    def __init__(self, feed: Feed, /) -> None:
        super().__init__(feed)
        self._armed: tuple[int, int] | None = None  # while something counts what is received
        self._latest: tuple[int, int] | None = None  # where the latest pass began
        self._times = 0  # that the training epoch of the latest pass was begun by passes alone
        self._turn = 0  # a new one whenever something begins or ceases to count

    def pass_begins(self) -> tuple[int, int, int]:
        """Return the epoch and the step at which a lent pass begins, and the turn it belongs to."""
        with _LOCK:
            if self._armed is not None:
                self._latest = self._armed
                return *self._armed, self._turn
            before, self._latest = self._latest, self._cursor.begin()
            again = before is not None and before[0] == self._latest[0]
            self._times = self._times + 1 if again else 1
            if self._times == 3 and not self.feed.sampler.evaluation:
                warnings.warn(
                    f"passes begin epoch {self._latest[0]} for the third time, so the same batches "
                    f"come again: call loader.set_epoch(epoch) before each pass, or "
                    f"{self._counts}, which goes on after the batches that the loop received",
                    stacklevel=3,
                )
            return *self._latest, self._turn

    def pass_delivered(self, epoch: int, turn: int, /) -> None:
        """Move on to the next epoch, or have the next pass begin there while something counts."""
        with _LOCK:
            if turn != self._turn:
                return  # a pass that was given up may still run ahead, and would skip an epoch
            evaluation = self.feed.sampler.evaluation
            if self._armed is not None:
                if self._armed[0] == epoch:
                    self._armed = (epoch if evaluation else epoch + 1), 0
            elif evaluation:
                self._cursor.end()
            elif self._cursor.epoch == epoch:
                self._cursor.seek(epoch, len(self))

    def _arm(self, epoch: int, step: int) -> None:
        """Have passes begin here, however many are made, while something counts."""
        with _LOCK:
            self._turn += self._armed is None
            self._armed = epoch, step

    def _drawn_from(self, epoch: int, step: int) -> bool:
        """Say whether the latest pass began here."""
        return self._latest == (epoch, step)

    def _trained(self, epoch: int, step: int) -> None:
        """Stand where the training stands."""
        self._cursor.seek(epoch, step)

    def _disarm(self) -> None:
        """Count no more from outside."""
        with _LOCK:
            self._turn += self._armed is not None
            self._armed = self._latest = None

    def _stop(self) -> None:
        super()._stop()
        self._disarm()
