"""Infer the spec of a recipe from the first sample, and check that its functions are repeatable."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from twinfeed.loaders.batches._decoded_cache import Fields
from twinfeed.loaders.batches.batch_function import BatchFunction
from twinfeed.loaders.batches.batcher import (
    Batcher,
    check_sample,
    with_private_copies,
)
from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.batches.repeatability import (
    array_copy,
    bitwise_equal,
    call_repeatedly,
)
from twinfeed.loaders.errors import DecodeError, LoaderError
from twinfeed.loaders.feed.arguments import check_collated, check_unreserved
from twinfeed.loaders.feed.collate import (
    CollateError,
    FieldSpec,
    collate,
    is_string,
    mode_of,
    spec_of,
)
from twinfeed.loaders.index import Index
from twinfeed.loaders.reading.prefetch.schedule import Request, of_all_ranks
from twinfeed.loaders.reading.source import Source
from twinfeed.samplers import BatchStream

# How many steps are searched for a sample of another record than the first.
_MAX_STEPS = 32

# How often a source and decode are tried: if a dataset flips images at random, all reads are equal
# once in 128 times. A transform is tried more often, as a rare random choice must show.
_CALLS, _TRANSFORM_CALLS = 8, 16


def probe_requests(
    index: Source, sampler: BatchStream, size: int = 1, /
) -> tuple[Request, Request]:
    """Return two requests of `size` samples, of different records if there are any, to try
    functions on. The first has the first samples of step 0, the second the last samples of the
    first batch in which they are others: batches [4, 7], [2, 9] give 4 and 7, and [4, 4], [2, 9]
    give 4 and 9. They are of all ranks.
    """
    if not len(index):
        problem = "a feed without records does not show the fields of a batch"
        raise LoaderError(problem, advice="give the feed spec=, and no batch_transform")
    # The sampler of the global batches, so that every rank tries the same samples.
    sampler = of_all_ranks(sampler)
    first = Request.plain(np.zeros(1, np.int64))  # record 0
    for step in range(min(len(sampler), _MAX_STEPS)):
        request = Request.of(sampler, 0, step)
        positions = np.arange(len(request.ids))
        if step == 0:
            first = request.where(positions < size)
        last = request.where(positions >= len(positions) - size)
        if len(last.ids) and not np.array_equal(last.records, first.records):
            return first, last
    return first, Request.plain(first.records[::-1])


def probed(draft: Recipe, declared: dict[str, FieldSpec] | None, sampler: BatchStream, /) -> Recipe:
    """Return the recipe with the spec of each field, after checking the user's functions.

    The spec is `spec=`, or that of the stream's first sample. Functions of this library need no
    check.
    """
    sample: Fields = {}
    is_own = draft.decode is None or type(draft.decode).__module__.startswith("twinfeed.")
    if declared is None:
        requests = _sample_requests(draft, sampler)
        sample = _probe(draft, requests, is_own)
        declared = _spec_of_sample(draft, requests[0], sample)
    _check_spec(draft, declared)
    if not sample and (draft.needs_sample or not is_own or not isinstance(draft.index, Index)):
        with suppress(LoaderError, OSError):  # a damaged record, raised when its batch is made
            requests = _sample_requests(draft, sampler)
            sample = _probe(draft, requests, is_own)
    return draft.with_spec(declared, sample)


def tried(recipe: Recipe, function: BatchFunction, sampler: BatchStream, /) -> Recipe:
    """Return the recipe with the function of a batch, after checking that it is repeatable.

    Raises:
        ValueError: repeated calls on one batch return different results.
        DecodeError: the function failed.
    """
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

        options: dict[str, Any] = {"times": 3, "input_name": "one batch"}
        values = call_repeatedly("batch_transform", call, first, second, **options)
    padded_fields = {name for name in recipe.spec if mode_of(recipe.collate, name) == "pad"}
    function, row = function.with_spec(values, padded_fields)
    recipe.check_names("field", function.spec, "give it another name in batch_transform")
    return recipe.with_batch_function(function, row)


def _sample_requests(draft: Recipe, sampler: BatchStream) -> tuple[Request, Request, Request]:
    """Return the requests of the stream's first sample, of it and another record's, of this."""
    first, second = probe_requests(draft.index, sampler)
    both: dict[str, Any] = {
        name: np.concatenate([getattr(first, name), getattr(second, name)])
        for name in ("ids", "records", "views", "seeds")
    }
    return first, first._replace(**both), second  # last, to overwrite what the others have


def _probe(draft: Recipe, requests: tuple[Request, ...], is_own: bool) -> Fields:
    """Return the sample of the first request, after checking reading, decode and transform."""
    first = requests[0]
    with Batcher(draft) as batcher:
        if is_own:
            (sample,) = batcher.decoded(first.records)
        if not isinstance(draft.index, Index):
            item = draft.index.describe(int(first.records[0]))
            read = lambda request: batcher.stored(request.records)  # noqa: E731
            call_repeatedly("read", read, *requests, times=_CALLS, input_name=item)
        if not is_own:
            decode = lambda request: batcher.decoded(request.records)  # noqa: E731
            sample = call_repeatedly("decode", decode, *requests, times=_CALLS)
        if draft.transform is not None:
            sample = _probe_transform(batcher, requests, sample)
        check_sample(draft, int(first.records[0]), sample, sample)
        return sample


def _probe_transform(batcher: Batcher, requests: tuple[Request, ...], decoded: Fields) -> Fields:
    """Return the transformed sample of the first request, whose decoded sample is `decoded`.

    Shared arrays are read-only in numpy, but `torch.from_numpy(array).add_(1)` writes to them all
    the same.
    """
    recipe = batcher.recipe
    shares = recipe.shares_arrays
    # Names that the transform gets from elsewhere must not be fields.
    advice = "give it another name in decode"
    recipe.check_names("field", decoded, advice, side=recipe.side)
    before = array_copy(decoded)
    second_decoded = cache(lambda: batcher.decoded(requests[2].records))

    def transform(request: Request) -> list[Fields]:
        """Return the transformed samples of a request."""
        samples = [] if request is requests[2] else [decoded]
        samples += [] if request is requests[0] else second_decoded()
        if not shares:  # then the transform may write to the arrays
            samples = [with_private_copies(sample, arrays=True) for sample in samples]
        results = batcher.transformed(samples, request, batcher.table_rows(request))
        for name, value in before.items() if shares else ():
            if not bitwise_equal(value, decoded[name]):
                where = recipe.index.describe(int(requests[0].records[0]))
                raise DecodeError(
                    f"{where}: transform wrote to the array of field {name!r}, which other uses "
                    f"share",
                    advice="write to array.copy(), or to torch.tensor(array)",
                )
        return results

    return call_repeatedly("transform", transform, *requests, times=_TRANSFORM_CALLS)


def _spec_of_sample(draft: Recipe, request: Request, sample: Fields) -> dict[str, FieldSpec]:
    """Return the spec of each field of the sample of a request.

    An empty list, which shows no type, has that of the index.
    """
    try:
        spec = spec_of(sample, draft.collate)
    except CollateError as error:
        where = draft.index.describe(int(request.records[0]))
        raise DecodeError(f"{where}: {error}") from error
    stored = draft.index.fields if isinstance(draft.index, Index) else {}
    for name in stored.keys() & spec.keys():
        of_strings = stored[name].kind == "bytes_list" and mode_of(draft.collate, name) == "ragged"
        if of_strings and isinstance(sample[name], list) and not sample[name]:
            spec[name] = FieldSpec(shape=(None,), dtype=None)  # any number of byte strings
    return spec


def _check_spec(draft: Recipe, spec: Mapping[str, Any]) -> None:
    """Check that the fields can be collated as the user says, and that no name is used twice in a
    batch: of fields, columns, side tables, the loader's own, and the sizes that padding adds.
    """
    for name in spec:
        if not isinstance(name, str):
            raise TypeError(f"the name of a field must be a str, got {name!r}")
    # Fields must not have the names of side tables, "id" or "mask". Except that a transform may
    # replace the rows of a side table, by a field with the name of the table.
    side_names = draft.side if draft.transform is None else ()
    advice = f"give it another name in {draft.last_function}"
    draft.check_names("field", spec, advice, side=side_names)
    check_collated(draft.index, draft.collate, spec)
    names_by_kind = {"field": spec, "column": draft.index.columns, "side table": draft.side}
    for name, field in spec.items():
        if field.shape and is_string(field.dtype) and mode_of(draft.collate, name) != "ragged":
            raise ValueError(f"spec of {name!r} is a list of strings: collate it with 'ragged'")
        # Collate a batch of no samples, to see which names are added, such as {"x_length"} for x.
        # This also raises an error if the padding value of a `Pad` does not fit the dtype.
        added_names = collate({name: ()}, {name: field}, how=draft.collate).keys() - {name}
        use = f"the name of the sizes that 'pad' adds for {name!r}"
        # Raises an error, with the text `use`, if a field, column or side table has such a name.
        for kind, names in names_by_kind.items():
            check_unreserved(kind, names, added_names, use, f"rename one in {draft.last_function}")
