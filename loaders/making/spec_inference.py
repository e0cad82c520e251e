"""The element spec of a feed, inferred from the first sample, and the test that it repeats."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.collate import (
    FieldSpec,
    MisfitError,
    collate,
    is_string,
    mode_of,
    spec_of,
)
from twinfeed.loaders.feed.config import FeedConfig, check_collated, check_free, check_names
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.index import Index
from twinfeed.loaders.making.compiled import CompiledFeed
from twinfeed.loaders.making.samples import Samples, known_to_repeat
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.source import reader_of

_STEPS = 32  # most steps that are searched for a sample of another record


def infer_spec(feed: FeedConfig, /) -> dict[str, FieldSpec]:
    """Return the spec of a feed: the declared one, or that of the first sample.

    Decode and transform are called several times with different global random seeds.

    Raises:
        ValueError: two calls give two results. Errors of decode and transform are raised too.
    """
    declared = feed.declared_spec
    if declared is None:
        return _check_spec(feed, _spec_of_first_sample(feed))
    _check_spec(feed, declared)
    repeatable = isinstance(feed.index, Index) and known_to_repeat(feed.decode)
    if feed.transform is not None or not repeatable:
        with suppress(LoaderError, OSError):  # damaged, and perhaps never drawn
            _first_sample(feed)
    return declared


def probe_requests(feed: FeedConfig, rows: int = 1) -> tuple[Request, Request]:
    """Return the first `rows` samples of the stream, the same for every rank, and as many others.

    The others are of other records if one of the first steps has such records. Otherwise they are
    the first records in reverse order, with other seeds. An empty stream gives record 0.
    """
    sampler = Schedule(feed.sampler).all_ranks.sampler
    first = Request.plain(np.zeros(1, np.int64))
    for step in range(min(len(sampler), _STEPS)):
        request = Request.of(sampler, 0, step)
        request = request.where(request.ids >= 0)
        positions = np.arange(len(request.ids))
        if not step:
            first = request.where(positions < rows)
        other = request.where(positions >= len(positions) - rows)
        if len(other.ids) and not np.array_equal(other.records, first.records):
            return first, other
    return first, Request.plain(first.records[::-1])


def _first_sample(feed: FeedConfig) -> Mapping[str, Any]:
    """Make the first sample by repeated calls that must agree."""
    with closing(reader_of(feed.index)) as reader:
        samples = Samples(CompiledFeed(feed, {}), reader)
        return samples.probe_sample(*probe_requests(feed))


def _spec_of_first_sample(feed: FeedConfig) -> dict[str, FieldSpec]:
    """Return the spec that the first sample has; the index knows what an empty list holds."""
    try:
        sample = _first_sample(feed)
        spec = spec_of(sample, feed.collate)
    except MisfitError as error:
        where = feed.index.describe(int(probe_requests(feed)[0].records[0]))
        raise DecodeError(f"{where}: {error}") from error
    kinds = feed.index.fields if isinstance(feed.index, Index) else {}
    for name in kinds.keys() & spec.keys():
        strings = kinds[name].kind == "bytes_list" and mode_of(feed.collate, name) == "ragged"
        if strings and isinstance(sample[name], list) and not sample[name]:
            spec[name] = FieldSpec((None,), None)
    return spec


def _check_spec(feed: FeedConfig, spec: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
    """Return a spec; raise TypeError or ValueError if its names or collation do not fit."""
    for name in spec:
        if not isinstance(name, str):
            raise TypeError(f"the name of a field must be a str, got {name!r}")
    last = "decode" if feed.transform is None else "transform"
    beside = feed.side if feed.transform is None else ()  # a transform may replace side rows
    check_names(feed, "field", spec, f"give it another name in {last}", beside=beside)
    check_collated(feed, spec)
    all_names = {"field": spec, "column": feed.index.columns, "side table": feed.side}
    for name, field in spec.items():
        if field.shape and is_string(field.dtype) and mode_of(feed.collate, name) != "ragged":
            raise ValueError(f"spec of {name!r} is a list of strings: collate it with 'ragged'")
        # A Pad must fit its field.
        added = collate({name: ()}, {name: field}, how=feed.collate).keys() - {name}
        use = f"the name of what 'pad' adds to {name!r}: give one another name in {last}"
        for what, names in all_names.items():
            check_free(what, names, added, use)
    return spec
