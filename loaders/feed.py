"""From a step of a sampler to a batch of arrays: the part both backends share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.cache import DecodedCache
from twinfeed.loaders.collate import Collate, FieldSpec, check_collate, collate, mode_of, spec_of
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.reader import Reader
from twinfeed.samplers import BatchStream

Sample = dict[str, Any]
Batch = dict[str, Any]
Decode = Callable[[Sample], Mapping[str, Any]]
Int64s = npt.NDArray[np.int64]

# What a transform is told of its sample, beside the fields; the batch does not hold it.
TOLD = ("record", "view", "seed")


class Request(NamedTuple):
    """One rank batch to be read: what a worker needs to know, and no more.

    `ids`, `records` and `views` are int64[batch], -1 for padding; `seeds` is uint64[batch].

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> request_of(ExactOnceBatchSampler(5, batch_size=2), epoch=0, step=2).records
    array([4])
    """

    epoch: int
    step: int
    ids: Int64s
    records: Int64s
    views: Int64s
    seeds: npt.NDArray[np.uint64]

    def where(self, kept: npt.NDArray[np.bool_]) -> Request:
        """Leave the samples where `kept` (bool[batch]) is False out."""
        return self._replace(
            ids=self.ids[kept],
            records=self.records[kept],
            views=self.views[kept],
            seeds=self.seeds[kept],
        )


def request_of(
    sampler: BatchStream, ids: Int64s | None = None, /, *, epoch: int, step: int
) -> Request:
    """Make the request of one step; `ids`, where the caller has drawn them already.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> request_of(ExactOnceBatchSampler(5, batch_size=2), epoch=0, step=0).ids
    array([0, 1])
    """
    if ids is None:
        ids = sampler.batch(epoch, step)
    return Request(
        epoch, step, ids, sampler.records(ids), sampler.views(ids), sampler.seeds(epoch, step)
    )


def check_fit(index: Index, sampler: BatchStream, /) -> None:
    """Raise TypeError or ValueError where `sampler` cannot draw from `index`.

    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> check_fit("train.index", ExactOnceBatchSampler(5, batch_size=2))
    Traceback (most recent call last):
    ...
    TypeError: index must be an Index, got a str: open_index(path) gives one
    """
    if not isinstance(index, Index):
        raise TypeError(
            f"index must be an Index, got a {type(index).__name__}: open_index(path) gives one"
        )
    if not isinstance(sampler, BatchStream):
        raise TypeError(
            f"sampler must be a batch sampler of twinfeed.samplers, got a "
            f"{type(sampler).__name__}: BatchSampler(order, batch_size=…) makes one of an order"
        )
    if sampler.num_records != len(index):
        raise ValueError(
            f"the sampler was made for {sampler.num_records} records, the index has {len(index)}: "
            f"make it with index.labels or len(index); SubsetSampler draws from a part"
        )


class Feed:
    """Turn the requests of `sampler` into batches: read, decode, transform, collate.

    A batch is a dict of `id` (int64[batch], -1 for padding), every column of the index (`label`,
    …), the rows of every side table, the fields, and `mask` (bool[batch], False for padding)
    where the sampler pads.

    `fields` names what is read of each record (default: all). `decode` takes a dict of one
    record's fields and returns what they hold; it depends on the record alone, and runs once for
    a record that a batch holds twice, or that a reuse sampler keeps live. A decode with `into`
    and `writes`, as `DecodeImage` has, writes into the batch itself where it can.
    `transform` takes one sample: what decode returned, its columns and side rows, and `id`,
    `record`, `view`, `seed` (ints; the seed is the same in every framework and for any number of
    workers), and returns what the batch shall hold of it. `side` maps names to arrays joined by
    sample id. `spec` says what a sample holds where the first record cannot tell.
    `threads` share the decoding of a batch. Raises ValueError when the sampler was made for
    another number of records.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
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
        self.fields = tuple(index.fields) if fields is None else tuple(fields)
        self.decode = decode
        self.transform = transform
        self.how = check_collate(collate)
        self.side = dict(side or {})
        self.masked = sampler.padded
        self.threads = threads
        self.reader = Reader(index, verify=verify)
        self.cache = None if sampler.live is None else DecodedCache(reuse=sampler.reuse)
        self._given_spec = spec
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    @cached_property
    def spec(self) -> Mapping[str, FieldSpec]:
        """What one sample holds in each field, read off the first record unless it was given."""
        if self._given_spec is not None:
            return self._given_spec
        first = _plain(np.zeros(1, np.int64), np.zeros(1, np.uint64))
        values = self._values(first, cached=False)
        return spec_of({name: value for name, (value,) in values.items()})

    def __call__(self, request: Request, /) -> Batch:
        """Read one batch; raise what reading raises, and DecodeError, each naming the record."""
        _ = self.spec  # first, as decoding in place needs it
        held = request.ids >= 0
        batch: Batch = {"id": request.ids}
        batch |= {name: _rows(rows, request.records) for name, rows in self.index.columns.items()}
        batch |= {name: _rows(rows, request.ids) for name, rows in self.side.items()}
        values = self._values(request if held.all() else request.where(held))
        spread = {name: _spread(values.get(name, []), held) for name in self.spec}
        batch |= collate(spread, self.spec, how=self.how)
        if self.masked:
            batch["mask"] = held
        return batch

    def samples(self, records: Int64s, seeds: npt.NDArray[np.uint64], /) -> list[Sample]:
        """Read single samples by record, whatever the sampler: `id`, columns, side rows, fields.

        Raises ValueError for a side table that is joined by sample id, and not by record.
        """
        for name, rows in self.side.items():
            if len(rows) != len(self.index):
                raise ValueError(
                    f"side table {name!r} has {len(rows)} rows for {len(self.index)} records: "
                    f"its samples are known to a sampler only"
                )
        held: dict[str, Iterable[Any]] = {"id": records.tolist()}
        held |= {name: rows[records] for name, rows in self.index.columns.items()}
        held |= {name: rows[records] for name, rows in self.side.items()}
        held |= self._values(_plain(records, seeds), cached=False)
        return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)]

    def prefetch(self, request: Request, /) -> None:
        """Tell the system which bytes a later request will read, without waiting for them."""
        self.reader.prefetch(request.records[request.ids >= 0], self.fields)

    def close(self) -> None:
        """Close the files and threads; a later call opens them anew."""
        self.reader.close()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _values(self, request: Request, *, cached: bool = True) -> dict[str, Sequence[Any]]:
        """Each field's values, one for each id; the request has no padding."""
        if self.decode is None and self.transform is None:
            return dict(self.reader.read(request.records, self.fields))
        if cached and self._may_decode_in_place(request):
            return self._in_place(request)
        samples: Sequence[Mapping[str, Any]] = self._decoded(request, cached=cached)
        if self.transform is not None:
            samples = self._transformed(samples, request)
        return self._by_field(samples, request.records)

    def _may_decode_in_place(self, request: Request) -> bool:
        """Whether decode can write into the batch itself, which nothing changes after it."""
        writes: Sequence[str] = getattr(self.decode, "writes", ())
        if not writes or self.transform is not None or self.cache is not None:
            return False
        stacked = all(n in self.spec and mode_of(self.how, n) == "stack" for n in writes)
        records = request.records.tolist()
        return stacked and len(set(records)) == len(records)

    def _in_place(self, request: Request) -> dict[str, Sequence[Any]]:
        """Decode into the rows of the batch's own arrays: no copy, no memory for single images."""
        decode: Any = self.decode
        spec = {name: self.spec[name] for name in decode.writes}
        count = len(request.records)
        rows = {name: np.empty((count, *one.shape), one.dtype) for name, one in spec.items()}
        slots = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
        given = list(zip(self._read(request.records), slots, strict=True))
        made = self._apply("decode", lambda pair: decode.into(*pair), given, request.records)
        values = self._by_field(made, request.records)
        for name, array in rows.items():
            if all(one[name] is slot[name] for one, slot in zip(made, slots, strict=True)):
                values[name] = array  # type: ignore[assignment]
        return values

    def _by_field(
        self, samples: Sequence[Mapping[str, Any]], records: Int64s
    ) -> dict[str, Sequence[Any]]:
        """Turn samples, which all have the same fields, into the values of each field."""
        names = samples[0].keys() if samples else ()
        for sample, record in zip(samples, records, strict=True):
            if sample.keys() != names:
                raise DecodeError(
                    f"{self.index.describe(record)}: decode gave the fields {sorted(sample)}, "
                    f"for another record of the batch {sorted(names)}; give every record the same"
                )
        return {name: [sample[name] for sample in samples] for name in names}

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
        return self._apply("decode", self.decode, samples, records)

    def _read(self, records: Int64s) -> list[Sample]:
        fields = self.reader.read(records, self.fields)
        return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]

    def _transformed(self, samples: Sequence[Mapping[str, Any]], request: Request) -> list[Sample]:
        assert self.transform is not None
        joined = {name: rows[request.records] for name, rows in self.index.columns.items()}
        joined |= {name: rows[request.ids] for name, rows in self.side.items()}
        joined |= {
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
        made = self._apply("transform", self.transform, told, request.records)
        return [{name: sample[name] for name in sample if name not in TOLD} for sample in made]

    def _apply(
        self,
        what: str,
        function: Callable[[Any], Mapping[str, Any]],
        samples: Sequence[Any],
        records: Sequence[int] | Int64s,
    ) -> list[Mapping[str, Any]]:
        """Call `function` on every sample, in parts of the batch on the threads."""

        def part(places: Iterable[int]) -> list[Mapping[str, Any]]:
            made = []
            for place in places:
                try:
                    made.append(_mapping(function(samples[place])))
                except LoaderError as error:
                    where = self.index.describe(records[place])
                    problem = f"{where}: {error.problem}"
                    raise type(error)(problem, advice=error.advice) from error
                except Exception as error:
                    where = self.index.describe(records[place])
                    told = f"{where}: {what} failed: {error!r}"
                    if isinstance(error, KeyError):
                        given = self.fields if what == "decode" else samples[place]
                        told += f"; it was given {sorted(given)}"
                    raise DecodeError(told) from error
            return made

        if self.threads < 2:
            return part(range(len(samples)))
        if self._pool is None or self._pid != os.getpid():  # a forked child has no threads
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(self.threads, "twinfeed-decode")
        parts = [range(first, len(samples), self.threads) for first in range(self.threads)]
        made: list[Any] = [None] * len(samples)
        for places, results in zip(parts, self._pool.map(part, parts), strict=True):
            made[places.start :: self.threads] = results
        return made


def _mapping(made: Any) -> Mapping[str, Any]:
    """What a callable returned, which must be a dict of fields."""
    if not isinstance(made, Mapping):
        raise TypeError(f"it must return a dict of fields, not a {type(made).__name__}")
    return made


def _plain(records: Int64s, seeds: npt.NDArray[np.uint64]) -> Request:
    """Request records by themselves: no step, no views."""
    return Request(0, 0, records, records, np.zeros_like(records), seeds)


def _rows(table: npt.NDArray[Any], ids: Int64s) -> npt.NDArray[Any]:
    """The rows of `table`, zeros where an id is -1."""
    held = ids >= 0
    if held.all():
        return np.asarray(table[ids])
    rows = np.zeros((len(ids), *table.shape[1:]), table.dtype)
    rows[held] = table[ids[held]]
    return rows


def _spread(values: Sequence[Any], held: npt.NDArray[np.bool_]) -> Sequence[Any]:
    """`values` at the places that are held, None at the others."""
    if held.all():
        return values
    rest = iter(values)
    return [next(rest) if one else None for one in held]
