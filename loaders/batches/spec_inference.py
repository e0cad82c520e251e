"""Infer the spec of a feed from its first sample, and check that its functions are repeatable."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import numpy as np

from twinfeed.loaders.batches.prepared import PreparedFeed
from twinfeed.loaders.batches.samples import Samples, is_own_decode
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import (
    FeedConfig,
    check_collated,
    check_names,
    check_unreserved,
)
from twinfeed.loaders.feed.collate import (
    CollateError,
    FieldSpec,
    collate,
    is_string,
    mode_of,
    spec_of,
)
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.prefetch.schedule import of_all_ranks
from twinfeed.loaders.reading.source import reader_of

# How many steps are searched for a sample of another record than the first.
_MAX_STEPS = 32


def infer_spec(feed: FeedConfig, /) -> dict[str, FieldSpec]:
    """Return the spec (shape and dtype) of each field of a feed, and check the user's functions.

    The spec is what the user gave as `spec=`, or else that of the first sample of the stream.

    Decode and transform are called for this sample several times, with different global random
    seeds, to check that they are deterministic. This is not needed if the feed has no transform,
    reads an index, and its decode is None or a class of this library, such as `DecodeImage`.

    Raises:
        ValueError: two calls return different results.
        DecodeError: decode or transform failed.
    """
    if feed.declared_spec is None:
        spec = _spec_of_first_sample(feed)  # checks the functions too
        _check_spec(feed, spec)
        return spec
    _check_spec(feed, feed.declared_spec)
    is_deterministic = isinstance(feed.index, Index) and is_own_decode(feed.decode)
    if feed.transform is not None or not is_deterministic:
        # The sample itself is not needed, as the spec is known.
        with suppress(LoaderError, OSError):  # a damaged record, raised when its batch is made
            _probe_first_sample(feed)
    return feed.declared_spec


def probe_requests(feed: FeedConfig, size: int = 1) -> tuple[Request, Request]:
    """Return two requests of `size` samples each, to try the user's functions on.

    The two must have different records, to see whether the call for the second request changes the
    result for the first, as when a function fills one buffer again and again:

    - The first request has the first samples of step 0.
    - The second request has the last samples of a batch: of the first batch in which they are other
      records than in the first request.

    For example, with size 1, the batches [4, 7], [2, 9] give requests for the records 4 and 7. The
    batches [4, 4], [2, 9] give 4 and 9.

    If all batches have the same records, the second request has them in reverse order. If there is
    no batch at all, both are for record 0. These two requests, which the sampler does not draw, are
    of epoch 0, step 0 and seeds 0 (`Request.plain`).

    Raises:
        LoaderError: the feed has no records.
    """
    if not len(feed.index):
        problem = "a feed without records does not show the fields of a batch"
        raise LoaderError(problem, advice="give the feed spec=, and no batch_transform")
    # The sampler of the global batches, so that every rank tries the same samples.
    sampler = of_all_ranks(feed.sampler)
    first = Request.plain(np.zeros(1, np.int64))  # record 0
    for step in range(min(len(sampler), _MAX_STEPS)):
        request = Request.of(sampler, 0, step)
        real = request.where(request.ids >= 0)  # without padding
        positions = np.arange(len(real.ids))
        if step == 0:
            first = real.where(positions < size)
        last = real.where(positions >= len(positions) - size)
        if len(last.ids) and not np.array_equal(last.records, first.records):
            return first, last
    return first, Request.plain(first.records[::-1])


def _probe_first_sample(feed: FeedConfig) -> Mapping[str, Any]:
    """Return the first sample of the stream (a dict by field), after checking the user's functions.

    Raises:
        ValueError: repeated calls of decode or transform return different results.
    """
    first, second = probe_requests(feed)
    with closing(reader_of(feed.index)) as reader:
        samples = Samples(PreparedFeed(feed, spec={}), reader)  # the spec is not known yet
        return samples.probe_sample(first, second)


def _spec_of_first_sample(feed: FeedConfig) -> dict[str, FieldSpec]:
    """Return the spec (shape and dtype) of each field of the first sample of the stream.

    An empty list does not show its type. If the index says that the field has lists of byte
    strings, so does the spec.
    """
    try:
        sample = _probe_first_sample(feed)
        spec = spec_of(sample, feed.collate)
    except CollateError as error:
        first, _ = probe_requests(feed)
        where = feed.index.describe(int(first.records[0]))
        raise DecodeError(f"{where}: {error}") from error
    stored = feed.index.fields if isinstance(feed.index, Index) else {}
    for name in stored.keys() & spec.keys():
        of_strings = stored[name].kind == "bytes_list" and mode_of(feed.collate, name) == "ragged"
        if of_strings and isinstance(sample[name], list) and not sample[name]:
            spec[name] = FieldSpec(shape=(None,), dtype=None)  # any number of byte strings
    return spec


def _check_spec(feed: FeedConfig, spec: dict[str, FieldSpec]) -> None:
    """Check that the fields can be collated as the feed says, and that no name is used twice.

    A batch is a dict that has, besides the fields of its samples:

    - the columns, which are arrays of the index, and the side tables (`side=` of the feed);
    - "id", and "mask" if the sampler pads batches;
    - `x_length` or `x_shape` for each field x that is collated with "pad".

    Raises:
        TypeError: the name of a field is not a str.
        ValueError: a name of the batch is used twice, or a field cannot be collated.
    """
    for name in spec:
        if not isinstance(name, str):
            raise TypeError(f"the name of a field must be a str, got {name!r}")
    last_function = "decode" if feed.transform is None else "transform"
    # Fields must not have the names of side tables, "id" or "mask". Except that a transform may
    # replace the rows of a side table, by a field with the name of the table.
    side_names = feed.side if feed.transform is None else ()
    check_names(feed, "field", spec, f"give it another name in {last_function}", side=side_names)
    check_collated(feed, spec)
    names_by_kind = {"field": spec, "column": feed.index.columns, "side table": feed.side}
    for name, field in spec.items():
        if field.shape and is_string(field.dtype) and mode_of(feed.collate, name) != "ragged":
            raise ValueError(f"spec of {name!r} is a list of strings: collate it with 'ragged'")
        # Collate a batch of no samples, to see which names are added, such as {"x_length"} for x.
        # This also raises an error if the padding value of a `Pad` does not fit the dtype.
        added_names = collate({name: ()}, {name: field}, how=feed.collate).keys() - {name}
        use = f"the name of the sizes that 'pad' adds for {name!r}"
        # Raises an error, with the text `use`, if a field, column or side table has such a name.
        for kind, names in names_by_kind.items():
            check_unreserved(kind, names, added_names, use, f"rename one in {last_function}")
