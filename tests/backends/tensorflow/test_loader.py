"""A loader's place: where passes begin, what is counted, and what lives on after a pass."""

import gc
import json
import resource
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from support.batches import expected, noted
from support.refusals import Call, Refused
from support.tensorflow_feeds import CLASSES, RECORDS, ids_of, loader, numbers, packed, word
from support.threads import started_threads

from twinfeed.loaders import Feed, NumpyLoader, Seeded
from twinfeed.loaders.batches.batcher import Batcher
from twinfeed.loaders.tensorflow import (
    TensorFlowLoader,
    choose,
    prefetch_to_device,
    source_datasets,
)
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    SequentialSampler,
    ShardShuffleSampler,
)


def sampler() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8)


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].numpy().tolist() for batch in batches]


def test_scalar_tensor_is_a_number_of_records() -> None:
    """Such as the cardinality of a dataset."""
    assert len(RandomSampler(tf.data.Dataset.range(10).cardinality(), seed=0)) == 10


def test_pass_after_break_continues_after_received_batches() -> None:
    one, got = loader(packed(RECORDS), sampler(), prefetch=8), []
    for stop in (3, 7, 8, 16):
        for batch in one:
            got.append(batch["id"].numpy().tolist())
            assert (one.epoch, one.step) == divmod(len(got), 8)
            if len(got) == stop:
                break
    assert got == ids_of(sampler(), 0, 1)


def test_late_batch_of_abandoned_pass_keeps_position() -> None:
    """A thread that runs ahead may deliver its last batch after the loop was left."""
    one = loader(packed(RECORDS), sampler())
    one.run.track_from(0, 3)
    pass_start = one.run.start_external()
    assert pass_start[:2] == (0, 3)
    one.run.stop_tracking()
    one.run.finish_external(pass_start)
    assert (one.epoch, one.step) == (0, 0)
    one.run.finish_external(one.run.start_external())
    assert (one.epoch, one.step) == (1, 0)


@pytest.mark.parametrize("how", [pytest.param("map", marks=pytest.mark.long), "take", "device"])
def test_tracked_dataset_counts_received_batches(how: str) -> None:
    one, got = loader(packed(RECORDS), sampler()), []
    dataset = one.dataset.map(lambda batch: {"id": batch["id"]})
    if how == "device":
        dataset = prefetch_to_device(dataset, device="/CPU:1", prefetch=8)
    for stop in (3, 7, 8, 16):
        cut = dataset.take(stop - len(got)) if how == "take" else dataset
        tracked = one.track(cut)
        for batch in tracked:
            got.append(batch["id"].numpy().tolist())
            if how != "take" and len(got) == stop:
                break
        assert (one.epoch, one.step) == divmod(stop, 8)
    assert got == ids_of(sampler(), 0, 1)


def test_tracked_dataset_may_repeat() -> None:
    one = loader(packed(RECORDS), sampler())
    repeated = prefetch_to_device(one.dataset.repeat(2), device="/CPU:1", prefetch=8)
    got = []
    for batch in one.track(repeated):
        got.append(batch["id"].numpy().tolist())
        assert (one.epoch, one.step) == divmod(len(got), 8)
    assert got == ids_of(sampler(), 0, 1)


@pytest.mark.filterwarnings("ignore:set_epoch starts epoch 0 again")
def test_new_pass_ends_running_pass_with_error() -> None:
    one = loader(packed(RECORDS), sampler())
    for ends in (
        lambda: next(iter(one)),
        lambda: next(one.track(one.dataset)),
        lambda: one.set_epoch(0),
        lambda: one.load_state_dict(one.state_dict()),
        one.close,
    ):
        batches = one.track(one.dataset)
        next(batches)
        ends()
        with pytest.raises(RuntimeError, match="ended before its last batch"):
            next(batches)
    one.set_epoch(3)
    got = []
    for batch in one.track(one.dataset):
        got.append(batch["id"].numpy().tolist())
        if one.step == 0:
            one.set_epoch(0)  # after the last batch nothing is lost
    assert got == ids_of(sampler(), 3)


@pytest.mark.parametrize("step", [1, 7])
def test_dataset_length_is_epoch_length_after_resume(step: int) -> None:
    one = loader(packed(RECORDS), sampler(), prefetch=4)
    dataset = one.dataset
    one.load_state_dict({**one.state_dict(), "epoch": 2, "step": step})
    assert len(dataset) == len(dataset.map(lambda batch: batch["id"]).prefetch(1)) == 8
    rest = expected(packed(RECORDS), sampler(), [2])[step:]
    assert [noted(batch) for batch in dataset] == rest
    assert (one.epoch, one.step) == (3, 0)
    assert ids(dataset) == ids_of(sampler(), 3)


