"""Errors within a pipeline reach the user with their place, and nothing hangs."""

import gc
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from support import PROGRAMS, TESTS
from support.programs import PYTHON, QUIET
from support.tensorflow_feeds import loader, packed, word

from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    FieldSpec,
    Index,
    NumpyLoader,
    StaleIndexError,
    open_index,
)
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.tensorflow import original_errors
from twinfeed.samplers import BatchStream, ExactOnceBatchSampler

# What the library reads itself, and not a reader of TensorFlow.
both_ways = pytest.mark.usefixtures("readahead")


def once() -> BatchStream:
    return ExactOnceBatchSampler(61, batch_size=8)


@pytest.fixture
def damaged(tmp_path: Path) -> Index:
    """An index of which record 40 no longer has its bytes."""
    index = copied(tmp_path / "damaged")
    damage(index, 40)
    return index


@both_ways
def test_damaged_bytes_name_shard_offset_and_record(damaged: Index) -> None:
    shard, number = damaged.location(40)
    with pytest.raises(tf.errors.OpError) as raised:
        list(loader(damaged, once()).dataset)
    for fact in ("DataCorruptionError", shard, f"record: {number}", "byte offset: "):
        assert fact in raised.value.message


def errors() -> list[DataCorruptionError]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, DataCorruptionError)]


def test_loop_ended_before_damage_keeps_no_error(damaged: Index) -> None:
    """Batches are read several at once, so that what has failed may lie far ahead of the loop."""
    before = errors()
    one = loader(damaged, once(), prefetch=8)
    for _ in islice(one.dataset, 4):
        time.sleep(0.1)  # until the pass has reached the damage
    deadline = time.monotonic() + 60
    while len(errors()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(errors()) == len(before)


@both_ways
@pytest.mark.parametrize("prefetch", [0, pytest.param(2, marks=pytest.mark.long), 8])
def test_batches_before_error_come_first(damaged: Index, prefetch: int) -> None:
    one = loader(damaged, once(), prefetch=prefetch)
    batches = one.track(one.dataset)
    assert [len(batch["id"]) for batch in islice(batches, 5)] == [8] * 5
    with pytest.raises(DataCorruptionError) as raised:
        next(batches)
    assert (one.epoch, one.step) == (0, 0)  # an evaluation has no place
    assert isinstance(raised.value.__cause__, tf.errors.OpError)
    assert raised.value.record == damaged.location(40)[1]


@both_ways
def test_unread_error_keeps_no_loader_alive(damaged: Index) -> None:
    one = loader(damaged, once())
    with pytest.raises(tf.errors.OpError):
        list(one.dataset)
    known = weakref.ref(one)
    del one
    gc.collect()
    assert known() is None


@both_ways
def test_damaged_bytes_in_fit_raise_corruption_error(damaged: Index) -> None:
    import keras

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": [float(len(sample["word"]))]}

    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset = loader(damaged, once(), decode=decode).dataset.map(lambda b: (b["x"], b["label"]))
    with pytest.raises(DataCorruptionError, match="what to do"), original_errors():
        model.fit(dataset, verbose=0, shuffle=False)


def copied(folder: Path) -> Index:
    """Another copy of the shards."""
    shutil.copytree(Path(packed(61).root), folder)
    return open_index(next(folder.glob("*.index")))


def damage(index: Index, record: int) -> None:
    """Write over the bytes of a record."""
    row = index.table("word")[record]
    with open(Path(index.root) / index.location(record)[0], "r+b") as shard:
        shard.seek(int(row["offset"]))
        shard.write(b"\0\0")


def test_missing_or_cut_shard_is_named(tmp_path: Path) -> None:
    index = copied(tmp_path / "copy")
    shard = Path(index.root) / index.location(40)[0]
    one = loader(index, once())
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match="restore the file") as gone:
        list(one)
    assert gone.value.filename == str(shard)
    shard.write_bytes(content[:-1])
    with pytest.raises(StaleIndexError, match="has changed") as stale:
        list(one)
    assert stale.value.path == str(shard)
    shard.write_bytes(content)
    assert sum(len(batch["id"]) for batch in one) == 61


@both_ways
def test_decode_error_names_record() -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise StopIteration("as a bare next() would")
        return {"x": 1}

    with pytest.raises(DecodeError, match=r"record 40 .*StopIteration"):
        list(loader(packed(61), once(), decode=decode))


