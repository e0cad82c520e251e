"""What a training is fed: an index, a sampler, and what is done to each record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from twinfeed.loaders import _checks
from twinfeed.loaders._batcher import Batch, Batcher, joined_rows
from twinfeed.loaders._samples import TOLD, Sample, Samples, known_to_repeat
from twinfeed.loaders.collate import Collate, FieldSpec, MisfitError, check_collate, spec_of
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.opened import check_index
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.request import Request, requests
from twinfeed.samplers import BatchStream
from twinfeed.samplers._validate import counted

Decode = Callable[[Sample], Mapping[str, Any]]
Verify = bool | Literal["all"]


class Feed:
    """Say what a training is fed, once, for every framework.

    A feed is a value: a feed owns no thread, cache, open file or place, and never changes. A loader
    carries the feed: `NumpyLoader(feed)`, `TorchLoader(feed)`, `TensorFlowLoader(feed)`. The method
    `batches` is a plain loop. Every loader gives the same batches.

    A batch is a dict of `id` (int64[batch], -1 for padding), every column of the index (`label`,
    …), the rows of every side table, the fields, and `mask` (bool[batch], False for padding)
    where the sampler pads.

    - `index`: where the records lie. `open_index`, `build_index` and `pack` return an index.
    - `sampler`: which records make the next batch; a batch sampler of `twinfeed.samplers`.
    - `fields`: the names of the fields to read. Default: all fields.
    - `decode`: a function from a dict of one record's fields to a dict of decoded values. The
      result must depend on the record alone. A decode with `into` and `writes`, such as
      `DecodeImage`, writes into the batch itself where possible.
    - `transform`: a function of one sample. The sample has what decode returned, its columns and
      side rows, and `id`, `record`, `view`, `seed`, `seed32`. The function returns what the batch
      will hold, without these five. The seed (64 bits, and the low 32 bits) is the same in every
      framework and for any number of workers.
    - `collate`: "stack", "pad" or "ragged", or a dict with one of these for each field.
    - `side`: arrays joined by sample id, by name.
    - `spec`: the shape and dtype of each field of a sample. Default: those of record 0.
    - `verify`: True compares the bytes of each field with the index's CRC-32C. "all" also checks
      every use of a shared array. False checks nothing.
    - `readahead`: bytes to read before their batches need them. Default: 64 MiB while reading waits
      for a disk or a network, and 0 while all pages are in memory. 0 reads nothing ahead.

    Before the first pass, decode and transform are called a few times for record 0, under different
    global random states. The results must be equal. This test finds most transforms that draw from
    a random state, but proves nothing. `Seeded` makes such a transform repeatable.

    Samples may share decoded arrays: with reuse, with views, and where a batch may hold a record
    twice. A transform then gets read-only arrays, and has to copy an array before writing to it.

    Raises ValueError for a sampler of another number of records. Raises ValueError where a column,
    a side table or a field has a name that the batch or the transform uses for something else.
    Raises KeyError or TypeError for wrong `fields`.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> sampler = ExactOnceBatchSampler(3, batch_size=2)
    >>> feed = Feed(index, sampler, decode=lambda sample: {"size": len(sample["word"])})
    >>> next(feed.batches(epoch=0))
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
        verify: Verify = True,
        readahead: int | None = None,
    ) -> None:
        _check_fit(index, sampler)
        for name, function in (("decode", decode), ("transform", transform)):
            if function is not None and (not callable(function) or _not_made(function)):
                raise TypeError(f"{name} must be a function of a sample, got {function!r}")
        if readahead is not None:
            readahead = _checks.count("readahead", readahead, minimum=0)
        self.index = index
        self.sampler = sampler
        self.fields = tuple(index.fields) if fields is None else _checks.names("fields", fields)
        self.decode = decode
        self.transform = transform
        self._collate = check_collate(collate)
        self._side = _checks.mapping("side", side)
        self.verify = verify if verify == "all" else _checks.flag("verify", verify)
        self.readahead = readahead
        given = {name: _field(name, one) for name, one in _checks.mapping("spec", spec).items()}
        self._given_spec = None if spec is None else given
        self._unchangeable = True
        self._check_names("column", index.columns, "build the index with fields= that leave it out")
        self._check_names("side table", self._side, "give it another name")
        for name, rows in self._side.items():
            self._check_side(name, rows)
        for name in self.fields:
            if name not in index.columns:
                index.table(name)  # raises for an unknown name
        if decode is None:
            advice = "leave it out with fields=, or give it another name in decode"
            self._check_names("field", self.fields, advice, beside=self._side)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_unchangeable"):
            raise AttributeError(f"a Feed does not change: make another Feed to set {name!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Feed does not change: {name!r} stays")

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.sampler)

    def __repr__(self) -> str:
        return f"Feed({self.index!r}, {self.sampler!r})"

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `start` on, as numpy arrays.

        The batches depend on nothing but the feed and the two numbers. Raises IndexError outside
        the sampler's epochs and steps.
        """
        with Batcher(self) as batcher:
            batcher.look_ahead(self, epoch, start)
            yield from map(batcher, self.requests(epoch, start))

    def requests(self, epoch: int = 0, start: int = 0) -> Iterator[Request]:
        """Yield the request of each batch of an epoch, from step `start` on."""
        return requests(self.sampler, epoch, start, seeds=self.seeded)

    def shard(self, rank: int, world_size: int) -> Feed:
        """Return the feed of one rank: the sampler's `shard`, all else the same."""
        other = copy.copy(self)
        other.__dict__["sampler"] = self.sampler.shard(rank, world_size)
        return other

    @property
    def shares(self) -> bool:
        """Whether samples share decoded arrays, so that a transform gets read-only arrays."""
        views = self.sampler.num_ids != self.sampler.num_records
        return self.sampler.live is not None or views or self.sampler.repeats

    @property
    def seeded(self) -> bool:
        """Whether the samples' seeds are needed: only a transform uses seeds."""
        return self.transform is not None

    @property
    def alone(self) -> bool:
        """Whether the transform must run alone, since it sets global states."""
        return bool(getattr(self.transform, "alone", False))

    @property
    def collate(self) -> Collate:
        """How samples become a batch: a mode, or the mode of each field by name."""
        how = self._collate
        return MappingProxyType(how) if isinstance(how, dict) else how

    @property
    def side(self) -> Mapping[str, npt.NDArray[Any]]:
        """The side tables by name."""
        return MappingProxyType(self._side)

    @property
    def spec(self) -> Mapping[str, FieldSpec]:
        """The shape and dtype of each field of a sample, given or read from record 0.

        decode and transform are tried here. Raises ValueError where two calls give two results.
        """
        return MappingProxyType(self._spec)

    @cached_property
    def _spec(self) -> dict[str, FieldSpec]:
        spec = self._given_spec
        if spec is None:
            try:
                spec = self._read_spec()
            except DecodeError as error:
                error.advice = error.advice or (
                    "record 0 is decoded to see what a sample holds, whether it is drawn or not: "
                    "mend it, or say with spec= what a sample holds"
                )
                raise
        elif self.transform is not None or not known_to_repeat(self.decode):
            with suppress(LoaderError, OSError):  # record 0 may be missing if it is never drawn
                self._read_spec()
        for name in spec:
            if not isinstance(name, str):
                raise TypeError(f"the name of a field must be a str, got {name!r}")
        last = "decode" if self.transform is None else "transform"
        beside = self._side if self.transform is None else ()  # a transform may replace side rows
        self._check_names("field", spec, f"give it another name in {last}", beside=beside)
        unknown = set(self._collate) - spec.keys() if isinstance(self._collate, dict) else ()
        if unknown:
            raise ValueError(f"collate names {sorted(unknown)}, the fields are {sorted(spec)}")
        return spec

    def _read_spec(self) -> dict[str, FieldSpec]:
        """Read the spec from record 0, by repeated calls that must agree."""
        first = Request.plain(np.zeros(1, np.int64))
        with Reader(self.index, verify=bool(self.verify)) as reader:
            values = Samples(self, reader).tried(first, joined_rows(self.index, self._side, first))
        try:
            return spec_of({name: value for name, (value,) in values.items()})
        except MisfitError as error:
            raise DecodeError(f"{self.index.describe(0)}: {error}") from error

    def _check_side(self, name: str, rows: Any) -> None:
        """Raise ValueError or TypeError for a side table that cannot be joined by sample id."""
        if name in self.index.columns:
            raise ValueError(f"side table {name!r} has the name of a column of the index")
        if getattr(getattr(rows, "dtype", None), "kind", "O") not in "biufc":
            raise TypeError(
                f"side table {name!r} must be an array of numbers (numpy's, or a SideTable), "
                f"got {type(rows).__name__}"
            )
        if len(rows) != self.sampler.num_ids:
            raise ValueError(
                f"side table {name!r} has {counted(len(rows), 'row')} for "
                f"{counted(self.sampler.num_ids, 'sample id')}: "
                f"give it a row for each id of the sampler, in their order"
            )

    def _check_names(
        self, what: str, names: Iterable[str], advice: str, *, beside: Iterable[str] = ()
    ) -> None:
        """Raise ValueError for a name that the batch, or the transform, has for something else."""
        names = set(names)
        both = names.intersection(beside)
        if both:
            raise ValueError(f"{what} {min(both)!r} has the name of a side table: {advice}")
        taken, whose = (TOLD, "sample") if self.transform is not None else (("id",), "batch")
        both = names.intersection(("mask", *taken) if self.sampler.padded else taken)
        if both:
            raise ValueError(
                f"{what} {min(both)!r} has a name that the loader itself gives to every {whose}: "
                f"{advice}"
            )