def test_take_from_dataset_keeps_position() -> None:
    one = loader(packed(RECORDS), sampler(), prefetch=100)
    assert len(list(one.dataset.take(7))) == 7
    assert (one.epoch, one.step) == (0, 0)
    assert ids(one.dataset) == ids_of(sampler(), 0)
    assert (one.epoch, one.step) == (1, 0)
    one.set_epoch(5)
    assert ids(one.dataset) == ids_of(sampler(), 5)


def test_position_advances_to_next_epoch_at_last_batch() -> None:
    one = loader(packed(RECORDS), sampler())
    for epoch in range(3):
        batches = iter(one.dataset)
        assert ids(next(batches) for _ in range(8)) == ids_of(sampler(), epoch)
        assert (one.epoch, one.step) == (epoch + 1, 0)


@pytest.mark.filterwarnings("ignore:set_epoch starts epoch 0 again")
def test_epoch_started_for_third_time_warns() -> None:
    one = loader(packed(RECORDS), sampler())
    for _ in range(2):
        next(iter(one.dataset))
    with pytest.warns(UserWarning, match=r"epoch 0 for the third time.*set_epoch"):
        next(iter(one.dataset))
    for between in (
        lambda: one.set_epoch(0),
        lambda: one.load_state_dict(one.state_dict()),
        lambda: [one.set_epoch(0), next(iter(one)), one.set_epoch(0)],
    ):
        between()
        for _ in range(2):
            next(iter(one.dataset))
    once = loader(packed(RECORDS), ExactOnceBatchSampler(RECORDS, batch_size=8))
    for _ in range(4):
        next(iter(once.dataset))


@pytest.mark.parametrize("how", ["loader", "track", "dataset"])
def test_evaluation_gives_every_record_in_each_pass(how: str) -> None:
    one = loader(packed(RECORDS), ExactOnceBatchSampler(RECORDS, batch_size=8))

    def batches() -> Any:
        return {"loader": one, "track": one.track(one.dataset), "dataset": one.dataset}[how]

    whole = ids_of(one.feed.sampler, 0)
    next(iter(batches()))
    for _ in range(2):
        assert ids(batches()) == whole
        assert (one.epoch, one.step) == (0, 0)
    one.load_state_dict({**one.state_dict(), "step": 3})
    assert ids(batches()) == whole[3:]
    assert ids(batches()) == whole


def test_numpy_loader_resumes_from_state_of_tensorflow_loader() -> None:
    one = loader(packed(RECORDS), sampler())
    states = [one.state_dict()]
    for _ in one:
        states.append(one.state_dict())
        assert one.state_dict() == json.loads(json.dumps(states[-1]))
    places = [(state["epoch"], state["step"]) for state in states]
    assert places == [*((0, step) for step in range(8)), (1, 0)]
    with NumpyLoader(Feed(packed(RECORDS, "tar"), sampler())) as plain:
        plain.load_state_dict(states[5])
        assert [batch["id"].tolist() for batch in plain] == ids_of(sampler(), 0)[5:]