def test_shapes_that_differ_from_the_first_records_are_refused() -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": [0.0] * (3 if sample["word"] in [word(n) for n in range(40, 48)] else 2)}

    refused = pytest.raises(ValueError, match=r"field 'x' has shape \(3,\), but \(2,\)")
    with refused, original_errors():
        list(loader(packed(61), once(), decode=decode).dataset)


class Wordless(BaseException):
    """An error whose text is empty."""


def test_error_without_message_is_not_taken_for_another() -> None:
    """The empty text is in every message."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise Wordless
        return {"x": 1}

    failed = loader(packed(61), once(), decode=decode)
    with pytest.raises(tf.errors.OpError):
        list(failed.dataset)
    dataset = loader(packed(61), once()).dataset.map(lambda b: tf.ensure_shape(b["id"], [3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?i)shape"), original_errors():
        list(dataset)
    with pytest.raises(Wordless), original_errors():
        list(failed.dataset)


def test_error_of_another_loader_is_not_translated() -> None:
    """Not even where both have the same words."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        raise OSError("cannot read this")

    failed = loader(packed(61), once(), decode=decode, spec={"x": FieldSpec((), None)})
    with pytest.raises(tf.errors.OpError):
        list(failed.dataset)
    with pytest.raises(DecodeError) as caught:
        list(NumpyLoader(failed.feed))

    def again(_: Any) -> Any:
        raise caught.value

    one = loader(packed(61), once())
    dataset = one.dataset.map(lambda batch: tf.numpy_function(again, [batch["id"]], tf.int64))
    with pytest.raises(tf.errors.OpError, match="DecodeError: record 0"):
        list(one.track(dataset))
    with pytest.raises(DecodeError), original_errors():
        list(failed.dataset)


def test_nothing_hangs_at_exit() -> None:
    """The script itself reads both ways."""
    ends = {"exit": 3, "live iterator": 0, "kept": 0, "error": 1, "slow error": 1}
    environment = os.environ | QUIET | {"PYTHONPATH": f"{TESTS}:{os.environ['PYTHONPATH']}"}
    command = [PYTHON, str(PROGRAMS / "tensorflow_faults.py"), *ends]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    said, hows, ended = (
        re.split(r"^(.*): status (.*)\n", done.stderr, flags=re.MULTILINE)[n::3] for n in range(3)
    )
    assert dict(zip(hows, map(int, ended), strict=True)) == ends, done.stderr
    for how, words in zip(hows, said, strict=False):
        assert ("record 40 " in words) == (ends[how] == 1), words


LIVE = """
import tensorflow as tf
from support.tensorflow_feeds import loader, packed
from twinfeed.samplers import SequentialSampler, BatchSampler
feed = loader(packed(61), BatchSampler(SequentialSampler(61), batch_size=4))
live = [iter(feed), iter(feed.dataset), iter(tf.data.Dataset.range(3))]
next(live[0])
"""


@pytest.mark.long
def test_live_iterators_at_exit_end_silently() -> None:
    """In an interpreter of its own: a fork keeps its modules at exit."""
    done = subprocess.run(
        [sys.executable, "-c", LIVE],
        env=os.environ | QUIET | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "Exception ignored" not in done.stderr, done.stderr


def replace_words(index: Index, new: Path) -> None:
    """Replace each shard by a shard of as many bytes, whose checksums fit its zeros."""
    for shard in index.shard_paths.tolist():
        old = Path(index.root, shard)
        with TFRecordWriter(new) as writer:
            for record in tf.data.TFRecordDataset(str(old)):
                sample = tf.train.Example.FromString(record.numpy())
                values = sample.features.feature["word"].bytes_list.value
                values[0] = bytes(len(values[0]))
                writer.write(sample.SerializeToString(deterministic=True))
        assert new.stat().st_size == old.stat().st_size
        new.replace(old)


@both_ways
def test_shard_replaced_in_mid_pass_is_refused(tmp_path: Path) -> None:
    """By a rename, with as many bytes: what is open is read on, and the new file is refused."""
    index = copied(tmp_path / "here")
    again = loader(index, once(), prefetch=0)
    batches = iter(again)
    seen = next(batches)["word"].numpy().tolist()
    replace_words(index, tmp_path / "new")
    with pytest.raises((DataCorruptionError, StaleIndexError)):
        seen.extend(one for batch in chain(batches, again) for one in batch["word"].numpy())
    assert seen == [word(n) for n in range(len(seen))]
