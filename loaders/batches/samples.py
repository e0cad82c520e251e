"""Make the samples of a request: read, decode and transform its records."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from twinfeed.loaders.batches._decoded_cache import DecodedCache
from twinfeed.loaders.batches._sample_map import SampleMap, call_for_record, check_values
from twinfeed.loaders.batches._shared_samples import (
    Fields,
    check_not_mutated,
    with_private_copies,
    with_read_only_arrays,
    with_writable_arrays,
)
from twinfeed.loaders.batches.meter import Meter
from twinfeed.loaders.batches.prepared import PreparedFeed
from twinfeed.loaders.batches.repeatability import (
    array_copy,
    bitwise_equal,
    buffer_error,
    call_repeatedly,
    first_shared,
)
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import TRANSFORM_EXTRAS, check_unreserved
from twinfeed.loaders.feed.collate import (
    Allocate,
    FieldSpec,
    aligned,
    dtype_of,
    mode_of,
    smallest_shape,
)
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.feed.seeded import LOW_32_BITS
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.arrays import StringColumn
from twinfeed.loaders.reading.side_table import ByRecord, ViewRows
from twinfeed.loaders.reading.source import Reads, read_with_missing
from twinfeed.loaders.support.array_types import Array, Int64s

Values = Mapping[str, Sequence[Any]]
"""The values of each field by name, a value for each sample."""

Rows = Array | list[str]
"""The rows of a column or a side table, one for each sample."""

# How many calls of a transform are checked for changes of the arrays that samples share. Not all
# are: a checksum of a large image takes longer than a crop of it.
_MAX_MUTATION_CHECKS = 4

# How often the first record of a source is read: if the dataset flips images at random, all reads
# are equal once in 128 times.
_PROBE_READS = 8


class Samples:
    """Read, decode and transform the samples of requests, for one pass.

    Each pass has its own decoding threads and its own cache of decoded images. If the shape of a
    field is known, decode may write into the array of the batch, which `empty` allocates.
    """

    def __init__(
        self,
        prepared: PreparedFeed,
        reader: Reads,
        /,
        *,
        threads: int = 0,
        meter: Meter | None = None,
        empty: Allocate = aligned,
    ) -> None:
        self.meter = Meter() if meter is None else meter
        self._empty = empty
        feed, traits = prepared.config, prepared.config.sampler.traits
        self.index = feed.index
        self.reader = reader
        self.fields = feed.fields
        self._missing = dict(feed.missing)
        self.decode = feed.decode
        self.transform = feed.transform
        self.side_tables = dict(feed.side)
        self.sample_map = SampleMap(feed.index, threads=threads)
        # If the sampler draws each record several times close together, its image is kept.
        self.cache = None if traits.max_cached is None else DecodedCache(traits.uses, self._decode)
        self._shares_arrays = feed.shares_arrays  # several samples may use one decoded array
        self._mutation_checks_left = _MAX_MUTATION_CHECKS
        self._in_place_fields = self._fields_in_place(prepared)

    def table_rows(self, request: Request, /) -> dict[str, Rows]:
        """Return, for each column and side table by name, its rows for the samples of a request.

        The request has no padding. It has two ids for each sample. For example, a sampler draws 3
        crops of each record: sample id 7 (of `ids`) is crop 1 of record id 2 (of `records`), since
        7 = 3 * 2 + 1. For this sample, columns and `ByRecord` tables are read at row 2, as they
        have a row for each record, and `ViewRows` at row `starts[2] + 1`. Other side tables have a
        row for each sample, and are read at row 7.
        """
        columns = self.index.columns
        rows = {name: _rows_of(columns[name], request.records) for name in columns}
        for name, table in self.side_tables.items():
            if isinstance(table, ViewRows):
                at = table.starts[request.records] + request.views
                rows[name] = _rows_of(table.table, at)
            elif isinstance(table, ByRecord):
                rows[name] = _rows_of(table.table, request.records)
            else:
                rows[name] = _rows_of(table, request.ids)
        return rows

    def field_values(
        self, request: Request, table_rows: Mapping[str, Rows], /, *, cached: bool = True
    ) -> Values:
        """Read, decode and transform the records of a request.

        Args:
            request: the samples of the batch; the caller has left out the ids -1 of padding.
            table_rows: the rows of each column (an array of the index) and each side table (of the
                user) for the samples. The transform gets them beside the fields.
            cached: whether the cache of decoded images is used.

        Returns:
            For each field, the values of all samples.
        """
        records = request.records
        if self.decode is None and self.transform is None:
            return self._read_fields(records)
        # `_in_place_fields` are fields that decode can write directly into the arrays of the batch,
        # which saves copying them. A record that the batch has twice would be decoded twice then,
        # into two rows. `_decode_request` decodes it once, which saves more.
        has_repeats = len(set(records.tolist())) < len(records)
        if self._in_place_fields and not has_repeats:
            return self._decode_in_place(records)
        samples = self._decode_request(request, cached=cached)
        if self.transform is not None:
            arguments = samples, request, table_rows
            samples = self.meter.timed("transforming", self._transform, *arguments)
        # The name "transform" or "decode" is for the message if a value is None.
        return self.sample_map.values_by_field(self.last_function, records, samples)

    def probe_sample(self, first: Request, second: Request, /) -> Fields:
        """Return the sample of the request `first`, after checking the user's functions with it.

        Each of the two requests has one sample. Three steps are checked one after another:

        1. reading, if the records do not come from an index;
        2. decode, unless it is known to be deterministic;
        3. transform.

        Each step is run for `first` several times, under different global random seeds: the results
        must be equal. Then it is run for `second` once. If the function fills one buffer again and
        again, this overwrites the results for `first`, which is an error.

        Raises:
            ValueError: the results of the calls differ, or one is changed later.
        """
        # If samples share decoded arrays, `_call_transform` checks that the transform does not
        # write to them: in so many calls, since the check is slow. One of the calls below is enough
        # here, since all of them must do the same.
        self._mutation_checks_left = 1
        if not isinstance(self.index, Index):  # of a user's own source; an index is deterministic
            self._probe_read(first.records, second.records)
        if is_own_decode(self.decode):
            sample = self._decode_one(first.records)
        else:
            records = first.records, second.records
            sample = call_repeatedly("decode", self._decode_one, *records, times=3)
            if hasattr(self.decode, "writes"):
                self._probe_in_place_decode(*records, sample)

        def transform(request: Request) -> Fields:
            """Return the transformed sample of a request."""
            decoded = sample if request is first else self._decode_one(request.records)
            if not self._shares_arrays:  # then the transform may write to the arrays
                decoded = with_private_copies(decoded, arrays=True)
            return self._transform([decoded], request, self.table_rows(request))[0]

        if self.transform is not None:  # 16 times: a rare random choice must show
            sample = call_repeatedly("transform", transform, first, second, times=16)
        # `last_function`, the name "decode" or "transform", is for the message of an error.
        check_values(self.index, self.last_function, int(first.records[0]), sample)
        return sample

    def _probe_read(self, first: Int64s, second: Int64s) -> None:
        """Check that a source's reads are repeatable, and do not return one buffer for two records.

        `first` and `second` are arrays of one record id. `call_repeatedly` reads `first` several
        times, and then `second` once. At last, both are read alone and together: a source that
        fills one buffer for all records returns the values of the last record for both when they
        are read together, but the right values when each is read alone.

        Raises:
            ValueError: repeated reads of `first` differ, or the source fills one buffer.
        """

        def read(records: Int64s) -> Sample:
            """Return the stored fields of records[0]."""
            return self._read_samples(records)[0]

        item = self.index.describe(int(first[0]))
        call_repeatedly("read", read, first, second, times=_PROBE_READS, input_name=item)
        with suppress(LoaderError, OSError):  # raised again when the record's batch is made
            first_alone, second_alone = array_copy(read(first)), array_copy(read(second))
            first_of_both, second_of_both = self._read_samples(np.concatenate([first, second]))
            for name in first_of_both:
                equal_together = bitwise_equal(first_of_both[name], second_of_both[name])
                if equal_together and not bitwise_equal(first_alone[name], second_alone[name]):
                    raise buffer_error("read", name)

    def _probe_in_place_decode(self, first: Int64s, second: Int64s, sample: Fields) -> None:
        """Check that the user's `decode.into` returns the same sample as decode.

        `first` and `second` are arrays of one record id, and `sample` is what decode has returned
        for `first`. `decode.into(stored, arrays)` also returns the decoded sample, but writes some
        fields, `decode.writes`, into existing arrays. Arrays full of zeros are tried, and then
        arrays full of ones: so an element that is not written differs from `sample` at least once.

        Each time, `call_repeatedly` decodes `first` three times, and then `second` once. It raises
        an error if the results for `first` differ, or if the last call changes one of them.

        Raises:
            ValueError: a result differs from `sample`, or from another result, or is changed later.
        """
        decode: Any = self.decode

        def decode_into_arrays(fill: int, records: Int64s) -> Fields:
            """Decode records[0] into arrays full of `fill`, and return the sample."""
            arrays = {name: np.full_like(sample[name], fill) for name in decode.writes}
            stored = self._read_samples(records)[0]
            arguments = int(records[0]), stored, arrays
            return call_for_record(self.index, "decode", decode.into, *arguments)

        for fill in (0, 1):
            decode_filled = partial(decode_into_arrays, fill)
            result = call_repeatedly("decode", decode_filled, first, second, times=3)
            if not bitwise_equal(result, sample):
                advice = f"write every element of {list(decode.writes)}, or leave `writes` out"
                raise ValueError(f"decode.into returned another sample than decode: {advice}")

    @property
    def last_function(self) -> str:
        """The name of the function that returns the final values of a sample."""
        return "transform" if self.transform is not None else "decode"

    def close(self) -> None:
        """End the threads and drop the cached images; a later call starts new threads."""
        self.sample_map.close()
        if self.cache is not None:
            self.cache.close()

    def _fields_in_place(self, prepared: PreparedFeed) -> dict[str, FieldSpec]:
        """Return the specs of the fields that decode writes directly into the arrays of a batch.

        This needs a `decode.into` function, whose fields (`decode.writes`) are all stacked and have
        a known shape. No transform or cache may need the samples. Otherwise, return {}.
        """
        spec, collation = prepared.spec, prepared.config.collate
        writes: Sequence[str] = getattr(self.decode, "writes", ())
        if self.transform is not None or self.cache is not None:
            return {}
        all_stacked = all(
            name in spec and mode_of(collation, name) == "stack" and None not in spec[name].shape
            for name in writes
        )
        return {name: spec[name] for name in writes} if all_stacked else {}

    def _decode_in_place(self, records: Int64s) -> dict[str, Sequence[Any]]:
        """Decode records directly into the rows of new arrays, which saves a copy of each image.

        For example, two records have the field "image" of the shape (4, 4): their new array has the
        shape (2, 4, 4). For record 0, `decode.into(sample, slots)` is called with the row array[0]
        as slots["image"]. If the image fits, decode writes it there, and returns a sample whose
        "image" is the object slots["image"] itself. Otherwise it returns another array.

        Returns:
            For each field: the new array if all values were written there, or else a list of the
            values.
        """
        arrays = {
            # All sizes of these shapes are known, so `smallest_shape` changes nothing. It is only
            # there for the type checker: in its return type, no size is None.
            name: self._empty((len(records), *smallest_shape(field.shape)), dtype_of(field))
            for name, field in self._in_place_fields.items()
        }
        slots = samples_of(arrays)  # for each sample, a dict of its row in each array
        decode: Any = self.decode
        samples = self._call_decode(decode.into, records, slots, in_place=self._in_place_fields)
        values = self.sample_map.values_by_field("decode", records, samples)
        for name, array in arrays.items():
            # If decode has returned the row object of each record, all values are in the array.
            if all(sample[name] is slot[name] for sample, slot in zip(samples, slots, strict=True)):
                values[name] = array  # type: ignore[assignment]
        return values

    def _decode_request(self, request: Request, *, cached: bool) -> list[Fields]:
        """Return the decoded samples of a request, from the cache if `cached` and if there is one.

        If samples may share arrays, a record that the request has several times is decoded once.
        """
        if cached and self.cache is not None:
            return self.cache.get(request)
        if not self._shares_arrays:
            return self._decode(request.records)
        distinct, positions = np.unique(request.records, return_inverse=True)
        decoded = self._decode(distinct)
        return [decoded[position] for position in positions]

    def _decode(self, records: Int64s) -> list[Fields]:
        """Read and decode records. The arrays are read-only if samples share them."""
        if self.decode is None:
            samples: list[Fields] = [*self._read_samples(records)]
        else:
            samples = self._call_decode(self.decode, records)
        if self._shares_arrays:
            return [with_read_only_arrays(sample) for sample in samples]
        return samples

    def _decode_one(self, records: Int64s, position: int = 0) -> Fields:
        """Read and decode the record at a position of `records`."""
        return self._decode(records[position : position + 1])[0]

    def _call_decode(
        self, decode: Any, records: Int64s, *arguments: Sequence[Any], in_place: Container[str] = ()
    ) -> list[Fields]:
        """Read records, and call the user's decode for the sample of each, on the threads.

        Args:
            decode: the user's function, or its method `into`.
            records: record ids.
            *arguments: the arguments of decode after the sample, each a list of a value per record.
            in_place: fields that decode writes to the rows of one array. They share memory on
                purpose, so they are not checked.

        Raises:
            DecodeError: decode failed; or it fills and returns the same array in each call, and so
                overwrites the result of the call before.
        """
        inputs = records, self._read_samples(records), *arguments
        decoded = self.meter.timed("decoding", self.sample_map.map, "decode", decode, *inputs)
        decode_again = partial(self._decode_one, records)  # decode_again(2) decodes records[2]
        self._check_overwritten("decode", decoded, records, decode_again, in_place)
        return decoded

    def _read_fields(self, records: Int64s) -> Values:
        """Read the stored fields of records; return by field a list of values."""
        arguments = self.reader, records, self.fields, self._missing
        return self.meter.timed("reading", read_with_missing, *arguments)

    def _read_samples(self, records: Int64s) -> list[Sample]:
        """Read the stored fields of records; return a dict by field for each record."""
        return samples_of(self._read_fields(records)) if self.fields else [{} for _ in records]

    def _transform(
        self, samples: Sequence[Fields], request: Request, table_rows: Mapping[str, Rows]
    ) -> list[Fields]:
        """Call the user's transform for each decoded sample of a request, and return the results.

        The transform gets the fields of the sample, its rows of columns and side tables
        (`table_rows`), and the `TRANSFORM_EXTRAS` such as `id` and `seed`. These extras are removed
        from the results.

        Raises:
            DecodeError: the transform failed, changed an extra, or changed an earlier result.
        """
        names = samples[0] if samples else ()
        # Names that the transform gets from elsewhere must not be fields.
        advice = "give it another name in decode"
        check_unreserved("field", names, self.side_tables, "the name of a side table", advice)
        use = "a name that the loader itself gives to every sample"
        check_unreserved("field", names, TRANSFORM_EXTRAS, use, advice)
        seeds = request.seeds
        assert seeds is not None  # requests have seeds if the feed has a transform
        extras: dict[str, Iterable[Any]] = {
            **table_rows,
            "id": request.ids.tolist(),
            "record": request.records.tolist(),
            "view": request.views.tolist(),
            "seed": seeds.tolist(),
            "seed32": (seeds & np.uint64(LOW_32_BITS)).tolist(),
        }
        # The transform may write to what it gets, but not to arrays that other samples share.
        if self._shares_arrays:
            private = [with_private_copies(sample, arrays=False) for sample in samples]
        else:
            private = [with_writable_arrays(sample) for sample in samples]
        inputs = [
            {**sample, **extra} for sample, extra in zip(private, samples_of(extras), strict=True)
        ]
        arguments = request.records, inputs, samples
        results = self.sample_map.map("transform", self._call_transform, *arguments)

        def transform_again(position: int) -> Fields:
            """Decode and transform the sample at this position once more."""
            single = request.where(np.arange(len(samples)) == position)
            decoded = self._decode_one(single.records)
            return self._transform([decoded], single, self.table_rows(single))[0]

        self._check_overwritten("transform", results, request.records, transform_again)
        for result, sample, record in zip(results, inputs, request.records, strict=True):
            for name in TRANSFORM_EXTRAS:
                if name in result and result[name] is not sample[name]:
                    where = self.index.describe(record)
                    raise DecodeError(f"{where}: transform changed {name!r}: rename the new value")
        return [
            {name: result[name] for name in result if name not in TRANSFORM_EXTRAS}
            for result in results
        ]

    def _call_transform(self, sample: Sample, decoded: Fields) -> Fields:
        """Return `transform(sample)`, where the sample was made of the fields in `decoded`.

        If a record is drawn several times, all its samples share the decoded arrays. Then the first
        calls check that the transform has not changed them.
        """
        assert self.transform is not None
        if not self._shares_arrays or not self._mutation_checks_left:
            return self.transform(sample)
        self._mutation_checks_left -= 1
        with check_not_mutated(decoded):
            return self.transform(sample)

    def _check_overwritten(
        self,
        function_name: str,
        samples: Sequence[Fields],
        records: Int64s,
        recompute: Callable[[int], Fields],
        unchecked_fields: Container[str] = (),
    ) -> None:
        """Raise DecodeError if a user's function has overwritten the result of an earlier call.

        This happens if it fills and returns the same buffer each time. Then samples share memory.
        But samples may also share memory rightly, as parts of one constant array. So the first
        sample that shares memory with a later one is computed once more: if the result differs, the
        sample was overwritten.

        Args:
            function_name: "decode" or "transform", for the message.
            samples: the results of the calls.
            records: the record id of each sample, for the message.
            recompute: a function that returns the sample at a position, computed once more.
            unchecked_fields: fields that share memory on purpose, as rows of one array.
        """
        for field in samples[0] if len(samples) > 1 else ():
            values = [sample.get(field) for sample in samples]
            # The position of the first value whose memory a later value has too, or None.
            first = None if field in unchecked_fields else first_shared(values)
            if first is not None:
                value = array_copy(values[first])  # a copy, as the same buffer may be filled again
                if not bitwise_equal(value, recompute(first).get(field)):
                    where = self.index.describe(int(records[first]))
                    raise DecodeError(f"{where}: {buffer_error(function_name, field)}")


def _rows_of(table: Any, indices: Int64s) -> Rows:
    """Return the rows of a column or side table with these indices, as an array or a list of str.

    The array is in the machine's byte order, which torch needs.
    """
    if isinstance(table, StringColumn):
        return list(map(table.__getitem__, indices.tolist()))
    array = np.asarray(table[indices])  # a side table may be another library's array
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def is_own_decode(decode: object, /) -> bool:
    """Return whether decode is known to be deterministic: it is None, or this library's."""
    return decode is None or type(decode).__module__.startswith("twinfeed.")


def samples_of(fields: Mapping[str, Iterable[Any]], /) -> list[Sample]:
    """Turn a dict that has the values of all samples for each field into a list of samples.

    For example {"x": [1, 2]} becomes [{"x": 1}, {"x": 2}].
    """
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