def loop(
    folder: Path, stop_after: int | None, wrap: Callable[[tf.data.Dataset], Any] = lambda d: d
) -> tuple[list[list[int]], np.ndarray]:
    """Train and validate in turn, in a loop of one's own, saving after every batch."""
    tf.random.set_seed(1)
    index = packed(RECORDS)
    one = loader(index, sampler(), decode=numbers)
    weights = tf.Variable(tf.zeros([5, CLASSES]))
    checkpoint = tf.train.Checkpoint(weights=weights, loader=one)
    manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=1)
    manager.restore_or_initialize()

    @tf.function(reduce_retracing=True)
    def loss_of(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        logits = tf.matmul(x, weights)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(x, labels)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    validation = loader(index, ExactOnceBatchSampler(RECORDS, batch_size=16), decode=numbers)
    dataset = wrap(one.dataset)
    seen: list[list[int]] = []
    while one.epoch < 2:
        for batch in one.track(dataset):
            seen.append(batch["id"].numpy().tolist())
            step(batch["x"], batch["label"])
            if len(seen) % 3 == 0:
                assert (
                    sum(len(b["id"]) for b in validation if loss_of(b["x"], b["label"]) > 0) == 61
                )
            manager.save()
            if len(seen) == stop_after:
                return seen, weights.numpy()
    assert (one.epoch, one.step) == (2, 0)
    return seen, weights.numpy()


@pytest.mark.parametrize("after", [3, pytest.param(8, marks=pytest.mark.long)])
def test_loop_resumed_from_checkpoint_equals_uninterrupted_loop(tmp_path: Path, after: int) -> None:
    whole, weights = loop(tmp_path / "whole", None)
    assert whole == ids_of(sampler(), 0, 1)
    first, _ = loop(tmp_path / "cut", after)
    rest, resumed = loop(tmp_path / "cut", None)
    assert first + rest == whole
    assert np.array_equal(weights, resumed)


def test_tracked_device_prefetch_counts_received_batches(tmp_path: Path) -> None:
    def wrap(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return prefetch_to_device(dataset, device="/CPU:1", prefetch=4)

    first, _ = loop(tmp_path, 11, wrap)
    rest, _ = loop(tmp_path, None, wrap)
    assert first + rest == ids_of(sampler(), 0, 1)


def test_checkpoint_of_dataset_iterator_is_refused(tmp_path: Path) -> None:
    one = loader(packed(RECORDS), sampler())
    iterator = iter(one.dataset)
    next(iterator)
    with pytest.raises(tf.errors.OpError, match=r"(?i)stateful|serializ|unimplemented"):
        tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "checkpoint"))


def test_cached_evaluation_gives_every_record_in_each_pass() -> None:
    """A cached training would have one epoch for ever: it is refused where somebody counts."""
    one = loader(packed(RECORDS), ExactOnceBatchSampler(RECORDS, batch_size=8))
    cached = one.dataset.cache()
    for _ in range(3):
        assert ids(cached) == ids_of(one.feed.sampler, 0)


@pytest.mark.parametrize("device", ["/CPU:1", "CPU:1", "cpu:1", "/device:CPU:1"])
def test_batches_lie_on_given_device(device: str) -> None:
    feed = Feed(packed(RECORDS), sampler())
    on_device = TensorFlowLoader(feed, device=device)
    batches = list(on_device)
    assert batches[0]["label"].device.endswith("CPU:1")
    assert [noted(batch) for batch in batches] == expected(packed(RECORDS), sampler())
    assert next(iter(TensorFlowLoader(feed)))["label"].device.endswith(":0")


def test_prefetch_to_device_keeps_length_and_strings() -> None:
    one = loader(packed(RECORDS), sampler())
    on_device = prefetch_to_device(one.dataset, device="/CPU:1")
    assert len(on_device) == len(one)
    assert on_device.element_spec == one.dataset.element_spec
    batches = list(on_device)
    assert [noted(batch) for batch in batches] == expected(packed(RECORDS), sampler())
    assert batches[0]["label"].device.endswith("CPU:1")


