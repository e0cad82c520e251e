"""From a request to the values of each field: read, decode, transform."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.collate import Empty, FieldSpec, aligned, dtype_of, least, mode_of
from twinfeed.loaders.feed.config import TRANSFORM_EXTRAS
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.feed.seeded import LOW_32_BITS, copied, first_shared, repeated, reused, same
from twinfeed.loaders.formats.records import Sample
from twinfeed.loaders.index import Index
from twinfeed.loaders.making._decoded_cache import DecodedCache
from twinfeed.loaders.making._sample_map import Calls, Made, call, check_values
from twinfeed.loaders.making._shared_samples import lent, unchanged, with_read_only_arrays
from twinfeed.loaders.making.compiled import CompiledFeed
from twinfeed.loaders.making.meter import Meter
from twinfeed.loaders.reading.source import Reads, Source, values_of
from twinfeed.loaders.support.array_types import Array, Int64s

Values = Mapping[str, Sequence[Any]]
"""The values of each field by name, a value for each sample."""

_LOADERS_OWN = "a name that the loader itself gives to every sample"

# How many uses of shared arrays are checked: a checksum of a large image costs more than a crop.
_CHECKED = 4

# How often the first item of a source is read: a random flip is then missed once in 128.
_READS = 8


class Samples:
    """Read, decode and transform the samples of requests, for one pass.

    The decoding threads and the cache of decoded images belong to the pass. Where the spec says the
    shape, decode may write into the arrays of the batch, which `empty` makes.
    """

    def __init__(
        self,
        compiled: CompiledFeed,
        reader: Reads,
        /,
        *,
        threads: int = 0,
        meter: Meter | None = None,
        empty: Empty = aligned,
    ) -> None:
        self.meter = Meter() if meter is None else meter
        self._empty = empty
        feed, traits = compiled.config, compiled.config.sampler.traits
        self.index = feed.index
        self.reader = reader
        self.fields = feed.fields
        self._missing = dict(feed.missing)
        self.decode = feed.decode
        self.transform = feed.transform
        self._side = frozenset(feed.side)
        self.calls = Calls(feed.index, threads=threads)
        self.cache = None if traits.max_cached is None else DecodedCache(traits.uses, self._decode)
        self._shares = feed.shares_arrays
        self._unchecked = _CHECKED
        self._slots = self._writable_fields(compiled)

    def values(
        self, request: Request, joined: Mapping[str, Array], /, *, cached: bool = True
    ) -> Values:
        """Return each field's values, a value for each sample; `joined` has the rows of columns."""
        if self.decode is None and self.transform is None:
            return self._read(request.records)
        if self._slots and len(set(request.records.tolist())) == len(request.records):
            return self._in_place(request)
        samples = self._decoded(request, cached=cached)
        if self.transform is not None:
            samples = self.meter.timed("transforming", self._transformed, samples, request, joined)
        return self.calls.by_field(self.last, request.records, samples)

    def probe_sample(self, first: Request, other: Request, side: Mapping[str, Array], /) -> Made:
        """Make the first sample by repeated calls that agree, also after a call for `other`."""
        self._unchecked = 1  # checking one call is enough, since all calls must agree
        records = first.records, other.records
        if not isinstance(self.index, Index):
            self._try_read(*records)

        def decoded(records: Int64s) -> Made:
            return self._decode(records.tolist())[0]

        if known_to_repeat(self.decode):
            sample = decoded(first.records)
        else:
            sample = repeated("decode", decoded, *records, times=3)
            if hasattr(self.decode, "writes"):
                self._try_into(*records, sample)

        def transformed(request: Request) -> Made:
            given = sample if request is first else decoded(request.records)
            given = given if self._shares else _copied(given)
            rows = joined_rows(self.index, side, request)
            return self._transformed([given], request, rows)[0]

        made = sample
        if self.transform is not None:
            made = repeated("transform", transformed, first, other, times=16)
        check_values(self.index, self.last, int(first.records[0]), made)
        return made

    def _try_read(self, first: Int64s, other: Int64s) -> None:
        """Raise ValueError if the values of a record depend on the call, or on another record."""

        def read(records: Int64s) -> Sample:
            return self._undecoded(records)[0]

        item = self.index.describe(int(first[0]))
        repeated("read", read, first, other, times=_READS, of=item)
        with suppress(LoaderError, OSError):
            one, another = copied(read(first)), copied(read(other))
            row, last = self._undecoded(np.concatenate([first, other]))
            for name in row:
                if same(row[name], last[name]) and not same(one[name], another[name]):
                    raise reused("read", name)

    def _try_into(self, first: Int64s, other: Int64s, sample: Made) -> None:
        """Raise ValueError if what `decode.into` writes is not what decode returns."""
        decode: Any = self.decode

        def into(fill: int, records: Int64s) -> Made:
            slots = {name: np.full_like(sample[name], fill) for name in decode.writes}
            row = *self._undecoded(records), slots
            return call(self.index, "decode", decode.into, int(records[0]), *row)

        for fill in (0, 1):
            made = repeated("decode", partial(into, fill), first, other, times=3)
            if not same(made, sample):
                raise ValueError(
                    f"decode.into gave another sample than decode: write every element of "
                    f"{list(decode.writes)} into its slot, or leave `writes` out"
                )

    @property
    def last(self) -> str:
        """The name of the callable that makes the final values of a sample."""
        return "transform" if self.transform is not None else "decode"

    def close(self) -> None:
        """End the threads and drop the cached images; a later call starts new threads."""
        self.calls.close()
        if self.cache is not None:
            self.cache.close()

    def _writable_fields(self, compiled: CompiledFeed) -> dict[str, FieldSpec]:
        """Return the fields that decode can write into the batch: no later step changes them."""
        spec, how = compiled.spec, compiled.config.collate
        writes: Sequence[str] = getattr(self.decode, "writes", ())
        if self.transform is not None or self.cache is not None:
            return {}
        stacked = all(
            name in spec and mode_of(how, name) == "stack" and None not in spec[name].shape
            for name in writes
        )
        return {name: spec[name] for name in writes} if stacked else {}

    def _in_place(self, request: Request) -> dict[str, Sequence[Any]]:
        """Decode into the rows of the batch's own arrays: no copy, no memory for single images."""
        decode: Any = self.decode
        count = len(request.records)
        rows = {
            name: self._empty((count, *least(one.shape)), dtype_of(one))
            for name, one in self._slots.items()
        }
        slots, samples = _samples(rows), self._undecoded(request.records)
        each, records = self.calls.each, request.records
        made = self.meter.timed("decoding", each, "decode", decode.into, records, samples, slots)
        self._check_overwritten("decode", made, records, self._decode_one(records), self._slots)
        values = self.calls.by_field("decode", request.records, made)
        for name, array in rows.items():
            if all(one[name] is slot[name] for one, slot in zip(made, slots, strict=True)):
                values[name] = array  # type: ignore[assignment]
        return values

    def _decoded(self, request: Request, *, cached: bool) -> list[Made]:
        """Decode the samples; each record once, where samples may share."""
        if cached and self.cache is not None:
            return self.cache.get(request)
        if not self._shares:
            return self._decode(request.records.tolist())
        distinct, where = np.unique(request.records, return_inverse=True)
        decoded = self._decode(distinct.tolist())
        return [decoded[place] for place in where]

    def _decode(self, records: Sequence[int]) -> list[Made]:
        samples: list[Made] = [*self._undecoded(np.array(records, np.int64))]
        if self.decode is not None:
            each = self.calls.each
            samples = self.meter.timed("decoding", each, "decode", self.decode, records, samples)
            self._check_overwritten("decode", samples, records, self._decode_one(records))
        return [with_read_only_arrays(one) for one in samples] if self._shares else samples

    def _read(self, records: Int64s) -> Values:
        given = self.reader, records, self.fields, self._missing
        return self.meter.timed("reading", values_of, *given)

    def _undecoded(self, records: Int64s) -> list[Sample]:
        return _samples(self._read(records)) if self.fields else [{} for _ in records]

    def _transformed(
        self, samples: Sequence[Made], request: Request, joined: Mapping[str, Array]
    ) -> list[Made]:
        """Call the transform with `id`, `seed` and the like, and remove these from the result."""
        for name in samples[0] if samples else ():
            if name in self._side or name in TRANSFORM_EXTRAS:
                whose = "the name of a side table" if name in self._side else _LOADERS_OWN
                raise ValueError(f"field {name!r} has {whose}: give it another name in decode")
        seeds = np.zeros(0, np.uint64) if request.seeds is None else request.seeds
        rows: dict[str, Iterable[Any]] = {
            **joined,
            "id": request.ids.tolist(),
            "record": request.records.tolist(),
            "view": request.views.tolist(),
            "seed": seeds.tolist(),
            "seed32": (seeds & np.uint64(LOW_32_BITS)).tolist(),
        }
        own = lent if self._shares else writable
        whole = [{**own(one), **row} for one, row in zip(samples, _samples(rows), strict=True)]
        made = self.calls.each("transform", self._call, request.records, whole, samples)

        def again(place: int) -> Made:
            single = request.where(np.arange(len(samples)) == place)
            rows = {name: part[place : place + 1] for name, part in joined.items()}
            return self._transformed(self._decode(single.records.tolist()), single, rows)[0]

        self._check_overwritten("transform", made, request.records, again)
        for sample, given, record in zip(made, whole, request.records, strict=True):
            for name in TRANSFORM_EXTRAS:
                if name in sample and sample[name] is not given[name]:
                    where = self.index.describe(record)
                    raise DecodeError(f"{where}: transform gave {name!r} another value: rename it")
        return [
            {name: sample[name] for name in sample if name not in TRANSFORM_EXTRAS}
            for sample in made
        ]

    def _decode_one(self, records: Sequence[int] | Int64s) -> Callable[[int], Made]:
        return lambda place: self._decode([int(records[place])])[0]

    def _check_overwritten(
        self,
        name: str,
        samples: Sequence[Made],
        records: Sequence[int] | Int64s,
        again: Callable[[int], Made],
        skip: Container[str] = (),
    ) -> None:
        """Raise DecodeError if a call of a function has changed what an earlier call returned.

        Samples may share a constant, or a view of a cache. So the first sample that shares memory
        is made `again`, by position, and compared.
        """
        for field in samples[0] if len(samples) > 1 else ():
            values = [sample.get(field) for sample in samples]
            place = None if field in skip else first_shared(values)
            if place is not None:
                before = copied(values[place])
                if not same(before, again(place).get(field)):
                    where = self.index.describe(int(records[place]))
                    raise DecodeError(f"{where}: {reused(name, field)}")

    def _call(self, whole: Sample, sample: Made) -> Made:
        """Call the transform, and check that shared arrays have not changed."""
        assert self.transform is not None
        if not self._shares or not self._unchecked:
            return self.transform(whole)
        self._unchecked -= 1
        with unchanged(sample):
            return self.transform(whole)


