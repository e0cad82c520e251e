"""Base classes of the loaders of a feed: they have its reader, and states that name its records."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, ref

from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.feed import Feed, recipe_of, require_feed
from twinfeed.loaders.batches.prefetch import Prefetcher
from twinfeed.loaders.feed.arguments import Batch
from twinfeed.loaders.feed.collate import Allocate, aligned
from twinfeed.loaders.loop.loader import B, Loader
from twinfeed.loaders.loop.record_state import check_records, record_state
from twinfeed.loaders.loop.run import Run
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule
from twinfeed.loaders.reading.source import FieldReader, reader_of
from twinfeed.loaders.support import system
from twinfeed.samplers import validate

S = TypeVar("S")
T = TypeVar("T")

PREFETCH, _MAX_DEFAULT_THREADS = 2, 8  # batches that are kept ready, and threads, by default


# For each feed and loader class, the loader that was iterated over last, and its run: to warn if a
# script makes a new loader for each epoch, which would always get epoch 0.
_LAST_LOADERS: WeakKeyDictionary[Feed, dict[type, tuple[ref[Any], Run]]] = WeakKeyDictionary()


class FeedLoader(Loader[B]):
    """Iterate over the batches of a feed."""

    _shared: ClassVar[tuple[str, ...]] = ("_sampler", "feed", "feed.index")

    def __init__(self, feed: Feed, *, readahead: int | None) -> None:
        self.feed = require_feed(feed)
        super().__init__(feed.sampler)
        if readahead is not None:
            readahead = validate.integer("readahead", readahead, minimum=0)
        self.readahead = readahead
        self.reader: FieldReader = reader_of(feed.index)
        self.schedule = Schedule(feed.sampler)

    def __iter__(self) -> Iterator[B]:
        """Iterate over the batches, from the position to the end of the epoch.

        Warns if a new loader is made for each epoch, which would get epoch 0 again.
        """
        loaders = _LAST_LOADERS.setdefault(self.feed, {})
        previous, run = loaders.get(type(self), (None, self.run))
        loaders[type(self)] = ref(self), self.run
        # A loader that still exists is no reason to warn: a script may compare two loaders.
        was_deleted = previous is not None and previous() is None
        has_epoch_0 = (run.epoch, run.received_epochs) == (1, {0})
        is_new = not (self.run.received_epochs or self.run.position_was_set)
        if was_deleted and has_epoch_0 and is_new:
            name = type(self).__name__
            warnings.warn(
                f"a new {name} of the same feed starts epoch 0 again, and gives the same batches: "
                f"use one {name} for all epochs, or call set_epoch(0) if this is intended",
                stacklevel=2,
            )
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Loader`, with what identifies the records."""
        state = {**super().state_dict(), "records": record_state(self.feed.index)}
        if self.feed.batch_transform:  # its results depend on the size of a rank's batch
            state["ranks"] = self.feed.sampler.world_size
        return state

    def close(self) -> None:
        super().close()
        self.reader.close()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError for a state of another sampler or of other records; warn if
        records cannot be compared, or `batch_transform` will differ.
        """
        # The sampler is checked first: its error says so if the numbers of records differ.
        super()._check_state(state)
        index = self.feed.index
        check_records(state.get("records"), record_state(index), index)
        ranks = self.feed.sampler.world_size
        state_ranks = state.get("ranks", ranks)  # only in states of loaders with batch_transform
        if self.feed.batch_transform is not None and state_ranks != ranks:
            warnings.warn(
                f"the state was saved with world size {state_ranks}, and this loader has {ranks}: "
                f"batch_transform gets the batch of one rank, so its results will differ",
                stacklevel=3,
            )


class ThreadedLoader(FeedLoader[B]):
    """The base class of loaders whose batches are made by threads of this process, in order."""

    @validate.show_call("NumpyLoader(feed)")
    def __init__(
        self,
        feed: Feed,
        *,
        prefetch: int | None = None,
        threads: int | None = None,
        readahead: int | None = None,
    ) -> None:
        super().__init__(feed, readahead=readahead)
        self.prefetch, self.threads = resolve_prefetch(feed, prefetch, threads)
        self._goes_on = not feed.sampler.evaluation and len(feed.sampler) > 0

    def _batches(
        self,
        epoch: int,
        start: int,
        convert: Callable[[Batch], Any] | None = None,
        *,
        empty: Allocate = aligned,
    ) -> Generator[Any, None, None]:
        """Yield `convert(batch)`, or the batch, of each step from `start` on, and if the pass goes
        on, of the next epochs. `convert` must not refer to the loader.
        """
        feed, readahead, goes_on = self.feed, self.readahead, self._goes_on
        schedule = self.schedule
        # `max_cached` is the number of decoded images to cache until they are drawn again, or None.
        reuses_images = feed.sampler.traits.max_cached is not None
        decode_threads, batch_threads = (self.threads, 0) if reuses_images else (0, self.threads)
        with Batcher(
            recipe_of(feed),
            reader=self.reader,
            threads=decode_threads,
            meter=self.meter,
            empty=empty,
        ) as batcher:
            del self  # or the thread that runs this would keep the loader, and so itself, alive
            batcher.start_pass(schedule, epoch, start, readahead=readahead, goes_on=goes_on)
            start_epoch = partial(batcher.start_pass, schedule, readahead=readahead, running=True)
            requests = schedule.requests(
                epoch, start, goes_on=goes_on, seeds=feed.seeded, start_epoch=start_epoch
            )
            make: Callable[[Request], Any] = batcher
            if convert is not None:
                make = lambda request: convert(batcher(request))  # noqa: E731
            with closing(in_order(make, requests, threads=batch_threads)) as batches:
                yield from batches

    def _prefetched(
        self, batches: Generator[T, None, None]
    ) -> Prefetcher[T] | Generator[T, None, None]:
        """Return the batches; with `prefetch`, a thread makes them before they are read."""
        return Prefetcher(batches, depth=self.prefetch) if self.prefetch else batches


def in_order(
    function: Callable[[S], T], items: Iterable[S], /, *, threads: int
) -> Generator[T, None, None]:
    """Yield `function(item)` for each item, in order, computed ahead on a pool of threads.

    Up to `threads` results are computed ahead. With fewer than two threads, the caller's thread
    calls the function when a result is needed.

    >>> list(in_order(str.upper, "abc", threads=2))
    ['A', 'B', 'C']
    """
    if threads < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, "twinfeed-batch")
    try:
        pending: deque[Future[T]] = deque()
        for future in _submitted(pool, function, items):
            pending.append(future)
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _submitted(
    pool: ThreadPoolExecutor, function: Callable[[S], T], items: Iterable[S]
) -> Iterator[Future[T]]:
    """Yield the future of each item; of an error of `items` too, which is raised in its turn."""
    try:
        for item in items:
            yield pool.submit(function, item)
    except Exception as error:
        failed: Future[T] = Future()
        failed.set_exception(error)
        yield failed


def default_threads() -> int:
    """Return the default number of threads that make batches."""
    return min(_MAX_DEFAULT_THREADS, system.processors())


def resolve_prefetch(feed: Feed, prefetch: int | None, threads: int | None) -> tuple[int, int]:
    """Return the number of batches that are kept ready, and the number of threads that make them.

    `prefetch` and `threads` are the user's arguments, where None is the default.
    """
    in_memory = getattr(feed.index, "in_memory", False)
    if prefetch is None:  # to hand a batch to another thread takes longer than to slice arrays
        prefetch = 0 if in_memory and not feed.has_functions else PREFETCH
    prefetch = validate.integer("prefetch", prefetch, minimum=0)
    if threads is None:
        threads = default_threads() if prefetch and feed.has_functions else 0
    threads = validate.integer("threads", threads, minimum=0)
    # With a transform that sets global states, everything runs in the calling thread.
    return (0, 0) if feed.sets_global_state else (prefetch, threads)
