"""The engine that chooses from TensorFlow's own sequential readers of TFRecord files."""

from __future__ import annotations

import os
import re
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from twinfeed.loaders.errors import REBUILD, DataCorruptionError
from twinfeed.loaders.formats.tfrecord import framed_length, scan
from twinfeed.loaders.index import Index
from twinfeed.loaders.index.paths import join, stale_file
from twinfeed.loaders.making.feed import Feed, index_of
from twinfeed.loaders.reading.local import open_shard
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support import system
from twinfeed.loaders.support.array_types import Int64s
from twinfeed.loaders.support.regular import open_file
from twinfeed.loaders.tensorflow._callbacks import called
from twinfeed.loaders.tensorflow._choose import Sizes, batched, unit_of
from twinfeed.loaders.tensorflow._fields import FedFields, ParsedFields
from twinfeed.loaders.tensorflow._runs import Runs, find_runs, lay_out
from twinfeed.loaders.tensorflow._serve import Server
from twinfeed.loaders.tensorflow.original import EXAMINERS
from twinfeed.samplers import PKBatchSampler

# Files left to the rest of the process, and spare readers beyond the first epoch's need.
_RESERVE, _SPARE = 32, 2

# The least and the most that a reader buffers of its file, in bytes.
_BUFFER = 1 << 12, 1 << 18

# Opening a file for each run pays from this average number of records per run on.
_WORTH_OPENING = 3

# Numbers passes in the order they began.
_BEGUN = count()


