"""From a request to a batch of arrays: what one pass owns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders._checks import Array, Int64s
from twinfeed.loaders._closing import Closing
from twinfeed.loaders._meter import Meter
from twinfeed.loaders._samples import Sample, Samples
from twinfeed.loaders.collate import MisfitError, collate
from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading._ahead import Planner
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.request import Request
from twinfeed.samplers import BatchStream

if TYPE_CHECKING:
    from twinfeed.loaders.feed import Feed

Batch = dict[str, Any]


class Batcher(Closing):
    """Make the batches of a feed, one for each request.

    `reader` may be shared with other passes; without one the batcher has its own. `threads` share
    the decoding of a batch. `meter` adds up where time goes. A batcher pickles without the sampler,
    its threads and its cache.
    """

    def __init__(
        self,
        feed: Feed,
        /,
        *,
        reader: Reader | None = None,
        threads: int = 0,
        meter: Meter | None = None,
    ) -> None:
        self.spec = feed.spec  # before threads start: the callables are tried
        self._own_reader = reader is None
        self._reader = Reader(feed.index, verify=bool(feed.verify)) if reader is None else reader
        self.meter = Meter() if meter is None else meter
        self.samples = Samples(
            feed, self._reader, threads=threads, spec=self.spec, meter=self.meter
        )
        self._index = feed.index
        self._side = feed.side
        self._collate = feed.collate
        self._masked = feed.sampler.padded
        self._size = max(1, feed.sampler.batch_size)
        self._planner: Planner | None = None
        self._stream: BatchStream | None = None
        self._stored: list[str] = []

    def __call__(self, request: Request, /) -> Batch:
        """Read one batch; raise what reading raises, and DecodeError, each naming the record."""
        if self._stream is not None:
            self._reader.follow(self._stream, self._stored, request.epoch, request.step)
        if self._planner is not None:
            self.meter.timed("reading", self._planner.reached, request.step)
        held = request.ids >= 0
        kept = request.where(held)
        joined = joined_rows(self._index, self._side, kept)
        values = self.samples.values(kept, joined)
        if len(kept.ids) and values.keys() != self.spec.keys():
            raise DecodeError(
                f"{self._index.describe(kept.records[0])}: {self.samples.last} gave the fields "
                f"{sorted(values)} where {sorted(self.spec)} are expected: give every record the "
                f"fields of the first, or say with spec= which"
            )
        batch = self.meter.timed("collating", self._collated, request, held, joined, values)
        self.meter.made(request.step, max(1, -(-len(request.ids) // self._size)))
        return batch

    def _collated(
        self,
        request: Request,
        held: npt.NDArray[np.bool_],
        joined: Mapping[str, Array],
        values: Mapping[str, Sequence[Any]],
    ) -> Batch:
        batch: Batch = {"id": request.ids}
        batch |= {name: _padded(rows, held) for name, rows in joined.items()}
        spread = {name: _spread(values.get(name, []), held) for name in self.spec}
        with self.naming_records(request):
            batch |= collate(spread, self.spec, how=self._collate)
        if self._masked:
            batch["mask"] = held
        return batch

    def plain(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Read single samples by record, whatever the sampler: `id`, columns, side rows, fields.

        Raises ValueError for a side table that is joined by sample id, and not by record.
        """
        for name, rows in self._side.items():
            if len(rows) != len(self._index):
                raise ValueError(
                    f"side table {name!r} has {len(rows)} rows for {len(self._index)} records: its "
                    f"samples are known to a sampler only"
                )
        request = Request.plain(records, seeds)
        joined = joined_rows(self._index, self._side, request)
        values = self.samples.values(request, joined, cached=False)
        held = {"id": records.tolist(), **joined, **values}
        return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)]

    def look_ahead(self, feed: Feed, epoch: int, start: int, /) -> None:
        """Have what the coming batches need brought near, and decoded where images are cached.

        The next batch must be the one of step `start`, and so on to the end of the epoch.
        """
        self._stream, self._stored = feed.sampler, stored_fields(feed)
        self._planner = planner_for(feed, self._reader, epoch, start)
        threads = self.samples.calls.threads
        if self.samples.cache is not None and threads:
            self.samples.cache.look_ahead(feed.requests(epoch, start), threads=threads)

    def close(self) -> None:
        """End the threads, drop the cache, and close the files of a reader of its own."""
        self.samples.close()
        if self._own_reader:
            self._reader.close()

    @contextmanager
    def naming_records(self, request: Request) -> Iterator[None]:
        """Name the record whose value does not fit."""
        try:
            yield
        except MisfitError as error:
            where = self._index.describe(request.records[error.place])
            raise DecodeError(f"{where}: {error}") from error


def planner_for(feed: Feed, reader: Reader, epoch: int, start: int, /) -> Planner | None:
    """Return what plans the reading of a pass, where the feed reads anything ahead."""
    stored = stored_fields(feed)
    if feed.readahead == 0 or not stored:
        return None
    return Planner(reader, stored, feed.sampler, epoch, start, limit=feed.readahead)


def stored_fields(feed: Feed) -> list[str]:
    """Return the fields that are read of the shards."""
    return [name for name in feed.fields if name not in feed.index.columns]


def joined_rows(index: Index, side: Mapping[str, Array], request: Request, /) -> dict[str, Array]:
    """Return a row for each sample of a request without padding: of the index's columns by record,
    and of side tables by sample id. Their byte order is the machine's, which both frameworks take.
    """
    rows = {name: column[request.records] for name, column in index.columns.items()}
    rows |= {name: np.asarray(table[request.ids]) for name, table in side.items()}
    return {
        name: part.astype(part.dtype.newbyteorder("="), copy=False) for name, part in rows.items()
    }


def _padded(rows: Array, held: npt.NDArray[np.bool_]) -> Array:
    """`rows` at the places that are held, zeros at the others."""
    if held.all():
        return rows
    padded = np.zeros((len(held), *rows.shape[1:]), rows.dtype)
    padded[held] = rows
    return padded


def _spread(values: Sequence[Any], held: npt.NDArray[np.bool_]) -> Sequence[Any]:
    """`values` at the places that are held, None at the others."""
    if held.all():
        return values
    rest = iter(values)
    return [next(rest) if one else None for one in held]
