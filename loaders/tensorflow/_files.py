"""The engine that chooses from TensorFlow's own sequential readers of TFRecord files."""

from __future__ import annotations

import os
import re
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders import _system
from twinfeed.loaders._checks import Int64s
from twinfeed.loaders.errors import REBUILD, DataCorruptionError
from twinfeed.loaders.formats.tfrecord import framed_length
from twinfeed.loaders.index import Index
from twinfeed.loaders.index._paths import is_url, join
from twinfeed.loaders.reading._fetch import open_shard
from twinfeed.loaders.tensorflow._calls import called
from twinfeed.loaders.tensorflow._choose import chosen, select
from twinfeed.loaders.tensorflow._fields import FedFields, ParsedFields
from twinfeed.loaders.tensorflow._runs import Runs, find_runs, lay_out
from twinfeed.loaders.tensorflow._serve import Server
from twinfeed.loaders.tensorflow.errors import EXAMINERS
from twinfeed.samplers import PKBatchSampler

# Files left to the rest of the process, and readers beyond those the first epoch needs.
_RESERVE, _SPARE = 32, 2

# The least and the most that a reader holds of its file, in bytes.
_BUFFER = 1 << 12, 1 << 18

# Opening a file for each run pays from this average number of records per run on.
_WORTH_OPENING = 3

# Numbers passes in the order they began.
_BEGUN = count()


class ChooseFiles:
    """Readers of TFRecord files, each of which reads one run of records after another."""

    by_calls = False

    def __init__(self, server: Server, readers: int) -> None:
        self.server = server
        self.index = server.feed.index
        self.readers = readers
        self.begun = -1
        self._opened: set[int] = set()
        self._offsets = Offsets(self.index)
        self._reader = server.reader
        self._fields = (ParsedFields if ParsedFields.fit(server.feed) else FedFields)(server)
        EXAMINERS.add(self)

    def epoch(self, begun: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one pass."""
        types = [tf.int64, tf.int64, tf.int64, tf.int64, tf.int64, tf.int64, tf.int64]
        plan = called(self.plan, [begun], types)
        selector, sizes, *pieces, bounds = plan
        selector.set_shape([None, None])
        for part in plan[1:]:
            part.set_shape([None])
        readers = [
            self._read(*(part[bounds[n] : bounds[n + 1]] for part in pieces))
            for n in range(self.readers)
        ]
        nothing = tf.data.Dataset.from_tensors(b"").repeat()
        parts = {
            "place": tf.data.Dataset.range(begun[2], self.server.places),
            "size": tf.data.Dataset.from_tensor_slices(sizes),
            "records": chosen(readers, selector, nothing),
            "aside": self._fields.aside(begun, tf.shape(selector, tf.int64)[1]),
        }

        def batch(step: dict[str, Any]) -> tuple[tf.Tensor, Any]:
            return step["place"], self._fields.batch(begun, **step)

        return self.server.mapped(tf.data.Dataset.zip(parts), batch, self._fields.parallel)

    def plan(self, begun: Int64s) -> tuple[Int64s, ...]:
        """Lay out the rest of an epoch over the readers."""
        self.begun = next(_BEGUN)
        self._opened.clear()
        ids, batches, sizes = select(self.server, int(begun[1]), int(begun[2]))
        pieces = lay_out(runs_of(self.server, ids), self.readers)
        source = np.full(len(ids) + 1, self.readers)  # the last entry is for -1
        source[:-1][ids >= 0] = pieces.reader
        file, offsets = self._offsets.of(pieces.first)
        stored, lengths = self.index.shards["bytes"][file], self.index.shard_lengths[file]
        buffers = np.clip(pieces.counts * stored // np.maximum(lengths, 1), *_BUFFER)
        return source[batches], sizes, file, offsets, pieces.counts, buffers, pieces.bounds

    def open(self, file: np.int64) -> bytes:
        """Return the path of a shard, which must be there with the size in the index."""
        os.close(open_shard(self.index, int(file)))  # TensorFlow's own errors say less
        self._opened.add(int(file))
        return os.fsencode(join(self.index.root, self.index.shard_paths[int(file)]))

    def examine(self, message: str, /) -> None:
        """Raise for the record at the offset in TensorFlow's message, where its fields are damaged.

        The message does not say in which file. So the record at this offset is read in each file
        that the last pass opened.
        """
        found = re.search(r"record at (\d+)", message)
        names = [name for name in self.index.fields if self.index.fields[name].missing == 0]
        if found is None or not names:
            return
        tables = [self.index.table(name)["offset"] for name in names]
        stops = [0, *self.index.shard_stops.tolist()]
        for file in sorted(self._opened):
            start, stop = stops[file], stops[file + 1]
            for table in tables:
                record = start + np.searchsorted(table[start:stop], int(found[1]))
                if record < stop:
                    self._reader.read([record], names)

    def _read(
        self, files: tf.Tensor, offsets: tf.Tensor, counts: tf.Tensor, buffers: tf.Tensor
    ) -> tf.data.Dataset:
        """Read one piece after the other, each from its file's offset on."""

        def piece(
            file: tf.Tensor, offset: tf.Tensor, count: tf.Tensor, buffer: tf.Tensor
        ) -> tf.data.Dataset:
            path = called(self.open, [file], tf.string)
            path.set_shape([])
            variant = tf.raw_ops.TFRecordDatasetV2(
                filenames=[path], compression_type="", buffer_size=buffer, byte_offsets=[offset]
            )
            records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
            return records.take(count)

        pieces = tf.data.Dataset.from_tensor_slices((files, offsets, counts, buffers))
        return pieces.flat_map(piece)


def runs_of(server: Server, ids: Int64s) -> Runs:
    """Find the runs of a stream of sample ids."""
    records = server.feed.sampler.records(ids)
    return find_runs(records[records >= 0], server.feed.index.shard_stops)


def readers_for(server: Server) -> int:
    """Return how many sequential readers of files serve the stream; 0 where ids serve it better.

    The first epoch decides. Readers serve the stream only if:

    - the shards are local TFRecord files of which no record is left out;
    - runs of records are long enough to be worth opening a file for;
    - no more files are needed at once than may be open;
    - the stream is not P x K over several ranks, between which the files of classes would move;
    - no decoded images are cached, since readers would read an image again for every use.
    """
    index, sampler = server.feed.index, server.feed.sampler
    local = index.container == "tfrecord" and not is_url(index.root)
    if not local or index.options.left_out:
        return 0
    if sampler.live is not None or (isinstance(sampler, PKBatchSampler) and sampler.world_size > 1):
        return 0
    runs = runs_of(server, select(server, 0, 0).ids)
    if len(runs.turns) < _WORTH_OPENING * len(runs.first):
        return 0
    needed = runs.most_at_once()
    wanted = needed + needed // 4 + _SPARE
    limit = _system.file_limit()
    allowed = wanted if limit is None else limit - _system.open_files() - _RESERVE
    return min(wanted, allowed) if needed <= allowed else 0


class Offsets:
    """Find where records begin in their files.

    The first record of a file begins at 0. For any other, the headers of the file are read once.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self._firsts = index.shard_stops - index.shard_lengths
        self._starts: dict[int, Int64s] = {}

    def of(self, records: Int64s, /) -> tuple[Int64s, Int64s]:
        """Return the file and the byte offset of each record."""
        file = np.searchsorted(self.index.shard_stops, records, side="right")
        number = records - self._firsts[file]
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
