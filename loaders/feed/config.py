"""What batches are made of: a feed as the code that makes batches sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from twinfeed.loaders.feed.collate import Collate, FieldSpec
from twinfeed.loaders.reading.source import Source
from twinfeed.samplers import BatchStream

Sample = dict[str, Any]
"""A record's fields by name, as decode and transform take them."""

Batch = dict[str, Any]
"""The fields of a batch by name, as a loop receives them."""

Decode = Callable[[Sample], Mapping[str, Any]]
"""What makes a sample of a sample: `decode=` and `transform=`."""

BatchTransform = Callable[[Batch, int], Mapping[str, Any]]
"""What makes a batch of a batch and its seed: `batch_transform=`."""

TRANSFORM_EXTRAS = ("id", "record", "view", "seed", "seed32")
"""What a transform is given beside the fields. The batch does not hold these values."""


class FeedConfig:
    """What batches are made of. The only subclass, `Feed`, checks its arguments."""

    index: Source
    sampler: BatchStream
    fields: tuple[str, ...]
    decode: Decode | None
    transform: Decode | None
    batch_transform: BatchTransform | None
    _collate: Collate
    _given_spec: dict[str, FieldSpec] | None
    _given_batch_spec: dict[str, FieldSpec]
    _missing: dict[str, Any]
    _side: dict[str, npt.NDArray[Any]]

    @property
    def collate(self) -> Collate:
        """How samples become a batch: a mode, or the mode of each field by name."""
        how = self._collate
        return MappingProxyType(how) if isinstance(how, dict) else how

    @property
    def missing(self) -> Mapping[str, Any]:
        """The values of fields for the records that lack them."""
        return MappingProxyType(self._missing)

    @property
    def side(self) -> Mapping[str, npt.NDArray[Any]]:
        """The side tables by name."""
        return MappingProxyType(self._side)

    @property
    def shares_arrays(self) -> bool:
        """Whether samples share decoded arrays, so that a transform gets read-only arrays."""
        views = self.sampler.num_ids != self.sampler.num_records
        return self.sampler.traits.max_cached is not None or views or self.sampler.traits.repeats

    @property
    def has_functions(self) -> bool:
        """Whether functions are called for each record or batch, which threads are for."""
        return (self.decode, self.transform, self.batch_transform) != (None, None, None)

    @property
    def seeded(self) -> bool:
        """Whether the samples' seeds are needed: only a transform uses seeds."""
        return self.transform is not None

    @property
    def alone(self) -> bool:
        """Whether the transform must run alone, since it sets global states."""
        return bool(getattr(self.transform, "alone", False))


def check_collated(feed: FeedConfig, names: Iterable[str], /) -> None:
    """Raise ValueError if `collate` names another field."""
    unknown = set(feed.collate).difference(names) if isinstance(feed.collate, Mapping) else ()
    if unknown:
        raise ValueError(f"collate names {sorted(unknown)}, the fields are {sorted(names)}")


def check_names(
    feed: FeedConfig, what: str, names: Iterable[str], advice: str, /, *, beside: Iterable[str] = ()
) -> None:
    """Raise ValueError for a name that the batch or the transform uses for something else."""
    check_free(what, names, beside, f"the name of a side table: {advice}")
    taken, whose = (
        (TRANSFORM_EXTRAS, "sample") if feed.transform is not None else (("id",), "batch")
    )
    taken = ("mask", *taken) if feed.sampler.traits.padded else taken
    use = f"a name that the loader itself gives to every {whose}: {advice}"
    check_free(what, names, taken, use)


def check_free(what: str, names: Iterable[str], taken: Iterable[str], use: str, /) -> None:
    """Raise ValueError if a name is among those that are taken, with their `use`."""
    both = set(names).intersection(taken)
    if both:
        raise ValueError(f"{what} {min(both)!r} has {use}")