def _field(name: str, given: object) -> FieldSpec:
    """Return the spec of a field; raise TypeError for what is no pair of a shape and a dtype."""
    try:
        shape, dtype = cast(tuple[Any, Any], given)
        return FieldSpec(tuple(shape), None if dtype is None else np.dtype(dtype))
    except (TypeError, ValueError) as error:
        example = "FieldSpec((224, 224, 3), np.uint8)"
        raise TypeError(f"spec of {name!r} must be as in {example}, got {given!r}") from error


def _not_made(function: object) -> bool:
    """Whether this is a class whose objects are functions."""
    return isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__)


def check_feed(feed: object, /) -> Feed:
    """Return a feed; raise TypeError for anything else."""
    if not isinstance(feed, Feed):
        raise TypeError(f"feed must be Feed(index, sampler), got {type(feed).__name__}")
    return feed


def _check_fit(index: Index, sampler: BatchStream) -> None:
    """Raise TypeError or ValueError where `sampler` cannot draw from `index`."""
    check_index(index)
    if not isinstance(sampler, BatchStream):
        raise TypeError(
            f"sampler must be a batch sampler of twinfeed.samplers, got a "
            f"{type(sampler).__name__}: BatchSampler(order, batch_size=…) makes one of an order"
        )
    if sampler.num_records != len(index):
        raise ValueError(
            f"the sampler was made for {counted(sampler.num_records, 'record')}, "
            f"the index has {len(index):,}: "
            f"make it with index.labels or len(index); a part of the records is drawn from with "
            f"PKBatchSampler(…, records=ids) or SubsetSampler(ids, num_records={len(index)})"
        )