def reused(seen: list[bytes]) -> TensorFlowLoader:
    """A loader whose sampler uses each decoded image three times; `seen` are those decoded."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        seen.append(sample["word"])
        return numbers(sample)

    stream = BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=1), batch_size=4)
    one = loader(packed(RECORDS), stream, decode=decode)
    assert one.feed.spec["x"].shape == (5,)
    seen.clear()  # which was decoded to see the shapes
    return one


def test_a_reuse_sampler_decodes_each_image_once() -> None:
    seen: list[bytes] = []
    one = reused(seen)
    assert sum(len(batch["id"]) for batch in one.dataset) == 3 * RECORDS
    assert len(seen) <= RECORDS + 8 - 1
    assert len(set(seen)) == RECORDS


def test_two_passes_over_reuse_feed_have_own_caches() -> None:
    seen: list[bytes] = []
    one = reused(seen)
    for _ in zip(one.dataset, one.dataset, strict=True):
        pass
    assert len(seen) <= 2 * (RECORDS + 8 - 1)


def batchers() -> list[weakref.ref[Batcher]]:
    gc.collect()
    return [weakref.ref(one) for one in gc.get_objects() if type(one) is Batcher]


def batchers_after_a_pass(before: int) -> int:
    """TensorFlow may end a pass a moment after its last batch, in a thread of its own."""
    deadline = time.monotonic() + 60
    while len(batchers()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(batchers())


def test_batcher_of_pass_is_freed_with_pass() -> None:
    one = loader(packed(RECORDS), sampler(), decode=numbers)
    dataset = one.dataset
    before = len(batchers())
    for how in (
        "break",
        "exhausted",
        "take",
        "break at the last",
        "repeat",
        "loader",
        "deleted",
    ):
        if how == "take":
            list(dataset.take(3))
        elif how == "exhausted":
            list(dataset.map(lambda batch: batch["x"]))
        elif how == "repeat":
            list(dataset.repeat(2).take(12))
        elif how == "loader":
            next(iter(one))
        else:
            for number, _ in enumerate(dataset):
                if number == 7 or how != "break at the last":
                    if number < 7:
                        assert len(batchers()) == before + 1
                    else:
                        assert batchers_after_a_pass(before) == before
                    break
            if how == "deleted":
                del dataset, one
        assert batchers_after_a_pass(before) <= before, how
        assert started_threads() == [], how


def test_unused_loader_and_feed_are_freed() -> None:
    known = []
    for how in ("loader", "dataset", "break", "track", "take"):
        one = loader(packed(RECORDS), sampler(), decode=numbers)
        batches = {
            "loader": lambda one=one: one,
            "track": lambda one=one: one.track(one.dataset.prefetch(1)),
            "take": lambda one=one: one.dataset.take(2),
        }.get(how, lambda one=one: one.dataset)()
        for _ in batches:
            if how in ("break", "track"):
                break
        known += [weakref.ref(one), weakref.ref(one.feed)]
        del one, batches
    gc.collect()
    assert [ref() for ref in known] == [None] * len(known)


def test_dataset_keeps_its_loader_alive() -> None:
    dataset = loader(packed(RECORDS), sampler()).dataset.map(lambda batch: batch["id"]).prefetch(1)
    gc.collect()
    assert [batch.numpy().tolist() for batch in dataset] == ids_of(sampler(), 0)
    batches = iter(loader(packed(RECORDS), sampler()).dataset.take(8))
    gc.collect()
    assert ids(batches) == ids_of(sampler(), 0)


def test_dataset_may_be_decoded_by_tensorflow_operations() -> None:
    index = packed(RECORDS)
    stream = PKBatchSampler(index.labels, p=4, k={0: 1, 3: 2}, batches_per_epoch=5, seed=0)
    signature = tf.TensorSpec([5], tf.uint8)

    def one(word: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.io.decode_raw(word, tf.uint8)[:5], [5])

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": tf.map_fn(one, batch["word"], fn_output_signature=signature)}

    dataset = loader(index, stream).dataset.map(decode, num_parallel_calls=2)
    assert len(dataset) == 5
    for batch in dataset:
        words = [np.frombuffer(word[:5], np.uint8) for word in batch["word"].numpy()]
        assert np.array_equal(batch["x"], words)
    none = ExactOnceBatchSampler(RECORDS, batch_size=2).shard(2, 3)
    assert {len(batch["x"]) for batch in loader(index, none).dataset.map(decode)} == {0, 1}


def test_transform_that_sets_global_states_runs_alone() -> None:
    running: list[int] = []
    together: list[int] = []

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        running.append(1)
        together.append(len(running))
        noise = np.random.random(3)
        running.pop()
        return {"noise": noise}

    options = {"decode": numbers, "transform": Seeded(transform)}
    one = TensorFlowLoader(Feed(packed(RECORDS), sampler(), **options), prefetch=8, threads=4)
    state = np.random.get_state()[1].tolist()
    batches, tried = iter(one.dataset), len(together)
    first = noted(next(batches))
    assert len(together) == tried + 8  # no batch ahead
    assert np.random.get_state()[1].tolist() == state
    assert [first, *map(noted, batches)] == expected(packed(RECORDS), sampler(), **options)
    assert max(together) == 1


def context(pipeline: int, pipelines: int, replicas: int) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(pipelines, pipeline, replicas)


def test_replicas_of_input_pipeline_get_rank_slices_in_order() -> None:
    one = loader(packed(RECORDS), ExactOnceBatchSampler(RECORDS, batch_size=8))
    whole = ids_of(one.feed.sampler, 0)
    parts = [one.dataset_for(context(pipeline, 2, 4)) for pipeline in range(2)]
    assert [len(part) for part in parts] == [8, 8]
    first, second = (ids(part) for part in parts)
    for step, want in enumerate(whole):
        here = slice(2 * step, 2 * step + 2)
        assert list(chain(*first[here], *second[here])) == want


def test_tracked_distributed_dataset_advances_position() -> None:
    strategy = tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])
    one = loader(packed(RECORDS), sampler())
    distributed = strategy.distribute_datasets_from_function(one.dataset_for)
    assert int(distributed.cardinality) == 8
    got: list[list[int]] = []
    for stop in (3, 8, 16):
        for batch in one.track(distributed):
            replicas = strategy.experimental_local_results(batch["id"])
            got.append(list(chain(*(part.numpy().tolist() for part in replicas))))
            if len(got) == stop:
                break
        assert (one.epoch, one.step) == divmod(stop, 8)
    assert got == ids_of(sampler(), 0, 1)


def test_ordinary_training_warns_of_nothing() -> None:
    one = loader(packed(RECORDS), sampler())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            list(one.dataset)
    assert word(0)


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_batches_reuse_freed_memory() -> None:
    """TensorFlow has glibc return freed memory wherever a dataset is made of a generator."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.ones(400_000, np.uint8)}

    sampler = BatchSampler(SequentialSampler(61), batch_size=4)
    one = loader(packed(61), sampler, decode=decode)
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in one:
            pass
        faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / len(one))
    assert min(faults) < 350  # of 390 pages a batch; other threads of this process have theirs


