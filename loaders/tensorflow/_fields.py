"""From serialized records to the fields of a batch: in the graph, or by the shared feed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.feed.request import Request
from twinfeed.loaders.formats.example import decode_list, parse
from twinfeed.loaders.index.opened import Index
from twinfeed.loaders.making.batcher import Batcher
from twinfeed.loaders.making.feed import Feed, index_of
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.tensorflow._callbacks import called
from twinfeed.loaders.tensorflow._layout import Layout
from twinfeed.loaders.tensorflow._serve import Server, spread

# Steps whose ids and columns one call passes to TensorFlow.
_STEPS = 32


class ParsedFields:
    """Let TensorFlow take byte strings out of the records.

    What else a batch holds (ids, columns, side tables, the mask) comes from Python. So do the
    lengths that the fields must have.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.index = server, index_of(server.feed, "this engine")
        self.names = [name for name in server.feed.fields if name not in self.index.columns]
        self._lengths_rows = max(1, len(self.names))  # TensorFlow crashes if it cuts no field
        self._missing: dict[str, bytes] = dict(server.feed.missing)
        if self.index.options.missing == "empty":
            self._missing = dict.fromkeys(self.names, b"") | self._missing
        rest = Feed(self.index, server.sampler, fields=(), side=server.feed.side, spec={})
        self._rest = Batcher(rest, reader=server.reader)
        self._layout = Layout(rest, server.layout.batch, server.reader)

    @staticmethod
    def fit(feed: Feed) -> bool:
        """Whether all fields are byte strings, and no Python function changes them."""
        index = index_of(feed, "this engine")
        kinds = {index.fields[name].kind for name in feed.fields if name not in index.columns}
        return not feed.has_functions and kinds <= {"bytes"}

    def batches(self, begun: tf.Tensor, records: tf.data.Dataset) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of (place, records)."""
        specs = [*self._layout.flat, tf.TensorSpec([None, self._lengths_rows], tf.int64)]

        def steps(first: tf.Tensor) -> tuple[tf.Tensor, ...]:
            found = called(self.rows, [begun, first], [spec.dtype for spec in specs])
            for part, spec in zip(found, specs, strict=True):
                part.set_shape([None, None, *spec.shape[1:]])
            return tuple(found)

        def batch(chosen: Any, rest: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, Any]:
            size = tf.shape(chosen[1])[0]
            return chosen[0], self._batch(begun, *chosen, *[part[:size] for part in rest])

        chunks = tf.data.Dataset.range(begun[2], self.server.places, _STEPS)
        aside = chunks.map(steps, num_parallel_calls=1, deterministic=True).unbatch()
        both = tf.data.Dataset.zip((records, aside))
        return self.server.mapped(both, batch, max(1, self.server.threads))

    def _batch(
        self, begun: tf.Tensor, place: tf.Tensor, records: tf.Tensor, *aside: tf.Tensor
    ) -> dict[str, Any]:
        *rest, lengths = aside
        fields = self._parsed(records)
        if self.names:
            found = [tf.strings.length(field) for field in fields.values()]
            same = tf.reduce_all(tf.equal(tf.cast(tf.stack(found, 1), tf.int64), lengths))
            refuse = partial(called, self.mismatch, [begun, place, *found], tf.bool)
            tf.cond(same, lambda: True, refuse)  # runs, since it may call a Python function
        batch = self._layout.restore(rest) | fields
        for name in self.names:
            batch[name].set_shape([self.server.layout.batch])
        return {name: batch[name] for name in self.server.layout.specs}

    def _parsed(self, records: tf.Tensor) -> dict[str, tf.Tensor]:
        if not self.index.options.example or not self.names:
            return dict.fromkeys(self.names, records)
        features = {
            name: tf.io.FixedLenFeature([], tf.string, self._missing.get(name, b""))
            for name in self.names
        }
        parsed = tf.io.parse_example(records, features)
        return {name: parsed[name] for name in self.names}

    def rows(self, begun: Int64s, first: np.int64) -> list[Array]:
        """Give the arrays of some steps, each [steps, rows, …], and the lengths of the fields."""
        sampler, epoch = self.server.sampler, int(begun[1])
        last = min(int(first) + _STEPS, self.server.steps)
        drawn = self.server.schedules[0].batches(epoch, int(first), last)
        ids = np.concatenate(drawn)
        records = sampler.records(ids)
        batch = self._rest(Request(epoch, int(first), ids, records, sampler.views(ids), None))
        lengths = np.zeros((len(ids), self._lengths_rows), np.int64)
        for number, name in enumerate(self.names):
            lengths[:, number] = self._lengths(name, records)
        sizes = np.array([len(one) for one in drawn])
        held = np.arange(max(1, sizes.max())) < sizes[:, None]
        return [spread(part, held) for part in (*self._layout.flatten(batch), lengths)]

    def _lengths(self, name: str, records: Int64s) -> Int64s:
        """Return the bytes of a field in each record; 0 for padding."""
        stored = np.zeros(len(records), np.int64)
        found = self.index.table(name)["length"][records[records >= 0]]
        value = self._missing.get(name)
        stored[records >= 0] = found if value is None else np.where(found == -1, len(value), found)
        return stored

    def mismatch(self, begun: Int64s, place: np.int64, *found: Int64s) -> None:
        """Raise for the first record whose fields are not as long as they should be."""
        records = self.server.request(begun, int(place)).records
        expected = [self._lengths(name, records) for name in self.names]
        number = int(np.flatnonzero((np.array(found) != np.array(expected)).any(axis=0))[0])
        self.server.reader.read(records[number : number + 1], self.names)  # says what it lacks
        raise DataCorruptionError(
            f"{self.index.describe(records[number])}: its fields are not as long as indexed",
            expected=dict(zip(self.names, (int(row[number]) for row in expected), strict=True)),
            found=dict(zip(self.names, (int(row[number]) for row in found), strict=True)),
        )


class FedFields:
    """Let the shared feed parse, decode and collate the records that TensorFlow read."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._given = server.reader = GivenRecords(index_of(server.feed, "this engine"))

    def batches(self, begun: tf.Tensor, records: tf.data.Dataset) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of (place, records)."""
        layout = self.server.layout

        def batch(place: tf.Tensor, data: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return place, layout.restore(called(self.arrays, [begun, place, data], layout.dtypes))

        return self.server.mapped(records, batch, self.server.parallel)

    def arrays(self, begun: Int64s, place: np.int64, data: Array) -> list[Array]:
        """Make the batch of the records that TensorFlow read."""
        batcher = self.server.batcher(begun, int(place))
        request = self.server.request(begun, int(place))
        self._given.held.records = dict(zip(request.records.tolist(), data, strict=True))
        return self.server.layout.flatten(batcher(request))


class GivenRecords(Reader):
    """Read records that this thread has already."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.held = threading.local()  # the serialized `records` of one batch, by their ids

    def _values(
        self, ids: Int64s, names: Sequence[str], missing: Mapping[str, Any], /
    ) -> dict[str, list[Any]]:
        data = [self.held.records[record] for record in ids.tolist()]
        example = self.index.options.example
        parsed = [parse(item) if example else {} for item in data]
        values: dict[str, list[Any]] = {}
        for name in names:
            if name in self.index.columns:
                values[name] = list(self.index.columns[name][ids])
            elif not example:
                values[name] = data
            else:
                rows = zip(parsed, ids.tolist(), strict=True)
                values[name] = [self._value(name, row, record, missing) for row, record in rows]
        return values

    def _value(
        self, name: str, row: dict[str, Any], record: int, missing: Mapping[str, Any]
    ) -> Any:
        kind = self.index.fields[name].kind
        if name in row:
            return row[name][0] if kind == "bytes" else row[name]
        if name in missing:
            return missing[name]
        if self.index.options.missing == "empty":
            return b"" if kind == "bytes" else decode_list(kind, b"")
        raise self._missing(0, np.array([record]), [name])
