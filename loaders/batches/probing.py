"""Infer the spec of a recipe from the first sample, and check that its functions are repeatable."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from twinfeed.loaders.batches._decoded_cache import Fields
from twinfeed.loaders.batches.batch_function import BatchFunction
from twinfeed.loaders.batches.batcher import Batcher, with_private_copies
from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.batches.repeatability import array_copy, bitwise_equal, call_repeatedly
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import check_collated
from twinfeed.loaders.feed.collate import CollateError, FieldSpec, collate, mode_of, spec_of
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.prefetch.schedule import Request, of_all_ranks
from twinfeed.loaders.reading.source import Source
from twinfeed.loaders.support import checks
from twinfeed.samplers import BatchStream

# The last of so many steps has the second sample that functions are tried on.
_MAX_STEPS = 32

# How often a source and decode are tried: if a dataset flips images at random, all reads are equal
# once in 128 times. A transform is tried more often, as a rare random choice must show.
_CALLS, _TRANSFORM_CALLS = 8, 16


def probe_requests(
    index: Source, sampler: BatchStream, size: int = 1, /
) -> tuple[Request, Request]:
    """Return two requests of `size` samples to try functions on, the same on every rank: the first
    samples of the stream, and the last of the latest batch that has other records.
    """
    if not len(index):
        problem = "a feed without records does not show the fields of a batch"
        raise LoaderError(problem, advice="give the feed spec=, and no batch_transform")
    steps, whole = range(min(len(sampler), _MAX_STEPS)), of_all_ranks(sampler)
    drawn = (Request.of(whole, 0, step) for step in (*steps[:1], *reversed(steps)))
    requests = (request for request in drawn if len(request.ids))
    first = next(requests, Request.plain(np.zeros(1, np.int64)))  # record 0 if nothing is drawn
    first = first.where(np.arange(len(first.ids)) < size)
    lasts = (request.where(np.arange(len(request.ids))[::-1] < size) for request in requests)
    differing = (last for last in lasts if not np.array_equal(first.records, last.records))
    last = next(differing, Request.plain(first.records[::-1]))  # other seeds, if no other records
    return first, last


def probed(draft: Recipe, declared: dict[str, FieldSpec] | None, sampler: BatchStream, /) -> Recipe:
    """Return the recipe with the spec of each field, after checking the user's functions."""
    sample, spec = dict[str, Any](), declared
    is_own = draft.decode is None or type(draft.decode).__module__.startswith("twinfeed.")
    if spec is None or draft.needs_sample or not is_own or not isinstance(draft.index, Index):
        try:
            first, second = probe_requests(draft.index, sampler)
            # The second comes last, to overwrite what the others have.
            requests = first, Request.joined([first, second]), second
            sample = dict(_probe(draft, requests, is_own))
            spec = _spec_of_sample(draft, first, sample) if spec is None else spec
        except (LoaderError, OSError):
            if spec is None:
                raise
            # A damaged record is raised when its batch is made.
    assert spec is not None
    checks.names("the fields of a sample", spec)
    check_collated(draft.index, draft.collate, spec)
    # Collate a batch of no samples, to see which names padding adds, such as "x_length" for "x".
    # This also raises an error if the padding value of a `Pad` does not fit the dtype.
    empty = [collate({name: ()}, {name: spec[name]}, how=draft.collate) for name in spec]
    sizes = {added for name, batch in zip(spec, empty, strict=True) for added in {*batch} - {name}}
    draft.check_names(spec, sizes, replaces_side=draft.transform is not None)
    return draft.with_examples(spec, sample, spec=spec)


def tried(recipe: Recipe, function: BatchFunction, sampler: BatchStream, /) -> Recipe:
    """Return the recipe with the function of a batch, after checking that it is repeatable."""
    # Both batches are as large as a rank's batch, as the function will see them. But they are made
    # of the same samples on every rank, so that all ranks find the same spec.
    first, second = probe_requests(recipe.index, sampler, sampler.batch_size)
    with Batcher(recipe) as batcher:
        first_batch = batcher(first)

        def call(request: Request) -> list[Fields]:
            """Make the batch of a request, and call the user's function on it."""
            batch = copy.deepcopy(first_batch) if request is first else batcher(request)
            batch.pop("mask", None)
            return [function.call(batch, request)]

        values = call_repeatedly("batch_transform", call, first, second, times=3)
    padded_fields = {name for name in recipe.spec if mode_of(recipe.collate, name) == "pad"}
    function, row = function.with_spec(values, padded_fields)
    recipe.check_names(function.spec, replaces_side=True)
    return recipe.with_examples(function.spec, row, batch_function=function)


def _probe(draft: Recipe, requests: tuple[Request, ...], is_own: bool) -> Fields:
    """Return the sample of the first request, after checking reading, decode and transform."""
    first, shares = requests[0], draft.shares_arrays
    with Batcher(draft) as batcher:
        decode_once = cache(lambda record: batcher.decoded(np.array([record]))[0])

        def transform(request: Request) -> list[Fields]:
            """Return the transformed samples of a request, each of which is decoded once."""
            samples = map(decode_once, request.records.tolist())
            # The transform may write to arrays that are not shared.
            copies = [with_private_copies(sample, arrays=not shares) for sample in samples]
            return batcher.transformed(copies, request, batcher.table_rows(request))

        if not isinstance(draft.index, Index):
            read = lambda request: batcher.stored(request.records)  # noqa: E731
            call_repeatedly("read", read, *requests, times=_CALLS)
        if not is_own:
            decode = lambda request: batcher.decoded(request.records)  # noqa: E731
            call_repeatedly("decode", decode, *requests, times=_CALLS)
        record = int(first.records[0])
        sample = decode_once(record)
        if draft.transform is None:
            return sample
        draft.check_names(sample)
        before = array_copy(sample)
        transformed = call_repeatedly("transform", transform, *requests, times=_TRANSFORM_CALLS)
        # Shared arrays are read-only in numpy, but torch.from_numpy(array).add_(1) writes to them.
        if shares and not bitwise_equal(before, sample):
            raise DecodeError(
                f"{draft.index.describe(record)}: transform wrote to an array that samples share",
                advice="write to array.copy(), or to torch.tensor(array)",
            )
        return transformed


def _spec_of_sample(draft: Recipe, request: Request, sample: Fields) -> dict[str, FieldSpec]:
    """Return the spec of each field of the sample of a request."""
    try:
        spec = spec_of(sample, draft.collate)
    except CollateError as error:
        where = draft.index.describe(int(request.records[0]))
        raise DecodeError(f"{where}: {error}") from error
    stored: Mapping[str, Any] = draft.index.fields if isinstance(draft.index, Index) else {}
    for name in stored.keys() & spec.keys():
        of_strings = stored[name].kind == "bytes_list" and mode_of(draft.collate, name) == "ragged"
        if of_strings and isinstance(sample[name], list) and not sample[name]:
            spec[name] = FieldSpec(shape=(None,), dtype=None)  # any number of byte strings
    return spec
