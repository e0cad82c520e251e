"""What the loaders of a feed have in common: its reader, and states that know its records."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, SupportsIndex, TypeVar
from weakref import WeakKeyDictionary, ref

from twinfeed.loaders.feed.collate import Allocate, aligned
from twinfeed.loaders.feed.config import Batch, check_batches
from twinfeed.loaders.feed.request import requests
from twinfeed.loaders.loop.loader import B, Loader
from twinfeed.loaders.loop.record_state import check_records, record_state
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.concurrency import MAX_DEFAULT_THREADS, resolve_prefetch
from twinfeed.loaders.making.feed import Feed, check_feed, compile_feed
from twinfeed.loaders.making.prefetch import Prefetcher, in_order
from twinfeed.loaders.reading.prefetch.schedule import Schedules, sharded_as
from twinfeed.loaders.reading.source import Reads, reader_of
from twinfeed.loaders.support.argument_hints import LOADER_HINTS, PROCESS_HINTS, hint_arguments
from twinfeed.samplers import BatchStream, StateMismatchError, validate

T = TypeVar("T")


# By feed and class, the last loader whose loop has received epoch 0 and nothing else: to warn if
# a script makes a new loader for each epoch.
_ONE_EPOCH: WeakKeyDictionary[Feed, dict[type, ref[Any]]] = WeakKeyDictionary()


class FeedLoader(Loader[B]):
    """Iterate over the batches of a feed."""

    _shared = ("_sampler", "feed", "feed.index")

    @property
    def lookahead(self) -> int | None:
        """The most batches that are drawn before the loop receives them, as the options allow.

        It is the same on all ranks. None where a framework draws the batches.
        """
        return None

    def __init__(
        self,
        feed: Feed,
        /,
        *,
        checksums: bool,
        readahead: int | None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        self.feed = check_feed(feed)
        super().__init__(feed.sampler, ledger=ledger)
        if readahead is not None:
            readahead = validate.integer("readahead", readahead, minimum=0)
        self.checksums, self.readahead = validate.flag("checksums", checksums), readahead
        self.reader: Reads = reader_of(feed.index, checksums=checksums)
        self.schedules = Schedules()

    def __iter__(self) -> Iterator[B]:
        """Iterate over the batches, from the position to the end of the epoch.

        Warns if a new loader is made for each epoch, which would get epoch 0 again.
        """
        previous = _ONE_EPOCH.get(self.feed, {}).pop(type(self), None)
        was_deleted = previous is not None and previous() is None  # live loaders may be compared
        if was_deleted and not (self._received_epochs or self._position_was_set):
            name = type(self).__name__
            warnings.warn(
                f"a new {name} of the same feed begins epoch 0 again, and the same batches come: "
                f"loop over one {name} in every epoch, or call set_epoch(0) if this is meant",
                stacklevel=2,
            )
        return super().__iter__()

    def _count_received(self) -> bool:
        """Count a batch that the loop has received; return whether it is the last of its epoch."""
        is_last = super()._count_received()
        if is_last and self._received_epochs == {0} and not self._sampler.evaluation:
            # If the next epoch is read by a new loader of this feed, `__iter__` warns.
            _ONE_EPOCH.setdefault(self.feed, {})[type(self)] = ref(self)
        return is_last

    def state_dict(self) -> dict[str, Any]:
        records = record_state(self.feed.index)
        # batch_transform sees a rank's batch.
        ranks = {"ranks": self.feed.sampler.world_size} if self.feed.batch_transform else {}
        return {**super().state_dict(), "records": records, **ranks}

    def change(self, sampler: BatchStream, /, *, at: SupportsIndex | None = None) -> int:
        """Draw by another sampler from a later step on, and return this step.

        The sampler is that of the loader with a longer schedule: all that differs comes at this
        step or later. From then on, batches and states are those of a run that had the sampler
        from its first step on. Every rank calls this after the same batch, with the same sampler,
        of all ranks.

        Args:
            sampler: as the loader's, but for changes from this step on.
            at: the step, over all epochs. Default: `global_step + lookahead`. It must be given
                where a framework draws the batches: where `lookahead` is None.

        Raises:
            StateMismatchError: the sampler has other batches before this step.
            ValueError: the step is not ahead of all that may be drawn already, an evaluation, and
                a sampler that does not fit the loader.

        >>> import numpy as np
        >>> from twinfeed import Feed, NumpyLoader, PKBatchSampler
        >>> data = {"label": np.array([0, 0, 1, 1, 2, 2])}
        >>> options = {"p": 2, "seed": 0, "batches_per_epoch": 8}
        >>> loader = NumpyLoader(Feed(data, PKBatchSampler(data["label"], k=1, **options)))
        >>> sizes = []
        >>> for batch in loader:
        ...     sizes.append(len(batch["label"]))
        ...     if loader.step == 3:
        ...         k = {0: 1, loader.global_step + loader.lookahead: 2}
        ...         first = loader.change(PKBatchSampler(data["label"], k=k, **options))
        >>> sizes, first
        ([2, 2, 2, 2, 4, 4, 4, 4], 4)
        """
        check_batches(sampler)
        if self._sampler.evaluation:
            raise ValueError("an evaluation has no changes: only a training has a schedule")
        step = self.global_step + (self.lookahead or 0)
        if at is not None:
            step = validate.integer("at", at, minimum=step)
        elif self.lookahead is None:
            raise ValueError("at= must be given, as a framework draws: a step that is far enough")
        feed = self._changed_feed(sharded_as(sampler, self._sampler))
        try:
            feed.sampler.position_of(self._sampler.state_at(*divmod(step, len(self))))
        except StateMismatchError as error:
            error.add_note(
                f"'the state' is this loader's: a change acts from step {step} on, so all that "
                f"differs in the schedule must come at step {step} or later"
            )
            raise
        compile_feed(feed)  # raises what is wrong with it before anything changes
        self.schedules.change(sampler, step)
        self.feed, self._sampler, self._cursor.stream = feed, feed.sampler, feed.sampler
        if self._ledger is not None:
            self._ledger.changed(feed, step)
        return step

    def _changed_feed(self, sampler: BatchStream) -> Feed:
        """Return the feed with another sampler; raise ValueError if the loader cannot serve it."""
        return self.feed.with_sampler(sampler)

    def _end_pass_and_tracking(self) -> None:
        super()._end_pass_and_tracking()
        for schedule in self.schedules.values():
            schedule.committed = 0  # the next pass may begin before the steps of the last one

    def close(self) -> None:
        super().close()
        self.reader.close()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError for a state of another sampler or of other records.

        Warns if the records cannot be compared, and if `batch_transform` sees other batches since
        the number of ranks has changed.
        """
        # The sampler comes first: if the numbers of records differ, its error names the difference.
        super()._check_state(state)
        index = self.feed.index
        if not check_records(state.get("records"), record_state(index), index):
            warnings.warn(
                "the state and the source share no digest: only the number of records was compared",
                stacklevel=3,
            )
        ranks = self.feed.sampler.world_size
        state_ranks = state.get("ranks", ranks)  # only in states of loaders with batch_transform
        if self.feed.batch_transform is not None and state_ranks != ranks:
            warnings.warn(
                f"the state is of {state_ranks} ranks, the loader of {ranks}: batch_transform sees "
                f"the batch of one rank, so its results are others than in the run before",
                stacklevel=3,
            )


