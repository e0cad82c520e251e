"""From a step of a sampler to a batch of arrays: the part both backends share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.cache import DecodedCache
from twinfeed.loaders.calls import Calls
from twinfeed.loaders.collate import (
    Collate,
    FieldSpec,
    MisfitError,
    check_collate,
    collate,
    least,
    mode_of,
    spec_of,
)
from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.index import Index
from twinfeed.loaders.joined import Joined
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.request import Int64s, Request, check_fit, plain_request
from twinfeed.samplers import BatchStream

Sample = dict[str, Any]
Batch = dict[str, Any]
Decode = Callable[[Sample], Mapping[str, Any]]

# What a transform is told of its sample, beside the fields, and does not give to the batch.
TOLD = ("id", "record", "view", "seed")


class Feed:
    """Turn the requests of `sampler` into batches: read, decode, transform, collate.

    A batch is a dict of `id` (int64[batch], -1 for padding), every column of the index (`label`,
    …), the rows of every side table, the fields, and `mask` (bool[batch], False for padding)
    where the sampler pads.

    `fields` names what is read of each record (default: all). `decode` takes a dict of one
    record's fields and returns what they hold; it depends on the record alone, and runs once for
    a record that a batch holds twice, or that a reuse sampler keeps live. A decode with `into`
    and `writes`, as `DecodeImage` has, writes into the batch itself where it can.
    `transform` takes one sample: what decode returned (a copy where that serves several samples),
    its columns and side rows, and `id`, `record`, `view`, `seed` (ints; the seed is the same in
    every framework and for any number of workers, and as a field np.uint64), and returns what the
    batch shall hold of it beside these four. `side` maps names to arrays joined by sample id.
    `spec` says what a sample holds in each field; without it the first record is decoded once more,
    with seed 0, to see.
    `threads` share the decoding of a batch. Raises ValueError when the sampler was made for another
    number of records, and where a column, side table or field has a name that the batch or the
    transform has for something else; KeyError and TypeError for `fields` that are none.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack, request_of
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> sampler = ExactOnceBatchSampler(3, batch_size=2)
    >>> feed = Feed(index, sampler, decode=lambda sample: {"size": len(sample["word"])})
    >>> feed(request_of(sampler, epoch=0, step=0))
    {'id': array([0, 1]), 'size': array([2, 2])}
    """

    def __init__(
        self,
        index: Index,
        sampler: BatchStream,
        /,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode | None = None,
        transform: Decode | None = None,
        collate: Collate = "stack",
        side: Mapping[str, npt.NDArray[Any]] | None = None,
        spec: Mapping[str, FieldSpec] | None = None,
        threads: int = 0,
        verify: bool = True,
    ) -> None:
        check_fit(index, sampler)
        self.index = index
        if isinstance(fields, str):
            raise TypeError(f"fields must be a list of names, got {fields!r}")
        self.fields = tuple(index.fields) if fields is None else tuple(fields)
        self.decode = decode
        self.transform = transform
        self.how = check_collate(collate)
        self.side = dict(side or {})
        self.masked = sampler.padded
        self._taken = {"id", *(TOLD if transform is not None else ())}
        if sampler.padded:
            self._taken.add("mask")
        self._check_names("column", index.columns, "build the index with fields= that leave it out")
        self._check_names("side table", self.side, "give it another name")
        self._joined = Joined(index, self.side, sampler.num_ids)
        for name in self.fields:
            if name not in index.columns:
                index.table(name)  # raises for a name that is none
        if decode is None:
            advice = "leave it out with fields=, or give it another name in decode"
            self._check_names("field", self.fields, advice, beside=self.side)
        self.reader = Reader(index, verify=verify)
        self.cache = None if sampler.live is None else DecodedCache(reuse=sampler.reuse)
        self._given_spec = spec and {
            name: FieldSpec(tuple(shape), None if dtype is None else np.dtype(dtype))
            for name, (shape, dtype) in spec.items()
        }
        self.calls = Calls(index, threads=threads)

    @cached_property
    def spec(self) -> Mapping[str, FieldSpec]:
        """What one sample holds in each field, read off the first record unless it was given."""
        spec = self._given_spec
        if spec is None:
            first = plain_request(np.zeros(1, np.int64), np.zeros(1, np.uint64))
            try:
                values = self._values(first, cached=False)
                with self._naming_records(first):
                    spec = spec_of({name: value for name, (value,) in values.items()})
            except DecodeError as error:
                error.advice = error.advice or (
                    "the first record is decoded to see what a sample holds, whether it is drawn "
                    "or not: mend it, or say with spec= what a sample holds"
                )
                raise
        no_text = [name for name in spec if not isinstance(name, str)]
        if no_text:
            raise TypeError(f"the name of a field must be a str, got {no_text[0]!r}")
        beside = self.side if self.transform is None else ()
        self._check_names("field", spec, f"give it another name in {self._last}", beside=beside)
        unknown = set(self.how) - spec.keys() if isinstance(self.how, Mapping) else ()
        if unknown:
            raise ValueError(f"collate names {sorted(unknown)}, the fields are {sorted(spec)}")
        return spec

    def __call__(self, request: Request, /) -> Batch:
        """Read one batch; raise what reading raises, and DecodeError, each naming the record."""
        _ = self.spec  # first, as decoding in place needs it
        held = request.ids >= 0
        batch: Batch = {"id": request.ids, **self._joined.rows(request)}
        values = self._values(request if held.all() else request.where(held))
        if held.any() and values.keys() != self.spec.keys():
            raise DecodeError(
                f"{self.index.describe(request.records[held][0])}: {self._last} gave the fields "
                f"{sorted(values)} where {sorted(self.spec)} are expected: give every record the "
                f"fields of the first, or say with spec= which"
            )
        spread = {name: _spread(values.get(name, []), held) for name in self.spec}
        with self._naming_records(request):
            batch |= collate(spread, self.spec, how=self.how)
        if self.masked:
            batch["mask"] = held
        return batch

    def samples(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Read single samples by record, whatever the sampler: `id`, columns, side rows, fields.

        Raises ValueError for a side table that is joined by sample id, and not by record.
        """
        self._joined.check_by_record()
        request = plain_request(records, seeds)
        held: dict[str, Iterable[Any]] = {"id": records.tolist(), **self._joined.rows(request)}
        held |= self._values(request, cached=False)
        return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)]

    def prefetch(self, request: Request, /) -> None:
        """Tell the system which bytes a later request will read, without waiting for them."""
        self.reader.prefetch(request.records[request.ids >= 0], self.fields)

    def close(self) -> None:
        """Close the files and threads; a later call opens them anew."""
        self.reader.close()
        self.calls.close()

    def _check_names(
        self, what: str, names: Iterable[str], advice: str, *, beside: Iterable[str] = ()
    ) -> None:
        """Raise ValueError for a name that the batch, or the transform, has for something else."""
        names = set(names)
        both = names.intersection(beside)
        if both:
            raise ValueError(f"{what} {min(both)!r} has the name of a side table: {advice}")
        clash = names & self._taken
        if clash:
            raise ValueError(
                f"{what} {min(clash)!r} has a name that the loader itself gives to every "
                f"{'sample' if self.transform is not None else 'batch'}: {advice}"
            )

    @property
    def _last(self) -> str:
        """The name of the callable that has the last word on what a sample holds."""
        return "transform" if self.transform is not None else "decode"

    @contextmanager
    def _naming_records(self, request: Request) -> Iterator[None]:
        """Name the record whose value does not fit."""
        try:
            yield
        except MisfitError as error:
            where = self.index.describe(request.records[error.place])
            raise DecodeError(f"{where}: {error}") from error

    def _values(self, request: Request, *, cached: bool = True) -> dict[str, Sequence[Any]]:
        """Each field's values, one for each id; the request has no padding."""
        if self.decode is None and self.transform is None:
            return dict(self.reader.read(request.records, self.fields))
        if cached and self._may_decode_in_place(request):
            return self._in_place(request)
        samples: Sequence[Mapping[str, Any]] = self._decoded(request, cached=cached)
        if self.transform is not None:
            samples = self._transformed(samples, request)
        return self.calls.by_field(self._last, request.records, samples)

    def _may_decode_in_place(self, request: Request) -> bool:
        """Whether decode can write into the batch itself, which nothing changes after it."""
        writes: Sequence[str] = getattr(self.decode, "writes", ())
        if not writes or self.transform is not None or self.cache is not None:
            return False
        stacked = all(
            n in self.spec and mode_of(self.how, n) == "stack" and None not in self.spec[n].shape
            for n in writes
        )
        records = request.records.tolist()
        return stacked and len(set(records)) == len(records)

    def _in_place(self, request: Request) -> dict[str, Sequence[Any]]:
        """Decode into the rows of the batch's own arrays: no copy, no memory for single images."""
        decode: Any = self.decode
        spec = {name: self.spec[name] for name in decode.writes}
        count = len(request.records)
        rows = {name: np.empty((count, *least(one.shape)), one.dtype) for name, one in spec.items()}
        slots = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        samples = self._read(request.records)
        made = self.calls.each("decode", decode.into, request.records, samples, slots)
        values = self.calls.by_field("decode", request.records, made)
        for name, array in rows.items():
            if all(one[name] is slot[name] for one, slot in zip(made, slots, strict=True)):
                values[name] = array  # type: ignore[assignment]
        return values

    def _decoded(self, request: Request, *, cached: bool) -> list[Mapping[str, Any]]:
        records = request.records.tolist()
        if cached and self.cache is not None:
            position = (request.epoch, request.step)
            return self.cache.get(position, records, request.views.tolist(), self._decode)
        distinct, where = np.unique(request.records, return_inverse=True)
        decoded = self._decode(distinct.tolist())
        return [decoded[place] for place in where]

    def _decode(self, records: Sequence[int]) -> list[Mapping[str, Any]]:
        samples = self._read(np.array(records, np.int64))
        if self.decode is None:
            return list(samples)
        return self.calls.each("decode", self.decode, records, samples)

    def _read(self, records: Int64s) -> list[Sample]:
        if not self.fields:
            return [{} for _ in records]
        fields = self.reader.read(records, self.fields)
        return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]

    def _transformed(self, samples: Sequence[Mapping[str, Any]], request: Request) -> list[Sample]:
        assert self.transform is not None
        if samples:
            advice = "give it another name in decode"
            self._check_names("field", samples[0], advice, beside=self.side)
        samples = self._own(samples)
        joined: dict[str, Iterable[Any]] = {
            **self._joined.rows(request),
            "id": request.ids.tolist(),
            "record": request.records.tolist(),
            "view": request.views.tolist(),
            "seed": request.seeds.tolist(),
        }
        rows = zip(*joined.values(), strict=True)
        told = [
            {**sample, **dict(zip(joined, row, strict=True))}
            for sample, row in zip(samples, rows, strict=True)
        ]
        made = self.calls.each("transform", self.transform, request.records, told)
        for sample, given, record in zip(made, told, request.records, strict=True):
            for name in TOLD:
                if name in sample and sample[name] is not given[name]:
                    raise DecodeError(
                        f"{self.index.describe(record)}: transform gave {name!r} another value, "
                        f"which the batch does not hold: give it another name"
                    )
        return [{name: sample[name] for name in sample if name not in TOLD} for sample in made]

    def _own(self, samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The samples, copied where others hold the same or an array is read-only: a transform may
        change what it gets.
        """
        seen: set[int] = set()
        owned = []
        for sample in samples:
            shared = self.cache is not None or id(sample) in seen
            seen.add(id(sample))
            owned.append(copy.deepcopy(sample) if shared else _writable(sample))
        return owned


def _writable(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sample, with copies of its read-only arrays."""

    def own(value: Any) -> Any:
        locked = isinstance(value, np.ndarray) and not value.flags.writeable
        return value.copy() if locked else value

    return {name: own(value) for name, value in sample.items()}


def _spread(values: Sequence[Any], held: npt.NDArray[np.bool_]) -> Sequence[Any]:
    """`values` at the places that are held, None at the others."""
    if held.all():
        return values
    rest = iter(values)
    return [next(rest) if one else None for one in held]
