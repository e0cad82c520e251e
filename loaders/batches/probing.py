"""Infer the spec of a recipe from the first sample, and check that its functions are repeatable."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from twinfeed.loaders.batches._decoded_cache import Fields
from twinfeed.loaders.batches.batch_function import BatchFunction
from twinfeed.loaders.batches.batcher import (
    Batcher,
    call_for_record,
    check_sample,
    with_private_copies,
)
from twinfeed.loaders.batches.recipe import Recipe
from twinfeed.loaders.batches.repeatability import (
    array_copy,
    bitwise_equal,
    buffer_error,
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
        real = request.without_padding()
        positions = np.arange(len(real.ids))
        if step == 0:
            first = real.where(positions < size)
        last = real.where(positions >= len(positions) - size)
        if len(last.ids) and not np.array_equal(last.records, first.records):
            return first, last
    return first, Request.plain(first.records[::-1])


def probed(draft: Recipe, declared: dict[str, FieldSpec] | None, sampler: BatchStream, /) -> Recipe:
    """Return the recipe with the spec of each field, after checking the user's functions.

    The spec is `spec=`, or that of the stream's first sample. Functions of this library need no
    check.
    """
    sample: Fields = {}
    if declared is None:
        first, second = probe_requests(draft.index, sampler)
        sample = _probe(draft, first, second)
        spec = _spec_of_sample(draft, first, sample)
        _check_spec(draft, spec)
    else:
        spec = declared
        _check_spec(draft, spec)
        is_deterministic = isinstance(draft.index, Index) and _is_own_decode(draft.decode)
        if not is_deterministic or draft.needs_sample:
            with suppress(LoaderError, OSError):  # a damaged record, raised when its batch is made
                sample = _probe(draft, *probe_requests(draft.index, sampler))
    return draft.with_spec(spec, sample)


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

        def call(request: Request) -> Fields:
            """Make the batch of a request, and call the user's function on it."""
            batch = copy.deepcopy(first_batch) if request is first else batcher(request)
            batch.pop("mask", None)
            return function.call(batch, request)

        values = call_repeatedly(
            "batch_transform", call, first, second, times=3, input_name="one batch"
        )
    padded_fields = {name for name in recipe.spec if mode_of(recipe.collate, name) == "pad"}
    function, row = function.with_spec(values, padded_fields)
    recipe.check_names("field", function.spec, "give it another name in batch_transform")
    return recipe.with_batch_function(function, row)


def _probe(draft: Recipe, first: Request, second: Request) -> Fields:
    """Return the sample of the request `first`, after checking reading, decode and transform with
    it in turn, and with `second`, a sample of another record.
    """
    with Batcher(draft) as batcher:
        if not isinstance(draft.index, Index):
            _probe_read(batcher, first, second)
        decode = partial(_decoded_sample, batcher)
        if _is_own_decode(draft.decode):
            sample = decode(first)
        else:
            sample = call_repeatedly("decode", decode, first, second, times=_CALLS)
            if hasattr(draft.decode, "writes"):
                _probe_in_place_decode(batcher, first, second, sample)
        if draft.transform is not None:
            sample = _probe_transform(batcher, first, second, sample)
        check_sample(draft, int(first.records[0]), sample, sample)
        return sample


def _decoded_sample(batcher: Batcher, request: Request) -> Fields:
    """Return the decoded sample of a request for one record."""
    return batcher.decoded(request.records)[0]


def _probe_read(batcher: Batcher, first: Request, second: Request) -> None:
    """Check that a source's reads are repeatable.

    A source that fills one buffer for all records shows if two are read together, and not if each
    is read alone.
    """

    def read(request: Request) -> Fields:
        """Return the stored fields of the record of a request."""
        return batcher.stored(request.records)[0]

    item = batcher.recipe.index.describe(int(first.records[0]))
    call_repeatedly("read", read, first, second, times=_CALLS, input_name=item)
    with suppress(LoaderError, OSError):  # raised again when the record's batch is made
        separate = [array_copy(read(request)) for request in (first, second)]
        together = batcher.stored(np.concatenate([first.records, second.records]))
        for name in together[0]:
            equal_together = bitwise_equal(together[0][name], together[1][name])
            if equal_together and not bitwise_equal(separate[0][name], separate[1][name]):
                raise buffer_error("read", name)


def _probe_in_place_decode(
    batcher: Batcher, first: Request, second: Request, sample: Fields
) -> None:
    """Check that `decode.into` returns the same sample as decode, `sample`.

    It decodes into zeros and into ones, so that an element that is not written differs once.
    """
    index, decode = batcher.recipe.index, batcher.recipe.decode
    writes, into = decode.writes, decode.into  # type: ignore[union-attr]

    def decode_into_arrays(fill: int, request: Request) -> Fields:
        """Decode the record of a request into arrays full of `fill`, and return the sample."""
        arrays = {name: np.full_like(sample[name], fill) for name in writes}
        (stored,) = batcher.stored(request.records)
        return call_for_record(index, "decode", into, int(request.records[0]), stored, arrays)

    for fill in (0, 1):
        decode_filled = partial(decode_into_arrays, fill)
        result = call_repeatedly("decode", decode_filled, first, second, times=_CALLS)
        if not bitwise_equal(result, sample):
            advice = f"write every element of {list(writes)}, or leave `writes` out"
            raise ValueError(f"decode.into returned another sample than decode: {advice}")


def _probe_transform(batcher: Batcher, first: Request, second: Request, decoded: Fields) -> Fields:
    """Return the transformed sample of `first`, whose decoded sample is `decoded`.

    Shared arrays are read-only in numpy, but `torch.from_numpy(array).add_(1)` writes to them all
    the same.
    """
    recipe = batcher.recipe
    index, shares = recipe.index, recipe.shares_arrays
    # Names that the transform gets from elsewhere must not be fields.
    advice = "give it another name in decode"
    recipe.check_names("field", decoded, advice, side=recipe.side)
    before = array_copy(decoded)

    def transform(request: Request) -> Fields:
        """Return the transformed sample of a request for one record."""
        sample = decoded if request is first else _decoded_sample(batcher, request)
        if not shares:  # then the transform may write to the arrays
            sample = with_private_copies(sample, arrays=True)
        (result,) = batcher.transformed([sample], request, batcher.table_rows(request))
        for name, value in before.items() if shares else ():
            if not bitwise_equal(value, decoded[name]):
                raise DecodeError(
                    f"{index.describe(int(first.records[0]))}: transform wrote to the array of "
                    f"field {name!r}, which other uses share",
                    advice="write to array.copy(), or to torch.tensor(array)",
                )
        return result

    return call_repeatedly("transform", transform, first, second, times=_TRANSFORM_CALLS)


def _is_own_decode(decode: object) -> bool:
    """Return whether decode is known to be deterministic: it is None, or this library's."""
    return decode is None or type(decode).__module__.startswith("twinfeed.")


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
