"""What a batch is: the slow, plain definition, made one record after another.

It shares only reading and collation with what makes the batches of a feed and of the loaders.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from support.inside import Reads, Schedule, collate, read_with_missing, reader_of
from twinfeed.loaders import Batch, Feed

NUMBERS = ("id", "record", "view", "seed", "seed32")


def batches(feed: Feed, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
    """The batches of an epoch from step `start` on."""
    with closing(reader_of(feed.index)) as reader:
        for step in range(start, len(feed)):
            yield _batch(feed, reader, epoch, step)


def _batch(feed: Feed, reader: Reads, epoch: int, step: int) -> Batch:
    sampler, spec = feed.sampler, feed.spec
    ids, seeds = sampler.batch(epoch, step), sampler.seeds(epoch, step)
    held, records, views = ids >= 0, sampler.records(ids), sampler.views(ids)
    samples: list[dict[str, Any]] = [{}] * len(ids)  # padding has no values
    for place in np.flatnonzero(held):
        numbers = (int(each[place]) for each in (ids, records, views, seeds))
        samples[place] = _sample(feed, reader, *numbers)
        assert samples[place].keys() == spec.keys()
    batch: Batch = {"id": ids}
    batch |= {name: _rows(rows, records, held) for name, rows in feed.index.columns.items()}
    batch |= {name: _rows(rows, ids, held) for name, rows in feed.side.items()}
    first = _first_bytes(feed, reader, samples) if not held.all() else {}
    fields = {name: [sample.get(name, first.get(name)) for sample in samples] for name in spec}
    batch |= collate(fields, spec, how=feed.collate)
    return batch | ({"mask": held} if sampler.traits.padded else {})


def _first_bytes(feed: Feed, reader: Reads, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The bytes of the first real sample of a batch, or else of the stream: those of padding."""
    first = next(filter(None, samples), None)
    if first is None:
        stream = Schedule(feed.sampler).all_ranks.sampler
        number, seed = stream.batch(0, 0)[:1], int(stream.seeds(0, 0)[0])
        record, view = int(stream.records(number)[0]), int(stream.views(number)[0])
        first = _sample(feed, reader, int(number[0]), record, view, seed)
    return {name: value for name, value in first.items() if isinstance(value, bytes)}


def _sample(
    feed: Feed, reader: Reads, number: int, record: int, view: int, seed: int
) -> dict[str, Any]:
    """The fields of one sample, decoded and transformed."""
    read = read_with_missing(reader, np.array([record]), feed.fields, dict(feed.missing))
    sample = {name: values[0] for name, values in read.items()}
    if feed.decode is not None:
        sample = _copied(feed.decode(sample))
    if feed.transform is None:
        return sample
    one = np.ones(1, bool)
    for name, rows in feed.index.columns.items():
        sample[name] = _rows(rows, np.array([record]), one)[0]
    for name, rows in feed.side.items():
        sample[name] = _rows(rows, np.array([number]), one)[0]
    sample |= zip(NUMBERS, (number, record, view, seed, seed & 0xFFFFFFFF), strict=True)
    made = _copied(feed.transform(sample))
    return {name: value for name, value in made.items() if name not in NUMBERS}


def _copied(made: Any) -> dict[str, Any]:
    """What a user's function made, in arrays that may be written to."""
    return {
        name: value.copy() if isinstance(value, np.ndarray) else value
        for name, value in made.items()
    }


def _rows(
    table: Any, numbers: npt.NDArray[np.int64], held: npt.NDArray[np.bool_]
) -> npt.NDArray[Any]:
    """The rows of these numbers in the machine's byte order, and zeros for padding."""
    rows = np.asarray(table[numbers.clip(0)])
    rows = rows.astype(rows.dtype.newbyteorder("="))
    rows[~held] = 0
    return rows
