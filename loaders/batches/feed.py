"""`Feed`: an index, a sampler, and the functions that are applied to each record."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from twinfeed.loaders.batches.batch_function import BatchFunction
from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.batches.probing import probed, tried
from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.feed.arguments import (
    Batch,
    BatchTransform,
    Decode,
    check_fields,
    check_fit,
    check_side_table,
    check_spec,
)
from twinfeed.loaders.feed.collate import Collate, FieldSpec, check_collate
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.by_key import ByKey, joined
from twinfeed.loaders.reading.dataset_source import as_source
from twinfeed.loaders.reading.missing import MissingValues, StoredFields, check_missing
from twinfeed.loaders.reading.prefetch.schedule import Request, Schedule
from twinfeed.loaders.reading.side_table import check_table
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support import checks
from twinfeed.loaders.support.display import html_table, short_repr
from twinfeed.samplers import BatchStream, validate
from twinfeed.samplers.validate import a_type, counted


class Feed:
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
        index: where the records lie. `open_index`, `build_index` and `pack` return an index. A dict
            of arrays, or a dataset whose records are dicts, is taken as `DatasetSource(index)`:
            record 0 is read once, for the names of the fields. Of a list of paths of images, the
            field "image" has the files, without labels. Any other source of records will do: see
            `OwnSource`.
        sampler: which records make the next batch; a batch sampler of `twinfeed.samplers`.
        fields: the names of the fields to read. Default: all fields.
        decode: a function from a dict of one record's fields to a dict of decoded values. The
            result must depend on the record alone.
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
        side: tables joined by sample id, by name: arrays of numbers, a `SideTable`, or strings (an
            array or a list of str, also of Arrow), of which a batch has a list of `str`.
            `ByRecord(table)` is joined by record, and `ByKey(table, key=…, value=…)` by key.
        spec: the shape and dtype of each field of a sample. Default: those of the first sample that
            the stream draws, whatever the rank.
        batch_spec: the same for fields that `batch_transform` returns, where they differ from those
            of the first batch: a length that changes is None.
        missing: "error" refuses fields that a record of the index is known to lack; of another
            source, fields with a null. A dict gives such fields a value, and may name columns, and
            fields that are not read. A number, not a list, says that each record has one. "late"
            raises an error only when such a record is read, for samplers that draw no such record.

    Raises:
        ValueError: the sampler was made for another number of records, or some records lack a
            field.
        ValueError: a column, a side table or a field has a name that the batch, padding or the
            transform uses for something else.
        KeyError: the index does not have one of `fields`, or `fields` does not have the field that
            a decode of this library reads.
        TypeError: `fields` are not names, `index` is not a source of records, or a column of a
            source is not a numpy array.

    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import pack
    >>> from twinfeed.samplers import ExactOnceBatchSampler
    >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
    >>> sampler = ExactOnceBatchSampler(3, batch_size=2)
    >>> feed = Feed(index, sampler, decode=lambda sample: {"size": len(sample["word"])})
    >>> feed[0, 0]
    {'id': array([0, 1]), 'size': array([2, 2])}
    """

    _is_complete = False  # whether no attribute may be set any more

    @validate.show_call("Feed(index, sampler, transform=…)")
    def __init__(
        self,
        index: Source | Any,
        sampler: BatchStream,
        *,
        fields: Sequence[str] | None = None,
        decode: Decode | None = None,
        transform: Decode | None = None,
        batch_transform: BatchTransform | None = None,
        collate: Collate = "stack",
        side: Mapping[str, Any] | None = None,
        spec: Mapping[str, FieldSpec] | None = None,
        batch_spec: Mapping[str, FieldSpec] | None = None,
        missing: MissingValues = "error",
    ) -> None:
        index = as_source(index)
        check_fit(index, sampler)
        names = tuple(index.fields) if fields is None else checks.names("fields", fields)
        check_fields(index, names)
        self.index: Source = index
        self.sampler = sampler
        self.fields = names
        self.decode, self.transform, self.batch_transform = decode, transform, batch_transform
        self._collate = check_collate(collate)
        self._side = {
            name: check_table(name, joined(table, index) if isinstance(table, ByKey) else table)
            for name, table in checks.mapping("side", side).items()
        }
        self._missing = check_missing(index, names, missing)
        self._declared_spec = None if spec is None else check_spec("spec", spec)
        self._declared_batch_spec = check_spec("batch_spec", batch_spec)
        self._is_complete = True
        self._check()

    def _check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        if self._declared_batch_spec and self.batch_transform is None:
            raise ValueError(
                "batch_spec describes the result of batch_transform: give spec= instead"
            )
        self._draft.check_names(self.fields if self.decode is None else ())
        for name, rows in self._side.items():
            check_side_table(name, rows, self.index, self.sampler)

    def __setattr__(self, name: str, value: object) -> None:
        if self._is_complete:
            raise AttributeError(f"a Feed does not change: make another Feed to set {name!r}")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.sampler)

    def __getitem__(self, position: tuple[int, int], /) -> Batch:
        """Return one batch as numpy arrays, `feed[epoch, step]`, and keep no files open.

        For inspection, a test, or a loop of your own in any order, from any thread or process. A
        loader is faster, since it reads ahead and keeps files open.

        Raises:
            IndexError: the sampler does not have this epoch or step.
            LoaderError: a record could not be read, or decoded (DecodeError).
        """
        if not isinstance(position, tuple) or len(position) != 2:
            raise TypeError(
                f"feed[0, 0] is the first batch of epoch 0, got feed[{position!r}]: iterate over a "
                f"loader of the feed; a DataLoader of your own takes RecordDataset(feed)"
            )
        request = Request.of(self.sampler, *position, seeds=self.seeded)
        with Batcher(recipe_of(self)) as batcher:
            return batcher(request)

    @property
    def spec(self) -> Mapping[str, FieldSpec]:
        """The shape and dtype of each field of a sample: `spec=`, or that of the first sample."""
        return MappingProxyType(dict(recipe_of(self).spec))

    @property
    def collate(self) -> Collate:
        """The collation of samples into a batch: a mode, or the mode of each field by name."""
        how = self._collate
        return MappingProxyType(how) if isinstance(how, dict) else how

    @property
    def missing(self) -> Mapping[str, Any]:
        """The values of fields for the records that lack them."""
        return MappingProxyType(self._missing)

    @property
    def side(self) -> Mapping[str, Any]:
        """The side tables by name: numbers as they were given, strings packed."""
        return MappingProxyType(self._side)

    @property
    def has_functions(self) -> bool:
        """Whether the feed has a decode, transform or batch_transform, worth running on threads."""
        return (self.decode, self.transform, self.batch_transform) != (None, None, None)

    @property
    def seeded(self) -> bool:
        """Whether the samples' seeds are needed: only a transform uses seeds."""
        return self.transform is not None

    @property
    def sets_global_state(self) -> bool:
        """Whether the transform sets global random states, so that no other thread may run then."""
        return bool(getattr(self.transform, "sets_global_state", False))

    @property
    def _draft(self) -> Recipe:
        """The recipe of the feed before anything is tried: see `Recipe.draft`."""
        names = ("index", "decode", "transform", "_collate", "_side")
        arguments = {name.lstrip("_"): getattr(self, name) for name in names}
        stored = StoredFields(self.index, self.fields, self._missing)
        return Recipe.draft(self.sampler, stored=stored, **arguments)

    def __repr__(self) -> str:
        functions = "".join(f", {name}={text}" for name, text in self._function_names.items())
        return f"Feed({self.index!r}, {self.sampler!r}{functions})"

    def _repr_html_(self) -> str:
        parts = {"index": self.index, "sampler": self.sampler} | self._function_names
        return html_table(f"Feed: {counted(len(self), 'batch')}", parts.items())

    @property
    def _function_names(self) -> dict[str, str]:
        """A short repr of decode, transform and batch_transform, unless they are None."""
        names = ("decode", "transform", "batch_transform")
        return {name: short_repr(f) for name in names if (f := getattr(self, name)) is not None}

    def requests(self, epoch: int = 0, start: int = 0) -> Iterator[Request]:
        """Yield the request for each batch of an epoch, from step `start` on."""
        return Schedule(self.sampler).requests(epoch, start, seeds=self.seeded)

    def shard(self, rank: int, world_size: int) -> Feed:
        """Return a copy of the feed for one rank, with `sampler.shard(rank, world_size)`."""
        return self.with_sampler(self.sampler.shard(rank, world_size))

    def with_sampler(self, sampler: BatchStream, /) -> Feed:
        """Return a copy of the feed with another sampler of the same records.

        The copy is a new feed: it calls decode and transform for its own first sample, as any feed
        does, and checks the names of its fields.

        Raises:
            ValueError: the sampler does not fit the records or the side tables.

        >>> import numpy as np
        >>> from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, SequentialSampler
        >>> feed = Feed({"x": np.arange(4)}, BatchSampler(SequentialSampler(4), batch_size=2))
        >>> feed.with_sampler(ExactOnceBatchSampler(4, batch_size=3))[0, 0]["x"]
        array([0, 1, 2])
        """
        check_fit(self.index, sampler)
        feed = copy.copy(self)  # its recipe is another, which `recipe_of` makes
        vars(feed)["sampler"] = sampler
        feed._check()
        return feed


_RECIPES: WeakKeyDictionary[Feed, Recipe] = WeakKeyDictionary()


def recipe_of(feed: Feed, /) -> Recipe:
    """Return the recipe of a feed: its specs are inferred and its functions checked, once."""
    if feed not in _RECIPES:
        recipe = probed(feed._draft, feed._declared_spec, feed.sampler)
        if feed.batch_transform is not None:
            arguments = feed.batch_transform, feed.sampler.batch_key, feed._declared_batch_spec
            recipe = tried(recipe, BatchFunction(*arguments), feed.sampler)
        _RECIPES[feed] = recipe
    return _RECIPES[feed]


def index_of(feed: object, caller: str, /) -> Index:
    """Return the index of a feed; raise TypeError if its records come from something else."""
    index = require_feed(feed).index
    if not isinstance(index, Index):
        raise TypeError(f"{caller} needs an index, and the feed has {a_type(index)}")
    return index


def require_feed(feed: object, /) -> Feed:
    """Return `feed`; raise TypeError if it is not a `Feed`."""
    if not isinstance(feed, Feed):
        raise TypeError(f"feed must be Feed(index, sampler), got {type(feed).__name__}")
    return feed
