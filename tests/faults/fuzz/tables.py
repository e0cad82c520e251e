"""Two targets of the fuzzer that are data: features that may be columns, and tables with keys."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from faults.fuzz.mutations import Corpus
from support.shards import write_tfrecord

from twinfeed.loaders import (
    ByKey,
    DatasetSource,
    Feed,
    LoaderError,
    NumpyLoader,
    Ragged,
    build_index,
)
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, SequentialSampler, ViewSampler


def column(_: Corpus, draw: random.Random) -> None:
    """Read numbers that may be a column: `lists` gives a field, a number in `missing` scalars."""
    lengths = draw.choice(([1], [1, None], [2], [17], [0, 1], [0, 1, 2, None], [1, 3]))
    dtype = draw.choice((np.int64, np.float32))
    wanted = [
        None if length is None else np.arange(length, dtype=dtype) - draw.randrange(3)
        for length in draw.choices(lengths, k=draw.randint(1, 6))
    ]
    wanted[0] = np.zeros(lengths[0], dtype)
    rows = [{"id": n} if x is None else {"id": n, "x": x} for n, x in enumerate(wanted)]
    lists = draw.choice((["x"], []))
    shard = write_tfrecord(Path("c.tfrecord"), rows)
    index = build_index(shard, "c.index", fields={"x": "x"}, lists=lists, missing="empty")
    whole = ExactOnceBatchSampler(len(index), batch_size=len(index))
    assert not (lists and "x" in index.columns)
    scalars = draw.random() < 0.5
    missing: Any = {"x": dtype(-9) if scalars else np.array([-9, -9], dtype)}
    collate: Any = "stack" if scalars or "x" in index.columns else {"x": "ragged"}
    error = found = None
    try:
        found = Feed(index, whole, missing=missing, collate=collate)[0, 0]["x"]
    except LoaderError as caught:
        error = caught
    are_numbers = all(x is None or len(x) == 1 for x in wanted)
    assert (error is None) == (not scalars or "x" in index.columns or are_numbers), error
    if error is not None:
        return
    filled = [np.array([-9] * (2 - scalars), dtype) if x is None else x for x in wanted]
    if isinstance(found, Ragged):
        assert found.lengths.tolist() == [len(x) for x in filled]
        assert found.values.tolist() == np.concatenate(filled).tolist()
    else:
        number = {len(x) for x in filled} == {1}
        assert found.tolist() == [x[0] if number else x.tolist() for x in filled]
    assert (found.values if isinstance(found, Ragged) else found).dtype == dtype


def by_key(_: Corpus, draw: random.Random) -> None:
    """Join a table by key: each record has the rows of its key, or the first without is named."""
    ids = [draw.randrange(-2, 6) for _ in range(draw.randint(1, 6))]
    keys = [draw.randrange(-2, 6) for _ in range(draw.randint(0, 12))]
    keys += draw.choice(([], ids, [*{*ids}]))
    draw.shuffle(keys)
    as_key = draw.choice((int, float, str, np.int32, lambda key: str(key).encode()))
    texts = draw.random() < 0.5
    values: list[Any] = [f"{n}\0" if texts else n / 2 for n in range(len(keys))]
    if draw.random() < 0.5:
        table = ByKey({"k": [*map(as_key, keys)], "v": values}, key="k", value="v", column="number")
    else:
        pairs = {
            as_key(key): [v for k, v in zip(keys, values, strict=True) if k == key] for key in keys
        }
        table = ByKey(pairs, column="number")
    wanted = [[v for k, v in zip(keys, values, strict=True) if k == number] for number in ids]
    source = DatasetSource({"number": np.array(ids)}, columns=["number"])
    lacking = [n for n, rows in enumerate(wanted) if not rows]
    error = None
    try:
        counts = table.counts(source)
    except ValueError as caught:
        error = str(caught)
    assert (error is not None) == bool(lacking), error
    if error is not None:
        assert error.startswith(f"record {lacking[0]} of"), error
        return
    assert counts.tolist() == [len(rows) for rows in wanted]
    pairs_in_order = SequentialSampler(int(counts.sum()))
    order = ViewSampler(pairs_in_order, counts, per_epoch="all", seed=0)
    feed = Feed(source, BatchSampler(order, batch_size=1), side={"v": table})
    assert [batch["v"][0] for batch in NumpyLoader(feed)] == [*chain.from_iterable(wanted)]
    double = np.flatnonzero(counts > 1).tolist()
    try:
        feed.with_sampler(BatchSampler(SequentialSampler(len(ids)), batch_size=1))
    except ValueError as caught:
        error = str(caught)
    assert (error is not None) == bool(double), error
    assert error is None or error.startswith(f"record {double[0]} of"), error
