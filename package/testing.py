"""Examine any sampler, and check a sampler, a source or functions of your own against laws.

`audit` takes samplers of any library. The others check what loaders rely on, and the library's own
samplers and sources are tested by them.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, SupportsIndex

import numpy as np

from twinfeed.loaders.audit.examination import audit
from twinfeed.loaders.audit.isolation import random_states, seeded
from twinfeed.loaders.audit.report import Answer, Audit
from twinfeed.samplers import BatchSampler, BatchStream, Sampler, validate
from twinfeed.samplers.types import Int64s

__all__ = ["Answer", "Audit", "audit", "check_feed", "check_sampler", "check_source"]

_EPOCHS = 3
_STEPS = 16  # steps of an epoch at which states are loaded
_RECORDS = 16  # records of a source that are read
_TIMES = 4  # each, by threads


def check_sampler(
    sampler: Sampler | BatchStream,
    /,
    *,
    batch_size: SupportsIndex = 4,
    worlds: Sequence[int] = (2, 3),
) -> None:
    """Check that a sampler is a pure function, and that it does what it declares.

    Three epochs are drawn whole, so give a small sampler. What is checked:

    - the same batches alone, together, in any order, in copies and after pickling, whatever the
      global random states of python, numpy and torch are, which do not change;
    - ids that lie in `[0, num_ids)`, and records in `[0, num_records)`;
    - slices of ranks that make up the batch;
    - states that JSON can hold, and that give the rest of an epoch;
    - `traits` and `spans`, as they are declared;
    - what `audit` asks of any sampler, if ids are record ids: it is then iterated as torch does.

    Args:
        sampler: a sampler, which is cut into batches, or a batch sampler.
        batch_size: ids of a batch of a sampler.
        worlds: the numbers of ranks to try.

    Raises:
        AssertionError: a law does not hold; the error names the first.

    >>> from twinfeed.samplers import RandomSampler
    >>> from twinfeed.testing import check_sampler
    >>> check_sampler(RandomSampler(10, seed=0))
    """
    _law(sampler.num_records > 0, "there are no records to draw: num_records is 0")
    stream = sampler
    if not isinstance(stream, BatchStream):
        stream = BatchSampler(stream, batch_size=batch_size)
    whole = [stream.batches(epoch, 0, len(stream)) for epoch in range(_EPOCHS)]
    for law in (_check_pure, _check_states, _check_declared, _check_spans):
        law(stream, whole)
    divided = [size for size in worlds if _check_ranks(stream, whole, size)]
    if stream.traits.num_ids is None and not stream.traits.padded:
        report = audit(
            lambda rank, world_size: copy.deepcopy(stream).shard(rank, world_size),
            num_records=stream.num_records,
            world_size=(1, *divided),
        )
        _law(report.ok, "\n".join(report.findings))


def _check_pure(stream: BatchStream, whole: list[list[Int64s]]) -> None:
    before = random_states()
    for epoch in reversed(range(_EPOCHS)):
        for step in reversed(range(len(stream))):
            _law(
                _same([stream.batch(epoch, step)], [whole[epoch][step]]),
                f"the batch of epoch {epoch}, step {step} differs when it is drawn again, alone",
            )
    moved = [name for name, state in random_states().items() if state != before.get(name)]
    _law(not moved, f"drawing a batch changes the global random state of {' and '.join(moved)}")
    with seeded(1):
        _law(
            _same(stream.batches(1, 0, len(stream)), whole[1]),
            "batches differ under other global random states",
        )
    copies: dict[str, Callable[[BatchStream], BatchStream]] = {
        "a pickled copy": lambda stream: pickle.loads(pickle.dumps(stream)),
        "a deep copy": copy.deepcopy,
    }
    for name, copied in copies.items():
        clone = copied(stream)
        _law(clone.fingerprint == stream.fingerprint, f"{name} has another fingerprint")
        _law(_same(clone.batches(1, 0, len(stream)), whole[1]), f"{name} gives other batches")


def _check_states(stream: BatchStream, whole: list[list[Int64s]]) -> None:
    for step in np.unique(np.linspace(0, len(stream), _STEPS).astype(int)).tolist():
        state = json.loads(json.dumps(stream.state_at(0, step)))
        restored = copy.deepcopy(stream)
        restored.load_state_dict(state)
        _law(restored.state_dict() == state, f"the state of step {step} changes when it is loaded")
        after = whole[0][step:] or whole[0 if stream.evaluation else 1]
        remaining = [ids for _, _, ids in restored.passes()]
        _law(_same(remaining, after), f"the state of step {step} does not give what is left")


def _check_ranks(stream: BatchStream, whole: list[list[Int64s]], world_size: int) -> bool:
    """Check the slices of ranks. Return whether there are any: some streams cannot be divided."""
    try:
        ranks = [stream.shard(rank, world_size) for rank in range(world_size)]
    except ValueError:
        return False
    for epoch, batches in enumerate(whole):
        parts = zip(*(rank.batches(epoch, 0, len(stream)) for rank in ranks), strict=True)
        joined = [np.concatenate(part) for part in parts]
        _law(_same(joined, batches), f"{world_size} ranks do not make up the batches")
    return True


def _check_declared(stream: BatchStream, whole: list[list[Int64s]]) -> None:
    traits = stream.traits
    for batches in whole:
        kept: set[int] = set()
        for ids in batches:
            records, views = stream.records(ids), stream.views(ids)
            for name, array in {"batch": ids, "records": records, "views": views}.items():
                _law(
                    array.dtype == np.int64 and array.shape == (len(ids),),
                    f"{name} must give int64[{len(ids)}], got {array.dtype}{list(array.shape)}",
                )
            real = records[ids >= 0]
            _law(len(real) == len(ids) or traits.padded, "a batch has padding, and padded is False")
            outside = real[(real < 0) | (real >= stream.num_records)]
            _law(not outside.size, f"records gave {outside[:1]}, num_records={stream.num_records}")
            plain = traits.num_ids is not None or _same([real], [ids[ids >= 0]])
            _law(plain, "ids are no record ids, and num_ids is not declared")
            if traits.record_ids is not None:
                listed = bool(np.isin(real, traits.record_ids).all())
                _law(listed, "a record is drawn that record_ids lacks")
            if not traits.repeats:
                _law(len(np.unique(real)) == len(real), "a record repeats, and repeats is False")
            if traits.max_cached is not None:
                used = zip(real.tolist(), views[ids >= 0].tolist(), strict=True)
                for record, view in used:
                    kept.add(record)
                    most = traits.max_cached
                    _law(len(kept) <= most, f"more than max_cached={most} records are used")
                    if view == traits.uses - 1:
                        kept.remove(record)
            sizes = {len(ids), stream.fixed_size or len(ids)}
            _law(len(sizes) == 1, f"batches have {sizes} ids, and one fixed_size")


def _check_spans(stream: BatchStream, whole: list[list[Int64s]]) -> None:
    records = stream.records(np.concatenate([np.zeros(0, np.int64), *whole[0]]))
    records = records[records >= 0]
    first, stop = stream.spans(records)
    _law(
        stream.traits.reads_blocks == bool((stop - first > 1).any()),
        f"reads_blocks is {stream.traits.reads_blocks}, and spans says the opposite",
    )
    for epoch in (None, 0):
        low, high = stream.spans(records, epoch)
        _law(
            bool(((first <= low) & (low <= records) & (records < high) & (high <= stop)).all()),
            "a span does not hold its record, or is longer in an epoch",
        )
        inside = low.min(initial=0) >= 0 and high.max(initial=0) <= stream.num_records
        _law(bool(inside), "a span has more records than there are")
        again = stream.spans(high - 1, epoch)
        _law(_same(list(again), [low, high]), "records of one span have different spans")


def check_feed(feed: Any, /, *, samples: SupportsIndex = 256) -> None:
    """Check that decode and transform give each sample alone what they give it in its batch.

    A loader tries them on one sample. This runs them over the first batches of epoch 0, under other
    global random states, and then for each sample alone: it finds functions that draw from a random
    state now and then, or fill a few buffers again and again. The `batch_transform` is called twice
    for each batch.

    Args:
        feed: a `Feed`.
        samples: how many samples to check, in whole batches.

    Raises:
        AssertionError: two results differ; the error names the record and the field.
        TypeError: what is no feed.
        ValueError: the feed's own trial of the functions has failed.

    >>> import numpy as np
    >>> from twinfeed import BatchSampler, Feed, RandomSampler
    >>> from twinfeed.testing import check_feed
    >>> sampler = BatchSampler(RandomSampler(8, seed=0), batch_size=4)
    >>> check_feed(Feed({"x": np.arange(8)}, sampler, transform=lambda sample: {"x": sample["x"]}))
    """
    from twinfeed.loaders.batches.batcher import Batcher
    from twinfeed.loaders.batches.feed import recipe_of, require_feed

    require_feed(feed)
    remaining = validate.integer("samples", samples, minimum=1)
    with Batcher(recipe_of(feed)) as batcher:
        for request in feed.requests():
            _check_batch(batcher, request)
            remaining -= len(request.ids)
            if remaining <= 0:
                break


def _check_batch(batcher: Any, request: Any) -> None:
    """Raise AssertionError if a sample of a batch, or the batch, is another when made again."""
    from twinfeed.loaders.batches.repeatability import array_copy, bitwise_equal

    index = batcher.recipe.index
    # A copy, as other calls may write to a buffer again.
    together = array_copy(batcher.field_values(request, batcher.table_rows(request), cached=False))
    if batcher.recipe.shares_arrays and batcher.recipe.transform is not None:
        _check_not_written(batcher, request)
    for position, record in enumerate(request.records.tolist()):
        single = request.where(np.arange(len(request.ids)) == position)
        separate = batcher.field_values(single, batcher.table_rows(single), cached=False)
        for name in together:
            same = bitwise_equal(together[name][position], separate[name][0])
            _law(same, f"{index.describe(record)}: field {name!r} differs alone and in a batch")
    if batcher.recipe.batch_function is not None:
        first, again = batcher(request), batcher(request)
        for name, value in first.items():
            same = bitwise_equal(value, again[name])
            _law(same, f"batch_transform returned another {name!r} for step {request.step}")


def _check_not_written(batcher: Any, request: Any) -> None:
    """Raise AssertionError if transform writes to decoded values that other samples share."""
    from twinfeed.loaders.batches.repeatability import array_copy, bitwise_equal

    decoded = batcher.decoded(request.records)
    before = array_copy(decoded)
    batcher.transformed(decoded, request, batcher.table_rows(request))
    for record, sample, copied in zip(request.records.tolist(), decoded, before, strict=True):
        where = batcher.recipe.index.describe(record)
        for name in sample:
            same = bitwise_equal(copied[name], sample[name])
            _law(same, f"{where}: transform wrote to {name!r}, which other samples share")


def check_source(source: Any, /) -> None:
    """Check that a source of your own gives the same values however its records are read.

    Some records are read: together, alone, in another order, twice in a batch, by four threads at
    once, after `close`, and from a pickled copy of the source. Arrays that are said to be `fresh`
    have memory of their own.

    Args:
        source: as `Feed` takes it in place of an index.

    Raises:
        AssertionError: a law does not hold; the error names the first.
        LoaderError: `read` fails, or gives no list of a value for each id.
        TypeError: what is no source, or a column that is no array.

    >>> from twinfeed.testing import check_source
    >>> check_source([1, 2, 3])
    Traceback (most recent call last):
        ...
    TypeError: index must be an Index, got a list: open_index(path) gives one. A user-defined...
    """
    from twinfeed.loaders.reading import source as sources

    sources.require_source(source)
    fields = list(source.fields)
    ids = np.unique(np.linspace(0, len(source) - 1, _RECORDS).astype(np.int64))
    for record in ids.tolist():
        text = source.describe(record)
        _law(isinstance(text, str) and "\n" not in text, f"describe({record}) must be one line")

    def read(reader: Any, order: Int64s) -> list[tuple[int, list[bytes]]]:
        found = reader.read_values(order.copy(), fields)
        rows = zip(*(map(_content, found[name]) for name in fields), strict=True)
        return list(zip(order.tolist(), map(list, rows), strict=True))

    reader = sources.reader_of(source)
    twice = [reader.read_values(ids, fields) for _ in range(2)]
    for name in fields:
        first, again = (found[name] for found in twice)
        taken = isinstance(first, np.ndarray) and first.flags.writeable  # by a batch, as it is
        _law(
            not taken or not np.may_share_memory(first, again),
            f"fresh is True, and read gives the memory of {name!r} twice",
        )
    expected = dict(read(reader, ids)) if fields else {}
    ways: dict[str, tuple[Any, list[Int64s]]] = {
        "in another order": (reader, [ids[::-1]]),
        "alone": (reader, [ids[at : at + 1] for at in range(len(ids))]),
        "twice in one batch": (reader, [np.repeat(ids, 2)]),
        "in a pickled copy": (sources.reader_of(pickle.loads(pickle.dumps(source))), [ids]),
        "in several threads": (reader, [ids[at:] for at in range(len(ids))] * _TIMES),
    }
    for way, (of, orders) in ways.items() if expected else ():
        with ThreadPoolExecutor(4 if "threads" in way else 1) as pool:
            read_rows = [row for rows in pool.map(read, repeat(of), orders) for row in rows]
        strays = [record for record, row in read_rows if row != expected[record]]
        _law(not strays, f"record {strays[:1]} has other values {way}")
        of.close()


def _content(value: Any) -> bytes:
    """Return bytes that are equal for equal values."""
    if isinstance(value, (bytes, str)):
        return pickle.dumps(value)
    array = np.asarray(value)
    content = array.tolist() if array.dtype == object else array.tobytes()
    return pickle.dumps((array.dtype.str, array.shape, content))


def _same(first: Sequence[Int64s], second: Sequence[Int64s]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


def _law(holds: bool, broken: str) -> None:
    """Raise AssertionError unless a law holds, under `python -O` too."""
    if not holds:
        raise AssertionError(broken)
