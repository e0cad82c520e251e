"""Loader and datasets give every sampler's batches as a plain loop does."""

from collections.abc import Callable
from functools import wraps
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from support.batches import expected, noted
from support.cases import mark_long
from support.plain import batches
from support.sampler_cases import FED
from support.tensorflow_feeds import decode, ids_of, loader, packed, word

from twinfeed.loaders import (
    DatasetSource,
    DecodeError,
    Feed,
    FieldSpec,
    LoaderError,
    NumpyLoader,
    build_index,
    pack,
)
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.tensorflow import TensorFlowLoader, choose, source_datasets
from twinfeed.loaders.tensorflow._batch_source import BatchSource
from twinfeed.loaders.tensorflow.device import chosen_device
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardShuffleSampler,
)

pytestmark = pytest.mark.usefixtures("graphs_as_written")

STORED = BatchSampler(SequentialSampler(61), batch_size=8)

Transform = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize("made", [decode, pytest.param(None, marks=pytest.mark.long)])
def test_snapshot_repeats_its_epoch(made: Transform | None, tmp_path: Path) -> None:
    """The next iterator, and another loader, take its batches from the disk."""
    for _ in range(2):
        one = loader(packed(61), STORED, decode=made)
        kept = one.dataset.snapshot(str(tmp_path))
        for _ in range(2):
            assert [batch["id"].numpy().tolist() for batch in kept] == ids_of(STORED, 0)


@pytest.mark.parametrize("name", mark_long([name for name, _ in FED], but_every=9))
def test_dataset_equals_plain_loop(name: str) -> None:
    make = dict(FED)[name]
    index = packed(make().num_records)
    options = {"decode": decode} if name.startswith(("reuse", "views", "exact")) else {}
    many = len(index) > 1000
    want = expected(index, make(), range(1 if many else 2), **options)
    dataset = loader(index, make(), **options).dataset
    assert len(dataset) == len(make())
    assert [noted(batch) for batch in dataset.repeat(1 if many else 2)] == want


