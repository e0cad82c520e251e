"""What a batch is: the slow, plain definition, made one record after another.

It shares only reading and collation with what makes the batches of a feed and of the loaders.
"""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from support.inside import Reads, StoredFields, collate, of_all_ranks, reader_of
from twinfeed.loaders import Batch, Feed, Ragged

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
    samples: list[dict[str, Any]] = []
    for place in np.flatnonzero(held):
        numbers = (int(each[place]) for each in (ids, records, views, seeds))
        samples.append(_sample(feed, reader, *numbers))
        assert samples[-1].keys() == spec.keys()
    batch: Batch = {"id": ids}
    batch |= {name: _rows(rows, records, held) for name, rows in feed.index.columns.items()}
    batch |= {name: _rows(rows, ids, held) for name, rows in feed.side.items()}
    fields = {name: [sample[name] for sample in samples] for name in spec}
    collated = collate(fields, spec, how=feed.collate)
    example = {} if held.all() else _first_sample(feed, reader)
    batch |= {
        name: _padded(value, held, example.get(name, b"")) for name, value in collated.items()
    }
    return batch | ({"mask": held} if sampler.traits.padded else {})


def _padded(value: Any, held: npt.NDArray[np.bool_], example: Any) -> Any:
    """A field with zeros, no values, or the bytes of an example where there is no sample."""
    if isinstance(value, Ragged):
        return Ragged(value.values, _padded(value.lengths, held, example))
    if isinstance(value, list):
        rows = iter(value)
        return [next(rows) if real else example for real in held]
    padded = np.zeros((len(held), *value.shape[1:]), value.dtype)
    for place, row in zip(np.flatnonzero(held), value, strict=True):
        padded[place] = row
    return padded


def _first_sample(feed: Feed, reader: Reads) -> dict[str, Any]:
    """The first sample of the stream, whose bytes padding has."""
    stream = of_all_ranks(feed.sampler)
    number, seed = stream.batch(0, 0)[:1], int(stream.seeds(0, 0)[0])
    record, view = int(stream.records(number)[0]), int(stream.views(number)[0])
    return _sample(feed, reader, int(number[0]), record, view, seed)


def _sample(
    feed: Feed, reader: Reads, number: int, record: int, view: int, seed: int
) -> dict[str, Any]:
    """The fields of one sample, decoded and transformed."""
    stored = StoredFields(feed.index, feed.fields, feed.missing)
    read = stored.read(reader, np.array([record]))
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
