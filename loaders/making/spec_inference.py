"""Infer the spec of a feed from its first sample, and check that its functions are repeatable."""

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
from twinfeed.loaders.feed.config import FeedConfig, check_collated, check_names, check_not_reserved
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.index import Index
from twinfeed.loaders.making.compiled import CompiledFeed
from twinfeed.loaders.making.samples import Samples, is_own_decode
from twinfeed.loaders.reading.prefetch.schedule import Schedule
from twinfeed.loaders.reading.source import reader_of

_MAX_STEPS = 32  # that are searched for a sample of another record


def infer_spec(feed: FeedConfig, /) -> dict[str, FieldSpec]:
    """Return the spec (shape and dtype) of each field of a feed: the user's, or the first sample's.

    Decode and transform are called several times with different global random seeds, to check that
    they are deterministic, unless this is known.

    Raises:
        ValueError: two calls return different results.
        DecodeError: decode or transform failed.
    """
    declared = feed.declared_spec
    if declared is None:
        return _check_spec(feed, _spec_of_first_sample(feed))
    _check_spec(feed, declared)
    is_deterministic = isinstance(feed.index, Index) and is_own_decode(feed.decode)
    if feed.transform is not None or not is_deterministic:
        with suppress(LoaderError, OSError):  # a damaged record, raised when its batch is made
            _probe_first_sample(feed)
    return declared


def probe_requests(feed: FeedConfig, rows: int = 1) -> tuple[Request, Request]:
    """Return two requests of `rows` samples each, to try the user's functions on.

    The first request has the first samples of the stream, the same for every rank, or record 0 if
    the stream is empty. The second has other records, if one of the first steps has any. Otherwise
    it has the first records in reverse order, with other seeds.
    """
    sampler = Schedule(feed.sampler).all_ranks.sampler
    first = Request.plain(np.zeros(1, np.int64))
    for step in range(min(len(sampler), _MAX_STEPS)):
        request = Request.of(sampler, 0, step)
        real = request.where(request.ids >= 0)
        positions = np.arange(len(real.ids))
        if not step:
            first = real.where(positions < rows)
        other = real.where(positions >= len(positions) - rows)
        if len(other.ids) and not np.array_equal(other.records, first.records):
            return first, other
    return first, Request.plain(first.records[::-1])


def _probe_first_sample(feed: FeedConfig) -> Mapping[str, Any]:
    """Make and return the first sample of the stream, as a dict by field.

    Raises:
        ValueError: repeated calls of decode or transform return different results.
    """
    with closing(reader_of(feed.index)) as reader:
        samples = Samples(CompiledFeed(feed, {}), reader)
        return samples.probe_sample(*probe_requests(feed))


def _spec_of_first_sample(feed: FeedConfig) -> dict[str, FieldSpec]:
    """Return the spec (shape and dtype) of each field of the first sample of the stream.

    An empty list does not show its type; if the index says that it is a list of strings, the spec
    is that of strings.
    """
    try:
        sample = _probe_first_sample(feed)
        spec = spec_of(sample, feed.collate)
    except MisfitError as error:
        where = feed.index.describe(int(probe_requests(feed)[0].records[0]))
        raise DecodeError(f"{where}: {error}") from error
    kinds = feed.index.fields if isinstance(feed.index, Index) else {}
    for name in kinds.keys() & spec.keys():
        of_strings = kinds[name].kind == "bytes_list" and mode_of(feed.collate, name) == "ragged"
        if of_strings and isinstance(sample[name], list) and not sample[name]:
            spec[name] = FieldSpec((None,), None)
    return spec


def _check_spec(feed: FeedConfig, spec: dict[str, FieldSpec]) -> dict[str, FieldSpec]:
    """Return `spec` unchanged, after checking the names of its fields and how they are collated.

    Raises:
        TypeError: a name that is no str.
        ValueError: a name that a batch uses for something else, or a field that cannot be collated.
    """
    for name in spec:
        if not isinstance(name, str):
            raise TypeError(f"the name of a field must be a str, got {name!r}")
    last_function = "decode" if feed.transform is None else "transform"
    side = feed.side if feed.transform is None else ()  # a transform may replace side rows
    check_names(feed, "field", spec, f"give it another name in {last_function}", side=side)
    check_collated(feed, spec)
    names_by_kind = {"field": spec, "column": feed.index.columns, "side table": feed.side}
    for name, field in spec.items():
        if field.shape and is_string(field.dtype) and mode_of(feed.collate, name) != "ragged":
            raise ValueError(f"spec of {name!r} is a list of strings: collate it with 'ragged'")
        # A batch of no samples shows which lengths 'pad' adds, and that a Pad fits its field.
        added = collate({name: ()}, {name: field}, how=feed.collate).keys() - {name}
        use = f"the name of what 'pad' adds to {name!r}: give one another name in {last_function}"
        for kind, names in names_by_kind.items():
            check_not_reserved(kind, names, added, use)
    return spec
