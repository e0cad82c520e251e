"""Make a batch of arrays for each request of a pass."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.batches._shared_samples import with_writable_arrays
from twinfeed.loaders.batches.meter import Meter
from twinfeed.loaders.batches.prepared import PreparedFeed
from twinfeed.loaders.batches.samples import Rows, Samples, Values, samples_of
from twinfeed.loaders.batches.spec_inference import probe_requests
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import Batch, stored_fields
from twinfeed.loaders.feed.collate import (
    Allocate,
    CollateError,
    aligned,
    check_collate,
    collate,
    is_bytes,
)
from twinfeed.loaders.feed.request import Request, requests
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.read_step import ReadStep, plan_pass
from twinfeed.loaders.reading.side_table import ByRecord
from twinfeed.loaders.reading.source import Reads, reader_of
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.closing import Closing
from twinfeed.samplers.validate import counted

Mask = npt.NDArray[np.bool_]
"""bool[batch], False for padding."""


class Batcher(Closing):
    """Make the batches of a feed: call the batcher with the request for a batch.

    `reader` may be shared with other passes. By default the batcher has a reader of its own. The
    samples of a batch are decoded on `threads`. `meter` adds up the times. `empty` allocates the
    arrays, as numpy.empty does. A batcher pickles without the sampler, the threads and the cache.
    """

    def __init__(
        self,
        prepared: PreparedFeed,
        /,
        *,
        reader: Reads | None = None,
        threads: int = 0,
        meter: Meter | None = None,
        empty: Allocate = aligned,
    ) -> None:
        feed, self.spec = prepared.config, prepared.spec
        self._batch_function = prepared.batch_function
        self._own_reader = reader is None
        self._reader = reader_of(feed.index) if reader is None else reader
        self.samples = Samples(prepared, self._reader, threads=threads, meter=meter, empty=empty)
        self.meter = self.samples.meter
        self._collation = check_collate(feed.collate)
        self._empty = empty
        self._has_padding = feed.sampler.traits.padded
        self._batch_size = max(1, feed.sampler.batch_size)
        self._steps_per_epoch = max(1, len(feed.sampler))
        self._fields = stored_fields(feed)
        # The first sample of the stream, whose bytes a batch has that is only padding.
        pads_bytes = self._has_padding and any(map(is_bytes, self.spec.values()))
        needs_first = pads_bytes and self._batch_function is None and len(feed.sampler)
        self._first_request = probe_requests(feed)[0] if needs_first else None
        self._read_plan: ReadPlan | None = None  # what to prefetch, after `start_pass`

    def __call__(self, request: Request, /) -> Batch:
        """Read, decode and collate the samples of a request; return them as a batch.

        Raises:
            LoaderError: a record could not be read, or decoded (DecodeError).
        """
        mask = request.ids >= 0 if self._has_padding else None  # False for padding
        real_request = request if mask is None else request.where(mask)  # without padding
        table_rows = self.samples.table_rows(real_request)
        try:
            with ExitStack() as stack:
                global_step = request.epoch * self._steps_per_epoch + request.step
                reading = ReadStep(self._reader, global_step, self._read_plan)
                # To enter requests the bytes of coming batches, which counts as reading time.
                self.meter.timed("reading", stack.enter_context, reading)
                values = self.samples.field_values(real_request, table_rows)
        except LoaderError as error:
            error.add_note(f"in the batch of epoch {request.epoch}, step {request.step}")
            raise
        if not len(real_request.ids):  # no sample shows the fields
            values = self._values_without_sample(len(request.ids))
        if self._batch_function is None:
            real = None if real_request is request else mask
            batch = self.meter.timed("collating", self._collate, request, real, table_rows, values)
        else:  # the function gets real samples only, and adds the padding to its result
            inputs = real_request, None, table_rows, values
            batch = self.meter.timed("collating", self._collate, *inputs)
            batch = self.meter.timed("transforming", self._batch_function, batch, request)
        if mask is not None:
            batch["mask"] = mask
        # A request may have the ids of several steps, which tf.data cuts into batches later. So the
        # number of ids is divided by the batch size, rounded up.
        self.meter.batch_done(request.step, max(1, -(-len(request.ids) // self._batch_size)))
        return batch

    def _values_without_sample(self, num_padding: int) -> Values:
        """Return no values, or for padding with bytes the values of the stream's first sample."""
        first = self._first_request
        if first is None or not num_padding:
            return dict.fromkeys(self.spec, ())
        return self.samples.field_values(first, self.samples.table_rows(first), cached=False)

    def _collate(
        self, request: Request, real: Mask | None, table_rows: dict[str, Rows], values: Values
    ) -> Batch:
        """Return the batch, a dict of arrays or lists, with a row for each sample of the request.

        Args:
            request: says which samples the batch has.
            real: bool[batch], False for samples that are padding; None if there is no padding.
            table_rows: the rows of each column and side table, without those of padding.
            values: the values of each field, without those of padding.

        The batch has zeros or "" for padding, and in a field of `bytes` the first real value.

        Raises:
            DecodeError: a value does not fit the spec of its field.
        """
        if real is not None:
            table_rows = {name: _with_padding_rows(rows, real) for name, rows in table_rows.items()}
        try:
            fields = collate(values, self.spec, how=self._collation, real=real, empty=self._empty)
        except CollateError as error:
            where = self.samples.index.describe(request.records[error.position])
            raise DecodeError(f"{where}: {error}") from error
        return {"id": request.ids, **table_rows, **fields}

    def samples_of_records(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Return the samples of records that the user has chosen, as `dataset[3]` does.

        Args:
            records: the record ids.
            seeds: the seed for the transform of each record.

        Returns:
            A dict for each record: `id`, its columns, its rows of side tables, and its fields.

        Raises:
            ValueError: the feed has a `batch_transform`, which needs whole batches; or it has a
                side table that cannot be read by record id. Such a table has a row for each sample
                that the sampler can draw, such as 3 rows for the 3 crops of each image, and no
                sampler has chosen a crop here. Readable are tables with a row for each record, and
                `ByRecord` tables.
        """
        if self._batch_function is not None:
            raise ValueError(
                "batch_transform needs whole batches: give the DataLoader "
                "batch_sampler=RequestSampler(feed), collate_fn=as_tensors"
            )
        for name, rows in self.samples.side_tables.items():
            if not isinstance(rows, ByRecord) and len(rows) != len(self.samples.index):
                raise ValueError(
                    f"side table {name!r} has {counted(len(rows), 'row')}, the index "
                    f"{len(self.samples.index):,} records: give a row for each, in ByRecord(table)"
                )
        request = Request.plain(records, seeds)
        table_rows = self.samples.table_rows(request)
        values = self.samples.field_values(request, table_rows, cached=False)
        fields = {"id": records.tolist(), **table_rows, **values}
        return [with_writable_arrays(sample) for sample in samples_of(fields)]

    def start_pass(
        self, schedule: Schedule, epoch: int, start: int, /, *, readahead: int | None
    ) -> None:
        """Start to prefetch the bytes of an epoch's batches, from step `start` on.

        The batches must then be requested in order, to the end of the epoch. If the sampler draws
        each image several times, coming images are decoded on threads too.

        Args:
            schedule: has the ids of the batches.
            epoch: the epoch.
            start: the step of the first batch.
            readahead: the number of bytes to prefetch, or None for the default.
        """
        global_step = epoch * self._steps_per_epoch + start
        self._read_plan = plan_pass(self._reader, schedule, self._fields, global_step, readahead)
        threads = self.samples.sample_map.threads
        if self.samples.cache is not None and threads:
            # Only the transform uses seeds, and it does not run ahead.
            coming_requests = requests(schedule, epoch, start, seeds=False)
            self.samples.cache.start_decoding(coming_requests, threads=threads)

    def close(self) -> None:
        """End the threads, drop the cache, and close the reader unless it is shared."""
        self.samples.close()
        if self._own_reader:
            self._reader.close()


def _with_padding_rows(rows: Rows, real: Mask) -> Rows:
    """Insert a row of zeros, or "", at each position where `real` is False.

    For example, rows [5, 7] with real [True, False, True] become [5, 0, 7].
    """
    if isinstance(rows, list):
        strings = iter(rows)
        return [next(strings) if is_real else "" for is_real in real]
    padded = np.zeros((len(real), *rows.shape[1:]), rows.dtype)
    padded[real] = rows
    return padded
