"""Errors within a pipeline reach the user with their place, and nothing hangs."""

import os
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow_help import packed, word

from twinfeed.loaders import DataCorruptionError, DecodeError, Index, open_index
from twinfeed.loaders.tensorflow import Position, make_dataset, original_errors
from twinfeed.samplers import BatchStream, ExactOnceBatchSampler

TESTS = Path(__file__).parent
FILES: dict[str, Any] = {"engine": "choose_from_datasets", "sources": "files"}


def once() -> BatchStream:
    return ExactOnceBatchSampler(61, batch_size=8)


@pytest.fixture
def damaged(tmp_path: Path) -> Index:
    """An index of which record 40 no longer has its bytes."""
    shutil.copytree(Path(packed(61).root), tmp_path / "copy")
    [path] = (tmp_path / "copy").glob("*.index")
    index = open_index(path)
    row = index.table("word")[40]
    with open(tmp_path / "copy" / index.shard_paths[int(row["file"])], "r+b") as shard:
        shard.seek(int(row["offset"]))
        shard.write(b"\0\0")
    return index


def test_damaged_bytes_name_shard_offset_and_record(damaged: Index) -> None:
    shard, number = damaged.place(40)
    with pytest.raises(tf.errors.OpError) as raised:
        list(make_dataset(damaged, once()))
    for fact in ("DataCorruptionError", shard, f"record: {number}", "byte offset: "):
        assert fact in raised.value.message


def test_the_batches_before_an_error_come_first(damaged: Index) -> None:
    position = Position(once())
    batches = position.counted(make_dataset(damaged, position.sampler, prefetch=8))
    assert [len(batch["id"]) for batch in islice(batches, 5)] == [8] * 5
    with pytest.raises(DataCorruptionError) as raised:
        next(batches)
    assert (position.epoch, position.step) == (0, 5)
    assert isinstance(raised.value.__cause__, tf.errors.OpError)
    assert raised.value.record == damaged.place(40)[1]


def test_damaged_bytes_under_fit(damaged: Index) -> None:
    import keras

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": [float(len(sample["word"]))]}

    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dataset = make_dataset(damaged, once(), decode=decode).map(lambda b: (b["x"], b["label"]))
    with pytest.raises(DataCorruptionError, match="what to do"), original_errors():
        model.fit(dataset, verbose=0, shuffle=False)


def test_damage_that_tensorflows_own_reader_met_is_found(damaged: Index) -> None:
    dataset = make_dataset(damaged, once(), **FILES)
    with pytest.raises(tf.errors.DataLossError, match="corrupted record at"):
        list(dataset)
    with pytest.raises(DataCorruptionError) as raised, original_errors():
        list(dataset)
    shard, number = damaged.place(40)
    assert str(raised.value.path).endswith(shard)
    assert raised.value.record == number


def test_a_failing_decode_is_the_callers_error_with_the_record() -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise StopIteration("as a bare next() would")
        return {"x": 1}

    for engine in ({}, FILES):
        dataset = make_dataset(packed(61), once(), decode=decode, **engine)
        with pytest.raises(DecodeError, match=r"record 40 .*StopIteration"), original_errors():
            list(dataset)


def test_shapes_that_differ_from_the_first_records_are_refused() -> None:
    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": [0.0] * (3 if sample["word"] in [word(n) for n in range(40, 48)] else 2)}

    refused = pytest.raises(ValueError, match=r"field 'x' has shape \(3,\) beside \(2,\)")
    with refused, original_errors():
        list(make_dataset(packed(61), once(), decode=decode))


def test_other_errors_stay_tensorflows() -> None:
    dataset = make_dataset(packed(61), once()).map(lambda b: tf.ensure_shape(b["id"], [3]))
    with (
        pytest.raises(tf.errors.InvalidArgumentError, match=r"(?i)shape"),
        original_errors(),
    ):
        list(dataset)


@pytest.mark.parametrize(
    ("how", "status"),
    [("exit", 3), ("live iterator", 0), ("kept", 0), ("error", 1), ("slow error", 1)],
)
def test_nothing_hangs_at_exit(how: str, status: int) -> None:
    command = [sys.executable, str(TESTS / "tensorflow_faults.py"), how]
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == status, done.stderr
    assert ("record 40 " in done.stderr) == (status == 1)
