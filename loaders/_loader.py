"""What loaders have in common: a feed, a place between two of its batches, one pass at a time."""

from __future__ import annotations

import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from time import perf_counter_ns
from typing import Any, Protocol

from twinfeed.loaders._closing import Closing
from twinfeed.loaders._meter import Meter, PassReport
from twinfeed.loaders.feed import Feed, check_feed
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.reader import Reader
from twinfeed.samplers import Cursor, StateMismatchError
from twinfeed.samplers._cursor import warn_unsharded

OTHER_PASS = (
    "this pass was ended before its last batch, by another pass over the same loader, or by its "
    "set_epoch, load_state_dict or close: leave the loop first, or give each loop a loader of its "
    "own; two loaders may carry one feed"
)
"""The error of a loop when something else has ended its pass."""


# Frameworks begin passes in threads of their own. All loaders share a lock, as locks do not pickle.
_LOCK = threading.Lock()

_END = object()


class Pass(Protocol):
    """Give the batches of one pass. `close` stops the threads or workers that run ahead."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def close(self) -> None: ...


class Loader(Closing):
    """Carry a feed to a training loop, and stand between two of its batches.

    - A pass begins with the first batch that the loop has not received, whatever ended the last
      pass. After the last batch of an epoch comes the next epoch. `set_epoch` begins an epoch.
    - In an evaluation (`ExactOnceBatchSampler`) each pass is whole. Only the first pass after
      `load_state_dict` is a remainder.
    - There is one pass at a time. Within a loop, another pass, `set_epoch`, `load_state_dict` or
      `close` ends the loop with RuntimeError. Nothing is read before the first `next`.

    Some loaders also *lend* batches to a training loop that does not say what it received. A lent
    pass runs from the loader's place to the end of the epoch, and counts nothing. Frameworks may
    look at a batch and give up the pass. This changes nothing. After the last batch the loader
    stands at the next epoch. A callback that counts the received batches sets where lent passes
    begin.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, NumpyLoader, pack
    >>> from twinfeed.samplers import BatchSampler, SequentialSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> loader = NumpyLoader(Feed(index, BatchSampler(SequentialSampler(3), batch_size=1)))
    >>> for batch in loader:
    ...     break
    >>> [batch["word"] for batch in loader], loader.epoch
    ([[b'be'], [b'or']], 1)
    """

    _counts = "loop over the loader itself"  # as a warning advises

    def __init__(self, feed: Feed, /) -> None:
        self.feed = check_feed(feed)
        self._cursor = Cursor(feed.sampler)
        self._reader = Reader(feed.index, verify=bool(feed.verify))
        self._meter = Meter()
        self._running: Pass | None = None
        self._armed: tuple[int, int] | None = None  # where passes begin while a callback counts
        self._latest: tuple[int, int] | None = None  # where the latest lent pass began
        self._times = 0  # how many lent passes in a row have begun the latest epoch
        self._turn = 0  # changes when a callback begins or stops counting

    @abstractmethod
    def _begin(self, epoch: int, start: int) -> Pass:
        """Begin a pass over the steps of an epoch from `start` on."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.feed)

    def __iter__(self) -> Iterator[Any]:
        self._stop()
        epoch, start = self._cursor.begin()
        self._meter.begin(start)
        running = self._begin(epoch, start)
        yield from self._deliver(running, self._received, batches=len(self) - start)

    def _deliver(
        self, running: Pass, received: Callable[[], bool], *, batches: int | None = None
    ) -> Iterator[Any]:
        """Yield the batches of a pass. `received` counts a batch, and says if its epoch ends."""
        warn_unsharded(self.feed.sampler)
        self._running = running
        try:
            for batch in self._timed(running, batches):
                last = received()
                yield batch
                if self._running is not running:
                    if last:
                        return
                    raise RuntimeError(OTHER_PASS)
        finally:
            if self._running is running:  # else a later pass has taken over
                self._end()

    def _timed(self, running: Pass, batches: int | None) -> Iterator[Any]:
        """Yield the batches of a pass (all, or exactly `batches`), and note the time of waiting."""
        for _ in count() if batches is None else range(batches):
            asked = perf_counter_ns()
            batch = next(running, _END) if batches is None else next(running)
            if batch is _END:
                return
            self._meter.received(asked)
            yield batch

    def report(self) -> PassReport:
        """Say where the time of the last pass went, so far: see `PassReport`.

        If a loop waits at many steps, the data slow the loop down. Print the report, or take
        `as_dict()` for a log.
        """
        return self._meter.report()

    def _received(self) -> bool:
        """Count a batch; return whether its epoch ends."""
        self._cursor.advance()
        return self._cursor.step == 0

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that the loop receives."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Step of the next batch that the loop receives, in `[0, len(loader))`."""
        return self._cursor.step

    def set_epoch(self, epoch: int, /) -> None:
        """Begin an epoch. A state loaded for this epoch keeps its step until the first batch."""
        self._stop()
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say what the loop has received, and of which records: a small dict that JSON can hold.

        A loader with another number of ranks or workers, with another container of the same
        records, or of another framework can continue from the state.
        """
        records = {"count": len(self.feed.index), **_contents(self.feed.index)}
        return {**self._cursor.state_dict(), "records": records}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue after the batches that `state` counts.

        Raises StateMismatchError for a state of other records or another sampler. Warns where the
        state says nothing of the records' content.
        """
        self._stop()
        # The sampler comes first: if the numbers of records differ, its error names the difference.
        self.feed.sampler.position_of(state)
        self._check_records(state.get("records"))
        self._cursor.load_state_dict(state)

    def close(self) -> None:
        """Stop the running pass and close the files; a later pass starts them anew."""
        self._stop()
        self._reader.close()

    def _stop(self) -> None:
        """End the running pass, and the counting by a callback."""
        self._end()
        self._disarm()

    def _end(self) -> None:
        """End the running pass."""
        if self._running is not None:
            running, self._running = self._running, None
            self._cursor.end()
            running.close()

    def _pass_begins(self) -> tuple[int, int, int]:
        """Return the epoch and the step at which a lent pass begins, and its turn."""
        if self._running is None:
            self._meter.begin(0, counted=False)
        with _LOCK:
            evaluation = self.feed.sampler.evaluation
            if self._armed is not None:
                if (self.epoch, self.step) > self._armed and not evaluation:
                    # The counting was killed, or somebody looks at a batch during the counting.
                    return self.epoch, self.step, self._turn
                self._latest = self._armed
                return *self._armed, self._turn
            before, self._latest = self._latest, self._cursor.begin()
            again = before is not None and before[0] == self._latest[0]
            self._times = self._times + 1 if again else 1
            if self._times == 3 and not evaluation:
                warnings.warn(
                    f"passes begin epoch {self._latest[0]} for the third time, so the same batches "
                    f"come again: call loader.set_epoch(epoch) before each pass, or "
                    f"{self._counts}, which goes on after the batches that the loop received",
                    stacklevel=3,
                )
            return *self._latest, self._turn

    def _pass_delivered(self, epoch: int, turn: int, /) -> None:
        """Move to the next epoch; while a callback counts, let the next pass begin there."""
        with _LOCK:
            if turn != self._turn:
                return  # a pass that was given up may still run ahead, and would skip an epoch
            evaluation = self.feed.sampler.evaluation
            if self._armed is not None:
                if self._armed[0] == epoch:
                    self._armed = (epoch if evaluation else epoch + 1), 0
            elif evaluation:
                self._cursor.end()
            elif self.epoch == epoch:
                self._cursor.seek(epoch, len(self))

    def _arm(self, epoch: int, step: int) -> None:
        """Let all lent passes begin here while a callback counts."""
        with _LOCK:
            self._turn += self._armed is None
            self._armed = epoch, step

    def _drawn_from(self, epoch: int, step: int) -> bool:
        """Return whether the latest lent pass began here."""
        return self._latest == (epoch, step)

    def _trained(self, epoch: int, step: int) -> None:
        """Move to the place of the training."""
        self._cursor.seek(epoch, step)

    def _disarm(self) -> None:
        """End the counting by a callback."""
        with _LOCK:
            self._turn += self._armed is not None
            self._armed = self._latest = None

    def _check_records(self, theirs: Any) -> None:
        """Compare the digests of a state's records with those of the feed's records."""
        compared = False
        for kind, ours in _contents(self.feed.index).items():
            known = theirs.get(kind) if isinstance(theirs, Mapping) else None
            known = known if isinstance(known, Mapping) else {}
            for name in sorted(ours.keys() & known):
                compared = True
                if ours[name] != known[name]:
                    raise StateMismatchError(
                        f"the state is of other records: {name!r} has the digest {known[name]!r} "
                        f"in the state, {ours[name]!r} in {self.feed.index.where}"
                    )
        if not compared:
            warnings.warn(
                f"the state says nothing of what the records hold: it has no digest of any of "
                f"{sorted(self.feed.index.digests)}; only the number of records was compared",
                stacklevel=3,
            )


def _contents(index: Index) -> dict[str, dict[str, str]]:
    """Return the digests of fields and of columns by name.

    A name may be a field in one container and a column in another: a tar holds numbers as text. The
    two are not compared.
    """
    told: dict[str, dict[str, str]] = {"fields": {}, "columns": {}}
    for name, digest in index.digests.items():
        told["columns" if name in index.columns else "fields"][name] = digest
    return told