class ChooseFiles:
    """Readers of TFRecord files, each of which reads one run of records after another."""

    def __init__(self, server: Server, readers: int) -> None:
        self.server = server
        self.index = index_of(server.feed, "this engine")
        self.readers = readers
        self.uncounted = server.uncounted
        self.begun = -1
        self._opened: set[int] = set()
        self._files: dict[int, tuple[int, ...]] = {}
        fields = self.index.fields.items()
        self._whole = [name for name, field in fields if field.missing == 0]
        self._offsets = Offsets(self.index)
        self._fields = (ParsedFields if ParsedFields.fit(server.feed) else FedFields)(server)
        EXAMINERS.add(self)

    def epoch(self, begun: tf.Tensor) -> tf.data.Dataset:
        """Make the dataset of (place, batch) of one pass."""
        unit, each, numbers, table, own = called(self.plan, [begun], [tf.int64] * 5)
        for part, shape in zip(
            (unit, each, numbers, table, own),
            ([], [None], [None], [None, 5], [self.readers]),
            strict=True,
        ):
            part.set_shape(shape)
        padding = tf.data.Dataset.from_tensors(b"").repeat()
        elements = tf.data.Dataset.choose_from_datasets(
            [*self._readers(table, own), padding],
            tf.data.Dataset.from_tensor_slices(numbers),
            stop_on_empty_dataset=True,
        )
        records = batched(elements, Sizes(each, unit, self.server.layout.batch))
        none = tf.data.Dataset.from_tensors(tf.constant([], tf.string))  # if a shard ends early
        parts = (
            tf.data.Dataset.range(begun[2], self.server.places),
            tf.data.Dataset.from_tensor_slices(each),
            records.concatenate(none.repeat()),
        )

        def whole(place: tf.Tensor, size: tf.Tensor, records: tf.Tensor) -> Any:
            found = tf.size(records, tf.int64)
            ended = partial(called, self.ended, [begun, place, found], tf.bool)
            tf.cond(found < size, ended, lambda: True)  # runs, since it may call a Python function
            return place, records

        return self._fields.batches(begun, tf.data.Dataset.zip(parts).map(whole))

    def ended(self, begun: Int64s, place: np.int64, found: np.int64) -> None:
        """Raise: TensorFlow has given fewer records than were chosen."""
        raise DataCorruptionError(
            "a shard ended before the records that the index says it holds",
            advice=f"copy the shard again, or {REBUILD}",
        )

    def plan(self, begun: Int64s) -> tuple[Any, ...]:
        """Lay out the rest of an epoch over the readers."""
        self.begun = next(_BEGUN)
        self._opened.clear()
        ids, sizes = _drawn(self.server, int(begun[1]), int(begun[2]))
        pieces = lay_out(runs_of(self.server, ids), self.readers)
        source = np.full(len(ids), self.readers)
        source[ids >= 0] = pieces.reader
        file, offsets = self._offsets.of(pieces.first)
        stored, lengths = self.index.shards["bytes"][file], self.index.shard_lengths[file]
        buffers = np.clip(pieces.counts * stored // np.maximum(lengths, 1), *_BUFFER)
        table = np.stack([file, pieces.first, offsets, pieces.counts, buffers], axis=1)
        return unit_of(sizes), sizes, source, table, np.diff(pieces.bounds)

    def open(self, file: np.int64, record: np.int64) -> bytes:
        """Return the path of a shard, which must have the size in the index.

        TensorFlow compares a record with its own checksum only, and would read another file of this
        size. So the first record that is read is compared with the index, and the shard must then
        stay the same file.
        """
        number = int(file)
        path = join(self.index.root, self.index.shard_paths[number])
        fd = open_shard(self.index, number)
        found = os.fstat(fd)
        os.close(fd)
        identity = found.st_dev, found.st_ino, found.st_mtime_ns
        if number not in self._files:
            with Reader(self.index) as reader:  # closed at once: TensorFlow opens its own
                reader.read([int(record)], self._whole)
        if self._files.setdefault(number, identity) != identity:
            raise stale_file(path, "the file that was opened before", "another file, or a new one")
        self._opened.add(number)
        return os.fsencode(path)

    def examine(self, message: str, /) -> None:
        """Raise for the damaged record at the offset in TensorFlow's message.

        The message does not say in which file. So each file that the last pass opened is scanned up
        to this offset.
        """
        found = re.search(r"record at (\d+)", message)
        if found is None:
            return
        for file in sorted(self._opened):
            for record in scan(join(self.index.root, self.index.shard_paths[file]), example=False):
                if record.offset > int(found[1]):
                    break

    def _readers(self, table: tf.Tensor, own: tf.Tensor) -> list[tf.data.Dataset]:
        """Make the readers. Each reads its own pieces of the table, one after the other.

        Readers share one traced function: tracing takes 20 ms for each of 100 readers.
        """
        opened = tf.function(self._opened_at, input_signature=[tf.TensorSpec([5], tf.int64)])

        def records(piece: tf.Tensor) -> tf.data.Dataset:
            file = tf.data.experimental.from_variant(opened(piece), tf.TensorSpec([], tf.string))
            return file.take(piece[3])

        return [
            tf.data.Dataset.from_tensor_slices(pieces).flat_map(records)
            for pieces in tf.split(table, own, num=self.readers)
        ]

    def _opened_at(self, piece: tf.Tensor) -> tf.Tensor:
        """Open the file of a piece at its offset."""
        file, first, offset, _, buffer = tf.unstack(piece)
        path = called(self.open, [file, first], tf.string)
        return tf.raw_ops.TFRecordDatasetV2(
            filenames=path[None], compression_type="", buffer_size=buffer, byte_offsets=offset[None]
        )


def _drawn(server: Server, epoch: int, start: int) -> tuple[Int64s, Int64s]:
    """Draw the rest of an epoch: the sample ids end to end, and the sizes of the batches."""
    drawn = server.schedules[0].batches(epoch, start, server.steps)
    sizes = np.array([len(ids) for ids in drawn], np.int64)
    return np.concatenate([np.zeros(0, np.int64), *drawn]), sizes


def runs_of(server: Server, ids: Int64s) -> Runs:
    """Find the runs of a stream of sample ids."""
    records = server.sampler.records(ids)
    return find_runs(records[records >= 0], index_of(server.feed, "this engine").shard_stops)


def check_files(feed: Feed, /) -> None:
    """Raise ValueError if sequential readers of files cannot serve a feed."""
    index, sampler = feed.index, feed.sampler
    if not isinstance(index, Index):
        raise _unserved(f"reads TFRecord files, and a {type(index).__name__} has none")
    if index.container != "tfrecord":
        raise _unserved(f"reads TFRecord files, and these shards are {index.container}")
    if index.remote:
        raise _unserved(f"reads local files, and these shards are at {index.root}")
    for name, names in (index.options.fields or {}).items():
        if names != name and name in feed.fields:
            raise _unserved(f"reads features by their own names, and this index renames {names!r}")
    if index.options.left_out:
        raise _unserved("cannot leave out records, as this index does")
    if sampler.traits.max_cached is not None:
        raise _unserved("would read an image again for each use")
    if isinstance(sampler, PKBatchSampler) and sampler.world_size > 1:
        raise _unserved("cannot move the files of classes from rank to rank")


def readers_for(server: Server) -> int:
    """Return how many sequential readers of files serve the stream. The first epoch decides.

    Raises:
        ValueError: runs of records are too short to be worth opening a file for, or more files are
            needed at once than may be open.
    """
    if server.ranks > 1:
        raise _unserved(f"serves one replica for each pipeline, got {server.ranks}")
    runs = runs_of(server, _drawn(server, 0, 0)[0])
    if len(runs.turns) < _WORTH_OPENING * len(runs.first):
        in_a_row = len(runs.turns) / len(runs.first)
        raise _unserved(
            f"reads records in stored order, and of this stream only {in_a_row:.1f} come in a row"
        )
    needed = runs.most_at_once()
    wanted = needed + needed // 4 + _SPARE
    limit = system.file_limit()
    allowed = wanted if limit is None else limit - system.open_files() - _RESERVE
    if needed > allowed:
        raise _unserved(f"needs {needed} files at once, and this process may open {allowed} more")
    return min(wanted, allowed)


def _unserved(why: str) -> ValueError:
    return ValueError(
        f"engine='choose_from_datasets' {why}: use engine='gather', which gives the same batches"
    )


class Offsets:
    """Find where records begin in their files.

    The first record of a file begins at 0. For any other record, the headers of the file are read
    once.
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
        with open_file(path) as opened:
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
