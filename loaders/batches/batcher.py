"""Make the batch of each request: read, decode, transform, collate, call its function, and pad."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import starmap
from operator import is_, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.batches._decoded_cache import DecodedCache, Fields
from twinfeed.loaders.batches.meter import Meter
from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import TRANSFORM_EXTRAS, Batch, column_advice, stored_fields
from twinfeed.loaders.feed.collate import (
    Allocate,
    CollateError,
    FieldSpec,
    aligned,
    collate,
    dtype_of,
    smallest_shape,
)
from twinfeed.loaders.feed.decode import DecodeImage
from twinfeed.loaders.feed.seeded import LOW_32_BITS
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.reading.prefetch.read_plan import ReadPlan
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule
from twinfeed.loaders.reading.reader import plan_of_pass
from twinfeed.loaders.reading.side_table import ByRecord, ViewRows
from twinfeed.loaders.reading.source import FieldReader, Source, read_only, reader_of
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.support.closing import Closing
from twinfeed.samplers.validate import a_type, counted

Values = Mapping[str, Sequence[Any]]
"""The values of each field by name, a value for each sample."""

Rows = Array | list[str]
"""The rows of a column or a side table, one for each sample."""

_NO_STEP: AbstractContextManager[None] = nullcontext()
"""The step of a batch of which nothing was prefetched."""

IMMUTABLE = (bytes, str, int, float, complex, bool, type(None), np.generic)


class Batcher(Closing):
    """Follow a recipe: call the batcher with the request for a batch. With threads, it is of one
    process.
    """

    def __init__(
        self,
        recipe: Recipe,
        /,
        *,
        reader: FieldReader | None = None,
        threads: int = 0,
        meter: Meter | None = None,
        empty: Allocate = aligned,
    ) -> None:
        self.recipe, self.threads, self._empty = recipe, threads, empty
        self._own_reader = reader is None
        self._reader = reader_of(recipe.index) if reader is None else reader
        self.meter = Meter() if meter is None else meter
        self._read = partial(self.meter.timed, "reading", recipe.stored.read, self._reader)
        self._pool: ThreadPoolExecutor | None = None  # of threads, after the first call
        # If the sampler draws each record several times close together, its image is kept.
        self.cache = None if recipe.uses is None else DecodedCache(recipe.uses, self.decoded)
        self._in_place = recipe.in_place
        self._read_plan: ReadPlan | None = None  # what to prefetch, after `start_pass`

    def __call__(self, request: Request, /) -> Batch:
        """Return the batch of a request."""
        recipe = self.recipe
        try:
            step = _NO_STEP
            if self._read_plan is not None and self._read_plan.active:
                global_step = request.epoch * recipe.steps_per_epoch + request.step
                step = self.meter.timed("reading", self._read_plan.step, global_step)
            with step:
                rows = self.table_rows(request)
                values = self.field_values(request, rows)
        except LoaderError as error:
            error.add_note(f"in the batch of epoch {request.epoch}, step {request.step}")
            raise
        batch = self.meter.timed("collating", self._collate, request, rows, values)
        if recipe.batch_function is not None:
            batch = self.meter.timed("transforming", recipe.batch_function, batch, request)
        if recipe.padded:
            batch = recipe.with_padding(batch, request.mask, self._empty)
        # A request may have the ids of several steps, which tf.data cuts into batches later.
        self.meter.count_batches(max(1, -(-len(batch["id"]) // recipe.batch_size)))
        return batch

    def table_rows(self, request: Request, /) -> dict[str, Rows]:
        """Return, for each column and side table, its rows for the samples of a request."""
        columns = self.recipe.columns.items()
        rows = {name: _rows_of(column, request.records) for name, column in columns}
        for name, table in self.recipe.side.items():
            if isinstance(table, ViewRows):
                at = table.starts[request.records] + request.views
                rows[name] = _rows_of(table.table, at)
            elif isinstance(table, ByRecord):
                rows[name] = _rows_of(table.table, request.records)
            else:
                rows[name] = _rows_of(table, request.ids)
        return rows

    def field_values(
        self, request: Request, rows: Mapping[str, Rows], /, *, cached: bool = True
    ) -> Values:
        """Read, decode and transform the records of a request."""
        recipe, records = self.recipe, request.records
        if not len(records):  # there is no sample that shows the fields
            return dict.fromkeys(recipe.spec, ())
        if recipe.decode is None and recipe.transform is None:
            return self._read(records)
        # A record that the batch has twice would be decoded twice into the arrays of the batch.
        # To decode it once saves more than the copies.
        if self._in_place and len(set(records.tolist())) == len(records):
            return self._decoded_in_place(records, *self._in_place)
        if cached and self.cache is not None:
            samples = self.cache.get(request)
        else:
            samples = self.decoded(records)
        if recipe.transform is not None:
            samples = self.meter.timed("transforming", self.transformed, samples, request, rows)
        return self._by_field(records, samples)

    def stored(self, records: Int64s, /) -> list[Sample]:
        """Read the stored fields of records; return a dict by field for each record."""
        return (
            samples_of(self._read(records)) if self.recipe.stored.names else [{} for _ in records]
        )

    def decoded(self, records: Int64s, /) -> list[Fields]:
        """Read and decode records; return the sample of each."""
        shares = self.recipe.shares_arrays
        if shares and len(set(records.tolist())) < len(records):
            distinct, positions = np.unique(records, return_inverse=True)
            of_distinct = self.decoded(distinct)
            return [of_distinct[position] for position in positions.tolist()]
        samples: Sequence[Fields] = self.stored(records)
        if decode := self.recipe.decode:
            inputs = "decode", decode, records, samples
            samples = self.meter.timed("decoding", self._call_each, *inputs)
        return [*map(_with_read_only_arrays, samples)] if shares else [*samples]

    def transformed(
        self, samples: Sequence[Fields], request: Request, rows: Mapping[str, Rows], /
    ) -> list[Fields]:
        """Call the user's transform for each decoded sample of a request."""
        recipe, seeds = self.recipe, request.seeds
        assert recipe.transform is not None
        assert seeds is not None  # requests have seeds if the feed has a transform
        extras: dict[str, Iterable[Any]] = {
            **rows,
            "id": request.ids.tolist(),
            "record": request.records.tolist(),
            "view": request.views.tolist(),
            "seed": seeds.tolist(),
            "seed32": (seeds & np.uint64(LOW_32_BITS)).tolist(),
        }
        # The transform may write to what it gets, but not to arrays that other samples share.
        private = with_private_copies if recipe.shares_arrays else _with_writable_arrays
        if recipe.decode is None and getattr(recipe.index, "in_memory", False):
            samples = [*map(with_private_copies, samples)]  # lists and tensors are the data set's
        inputs = [
            {**private(sample), **extra}
            for sample, extra in zip(samples, samples_of(extras), strict=True)
        ]
        results = self._call_each("transform", recipe.transform, request.records, inputs)
        for result, sample, record in zip(results, inputs, request.records, strict=True):
            for name in TRANSFORM_EXTRAS:
                if name in result and result.pop(name) is not sample[name]:
                    where = recipe.index.describe(record)
                    raise DecodeError(f"{where}: transform changed {name!r}: rename the new value")
        return [*results]

    def _decoded_in_place(self, records: Int64s, decode: DecodeImage, spec: FieldSpec) -> Values:
        """Decode records into the rows of a new array, which saves a copy of each image."""
        array = self._empty((len(records), *smallest_shape(spec.shape)), dtype_of(spec))
        rows = [*array]
        inputs = "decode", decode.into, records, self.stored(records), rows
        samples = self.meter.timed("decoding", self._call_each, *inputs)
        values = self._by_field(records, samples)
        # If decode has returned the row object of each record, all values are in the array.
        if all(map(is_, values[decode.field], rows)):
            values[decode.field] = array  # type: ignore[assignment]
        return values

    def _call_each(
        self,
        function_name: str,
        function: Callable[..., Fields],
        records: Int64s,
        /,
        *arguments: Sequence[Any],
    ) -> list[dict[str, Any]]:
        """Call a user's function for each sample, on the threads: each makes every n-th call."""
        call = partial(call_for_record, self.recipe.index, function_name, function)
        calls = [*zip(records, *arguments, strict=True)]
        num_threads = min(self.threads, len(calls))
        if num_threads < 2:
            return [*starmap(call, calls)]

        def run(thread: int) -> list[dict[str, Any]]:
            """Make the calls of one thread, one after another."""
            return [*starmap(call, calls[thread::num_threads])]

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "twinfeed-decode")
        results: list[Any] = [None] * len(calls)
        for thread, thread_results in enumerate(self._pool.map(run, range(num_threads))):
            results[thread::num_threads] = thread_results
        return results

    def _by_field(self, records: Int64s, samples: Sequence[Fields]) -> dict[str, Sequence[Any]]:
        """Turn samples (dicts by field) into a dict that has a list of values for each field."""
        fields = samples[0].keys()
        for sample, record in zip(samples, records, strict=True):
            if sample.keys() != fields:
                raise DecodeError(
                    f"{self.recipe.index.describe(record)}: {self.recipe.last_function} returned "
                    f"the fields {sorted(sample)}, but {sorted(fields)} for another record"
                )
        return {field: [*map(itemgetter(field), samples)] for field in fields}

    def _collate(self, request: Request, rows: Mapping[str, Rows], values: Values) -> Batch:
        """Return the batch of a request: arrays or lists, with a row for each sample."""
        recipe = self.recipe
        try:
            fields = collate(values, recipe.spec, how=recipe.collate, empty=self._empty)
        except CollateError as error:
            where = recipe.index.describe(request.records[error.position])
            raise DecodeError(f"{where}: {error}") from error
        return {"id": request.ids, **rows, **fields}

    def samples_of_records(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Return the samples of records that the user has chosen, as `dataset[3]` does."""
        recipe = self.recipe
        if recipe.batch_function is not None:
            raise ValueError(
                "batch_transform needs whole batches: give the DataLoader "
                "batch_sampler=RequestSampler(feed), collate_fn=as_tensors"
            )
        for name, table in recipe.side.items():
            if not isinstance(table, ByRecord) and len(table) != len(recipe.index):
                raise ValueError(
                    f"side table {name!r} has {counted(len(table), 'row')}, the index "
                    f"{len(recipe.index):,} records: give a row for each, in ByRecord(table)"
                )
        request = Request.plain(records, seeds)
        rows = self.table_rows(request)
        values = self.field_values(request, rows, cached=False)
        fields = {"id": records.tolist(), **rows, **values}
        return [_with_writable_arrays(sample) for sample in samples_of(fields)]

    def start_pass(
        self,
        schedule: Schedule,
        epoch: int,
        start: int,
        /,
        *,
        readahead: int | None,
        goes_on: bool = False,
        running: bool = False,
    ) -> None:
        """Start to prefetch the bytes of an epoch's batches, which are then requested in order from
        step `start` on, with `goes_on` over its end; then this is called for the next epoch, while
        the pass is `running`. If the sampler draws images several times, coming ones are decoded
        on threads too.
        """
        recipe = self.recipe
        fields = stored_fields(recipe.index, recipe.stored.names)
        step = epoch * recipe.steps_per_epoch + start
        self._read_plan = plan_of_pass(
            self._reader, schedule, fields, step, readahead, running=running
        )
        if self.cache is not None and self.threads and not running:
            # Only the transform uses seeds, and it does not run ahead.
            coming = schedule.requests(epoch, start, seeds=False, goes_on=goes_on)
            self.cache.start_decoding(coming, threads=self.threads)

    def close(self) -> None:
        """End the threads, drop the cache, and close the reader unless it is shared."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self.cache is not None:
            self.cache.close()
        if self._own_reader:
            self._reader.close()


def call_for_record(
    index: Source, function_name: str, function: Callable[..., Fields], record: int, /, *args: Any
) -> dict[str, Any]:
    """Return `function(*args)`, the dict of a user's decode or transform for a sample of a record,
    or raise DecodeError, which names the record.
    """
    try:
        result = function(*args)
        if not isinstance(result, (dict, Mapping)):
            raise TypeError(f"it must return a dict of fields, got {a_type(result)}")
        return dict(result)  # a copy, as the function may return the same dict for each sample
    except ImportError:  # no fault of the record; the message says what to install
        raise
    except LoaderError as error:
        problem = f"{index.describe(record)}: {error.problem}"
        raise type(error)(problem, advice=error.advice) from error
    except Exception as error:
        raise DecodeError(
            f"{index.describe(record)}: {function_name} failed: {error!r:.1000}"
            f"{_hint(index, error, args[0])}",
            advice=f"correct {function_name}, or leave the record out by records=, "
            "SubsetSampler or replaced()",
        ) from error


def _hint(index: Source, error: Exception, sample: Fields) -> str:
    """Return text to add to an error of a user's function: copy a read-only array; or the fields
    that the sample has, and whether the missing one is a column.
    """
    if isinstance(error, ValueError) and "read-only" in str(error):
        return "; copy the array before writing to it, as in image.copy()"
    if not isinstance(error, KeyError):
        return ""
    return f"; it was given {sorted(sample)}{column_advice(index, error.args)}"


def _with_read_only_arrays(sample: Fields) -> Fields:
    """Return a copy of a sample (a dict by field) that has read-only views of its arrays."""
    return {
        name: read_only(value) if isinstance(value, np.ndarray) else value
        for name, value in sample.items()
    }


def _with_writable_arrays(sample: Fields) -> dict[str, Any]:
    """Return a copy of a sample (a dict by field) in which read-only arrays are copied."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value
        for name, value in sample.items()
    }


def with_private_copies(sample: Fields, /, *, arrays: bool = False) -> dict[str, Any]:
    """Return a copy of a sample (a dict by field) with deep copies of its mutable values."""
    copies = dict(sample)
    for name, value in sample.items():
        if not isinstance(value, IMMUTABLE) and (arrays or not isinstance(value, np.ndarray)):
            with suppress(Exception):  # an open file, a tensor with a gradient
                copies[name] = copy.deepcopy(value)
    return copies


def _rows_of(table: Any, indices: Int64s) -> Rows:
    """Return rows of a column or side table as strings, or as an array in the byte order of the
    machine, which torch needs.
    """
    if type(table) is StringColumn:
        return list(map(table.__getitem__, indices.tolist()))
    array = np.asarray(table[indices])  # a side table may be another library's array
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def samples_of(fields: Mapping[str, Iterable[Any]], /) -> list[Sample]:
    """Turn a dict that has the values of all samples for each field into a list of samples."""
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