class MakingLoader(FeedLoader[B]):
    """Make the batches in this process: in order, on threads, ahead of the loop."""

    @hint_arguments(**LOADER_HINTS, **PROCESS_HINTS)
    def __init__(
        self,
        feed: Feed,
        /,
        *,
        prefetch: int | None = None,
        threads: int | None = None,
        checksums: bool = True,
        readahead: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(feed, checksums=checksums, readahead=readahead, ledger=ledger)
        self.prefetch, self.threads = resolve_prefetch(feed, prefetch, threads)

    @property
    def lookahead(self) -> int:
        # The default number of threads differs between machines, the bound must not.
        return self.prefetch + 1 + (max(MAX_DEFAULT_THREADS, self.threads) if self.threads else 0)

    def _batches(
        self, epoch: int, start: int, convert: Callable[[Batch], T], *, empty: Allocate = aligned
    ) -> Generator[T, None, None]:
        """Yield `convert(batch)` for each batch of an epoch, in order, from step `start` on.

        Each thread makes a whole batch. But if the sampler reuses decoded images, batches are made
        one after another, and the threads share the samples of each. `empty` allocates the arrays.
        """
        feed = self.feed
        schedule = self.schedules.of(feed.sampler)
        reuses_images = feed.sampler.traits.max_cached is not None
        decode_threads, batch_threads = (self.threads, 0) if reuses_images else (0, self.threads)
        with Batcher(
            compile_feed(feed),
            reader=self.reader,
            threads=decode_threads,
            meter=self.meter,
            empty=empty,
        ) as batcher:
            batcher.start_pass(schedule, epoch, start, readahead=self.readahead)
            epoch_requests = requests(schedule, epoch, start, seeds=feed.seeded)
            batches = in_order(
                lambda request: convert(batcher(request)), epoch_requests, threads=batch_threads
            )
            with closing(batches):
                yield from batches

    def _prefetched(
        self, batches: Generator[T, None, None]
    ) -> Prefetcher[T] | Generator[T, None, None]:
        """Return the batches; if the loader prefetches, they are made ahead on a thread."""
        return Prefetcher(batches, depth=self.prefetch) if self.prefetch else batches
