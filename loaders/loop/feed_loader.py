"""What the loaders of a feed have in common: its reader, and states that know its records."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

from twinfeed.loaders.feed.collate import Empty, aligned
from twinfeed.loaders.feed.config import Batch
from twinfeed.loaders.feed.request import requests
from twinfeed.loaders.loop.loader import B, Loader
from twinfeed.loaders.loop.record_state import check_records, record_state
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.concurrency import resolve_prefetch
from twinfeed.loaders.making.feed import Feed, check_feed, compile_feed
from twinfeed.loaders.making.prefetch import Prefetcher, in_order
from twinfeed.loaders.reading.prefetch.schedule import Schedules
from twinfeed.loaders.reading.source import Reads, reader_of
from twinfeed.loaders.support.argument_hints import LOADER_HINTS, PROCESS_HINTS, hint_arguments
from twinfeed.samplers import validate

T = TypeVar("T")


# By feed and class, the last loader that received epoch 0 and no more.
_ONE_EPOCH: WeakKeyDictionary[Feed, dict[type, ref[Any]]] = WeakKeyDictionary()


class FeedLoader(Loader[B]):
    """Iterate over the batches of a feed."""

    _shared = ("_sampler", "feed", "feed.index")

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
        last = _ONE_EPOCH.get(self.feed, {}).pop(type(self), None)
        deleted = last is not None and last() is None  # two loaders that live may be compared
        if deleted and not (self._epochs or self._positioned):
            name = type(self).__name__
            warnings.warn(
                f"a new {name} of the same feed begins epoch 0 again, and the same batches come: "
                f"loop over one {name} in every epoch, or call set_epoch(0) if this is meant",
                stacklevel=2,
            )
        return super().__iter__()

    def _received(self) -> bool:
        ended = super()._received()
        if ended and self._epochs == {0} and not self._sampler.evaluation:
            _ONE_EPOCH.setdefault(self.feed, {})[type(self)] = ref(self)
        return ended

    def state_dict(self) -> dict[str, Any]:
        records = record_state(self.feed.index)
        # batch_transform sees a rank's batch.
        ranks = {"ranks": self.feed.sampler.world_size} if self.feed.batch_transform else {}
        return {**super().state_dict(), "records": records, **ranks}

    def close(self) -> None:
        super().close()
        self.schedules.clear()
        self.reader.close()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        # The sampler comes first: if the numbers of records differ, its error names the difference.
        super()._check_state(state)
        index = self.feed.index
        if not check_records(state.get("records"), record_state(index), index):
            warnings.warn(
                "the state and the source share no digest: only the number of records was compared",
                stacklevel=3,
            )
        ranks = self.feed.sampler.world_size
        state_ranks = state.get("ranks", ranks)  # of a loader with batch_transform
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

    def _batches(
        self, epoch: int, start: int, convert: Callable[[Batch], T], *, empty: Empty = aligned
    ) -> Generator[T, None, None]:
        """Yield `convert(batch)` for each batch of an epoch, in order, from step `start` on.

        The batches are made on threads: whole batches, or, if decoded images are cached, which
        needs the batches in order, single samples of a batch.
        """
        feed, reader, meter = self.feed, self.reader, self.meter
        schedule = self.schedules[feed.sampler]
        cached = feed.sampler.traits.max_cached is not None
        decode_threads, batch_threads = (self.threads, 0) if cached else (0, self.threads)
        compiled = compile_feed(feed)
        with Batcher(
            compiled, reader=reader, threads=decode_threads, meter=meter, empty=empty
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
        """Return the batches, made ahead of the loop on a thread if the loader prefetches."""
        return Prefetcher(batches, depth=self.prefetch) if self.prefetch else batches
