"""Make a batch of arrays for each request of a pass."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.collate import Allocate, MisfitError, aligned, check_collate, collate
from twinfeed.loaders.feed.config import Batch, stored_fields
from twinfeed.loaders.feed.request import Request, requests
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.making._shared_samples import with_writable_arrays
from twinfeed.loaders.making.compiled import CompiledFeed
from twinfeed.loaders.making.meter import Meter
from twinfeed.loaders.making.samples import Rows, Samples, Values, samples_of
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.read_step import ReadStep, start_pass
from twinfeed.loaders.reading.side_table import ByRecord
from twinfeed.loaders.reading.source import Reads, reader_of
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.closing import Closing
from twinfeed.samplers.validate import counted


class Batcher(Closing):
    """Make the batches of a feed: call the batcher with the request for a batch.

    `reader` may be shared with other passes. By default the batcher has a reader of its own. The
    samples of a batch are decoded on `threads`. `meter` adds up the times. `empty` allocates the
    arrays, as numpy.empty does. A batcher pickles without the sampler, the threads and the cache.
    """

    def __init__(
        self,
        compiled: CompiledFeed,
        /,
        *,
        reader: Reads | None = None,
        threads: int = 0,
        meter: Meter | None = None,
        empty: Allocate = aligned,
    ) -> None:
        feed, self.spec, self._batch_function = (
            compiled.config,
            compiled.spec,
            compiled.batch_function,
        )
        self._own_reader = reader is None
        self._reader = reader_of(feed.index) if reader is None else reader
        self.samples = Samples(compiled, self._reader, threads=threads, meter=meter, empty=empty)
        self._index, self.meter = feed.index, self.samples.meter
        self._side_tables = dict(feed.side)
        self._collate_modes = check_collate(feed.collate)
        self._empty = empty
        self._has_padding = feed.sampler.traits.padded
        self._batch_size = max(1, feed.sampler.batch_size)
        self._steps_per_epoch = max(1, len(feed.sampler))
        self._stored_fields = stored_fields(feed)
        self._read_plan: ReadPlan | None = None

    def __call__(self, request: Request, /) -> Batch:
        """Return the batch for a request.

        Raises:
            LoaderError: a record could not be read, or decoded (DecodeError).
        """
        real = request.ids >= 0 if self._has_padding else None
        without_padding = request if real is None else request.where(real)
        table_rows = self.samples.table_rows(without_padding)
        try:
            with ExitStack() as stack:
                step = request.epoch * self._steps_per_epoch + request.step
                reading = ReadStep(self._reader, step, self._read_plan)
                self.meter.timed("reading", stack.enter_context, reading)
                values = self.samples.field_values(without_padding, table_rows)
        except LoaderError as error:
            error.add_note(f"in the batch of epoch {request.epoch}, step {request.step}")
            raise
        rows = request if self._batch_function is None else without_padding
        batch = self.meter.timed(
            "collating", self._collate, rows, without_padding, table_rows, values
        )
        if self._batch_function is not None:
            batch = self.meter.timed("transforming", self._batch_function, batch, request)
        if real is not None:
            batch["mask"] = real
        self.meter.batch_done(request.step, max(1, -(-len(request.ids) // self._batch_size)))
        return batch

    def _collate(
        self,
        request: Request,
        without_padding: Request,
        table_rows: dict[str, Rows],
        values: Values,
    ) -> Batch:
        """Stack the samples of a request to a batch, a dict of arrays or lists.

        `table_rows` are the rows of columns and side tables, `values` those of fields, for each
        sample of `without_padding`. If this is not `request` itself, padding is added.
        """
        if not len(without_padding.ids):  # a batch of padding alone
            values = dict.fromkeys(self.spec, ())
        real = None if without_padding is request else request.ids >= 0
        if real is not None:
            table_rows = {name: _with_padding_rows(rows, real) for name, rows in table_rows.items()}
        try:
            fields = collate(
                values, self.spec, how=self._collate_modes, real=real, empty=self._empty
            )
        except MisfitError as error:
            where = self._index.describe(request.records[error.position])
            raise DecodeError(f"{where}: {error}") from error
        return {"id": request.ids, **table_rows, **fields}

    def samples_of_records(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Return a sample (`id`, columns, side rows and fields) for each record id.

        Raises:
            ValueError: the feed has a `batch_transform`, which needs whole batches, or a side table
                that is joined by sample id, not by record id.
        """
        if self._batch_function is not None:
            raise ValueError(
                "batch_transform needs whole batches: give the DataLoader "
                "batch_sampler=RequestSampler(feed), collate_fn=as_tensors"
            )
        for name, rows in self._side_tables.items():
            if not isinstance(rows, ByRecord) and len(rows) != len(self._index):
                raise ValueError(
                    f"side table {name!r} has {counted(len(rows), 'row')} for "
                    f"{counted(len(self._index), 'record')}: only a sampler can join it"
                )
        request = Request.plain(records, seeds)
        table_rows = self.samples.table_rows(request)
        values = self.samples.field_values(request, table_rows, cached=False)
        fields = {"id": records.tolist(), **table_rows, **values}
        return [with_writable_arrays(sample) for sample in samples_of(fields)]

    def start_pass(
        self, schedule: Schedule, epoch: int, start: int, /, *, readahead: int | None
    ) -> None:
        """Start to prefetch bytes for an epoch, and to decode ahead if the sampler reuses images.

        The batches must then be requested in order, from step `start` to the end of the epoch.
        `readahead` is the number of bytes to prefetch, or None for the default.
        """
        first = epoch * self._steps_per_epoch + start
        self._read_plan = start_pass(self._reader, schedule, self._stored_fields, first, readahead)
        threads = self.samples.sample_map.threads
        if self.samples.cache is not None and threads:
            coming_requests = requests(schedule, epoch, start, seeds=False)
            self.samples.cache.look_ahead(coming_requests, threads=threads)

    def close(self) -> None:
        """End the threads, drop the cache, and close the reader unless it is shared."""
        self.samples.close()
        if self._own_reader:
            self._reader.close()


def _with_padding_rows(rows: Rows, real: npt.NDArray[np.bool_]) -> Rows:
    """Return `rows` spread over the batch, with zeros or "" where `real` (bool[batch]) is False."""
    if isinstance(rows, list):
        texts = iter(rows)
        return [next(texts) if is_real else "" for is_real in real]
    padded = np.zeros((len(real), *rows.shape[1:]), rows.dtype)
    padded[real] = rows
    return padded