def joined_rows(index: Source, side: Mapping[str, Array], request: Request, /) -> dict[str, Array]:
    """Return the rows of a request without padding: of columns by record, of side tables by sample
    id. The rows get the machine's byte order, since both frameworks need this order.
    """
    rows = {name: index.columns[name][request.records] for name in index.columns}
    for name, table in side.items():
        rows[name] = np.asarray(table[request.ids])
    for name, part in rows.items():
        if not part.dtype.isnative:
            rows[name] = part.astype(part.dtype.newbyteorder("="))
    return rows


def known_to_repeat(decode: object, /) -> bool:
    """Whether a decode is the library's own, which need not be tried."""
    return decode is None or type(decode).__module__.startswith("twinfeed.")


def _samples(fields: Mapping[str, Iterable[Any]]) -> list[Sample]:
    """Turn the values of each field into samples."""
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]


def _copied(sample: Made) -> Sample:
    """Return the sample with copies of its values, where they can be copied."""
    copies = dict(sample)
    for name, value in sample.items():
        with suppress(Exception):  # an open file, a tensor with a gradient
            copies[name] = copy.deepcopy(value)
    return copies


def writable(sample: Made, /) -> Sample:
    """Return the sample, with copies of its read-only arrays."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value
        for name, value in sample.items()
    }
