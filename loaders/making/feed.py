"""What a training is fed: an index, a sampler, and what is done to each record."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.feed.collate import Collate, FieldSpec, check_collate, mode_of
from twinfeed.loaders.feed.config import (
    Batch,
    BatchTransform,
    Decode,
    FeedConfig,
    check_collated,
    check_names,
)
from twinfeed.loaders.feed.missing_values import MissingValues, check_missing
from twinfeed.loaders.feed.request import Request, requests
from twinfeed.loaders.index import Index
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.spec_inference import infer_spec
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.source import Source, check_source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.counterparts import OF_A_FEED
from twinfeed.loaders.support.misnamed import counterparts
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.validate import counted


class Feed(FeedConfig):
    """Say what a training is fed, once, for every framework.

    A feed is immutable. It holds no threads, caches, open files or position. `feed[epoch, step]` is
    one batch. A loader iterates over the batches: `NumpyLoader(feed)`, `TorchLoader(feed)`,
    `TensorFlowLoader(feed)`. All give the same batches.

    A batch is a dict of `id` (int64[batch], -1 for padding), every column of the index (`label`,
    …), the rows of every side table, the fields, and `mask` (bool[batch], False for padding)
    where the sampler pads.

    Before the first pass of a loader, decode and transform are called a few times for the first
    sample of the stream, under different global random states. The results must be equal. This test
    finds most transforms that draw from a random state, but proves nothing. `Seeded` makes such a
    transform repeatable. A call for another sample must not change the results: a function or a
    source that fills one buffer again and again is refused.

    Samples may share decoded arrays: with reuse, with views, and if a batch may hold a record
    twice. A transform then gets read-only arrays, and has to copy an array before writing to it.

    Args:
        index: where the records lie. `open_index`, `build_index` and `pack` return an index. Any
            other source of records will do: see `OwnSource`.
        sampler: which records make the next batch; a batch sampler of `twinfeed.samplers`.
        fields: the names of the fields to read. Default: all fields.
        decode: a function from a dict of one record's fields to a dict of decoded values. The
            result must depend on the record alone. A decode may save the copy into the batch, as
            `DecodeImage` does: `decode.writes` names fields, and `decode.into(sample, slots)` is
            called in place of `decode(sample)` where a field's shape is known. It writes each of
            these fields into `slots[field]`, an array, and returns the sample with this array.
        transform: a function of one sample. The sample has what decode returned, its columns and
            side rows, and `id`, `record`, `view`, `seed`, `seed32`. The function returns what the
            batch will hold, without these five. The seed (64 bits, and the low 32 bits) is the same
            in every framework and for any number of workers.
        batch_transform: a function of a batch and its seed, `sampler.batch_seed(epoch, step)`. The
            batch holds the rows of one rank, without padding, as numpy arrays. The function returns
            what the batch will hold, a row for each sample in every field. It is not called for an
            empty batch. `id` and `mask` stay as they are.
        collate: "stack", "pad", "ragged" or a `Pad`, or a dict with one of these for each field.
            Strings are a list: of `bytes`, or of `str`, which TensorFlow encodes. A list of strings
            needs "ragged".
        side: arrays joined by sample id, by name.
        spec: the shape and dtype of each field of a sample. Default: those of the first sample that
            the stream draws, whatever the rank.
        batch_spec: the same for fields that `batch_transform` returns, where they differ from those
            of the first batch: a length that changes is None.
        missing: "error" refuses fields that a record of the index is known to lack; of another
            source, fields with a null. A dict gives such fields a value, and may name fields that
            are not read. "late" raises an error only when such a record is read, for samplers that
            draw no such record.

    Raises:
        ValueError: a sampler of another number of records, and fields that some record lacks.
        ValueError: a column, a side table or a field has a name that the batch, padding or the
            transform uses for something else.
        KeyError: wrong `fields`, and a `DecodeImage` or another decode of this library whose field
            is not among them.
        TypeError: `fields` of another type, an `index` that is no source of records, and a column
            of a source that is no numpy array.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> sampler = ExactOnceBatchSampler(3, batch_size=2)
    >>> feed = Feed(index, sampler, decode=lambda sample: {"size": len(sample["word"])})
    >>> feed[0, 0]
    {'id': array([0, 1]), 'size': array([2, 2])}
    """

    @counterparts(**OF_A_FEED)
    def __init__(
        self,
        index: Source,
        sampler: BatchStream,
        /,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode | None = None,
        transform: Decode | None = None,
        batch_transform: BatchTransform | None = None,
        collate: Collate = "stack",
        side: Mapping[str, npt.NDArray[Any]] | None = None,
        spec: Mapping[str, FieldSpec] | None = None,
        batch_spec: Mapping[str, FieldSpec] | None = None,
        missing: MissingValues = "error",
    ) -> None:
        _check_fit(index, sampler)
        given = {"decode": decode, "transform": transform, "batch_transform": batch_transform}
        for name, function in given.items():
            if function is not None and (not callable(function) or _not_made(function)):
                what = "a batch and its seed" if name == "batch_transform" else "a sample"
                raise TypeError(f"{name} must be a function of {what}, got {function!r}")
        if batch_spec is not None and batch_transform is None:
            raise ValueError("batch_spec is of what batch_transform returns: take spec= without it")
        self.index = index
        self.sampler = sampler
        self.fields = tuple(index.fields) if fields is None else checks.names("fields", fields)
        self.decode = decode
        self.transform = transform
        self.batch_transform = batch_transform
        self._collate = check_collate(collate)
        self._side = checks.mapping("side", side)
        self._given_spec = None if spec is None else _fields("spec", spec)
        self._given_batch_spec = _fields("batch_spec", batch_spec)
        self._check_fields()
        self._missing = check_missing(index, self.fields, missing)
        self._unchangeable = True
        check_names(self, "column", index.columns, "build the index with fields= that leave it out")
        check_names(self, "side table", self._side, "give it another name")
        for name, rows in self._side.items():
            self._check_side(name, rows)
        if decode is None and transform is None:
            self._check_plain()
        if decode is None:
            advice = "leave it out with fields=, or give it another name in decode"
            check_names(self, "field", self.fields, advice, beside=self._side)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, "_unchangeable"):
            raise AttributeError(f"a Feed does not change: make another Feed to set {name!r}")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.sampler)

    def __getitem__(self, position: tuple[int, int], /) -> Batch:
        """Make one batch as numpy arrays, `feed[epoch, step]`, and keep nothing open.

        For inspection, a test, or a loop of your own in any order, from any thread or process. A
        loader is faster, since it reads ahead and keeps files open.

        Raises:
            IndexError: outside the sampler's epochs and steps.
            LoaderError: an error of reading, or DecodeError. Each names the record.
        """
        if not isinstance(position, tuple) or len(position) != 2:
            raise TypeError(
                f"feed[epoch, step] is a batch, got feed[{position!r}]: iterate over a loader of "
                f"the feed; a DataLoader of your own takes RecordDataset(feed)"
            )
        request = Request.of(self.sampler, *position, seeds=self.seeded)
        with Batcher(self) as batcher:
            return batcher(request)

    @property
    def spec(self) -> Mapping[str, FieldSpec]:
        """The shape and dtype of each field of a sample, given or read from the first sample."""
        return MappingProxyType(infer_spec(self))

    def __repr__(self) -> str:
        return f"Feed({self.index!r}, {self.sampler!r})"

    def requests(self, epoch: int = 0, start: int = 0) -> Iterator[Request]:
        """Yield the request of each batch of an epoch, from step `start` on."""
        return requests(Schedule(self.sampler), epoch, start, seeds=self.seeded)

    def shard(self, rank: int, world_size: int) -> Feed:
        """Return the feed of one rank: the sampler's `shard`, all else the same."""
        other = copy.copy(self)
        other.__dict__["sampler"] = self.sampler.shard(rank, world_size)
        return other

    def _check_fields(self) -> None:
        """Raise KeyError for fields that the index, or the sample for decode, does not have."""
        known, columns = list(self.index.fields), list(self.index.columns)
        for name in self.fields:
            if name not in known and name not in columns:
                raise KeyError(f"no field {name!r}: the fields are {known}, the columns {columns}")
        for name in getattr(self.decode, "reads", ()):
            if name not in self.fields:
                raise KeyError(
                    f"decode reads the field {name!r}, and the feed has {list(self.fields)}: name "
                    f"one of these, as in DecodeImage('jpg')"
                )

    def _check_plain(self) -> None:
        """Raise ValueError if the fields make no batch as they are stored."""
        for name in self.fields:
            if name in self.index.columns or mode_of(self._collate, name) == "ragged":
                continue
            if isinstance(self.index, Index) and self.index.fields[name].kind == "bytes_list":
                raise ValueError(
                    f"field {name!r} holds lists of byte strings: collate it with 'ragged', or "
                    f"leave it out with fields="
                )
        check_collated(self, self.fields)
        if self._given_spec is not None and self._given_spec.keys() != set(self.fields):
            raise ValueError(f"spec names {list(self._given_spec)}, fields {list(self.fields)}")

    def _check_side(self, name: str, rows: Any) -> None:
        """Raise ValueError or TypeError for a side table that cannot be joined by sample id."""
        if name in self.index.columns:
            raise ValueError(f"side table {name!r} has the name of a column of the index")
        if getattr(getattr(rows, "dtype", None), "kind", "O") not in "biufc":
            got = type(rows).__name__
            raise TypeError(f"side table {name!r} must be an array of numbers, got {got}")
        if isinstance(rows, np.ndarray):
            validate.unmasked(f"side table {name!r}", rows)
        if len(rows) != self.sampler.num_ids:
            raise ValueError(
                f"side table {name!r} has {counted(len(rows), 'row')}, the sampler "
                f"{counted(self.sampler.num_ids, 'sample id')}: give it a row for each of these"
            )