def batches_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call for several batches adds their number."""
    given: list[int] = []
    real = BatchSource._read_rows

    @wraps(real)
    def noting(self: BatchSource, batchers: Any, pass_start: Any, *steps: int) -> Any:
        given.append(len(steps))
        return real(self, batchers, pass_start, *steps)

    monkeypatch.setattr(BatchSource, "_read_rows", noting)
    return given


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [1, 2, 4, 8, 15, 1]),
        ({"prefetch": 0}, []),
        ({"decode": lambda sample: {"x": len(sample["word"])}}, []),
    ],
)
def test_several_batches_without_decode_are_read_in_one_call(
    options: Any, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First 1, so that the first batch is quick; and none ahead of a loader without prefetch.

    The last one of an epoch, which may be smaller, is read alone.
    """
    given = batches_of_calls(monkeypatch)
    one = loader(packed(61), ExactOnceBatchSampler(61, batch_size=2), **options)
    assert [len(batch["id"]) for batch in one.dataset] == [2] * 30 + [1]
    assert given == sizes
    given.clear()
    one.load_state_dict(one.state_dict() | {"step": 27})
    assert len(list(one.dataset)) == 4
    assert given == ([1, 2, 1] if sizes else [])


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, [1, 2, 4, 8, 15, 1]),
        ({"word": ["a word"] * 61}, []),
        ({"image": np.zeros((61, 1 << 21), np.uint8)}, []),
    ],
)
def test_several_batches_of_numbers_are_read_in_one_call(
    fields: dict[str, Any], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where records have strings, whose size is not known, or are large."""
    given = batches_of_calls(monkeypatch)
    data = {"row": np.arange(183.0).reshape(61, 3), "label": np.arange(61) % 5, **fields}
    feed = Feed(data, BatchSampler(RandomSampler(61, seed=2), batch_size=2))
    for batch, plain in zip(TensorFlowLoader(feed).dataset, NumpyLoader(feed), strict=True):
        assert batch.keys() == plain.keys()
        assert batch["row"].numpy().tolist() == plain["row"].tolist()
        assert batch["label"].numpy().tolist() == plain["label"].tolist()
    assert given == sizes


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
def test_shapes_are_static_where_batch_size_is_fixed(name: str, size: int | None) -> None:
    sampler = dict(FED)[name]()
    dataset = loader(packed(sampler.num_records), sampler, decode=decode).dataset
    spec = {field: tuple(one.shape) for field, one in dataset.element_spec.items()}
    assert spec.pop("mask", (size,)) == (size,)
    assert spec == {"id": (size,), "label": (size,), "first": (size, 5), "word": (size,)}


def test_tar_shards_equal_plain_loop() -> None:
    index = packed(60, "tar")

    def sampler() -> BatchStream:
        return PKBatchSampler(index.labels, p=4, k={0: 2, 7: 3}, batches_per_epoch=5, seed=3)

    want = expected(packed(60), sampler(), range(2), decode=decode)
    dataset = loader(index, sampler(), decode=decode).dataset
    assert [noted(batch) for batch in dataset.repeat(2)] == want


@pytest.mark.parametrize("made", [decode, None])
def test_empty_rank_batch_keeps_every_field(made: Any) -> None:
    index = packed(61)
    options = {"decode": made, "side": {"row": np.arange(122).reshape(61, 2)}}

    def sampler() -> BatchStream:
        return ExactOnceBatchSampler(61, batch_size=60).shard(0, 2)

    want = expected(index, sampler(), range(3), **options)
    one = loader(index, sampler(), **options)
    given = []
    for epoch in range(3):
        one.set_epoch(epoch)
        given += [noted(batch) for batch in one.dataset]
    assert given == want
    assert any(batch["row"][1] == (0, 2) and batch["word"] == [] for batch in want)


def test_stacked_lists_may_have_no_values() -> None:
    samples = DatasetSource([{"x": np.zeros(0, np.int64)} for _ in range(4)])
    options = {"spec": {"x": FieldSpec((None,), np.dtype(np.int64))}}
    sampler = ExactOnceBatchSampler(4, batch_size=2)
    dataset = loader(samples, sampler, **options).dataset
    assert [noted(batch) for batch in dataset] == expected(samples, sampler, **options)


@pytest.mark.parametrize("collate", ["pad", "ragged"])
def test_collated_batches_equal_plain_loop(collate: Any, tmp_path: Path) -> None:
    samples = [{"sizes": np.arange(n % 4), "word": b"%d" % n, "x": n / 2} for n in range(20)]
    index = pack(samples, tmp_path, shards=2)["data"]
    spec = {"sizes": FieldSpec((0,), np.dtype(np.int64)), "word": FieldSpec((), None)}
    options: dict[str, Any] = {"collate": collate, "spec": spec}

    def sampler() -> BatchStream:
        return BatchSampler(RandomSampler(20, seed=1), batch_size=3)

    want = expected(index, sampler(), **options)
    dataset = loader(index, sampler(), **options).dataset
    assert [noted(batch) for batch in dataset] == want


def test_raw_records_equal_plain_loop(tmp_path: Path) -> None:
    path = tmp_path / "raw.tfrecord"
    with TFRecordWriter(path) as writer:
        for number in range(10):
            writer.write(b"record %d" % number)
    index = build_index(str(path), tmp_path / "raw.index", example=False)
    want = expected(index, ExactOnceBatchSampler(10, batch_size=4))
    dataset = loader(index, ExactOnceBatchSampler(10, batch_size=4)).dataset
    assert [noted(batch) for batch in dataset] == want


@pytest.mark.parametrize("decode", [None, lambda sample: {"n": len(sample["word"])}])
def test_missing_field_gets_fill_value(tmp_path: Path, decode: Any) -> None:
    """And without a value both name the record."""
    with TFRecordWriter(tmp_path / "a.tfrecord") as writer:
        for number in range(9):
            writer.write(encode({"word": b"x"} if number != 5 else {"other": b"y"}))
    index = build_index(tmp_path / "a.tfrecord", tmp_path / "a.index")
    once = ExactOnceBatchSampler(9, batch_size=4)
    options = {"decode": decode, "fields": ["word"]}
    feed = Feed(index, once, missing={"word": b"none"}, **options)
    want = [noted(batch) for batch in batches(feed)]
    assert [noted(batch) for batch in TensorFlowLoader(feed)] == want
    late = Feed(index, once, missing="late", **options)
    with pytest.raises(LoaderError, match=r"record 5 .*lacks the field 'word'"):
        list(TensorFlowLoader(late))


def test_device_is_found_in_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MultiWorkerMirroredStrategy TensorFlow names the process too."""
    seen = [
        tf.config.LogicalDevice(f"/job:worker/replica:0/task:1/device:{kind}:0", kind)
        for kind in ("CPU", "GPU")
    ]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: seen)
    for name in ("/CPU:0", "cpu", "CPU", "/device:CPU"):
        assert chosen_device(name) == "/CPU:0"
    assert chosen_device(None) == chosen_device("gpu") == "/GPU:0"
    for name in ("", ":", "cuda", "cpu:1", "cpu:"):
        with pytest.raises(ValueError, match="device must be one that TensorFlow sees"):
            chosen_device(name)


GROUPED = [name for name, make in FED if make().group_sampler is not None]


def seeded(sample: dict[str, Any]) -> dict[str, Any]:
    """A field that depends on the position in the stream."""
    return {"word": sample["word"], "drawn": np.int64(sample["seed"] >> 1)}


