"""`Recipe`: all that turns a request into a batch, but for the files, the threads and the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.batches.batch_function import BatchFunction
from twinfeed.loaders.feed.arguments import TRANSFORM_EXTRAS, Batch, Decode
from twinfeed.loaders.feed.collate import (
    Allocate,
    Collate,
    FieldSpec,
    Pad,
    Ragged,
    collation_of,
    mode_of,
)
from twinfeed.loaders.feed.decode import DecodeImage
from twinfeed.loaders.reading.missing import StoredFields
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support.array_types import Array
from twinfeed.samplers import BatchStream

Mask = npt.NDArray[np.bool_]
"""bool[batch], False for padding."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """Say how a request becomes a batch: what is read, which functions run, what they return.

    A recipe is made once of a feed, by `recipe_of`, which checks the functions. It pickles, for a
    worker process, without the sampler: it has only what a batch needs of it. A `Batcher` follows
    it, with a reader.

    Attributes:
        stored: the fields that are read.
        padded: whether batches may have padding.
        shares_arrays: whether several samples may use one decoded array, which is then read-only.
        uses: how often each decoded image is used, if it is kept for that; or None.
        batch_size: the number of ids of the largest batch, at least 1.
        steps_per_epoch: the number of batches of an epoch, at least 1.
        spec: the spec of each field of a sample, which decode and transform return.
        batch_function: the checked `batch_transform`, or None.
        example_bytes: the bytes that padding has, for each field of bytes of a batch.
    """

    index: Source
    stored: StoredFields
    decode: Decode | None
    transform: Decode | None
    collate: Collate
    side: Mapping[str, Any]
    padded: bool
    shares_arrays: bool
    uses: int | None
    batch_size: int
    steps_per_epoch: int
    spec: Mapping[str, FieldSpec] = field(default_factory=dict)
    batch_function: BatchFunction | None = None
    example_bytes: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def draft(cls, sampler: BatchStream, /, **arguments: Any) -> Recipe:
        """Return the recipe of a feed's arguments before anything is tried: it has no specs."""
        traits = sampler.traits
        has_views = sampler.num_ids != sampler.num_records
        keeps_images = traits.max_cached is not None
        return cls(
            **arguments,
            padded=traits.padded,
            shares_arrays=keeps_images or has_views or traits.repeats,
            uses=traits.uses if keeps_images else None,
            batch_size=max(1, sampler.batch_size),
            steps_per_epoch=max(1, len(sampler)),
        )

    @cached_property
    def columns(self) -> Mapping[str, Array]:
        """The columns of the source, each compared with its checksum once."""
        return dict(self.index.columns)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle, without the columns, which the source has."""
        return {name: value for name, value in vars(self).items() if name != "columns"}

    def with_examples(
        self, spec: Mapping[str, FieldSpec], sample: Mapping[str, Any], /, **changes: Any
    ) -> Recipe:
        """Return the recipe with changes, and for padding the bytes in a sample of this spec."""
        names = [name for name in spec if spec[name].dtype is None and not spec[name].shape]
        examples = {name: bytes(sample.get(name, b"")) for name in names if self.padded}
        return replace(self, example_bytes=examples, **changes)

    @property
    def shapes(self) -> tuple[Mapping[str, FieldSpec], Collate]:
        """The spec of each field of a batch, and how it is collated: frameworks infer shapes."""
        last = self.batch_function
        return (self.spec, self.collate) if last is None else (last.spec, last.how)

    @property
    def needs_sample(self) -> bool:
        """Whether a sample is needed although the user gave the spec."""
        return self.transform is not None or self.padded

    def with_padding(self, batch: Batch, mask: Mask | None, empty: Allocate, /) -> Batch:
        """Insert a row into each field of a batch where `mask` is False, and add `mask`.

        Numbers are 0, or the value of the field's `Pad`, ids are -1, and bytes those of a sample.
        """
        if mask is None:
            mask = np.ones(len(batch["id"]), bool)
        if not mask.all():
            batch = {name: self._padded(name, rows, mask, empty) for name, rows in batch.items()}
        return {**batch, "mask": mask}

    def _padded(self, name: str, rows: Any, mask: Mask, empty: Allocate) -> Any:
        """Return the rows of a field with a row of padding where `mask` is False."""
        spec, how = self.shapes
        if isinstance(rows, Ragged):
            return rows._replace(lengths=self._padded("", rows.lengths, mask, empty))
        if isinstance(rows, list):
            strings, padding = iter(rows), self.example_bytes.get(name, "")
            return [next(strings) if is_real else padding for is_real in mask]
        pad = collation_of(how, name) if name in spec and spec[name].shape else None
        padded = empty((len(mask), *rows.shape[1:]), rows.dtype)
        padded[~mask] = pad.value if isinstance(pad, Pad) else -(name == "id")
        padded[mask] = rows
        return padded

    def check_names(
        self, fields: Iterable[str], sizes: Iterable[str] = (), /, *, replaces_side: bool = False
    ) -> None:
        """Raise ValueError if two values of a batch, or of a transform's sample, have one name."""
        owner = "batch" if self.transform is None else "sample"
        own = {"id"} if self.transform is None else {*TRANSFORM_EXTRAS}
        own |= {"mask"} if self.padded else set()
        uses = dict.fromkeys(own, f"a name that the loader itself gives to every {owner}")
        uses |= dict.fromkeys(sizes, "the name of the sizes that 'pad' adds for a field")
        columns = dict.fromkeys(self.index.columns, "the name of a column of the index")
        tables = dict.fromkeys(() if replaces_side else self.side, "the name of a side table")
        kinds = {
            "column": (columns, {}),
            "side table": (self.side, columns),
            "field": (fields, tables),
        }
        for kind, (names, taken) in kinds.items():
            for name in names:
                if use := uses.get(name, taken.get(name)):
                    advice = "give it another name, or leave it out with fields="
                    raise ValueError(f"{kind} {name!r} has {use}: {advice}")

    @property
    def last_function(self) -> str:
        """The name of the function that returns the final values of a sample."""
        return "decode" if self.transform is None else "transform"

    @property
    def in_place(self) -> tuple[DecodeImage, FieldSpec] | None:
        """`DecodeImage` and the spec of its field, if it may decode into the array of a batch."""
        decode = self.decode
        if type(decode) is not DecodeImage or self.transform is not None or self.uses is not None:
            return None
        spec = self.spec.get(decode.field, FieldSpec((None,), None))
        is_stacked = None not in spec.shape and mode_of(self.collate, decode.field) == "stack"
        return (decode, spec) if is_stacked else None