def test_report_counts_batches_of_loader_and_dataset() -> None:
    one = loader(packed(RECORDS), sampler())
    list(one)
    report = one.report()
    assert report.batches == 8
    assert min(report.reading, report.collating, report.waiting) > 0
    list(one.dataset)
    assert one.report().batches >= 8
    assert one.report().waiting is None


def of(**options: Any) -> Callable[[], object]:
    return lambda: TensorFlowLoader(Feed(packed(RECORDS), sampler()), **options)


def chosen(stream: BatchStream, *sets: Any, **options: Any) -> Callable[[], object]:
    return lambda: choose(stream, [*map(tf.data.Dataset.from_tensors, sets)], **options)


def of_sources(stream: BatchStream, **options: Any) -> Callable[[], object]:
    return lambda: source_datasets(Feed(packed(RECORDS), stream, **options))


def chosen_sources(stream: BatchStream, **options: Any) -> Callable[[], object]:
    return lambda: choose(stream, source_datasets(Feed(packed(RECORDS), PK)), **options)


LANES = ShardShuffleSampler([21, 20, 20], seed=0, block=8, window=16)
BLOCKS, PADDED = (BatchSampler(LANES, batch_size=6, last_batch=how) for how in ("smaller", "pad"))
CLASSES_ALONE = PKBatchSampler.of_classes(2, p=2, k=1, seed=0)
PK = PKBatchSampler(np.arange(RECORDS) % CLASSES, p=4, k=4, seed=0)
SOURCE = np.zeros(RECORDS, int)

REFUSED: Refused = [
    (lambda: TensorFlowLoader(packed(RECORDS)), TypeError, "feed must be Feed"),  # type: ignore[arg-type]
    (of(engine="gather"), TypeError, "takes no engine="),
    (of(threads=-1), ValueError, "threads must be at least 0, got -1"),
    (of(prefetch=-1), ValueError, "prefetch must be at least 0, got -1"),
    (of(device="/GPU:7"), ValueError, "one that TensorFlow sees.*got '/GPU:7'"),
    (of(device="/job:worker/device:CPU:0"), ValueError, "got '/job:worker/device:CPU:0'"),
    (of(device=0), ValueError, "got 0"),
    (chosen(CLASSES_ALONE, 1), ValueError, "sources must be 2, one per class or set, got 1"),
    (chosen(CLASSES_ALONE, 1, "a"), TypeError, "Invalid `datasets`"),
    (chosen(BLOCKS, 1, 2, source=SOURCE), ValueError, "by blocks.* source_datasets"),
    (lambda: source_datasets(packed(RECORDS)), TypeError, "feed must be Feed"),  # type: ignore[arg-type]
    (of_sources(sampler()), ValueError, "classes, sets or segments"),
    (of_sources(PADDED), ValueError, "no padding of records or batches.*take TensorFlowLoader"),
    (of_sources(PK, batch_transform=lambda batch, seed: batch), ValueError, "batch_transform"),
    (of_sources(PK, decode=numbers, collate="pad"), ValueError, "no padding"),
    (chosen_sources(PK.shard(1, 2)), ValueError, "samples of the feed of PKBatchSampler"),
    (chosen_sources(BLOCKS), ValueError, "call choose.feed.sampler, source_datasets"),
    (chosen_sources(PK, source=SOURCE), ValueError, "call choose.feed.sampler, source_datasets"),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_tensorflow_loader_refuses_bad_arguments(
    call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call()
