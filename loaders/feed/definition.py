"""What a batch is: the slow, plain definition.

It shares nothing with what makes the batches of loaders, so that tests can hold the two together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from twinfeed.loaders.errors import DecodeError
from twinfeed.loaders.feed.calling import call, check_values
from twinfeed.loaders.feed.collate import Collate, FieldSpec, MisfitError, collate
from twinfeed.loaders.reading.source import Reads, Source, reader_of
from twinfeed.loaders.support.checks import Array
from twinfeed.samplers import BatchStream

Sample = dict[str, Any]
"""A record's fields by name, as decode and transform take them."""

Batch = dict[str, Any]
"""The fields of a batch by name, as a loop receives them."""

Decode = Callable[[Sample], Mapping[str, Any]]
"""What makes a sample of a sample: `decode=` and `transform=`."""

TOLD = ("id", "record", "view", "seed", "seed32")
"""What a transform is given beside the fields. The batch does not hold these values."""


class Definition(ABC):
    """Say what batches are made of, and make them one record after another."""

    index: Source
    sampler: BatchStream
    fields: tuple[str, ...]
    decode: Decode | None
    transform: Decode | None

    @property
    @abstractmethod
    def collate(self) -> Collate: ...
    @property
    @abstractmethod
    def side(self) -> Mapping[str, Array]: ...
    @property
    @abstractmethod
    def missing(self) -> Mapping[str, Any]: ...
    @property
    @abstractmethod
    def spec(self) -> Mapping[str, FieldSpec]: ...

    def batch(self, epoch: int = 0, step: int = 0) -> Batch:
        """Return one batch as numpy arrays, by the plain definition of what a batch is.

        It reads, decodes and transforms one record after another, checks all bytes, and keeps
        nothing open: slow, and made for a look, a debugger or a test. Every loader gives the same
        batch.

        Raises:
            IndexError: outside the sampler's epochs and steps.
            DecodeError: decode or transform fails. This error and those of reading name the record.

        >>> from tempfile import mkdtemp
        >>> from twinfeed.loaders import Feed, pack
        >>> from twinfeed.samplers import ExactOnceBatchSampler
        >>> index = pack([{"word": b"to"}, {"word": b"be"}, {"word": b"or"}], mkdtemp())["data"]
        >>> Feed(index, ExactOnceBatchSampler(3, batch_size=2)).batch(epoch=0, step=1)
        {'id': array([2]), 'word': [b'or']}
        """
        with closing(reader_of(self.index)) as reader:
            return self._batch(reader, epoch, step)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `start` on, each as `batch` gives it.

        The batches depend on nothing but the feed and the two numbers.

        Raises:
            IndexError: outside the sampler's epochs and steps.
        """
        self.sampler.batches(epoch, start, start)  # refuses what is no position, draws nothing
        with closing(reader_of(self.index)) as reader:
            for step in range(start, len(self.sampler)):
                yield self._batch(reader, epoch, step)

    def _batch(self, reader: Reads, epoch: int, step: int) -> Batch:
        sampler, index, spec = self.sampler, self.index, self.spec
        ids, seeds = sampler.batch(epoch, step), sampler.seeds(epoch, step)
        held, records, views = ids >= 0, sampler.records(ids), sampler.views(ids)
        samples: list[Sample] = [{}] * len(ids)  # padding has no values
        for place in np.flatnonzero(held):
            numbers = (int(each[place]) for each in (ids, records, views, seeds))
            sample = samples[place] = sample_of(self, reader, *numbers)
            if sample.keys() != spec.keys():
                raise DecodeError(
                    f"{index.describe(records[place])}: it has the fields {sorted(sample)} where "
                    f"{sorted(spec)} are expected"
                )
        batch: Batch = {"id": ids}
        batch |= {name: _rows(column, records, held) for name, column in index.columns.items()}
        batch |= {name: _rows(table, ids, held) for name, table in self.side.items()}
        fields = {name: [sample.get(name) for sample in samples] for name in spec}
        try:
            batch |= collate(fields, spec, how=self.collate)
        except MisfitError as error:
            raise DecodeError(f"{index.describe(records[error.place])}: {error}") from error
        return batch | ({"mask": held} if sampler._padded else {})


def sample_of(
    fed: Definition, reader: Reads, number: int, record: int, view: int, seed: int, /
) -> Sample:
    """Return the fields of one sample, decoded and transformed."""
    given = {"missing": dict(fed.missing)} if fed.missing else {}  # which only a Reader takes
    read = reader.read(np.array([record]), fed.fields, **given)
    sample = {name: values[0] for name, values in read.items()}
    if fed.decode is not None:
        sample = _called(fed, "decode", fed.decode, sample, record)
    if fed.transform is None:
        return sample
    one = np.ones(1, bool)
    for name, column in fed.index.columns.items():
        sample[name] = _rows(column, np.array([record]), one)[0]
    for name, table in fed.side.items():
        sample[name] = _rows(table, np.array([number]), one)[0]
    sample |= zip(TOLD, (number, record, view, seed, seed & 0xFFFFFFFF), strict=True)
    sample = _called(fed, "transform", fed.transform, sample, record)
    return {name: value for name, value in sample.items() if name not in TOLD}


def _called(
    fed: Definition, name: str, function: Decode, sample: Sample, record: int
) -> dict[str, Any]:
    """Return what a user's function makes of a sample, in arrays that may be written to."""
    made = call(fed.index, name, function, record, sample)
    check_values(fed.index, name, record, made)
    return {
        field: value.copy() if isinstance(value, np.ndarray) else value
        for field, value in made.items()
    }


def _rows(table: Any, numbers: Array, held: Array) -> Array:
    """Return the rows of these numbers in the machine's byte order, and zeros for padding."""
    rows = np.asarray(table[numbers.clip(0)])
    rows = rows.astype(rows.dtype.newbyteorder("="))
    rows[~held] = 0
    return rows
