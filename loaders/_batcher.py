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
from twinfeed.loaders.collate import Empty, MisfitError, aligned, check_collate, collate
from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading._ahead import Planner
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.request import Request
from twinfeed.samplers import BatchStream
from twinfeed.samplers._validate import counted

if TYPE_CHECKING:
    from twinfeed.loaders.feed import Feed

Batch = dict[str, Any]


class Batcher(Closing):
    """Make the batches of a feed, one for each request.

    `reader` may be shared with other passes. Without `reader` the batcher makes a reader of its
    own. `threads` share the decoding of a batch. `meter` adds up the times. `empty` makes the
    arrays of the fields. A batcher pickles without the sampler, the threads and the cache.
    """

    def __init__(
        self,
        feed: Feed,
        /,
        *,
        reader: Reader | None = None,
        threads: int = 0,
        meter: Meter | None = None,
        empty: Empty = aligned,
    ) -> None:
        self.spec = dict(feed.spec)  # this tries the callables, and must come before threads start
        self._own_reader = reader is None
        self._reader = Reader(feed.index, verify=bool(feed.verify)) if reader is None else reader
        self.meter = Meter() if meter is None else meter
        self.samples = Samples(
            feed, self._reader, threads=threads, spec=self.spec, meter=self.meter, empty=empty
        )
        self._index = feed.index
        self._side = dict(feed.side)
        self._collate = check_collate(feed.collate)
        self._empty = empty
        self._masked = feed.sampler.padded
        self._size = max(1, feed.sampler.batch_size)
        self._planner: Planner | None = None
        self._stream: BatchStream | None = None
        self._stored: list[str] = []

    def __call__(self, request: Request, /) -> Batch:
        """Make one batch. Raises errors of reading and DecodeError; each names the record."""
        if self._stream is not None:
            place = request.epoch, request.step
            planned = self._planner is not None
            self._reader.follow(self._stream, self._stored, *place, planned=planned)
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
                f"fields of record 0, or name the fields with spec="
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
            batch |= collate(spread, self.spec, how=self._collate, empty=self._empty)
        if self._masked:
            batch["mask"] = held
        return batch

    def plain(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Read single samples by record id, without a sampler: `id`, columns, side rows, fields.

        Raises ValueError for a side table that is joined by sample id, not by record id.
        """
        for name, rows in self._side.items():
            if len(rows) != len(self._index):
                raise ValueError(
                    f"side table {name!r} has {counted(len(rows), 'row')} for "
                    f"{counted(len(self._index), 'record')}: "
                    f"only a sampler knows which sample has which row"
                )
        request = Request.plain(records, seeds)
        joined = joined_rows(self._index, self._side, request)
        values = self.samples.values(request, joined, cached=False)
        held = {"id": records.tolist(), **joined, **values}
        return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)]

    def look_ahead(self, feed: Feed, epoch: int, start: int, /) -> None:
        """Read ahead for the coming batches. Decode ahead too where images are cached.

        The batches must then be made in order, from step `start` to the end of the epoch.
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
    """Return the planner of a pass; None where the feed reads nothing ahead."""
    stored = stored_fields(feed)
    if feed.readahead == 0 or not stored:
        return None
    return Planner(reader, stored, feed.sampler, epoch, start, limit=feed.readahead)


def stored_fields(feed: Feed) -> list[str]:
    """Return the fields that are read from the shards."""
    return [name for name in feed.fields if name not in feed.index.columns]


def joined_rows(index: Index, side: Mapping[str, Array], request: Request, /) -> dict[str, Array]:
    """Return the rows of a request without padding: of columns by record, of side tables by sample
    id. The rows get the machine's byte order, since both frameworks need this order.
    """
    rows = {name: column[request.records] for name, column in index.columns.items()}
    rows |= {name: np.asarray(table[request.ids]) for name, table in side.items()}
    return {
        name: part.astype(part.dtype.newbyteorder("="), copy=False) for name, part in rows.items()
    }


def _padded(rows: Array, held: npt.NDArray[np.bool_]) -> Array:
    """Return `rows` at the held places, and zeros at the others."""
    if held.all():
        return rows
    padded = np.zeros((len(held), *rows.shape[1:]), rows.dtype)
    padded[held] = rows
    return padded


def _spread(values: Sequence[Any], held: npt.NDArray[np.bool_]) -> Sequence[Any]:
    """Return `values` at the held places, and None at the others."""
    if held.all():
        return values
    rest = iter(values)
    return [next(rest) if one else None for one in held]
