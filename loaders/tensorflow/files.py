"""The engine that chooses from TensorFlow's own sequential readers of TFRecord files."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from twinfeed.loaders._system import file_limit, open_files
from twinfeed.loaders.errors import REBUILD, DataCorruptionError
from twinfeed.loaders.formats.tfrecord import framed_length
from twinfeed.loaders.index import Index
from twinfeed.loaders.index._paths import is_url, join
from twinfeed.loaders.tensorflow.choose import chosen, select
from twinfeed.loaders.tensorflow.errors import EXAMINERS, remembered
from twinfeed.loaders.tensorflow.fields import FedFields, ParsedFields
from twinfeed.loaders.tensorflow.runs import Runs, find_runs, lay_out
from twinfeed.loaders.tensorflow.serve import Server
from twinfeed.samplers import PKBatchSampler

Int64s = npt.NDArray[np.int64]

# Files left to the rest of the process, and readers beyond those the first epoch needs.
_RESERVE, _SPARE = 32, 2

# The least and the most that a reader holds of its file, in bytes.
_BUFFER = 1 << 12, 1 << 18


class ChooseFiles:
    """Readers of TFRecord files, each of which reads one run of records after the other."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.index = server.feed.index
        self.sampler = server.ranks[0].sampler
        self._check()
        runs = self._runs(select(server, self.sampler.epoch, 0).ids)
        self.readers = _readers(runs.most_at_once())
        self._offsets = Offsets(self.index)
        parsed = ParsedFields.fit(server.feed)
        self._reader = server.feed.reader
        self._fields = ParsedFields(server) if parsed else FedFields(server)
        EXAMINERS.add(self)

    def epoch(self, epoch: tf.Tensor, start: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one epoch from step `start` on."""
        types = [tf.int64, tf.int64, tf.string, tf.int64, tf.int64, tf.int64, tf.int64]
        plan = tf.numpy_function(self._plan, [epoch, start], types)
        selector, sizes, *pieces, bounds = plan
        selector.set_shape([None, None])
        for part in plan[1:]:
            part.set_shape([None])
        readers = [
            _reader(*(part[bounds[n] : bounds[n + 1]] for part in pieces))
            for n in range(self.readers)
        ]
        records = chosen(readers, selector, tf.data.Dataset.from_tensors(b"").repeat())
        width = tf.shape(selector, tf.int64)[1]
        parts = {
            "place": tf.data.Dataset.range(start, self.server.places),
            "size": tf.data.Dataset.from_tensor_slices(sizes),
            "records": records,
            "aside": self._fields.aside(epoch, start, width),
        }

        def batch(step: dict[str, Any]) -> tuple[tf.Tensor, Any]:
            return step["place"], self._fields.batch(epoch, **step)

        return tf.data.Dataset.zip(parts).map(
            batch, num_parallel_calls=self._fields.parallel, deterministic=True
        )

    def examine(self, message: str, /) -> None:
        """Raise for the record at the offset in TensorFlow's message, where its fields are damaged.

        The message does not say in which file: whatever lies at that offset in each is read.
        """
        found = re.search(r"record at (\d+)", message)
        names = [name for name in self.index.fields if self.index.fields[name].missing == 0]
        if found is None or not names:
            return
        tables = [self.index.table(name)["offset"] for name in names]
        for start, stop in pairwise([0, *self.index.shards["stop"].tolist()]):
            for table in tables:
                record = start + np.searchsorted(table[start:stop], int(found[1]))
                if record < stop:
                    self._reader.read([record], names)

    def _check(self) -> None:
        """Refuse what TensorFlow's reader cannot serve."""
        if self.index.container != "tfrecord" or is_url(self.index.root):
            raise ValueError(
                f"sources='files' needs local TFRecord shards, got {self.index.container} in "
                f"{self.index.root}: use sources='shards' or engine='gather'"
            )
        if self.index.options.left_out:
            raise ValueError(
                f"sources='files' reads every record of a file, and this index leaves out "
                f"{self.index.options.left_out}: use sources='shards' or engine='gather'"
            )
        if isinstance(self.sampler, PKBatchSampler) and self.sampler.world_size > 1:
            raise ValueError(
                f"sources='files' with P x K over {self.sampler.world_size} ranks: class files "
                f"would move between the ranks; use engine='gather'"
            )

    def _runs(self, ids: Int64s) -> Runs:
        records = self.sampler.records(ids)
        return find_runs(records[records >= 0], self.index.shards["stop"])

    @remembered
    def _plan(
        self, epoch: np.int64, start: np.int64
    ) -> tuple[Int64s, Int64s, npt.NDArray[Any], Int64s, Int64s, Int64s, Int64s]:
        """Lay out the rest of an epoch over the readers."""
        ids, batches, sizes = select(self.server, int(epoch), int(start))
        pieces = lay_out(self._runs(ids), self.readers)
        source = np.full(len(ids) + 1, self.readers)  # the last entry is for -1
        source[:-1][ids >= 0] = pieces.reader
        file, offsets = self._offsets.of(pieces.first)
        names = [join(self.index.root, path) for path in self.index.shard_paths.tolist()]
        paths = np.array([os.fsencode(name) for name in names], object)[file]
        shards = self.index.shards["bytes"][file], self.index.shard_lengths[file]
        buffers = np.clip(pieces.counts * shards[0] // np.maximum(shards[1], 1), *_BUFFER)
        return source[batches], sizes, paths, offsets, pieces.counts, buffers, pieces.bounds


class Offsets:
    """Find where records begin in their files.

    The first record of a file begins at 0; for another, the headers of its file are read once.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._starts: dict[int, Int64s] = {}

    def of(self, records: Int64s, /) -> tuple[Int64s, Int64s]:
        """Return the file and the byte offset of each record."""
        stops = self.index.shards["stop"]
        file = np.searchsorted(stops, records, side="right")
        number = records - np.concatenate([[0], stops])[file]
        offsets = np.zeros(len(records), np.int64)
        for one in np.unique(file[number > 0]).tolist():
            if one not in self._starts:
                self._starts[one] = self._walk(one)
            here = file == one
            offsets[here] = self._starts[one][number[here]]
        return file, offsets

    def _walk(self, file: int) -> Int64s:
        """Read the headers of one file, from each to the next."""
        path = join(self.index.root, self.index.shard_paths[file])
        offset, starts = 0, []
        with open(path, "rb", buffering=0) as opened:
            for number in range(int(self.index.shard_lengths[file])):
                length = framed_length(os.pread(opened.fileno(), 12, offset))
                if length is None:
                    raise DataCorruptionError(
                        "no record header where one must be",
                        path=path,
                        offset=offset,
                        record=number,
                        advice=f"copy the shard again, or {REBUILD}",
                    )
                starts.append(offset)
                offset += length
        return np.array(starts, np.int64)


def _readers(needed: int) -> int:
    """Return how many readers to make, or raise where the process may not open so many files."""
    limit = file_limit()
    allowed = needed + needed // 4 + _SPARE
    if limit is not None:
        allowed = limit - open_files() - _RESERVE
    if needed > allowed:
        raise ValueError(
            f"the stream is in the midst of {needed} files, or blocks of files, at once, and this "
            f"process may open {max(0, allowed)} more (ulimit -n is {limit}): use "
            f"engine='gather', which opens few for any number, or raise the limit"
        )
    return min(allowed, needed + needed // 4 + _SPARE)


def _reader(
    paths: tf.Tensor, offsets: tf.Tensor, counts: tf.Tensor, buffers: tf.Tensor
) -> tf.data.Dataset:
    """Read one piece after the other, each from its file's offset on."""

    def piece(
        path: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, buffer: tf.Tensor
    ) -> tf.data.Dataset:
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type="", buffer_size=buffer, byte_offsets=[offset]
        )
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
        return records.take(count)

    return tf.data.Dataset.from_tensor_slices((paths, offsets, counts, buffers)).flat_map(piece)