def chosen(feed: Feed, **options: Any) -> Any:
    return choose(feed.sampler, source_datasets(feed), device="/CPU:0", **options)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(number, name, marks=[pytest.mark.long] * (number % 9 > 0))
        for number, name in enumerate(GROUPED)
    ],
)
def test_choose_over_source_datasets_equals_plain_loop(number: int, name: str) -> None:
    """Of both containers in turn, of the whole and of a rank, of two epochs, and resumed."""
    sampler = dict(FED)[name]()
    index = packed(sampler.num_records, ("tfrecord", "tar")[number % 2])
    if sampler.world_size == 1 and number // 2 % 2 and "sections-3" not in name:
        sampler = sampler.shard(1, 2)
    want = expected(index, sampler, range(2), transform=seeded)
    loader = chosen(Feed(index, sampler, transform=seeded), replay=number % 5 == 0)
    assert [noted(batch) for _ in range(2) for batch in loader] == want
    loader.load_state_dict(sampler.state_at(1, len(sampler) // 2))
    assert [noted(batch) for batch in loader] == want[len(sampler) + len(sampler) // 2 :]


def test_ranks_over_source_datasets_give_global_batches() -> None:
    index = packed(120, "tar")
    segments = ShardShuffleSampler(index.shard_lengths, seed=1, block=8, window=8, sections=2)
    for sampler in (
        BatchSampler(segments, batch_size=12),
        PKBatchSampler(index.labels, p=4, k=3, seed=1, coverage="once"),
    ):
        ranks = [list(chosen(Feed(index, sampler.shard(rank, 2)))) for rank in range(2)]
        for one, other, whole in zip(*ranks, TensorFlowLoader(Feed(index, sampler)), strict=True):
            both = tf.concat([one["word"], other["word"]], 0)
            assert both.numpy().tolist() == whole["word"].numpy().tolist()


def test_dataset_of_segment_reads_block_after_block() -> None:
    index = packed(120)
    order = ShardShuffleSampler(index.shard_lengths, seed=1, block=8, window=4)
    datasets = source_datasets(Feed(index, BatchSampler(order, batch_size=6)))
    ids = [[int(sample["id"]) for sample in dataset] for dataset in datasets]
    assert len(datasets) == 4
    assert sorted(chain(*ids)) == list(range(120))
    for own in ids:
        first = order.spans(np.array(own), 0)[0]
        assert np.count_nonzero(np.diff(first)) == len(set(first.tolist())) - 1


@pytest.mark.parametrize("coverage", [pytest.param(None, marks=pytest.mark.long), "once"])
def test_dataset_of_class_has_records_of_class_alone(coverage: Any) -> None:
    index = packed(61)
    whole = PKBatchSampler(index.labels, p=4, k=2, seed=1, coverage=coverage)
    for sampler in (whole, whole.shard(1, 2)):
        datasets = source_datasets(Feed(index, sampler, side={"n": np.arange(61)}))
        samples = [list(dataset) for dataset in datasets]
        assert {len({int(sample["label"]) for sample in each}) for each in samples} <= {0, 1}
        assert sum(map(len, samples)) == sum(map(len, sampler.batches(0, 0, len(sampler))))
        assert all(sample["n"] == sample["id"] for each in samples for sample in each)


def test_source_datasets_serve_two_loaders() -> None:
    index = packed(61)
    feed = Feed(index, PKBatchSampler(index.labels, p=4, k=2, seed=1))
    datasets = source_datasets(feed)
    ways = [choose(feed.sampler, datasets, device="/CPU:0") for _ in range(2)]
    for *both, want in zip(*ways, TensorFlowLoader(feed), strict=True):
        assert [noted(batch) for batch in both] == [noted(want)] * 2


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.long), 2])
def test_batches_before_bad_record_come_first(prefetch: int) -> None:
    """Also where the record was read together with others of its segment."""
    index = packed(120)
    order = ShardShuffleSampler(index.shard_lengths, seed=1, block=8, window=4)
    sampler = BatchSampler(order, batch_size=6)
    bad = int(sampler.batch(0, 7)[3])

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(bad):
            raise RuntimeError("spoiled")
        return {"size": len(sample["word"])}

    loader, found = chosen(Feed(index, sampler, decode=decode), prefetch=prefetch), []
    with pytest.raises(DecodeError, match=rf"record {bad} .*spoiled") as raised:
        found.extend(batch["id"].numpy().tolist() for batch in loader)
    assert found == ids_of(sampler, 0)[:7]
    assert (loader.epoch, loader.step) == (0, 7)
    assert raised.value.__notes__ == ["in the batch of epoch 0, step 7"]


def test_error_in_last_batch_of_a_call_is_raised_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that fails has ended long before the loop gets to the batch that cannot be read."""
    index, sampler = packed(60), BatchSampler(SequentialSampler(60), batch_size=4)
    failed = Event()
    real = BatchSource._read_rows

    def failing(self: BatchSource, *call: Any) -> Any:
        if call[-1] == len(sampler) - 2:
            failed.set()
            raise LoaderError("spoiled")
        return real(self, *call)

    monkeypatch.setattr(BatchSource, "_read_rows", failing)
    one = loader(index, sampler)
    running = one.track(one.dataset)
    found = [next(running) for _ in range(4)]
    assert failed.wait(60)
    found += [next(running) for _ in range(len(sampler) - 6)]
    with pytest.raises(LoaderError, match="spoiled"):
        next(running)
    assert len(found) == len(sampler) - 2
