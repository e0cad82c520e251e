"""Both engines give every sampler's batches as a plain loop does."""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from batches import expected, noted
from hypothesis import given
from hypothesis import strategies as st
from plain import batches
from sampler_cases import FED
from tensorflow_help import decode, engine_of, few_files, ids_of, loader, packed

from twinfeed.loaders import (
    Feed,
    FieldSpec,
    Index,
    LoaderError,
    build_index,
    pack,
)
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.loaders.tensorflow._runs import find_runs, lay_out
from twinfeed.loaders.tensorflow._serve import Server
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardShuffleSampler,
    ViewSampler,
)

ENGINES = ["gather", "choose_from_datasets"]


# What sequential readers of files serve: all other streams do not meet records in stored order.
IN_STORED_ORDER = {
    "sequential",
    "sequential-drop-last",
    "shards-stored",
    "shards-sections-stored",
    "exact-once",
    "exact-once-pad",
}


STORED = BatchSampler(SequentialSampler(61), batch_size=8)

Transform = Callable[[dict[str, Any]], dict[str, Any]]


def test_views_of_records_in_stored_order_are_read_from_files() -> None:
    order = ViewSampler(SequentialSampler(61), [1, 2, 5] * 20 + [3], per_epoch="one", seed=8)
    stream = BatchSampler(order, batch_size=8)
    one = loader(packed(61), stream, engine="choose_from_datasets")
    assert [noted(batch) for batch in one.dataset] == expected(packed(61), stream, range(1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("made", [decode, None])
def test_a_snapshot_keeps_an_epoch(engine: str, made: Transform | None, tmp_path: Path) -> None:
    """The next iterator, and another loader, take its batches from the disk."""
    for _ in range(2):
        one = loader(packed(61), STORED, engine=engine, decode=made)
        kept = one.dataset.snapshot(str(tmp_path))
        for _ in range(2):
            assert [batch["id"].numpy().tolist() for batch in kept] == ids_of(STORED, 0)


def test_files_serve_streams_with_three_records_in_a_row() -> None:
    """Three on average, of 60 records: a run may be two blocks, or what is left of a shard."""
    index = packed(60)
    order = ShardShuffleSampler(
        index.shard_lengths, block=3, window=6, seed=0, order_within="stored"
    )
    stream = BatchSampler(order, batch_size=6)
    one = loader(index, stream, engine="choose_from_datasets")
    assert [batch["id"].numpy().tolist() for batch in one.dataset] == ids_of(stream, 0)


@pytest.mark.parametrize("name", [name for name, _ in FED])
def test_engines_give_what_a_plain_loop_gives(name: str) -> None:
    """The engine by ids serves every stream. The engine of files refuses what it cannot serve."""
    make = dict(FED)[name]
    index = packed(make().num_records)
    options = {"decode": decode} if name.startswith(("reuse", "views", "exact")) else {}
    many = len(index) > 1000
    want = expected(index, make(), range(1 if many else 2), **options)
    if name not in IN_STORED_ORDER:
        with pytest.raises(ValueError, match="use engine='gather', which gives the same batches"):
            _ = loader(index, make(), engine="choose_from_datasets", **options).dataset
    for engine in ENGINES if name in IN_STORED_ORDER else ["gather"]:
        dataset = loader(index, make(), engine=engine, **options).dataset
        assert len(dataset) == len(make())
        assert [noted(batch) for batch in dataset.repeat(1 if many else 2)] == want, engine


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1, 2, 4, 8, 16]),
        ({"prefetch": 0}, []),
        ({"decode": lambda sample: {"x": len(sample["word"])}}, []),
    ],
)
def test_a_call_gives_several_batches_where_nothing_is_done_to_them(
    options: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First 1, so that the first batch is quick; and none ahead of a loader without prefetch."""
    given: list[int] = []
    real = Server.read_together

    @wraps(real)
    def noting(self: Server, begun: Any, call: Any) -> Any:
        arrays = real(self, begun, call)
        given.append(len(arrays[0]))
        return arrays

    monkeypatch.setattr(Server, "read_together", noting)
    one = loader(packed(61), ExactOnceBatchSampler(61, batch_size=2), **options)
    assert [len(batch["id"]) for batch in one] == [2] * 30 + [1]
    assert given == sizes
    given.clear()
    one.load_state_dict(one.state_dict() | {"step": 27})
    assert len(list(one)) == 4
    assert given == ([1, 2, 1] if sizes else [])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("sequential", None),
        ("sequential-drop-last", 8),
        ("random-feistel-short-epochs", 500),
        ("exact-once-pad", 8),
        ("mixture", 7),
        ("pk", 8),
        ("pk-once", 8),
        ("pk-k-schedule", None),
        ("pk-random-k", None),
    ],
)
def test_shapes_are_static_where_they_can_be(name: str, size: int | None) -> None:
    sampler = dict(FED)[name]()
    dataset = loader(packed(sampler.num_records), sampler, decode=decode).dataset
    spec = {field: tuple(one.shape) for field, one in dataset.element_spec.items()}
    assert spec.pop("mask", (size,)) == (size,)
    assert spec == {"id": (size,), "label": (size,), "first": (size, 5), "word": (size,)}


def test_gather_over_tar() -> None:
    index = packed(60, "tar")

    def sampler() -> BatchStream:
        return PKBatchSampler(index.labels, p=4, k={0: 2, 7: 3}, batches_per_epoch=5, seed=3)

    want = expected(packed(60), sampler(), range(2), decode=decode)
    dataset = loader(index, sampler(), decode=decode).dataset
    assert [noted(batch) for batch in dataset.repeat(2)] == want


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("made", [decode, None])
def test_a_rank_with_an_empty_batch_keeps_every_field(engine: str, made: Any) -> None:
    index = packed(61)
    options = {"decode": made, "side": {"row": np.arange(122).reshape(61, 2)}}

    def sampler() -> BatchStream:
        return ExactOnceBatchSampler(61, batch_size=60).shard(0, 2)

    want = expected(index, sampler(), range(3), **options)
    one = loader(index, sampler(), **options, engine=engine)
    given = []
    for epoch in range(3):
        one.set_epoch(epoch)
        given += [noted(batch) for batch in one]
    assert given == want
    assert any(batch["row"][1] == (0, 2) and batch["word"] == [] for batch in want)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("collate", ["pad", "ragged"])
def test_engines_collate(engine: str, collate: Any, tmp_path: Path) -> None:
    samples = [{"sizes": np.arange(n % 4), "word": b"%d" % n, "x": n / 2} for n in range(20)]
    index = pack(samples, tmp_path, shards=2)["data"]
    spec = {"sizes": FieldSpec((0,), np.dtype(np.int64)), "word": FieldSpec((), None)}
    options: dict[str, Any] = {"collate": collate, "spec": spec}

    def sampler() -> BatchStream:
        order = RandomSampler(20, seed=1) if engine == "gather" else SequentialSampler(20)
        return BatchSampler(order, batch_size=3)

    want = expected(index, sampler(), **options)
    dataset = loader(index, sampler(), **options, engine=engine).dataset
    assert [noted(batch) for batch in dataset] == want


def test_files_of_raw_records(tmp_path: Path) -> None:
    path = tmp_path / "raw.tfrecord"
    with TFRecordWriter(path) as writer:
        for number in range(10):
            writer.write(b"record %d" % number)
    index = build_index(str(path), tmp_path / "raw.index", example=False)
    want = expected(index, ExactOnceBatchSampler(10, batch_size=4))
    for engine in ENGINES:
        dataset = loader(index, ExactOnceBatchSampler(10, batch_size=4), engine=engine).dataset
        assert [noted(batch) for batch in dataset] == want


def class_files(folder: Path, classes: int, each: int) -> Index:
    """One TFRecord file for each class."""
    for label in range(classes):
        with TFRecordWriter(folder / f"class-{label:05}.tfrecord") as writer:
            for number in range(each):
                writer.write(encode({"word": b"%d %d" % (label, number), "label": label}))
    return build_index(str(folder / "class-*.tfrecord"), folder / "classes.index", label="label")


def test_p_by_k_over_class_files_in_stored_order(tmp_path: Path) -> None:
    index = class_files(tmp_path, 12, 7)

    def sampler() -> BatchStream:
        return PKBatchSampler(
            index.labels, p=4, k=3, seed=1, batches_per_epoch=9, order_within="stored"
        )

    want = expected(index, sampler(), range(3))
    one = loader(index, sampler(), engine="choose_from_datasets")
    assert engine_of(one) == "ChooseFiles"
    assert [noted(batch) for batch in one.dataset.repeat(3)] == want
    one.load_state_dict({**one.state_dict(), "epoch": 1, "step": 4})
    assert [noted(batch) for batch in one] == want[13:18]


def test_more_class_files_than_may_be_open_are_refused(tmp_path: Path) -> None:
    index = class_files(tmp_path, 102, 4)
    sampler = PKBatchSampler(
        index.labels, p=34, k=1, seed=1, batches_per_epoch=12, order_within="stored"
    )
    with few_files(80):
        one = loader(index, sampler, engine="choose_from_datasets")
        with pytest.raises(ValueError, match=r"needs 102 files.*may open .*engine='gather'"):
            _ = one.dataset
        each = ExactOnceBatchSampler(len(index), batch_size=64)
        once = loader(index, each, engine="choose_from_datasets")
        assert engine_of(once) == "ChooseFiles"  # one after the other
        assert sum(len(batch["id"]) for batch in once) == len(index)


def test_lanes_in_stored_order_are_read_in_large_pieces() -> None:
    lengths = [400, 300, 500]
    shuffle = ShardShuffleSampler(lengths, seed=1, block=50, window=6, order_within="stored")
    sampler = BatchSampler(shuffle, batch_size=32)
    ids = np.concatenate(sampler.batches(0, 0, len(sampler)))
    runs = find_runs(ids, np.cumsum(lengths))
    assert runs.most_at_once() <= 8
    assert len(runs.first) <= 24 + 6  # the blocks, and those that a lane boundary cuts


def test_exactly_once_needs_one_reader() -> None:
    assert find_runs(np.arange(100), np.array([10, 40, 40, 100])).most_at_once() == 1


@given(st.data(), st.integers(1, 5))
def test_pieces_give_any_stream_with_any_number_of_readers(data: Any, readers: int) -> None:
    records = np.array(data.draw(st.lists(st.integers(0, 19), max_size=60)), np.int64)
    stops = np.array([4, 4, 11, 20])
    pieces = lay_out(find_runs(records, stops), readers)
    streams = []
    for start, stop in pairwise(pieces.bounds.tolist()):
        own = zip(pieces.first[start:stop], pieces.counts[start:stop], strict=True)
        streams.append([first + n for first, count in own for n in range(count)])
    assert [streams[reader].pop(0) for reader in pieces.reader] == records.tolist()
    assert not any(streams)
    for first, count in zip(pieces.first, pieces.counts, strict=True):
        file = np.searchsorted(stops, [first, first + count - 1], side="right")
        assert count > 0
        assert file[0] == file[1]


@pytest.mark.parametrize("decode", [None, lambda sample: {"n": len(sample["word"])}])
def test_engines_give_a_field_that_a_record_lacks_its_value(tmp_path: Path, decode: Any) -> None:
    """And without a value both name the record."""
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        for number in range(9):
            writer.write(encode({"word": b"x"} if number != 5 else {"other": b"y"}))
    index = build_index(tmp_path / "a.tfrecord", tmp_path / "a.index")
    once = ExactOnceBatchSampler(9, batch_size=4)
    options = {"decode": decode, "fields": ["word"]}
    for engine in ENGINES:
        feed = Feed(index, once, missing={"word": b"none"}, **options)
        want = [noted(batch) for batch in batches(feed)]
        assert [noted(batch) for batch in TensorFlowLoader(feed, engine=engine)] == want, engine
        late = Feed(index, once, missing="late", **options)
        with pytest.raises(LoaderError, match=r"record 5 .*lacks the field 'word'"):
            list(TensorFlowLoader(late, engine=engine))


def test_a_device_is_known_in_a_cluster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MultiWorkerMirroredStrategy TensorFlow names the process too."""
    seen = [
        tf.config.LogicalDevice(f"/job:worker/replica:0/task:1/device:{kind}:0", kind)
        for kind in ("CPU", "GPU")
    ]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: seen)
    assert chosen_device("/CPU:0") == "/CPU:0"
    assert chosen_device(None) == "/GPU:0"
