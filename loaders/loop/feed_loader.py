"""What the loaders of a feed have in common: its reader, and states that know its records."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, TypeVar

from twinfeed.loaders.feed.collate import Empty, aligned
from twinfeed.loaders.feed.config import Batch
from twinfeed.loaders.feed.request import requests
from twinfeed.loaders.loop.loader import B, Loader
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.concurrency import resolve_prefetch
from twinfeed.loaders.making.feed import Feed, check_feed, compile_feed
from twinfeed.loaders.making.prefetch import Prefetcher, in_order
from twinfeed.loaders.reading.prefetch.schedule import Schedules
from twinfeed.loaders.reading.source import Reads, Source, reader_of
from twinfeed.loaders.support.argument_hints import LOADER_HINTS, PROCESS_HINTS, hint_arguments
from twinfeed.samplers import StateMismatchError, validate

T = TypeVar("T")


class FeedLoader(Loader[B]):
    """Iterate over the batches of a feed."""

    _shared = ("_sampler", "feed", "feed.index")

    def __init__(self, feed: Feed, /, *, checksums: bool, readahead: int | None) -> None:
        self.feed = check_feed(feed)
        super().__init__(feed.sampler)
        if readahead is not None:
            readahead = validate.integer("readahead", readahead, minimum=0)
        self.checksums, self.readahead = validate.flag("checksums", checksums), readahead
        self.reader: Reads = reader_of(feed.index, checksums=checksums)
        self.schedules = Schedules()

    def state_dict(self) -> dict[str, Any]:
        records = {"count": len(self.feed.index), **_contents(self.feed.index)}
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
        self._check_records(state.get("records"))
        ours = self.feed.sampler.world_size
        theirs = state.get("ranks", ours)  # a state has it from a loader with batch_transform
        if self.feed.batch_transform is not None and theirs != ours:
            warnings.warn(
                f"the state is of {theirs} ranks, the loader of {ours}: batch_transform sees the "
                f"batch of one rank, so its results are others than in the run before",
                stacklevel=3,
            )

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
                        f"in the state, {ours[name]!r} in {self.feed.index!r}"
                    )
        if not compared:
            warnings.warn(
                "the state and the source share no digest: only the number of records was compared",
                stacklevel=4,
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
    ) -> None:
        super().__init__(feed, checksums=checksums, readahead=readahead)
        self.prefetch, self.threads = resolve_prefetch(feed, prefetch, threads)

    def _made(
        self, epoch: int, start: int, then: Callable[[Batch], T], *, empty: Empty = aligned
    ) -> Generator[T, None, None]:
        """Yield `then(batch)` of each batch of the rest of an epoch, in order."""
        feed, reader, meter = self.feed, self.reader, self.meter
        schedule = self.schedules[feed.sampler]
        # Each thread makes whole batches, unless these come in turn from a cache of decoded images.
        in_turn = feed.sampler.traits.max_cached is not None
        shared, whole = (self.threads, 0) if in_turn else (0, self.threads)
        own = compile_feed(feed)
        with Batcher(own, reader=reader, threads=shared, meter=meter, empty=empty) as batcher:
            batcher.start_pass(schedule, epoch, start, readahead=self.readahead)
            coming = requests(schedule, epoch, start, seeds=feed.seeded)
            with closing(in_order(lambda one: then(batcher(one)), coming, threads=whole)) as made:
                yield from made

    def _ahead(self, batches: Generator[T, None, None]) -> Prefetcher[T] | Generator[T, None, None]:
        """Return the batches made ahead of the loop, on a thread, if the loader has a thread."""
        return Prefetcher(batches, depth=self.prefetch) if self.prefetch else batches


def _contents(index: Source) -> dict[str, dict[str, str]]:
    """Return the digests of fields and of columns by name.

    A name may be a field in one container and a column in another: a tar holds numbers as text. A
    field and a column are not compared.
    """
    found: dict[str, dict[str, str]] = {"fields": {}, "columns": {}}
    for name, digest in index.digests.items():
        found["columns" if name in index.columns else "fields"][name] = digest
    return found
