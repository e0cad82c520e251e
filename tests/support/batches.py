"""Batches as plain Python: those that a loop receives, and those that it must receive."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from support.inside import NO_BLOCK, Schedule, batcher_of, fetch_ahead, gap_of, ranges_of_records
from support.plain import batches as plain
from twinfeed.loaders import Feed, Index, Ragged, Reader
from twinfeed.samplers import BatchStream

Noted = dict[str, Any]

readahead: int | None = None
"""What is given to the loaders that the helpers make; see the fixture of this name."""


def noted(batch: dict[str, Any]) -> Noted:
    """A batch of either framework as plain Python, with the dtypes and shapes of its arrays."""
    return {name: _plain(value) for name, value in batch.items()}


def expected(
    index: Index, sampler: BatchStream, epochs: Iterable[int] = (0,), **options: Any
) -> list[Noted]:
    """The batches of whole epochs by their plain definition."""
    feed = Feed(index, sampler, **options)
    return [noted(batch) for epoch in epochs for batch in plain(feed, epoch)]


def made(
    feed: Feed, epoch: int = 0, start: int = 0, *, ahead: int | None = None
) -> Iterator[dict[str, Any]]:
    """The batches of an epoch, made as all loaders make them."""
    with batcher_of(feed) as batcher:
        most = readahead if ahead is None else ahead
        batcher.start_pass(Schedule(feed.sampler), epoch, start, readahead=most)
        yield from map(batcher, feed.requests(epoch, start))


def received(batches: Iterable[dict[str, Any]]) -> list[Noted]:
    """What a training loop gets."""
    return [noted(batch) for batch in batches]


def two_epochs(loader: Any) -> list[Noted]:
    """What a training loop gets in epochs 0 and 1, each set by name. It closes the loader."""
    got = []
    with loader:
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            got += received(loader)
    return got


def take(batches: Iterable[dict[str, Any]], count: int) -> Iterator[Noted]:
    """Break a pass off after `count` batches."""
    iterator = iter(batches)
    for _ in range(count):
        yield noted(next(iterator))


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return value
    if isinstance(value, Ragged):
        pieces = np.split(value.values, np.cumsum(value.lengths)[:-1])
        return [piece.tolist() for piece in pieces[: len(value.lengths)]]
    if getattr(value, "is_nested", False):  # torch's ragged tensor
        return [row.tolist() for row in value.unbind()]
    if hasattr(value, "to_list"):  # TensorFlow's
        return value.to_list()
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)  # torch's
    if array.dtype == object:
        return array.tolist()
    return str(array.dtype), array.shape, array.tolist()


def read_ahead(reader: Reader, records: Any, fields: Sequence[str] = (), /) -> None:
    """Ask for the bytes of records, as a planner does."""
    ids = np.asarray(records, np.int64)
    names = [one for one in fields or reader.index.fields if one not in reader.index.columns]
    steps = np.zeros(len(ids), np.int64)
    fetch_ahead(
        reader,
        ranges_of_records(reader.index, names, ids, steps, NO_BLOCK, gap_of(reader.index)),
    )
