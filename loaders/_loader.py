"""What loaders have in common: a feed, a place between two of its batches, one pass at a time."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from twinfeed.loaders._closing import Closing
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.reading.reader import Reader
from twinfeed.samplers import Cursor, StateMismatchError
from twinfeed.samplers._passes import warn_unsharded

OTHER_PASS = (
    "this pass was ended before its last batch, by another pass over the same loader, or by its "
    "set_epoch, load_state_dict or close: leave the loop first, or give each loop a loader of its "
    "own; two loaders may carry one feed"
)
"""What is said to a loop whose pass was ended by something else."""


class Pass(Protocol):
    """Give the batches of one pass, and stop what runs ahead when it is closed."""

    def __next__(self) -> Any: ...
    def close(self) -> None: ...


class Loader(Closing):
    """Carry a feed to a training loop, and stand between two of its batches.

    Whatever ended the last pass, the next one goes on with what the loop has not received; at the
    end of an epoch with the next. `set_epoch` begins an epoch. Evaluation
    (`ExactOnceBatchSampler`) has no place to stand: each pass is whole, but for the first after
    `load_state_dict`. Nothing is read before the first `next`.

    There is one pass at a time: another one, `set_epoch`, `load_state_dict` or `close` within a
    loop ends the loop with RuntimeError.

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

    def __init__(self, feed: Feed, /) -> None:
        if not isinstance(feed, Feed):
            raise TypeError(f"feed must be a Feed, got a {type(feed).__name__}: Feed(index, …)")
        self.feed = feed
        self._cursor = Cursor(feed.sampler)
        self._reader = Reader(feed.index, verify=bool(feed.verify))
        self._running: Pass | None = None

    @abstractmethod
    def _begin(self, epoch: int, start: int) -> Pass:
        """Begin a pass over the steps of an epoch from `start` on."""

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.feed)

    def __iter__(self) -> Iterator[Any]:
        self._stop()
        yield from self._pass(*self._cursor.begin(), self._cursor.advance)

    def _pass(self, epoch: int, start: int, deliver: Callable[[], None]) -> Iterator[Any]:
        """Yield the batches of a pass, each after `deliver` was called for it."""
        warn_unsharded(self.feed.sampler)
        running = self._running = self._begin(epoch, start)
        try:
            for left in reversed(range(len(self) - start)):
                batch = next(running)
                deliver()
                yield batch
                if left and self._running is not running:
                    raise RuntimeError(OTHER_PASS)
        finally:
            if self._running is running:  # else a later pass has taken over
                self._end()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch that the loop receives."""
        return self._cursor.epoch

    @property
    def step(self) -> int:
        """Step of the next batch that the loop receives, in `[0, len(loader))`."""
        return self._cursor.step

    def set_epoch(self, epoch: int, /) -> None:
        """Begin an epoch. A state that was loaded in it keeps its step until the first batch."""
        self._stop()
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say what the loop has received, and of which records: a small dict that JSON can hold.

        Another number of ranks or workers, another container of the same records, and another
        framework's loader continue from it.
        """
        index = self.feed.index
        records = {"count": len(index), "digests": dict(index.digests)}
        return {**self._cursor.state_dict(), "records": records}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue after the batches that `state` counts.

        Raises StateMismatchError for a state of other records or another sampler. Warns where the
        state says nothing of the records' content.
        """
        self._stop()
        # The sampler first: it names what differs, where the number of records does.
        self.feed.sampler.position_of(state)
        self._check_records(state.get("records"))
        self._cursor.load_state_dict(state)

    def close(self) -> None:
        """Stop the running pass and close the files; a later pass starts them anew."""
        self._stop()
        self._reader.close()

    def _stop(self) -> None:
        """End the running pass, as something new begins."""
        self._end()

    def _end(self) -> None:
        """End the running pass."""
        if self._running is not None:
            running, self._running = self._running, None
            self._cursor.end()
            running.close()

    def _arm(self, epoch: int, step: int) -> None:
        """Hear from a callback where the pass that it counts begins."""

    def _drawn_from(self, epoch: int, step: int) -> bool:
        """Say whether the pass that a callback counts was begun here, as far as is known."""
        return True

    def _trained(self, epoch: int, step: int) -> None:
        """Hear from a callback before which batch the training stands."""

    def _disarm(self) -> None:
        """Hear from a callback that it counts no more."""

    def _check_records(self, theirs: Any) -> None:
        """Compare the content of the records that a state belongs to with that of the feed's."""
        ours = self.feed.index.digests
        digests = theirs.get("digests") if isinstance(theirs, Mapping) else None
        known = {} if not isinstance(digests, Mapping) else digests
        both = [name for name in ours if name in known]
        for name in both:
            if ours[name] != known[name]:
                raise StateMismatchError(
                    f"the state is of other records: {name!r} has the digest {known[name]!r} in "
                    f"the state, {ours[name]!r} in {self.feed.index.path}"
                )
        if not both:
            warnings.warn(
                f"the state says nothing of what the records hold: {sorted(known)} where the "
                f"index has {sorted(ours)}; only their number was compared",
                stacklevel=3,
            )