def _fields(argument: str, given: Mapping[str, FieldSpec] | None) -> dict[str, FieldSpec]:
    return {name: _field(name, one) for name, one in checks.mapping(argument, given).items()}


def _field(name: str, given: object) -> FieldSpec:
    """Return the spec of a field; raise TypeError unless it is a shape and a dtype."""
    try:
        shape, wanted = cast(tuple[Any, Any], given)
        dtype = None if wanted is None or wanted is bytes else np.dtype(wanted)
        return FieldSpec(tuple(shape), dtype)
    except (TypeError, ValueError) as error:
        example = "FieldSpec((224, 224, 3), np.uint8)"
        raise TypeError(f"spec of {name!r} must be as in {example}, got {given!r}") from error


def _not_made(function: object) -> bool:
    """Whether the caller passed a class, as DecodeImage in place of DecodeImage()."""
    return isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__)


def index_of(feed: object, what: str, /) -> Index:
    """Return the index of a feed; raise TypeError for another source: `what` needs an index."""
    index = check_feed(feed).index
    if not isinstance(index, Index):
        raise TypeError(f"{what} needs an index, and the feed has a {type(index).__name__}")
    return index


def check_feed(feed: object, /) -> Feed:
    """Return a feed; raise TypeError for anything else."""
    if not isinstance(feed, Feed):
        raise TypeError(f"feed must be Feed(index, sampler), got {type(feed).__name__}")
    return feed


def _check_fit(index: Source, sampler: BatchStream) -> None:
    """Raise TypeError or ValueError if `sampler` cannot draw from `index`."""
    check_source(index)
    if not isinstance(sampler, BatchStream):
        raise TypeError(
            f"sampler must give batches, got a {type(sampler).__name__}: "
            f"BatchSampler(sampler, batch_size=…) cuts a sampler into batches"
        )
    if sampler.num_records != len(index):
        raise ValueError(
            f"the sampler was made for {counted(sampler.num_records, 'record')}, "
            f"the index has {len(index):,}: make it with index.labels or len(index), and give a "
            f"part of the records by records=, or by SubsetSampler(ids, of={len(index)})"
        )
