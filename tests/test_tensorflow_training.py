"""Datasets under Keras, in loops of one's own, and resumed: the right batches at every step."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from batches import expected, noted
from tensorflow_help import ids_of, packed, word

from twinfeed.loaders.tensorflow import (
    Position,
    ResumeCallback,
    hide_gpus,
    make_dataset,
    prefetch_to_device,
)
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    ReuseSampler,
    StateMismatchError,
)

RECORDS, CLASSES = 61, 7

# Keras 3.15 converts its variables in a way that numpy 2 warns of when it saves weights.
saves_weights = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def sampler() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8)


def numbers(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.frombuffer(sample["word"][:5], np.uint8).astype(np.float32) / 255}


def pairs(batch: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    return batch["x"], batch["label"]


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    network = keras.Sequential([keras.Input([5]), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile("adam", loss, metrics=["accuracy"])
    return network


def recording(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, list[list[int]]]:
    """Inputs and targets, and the ids as the consumer takes them."""
    seen: list[list[int]] = []

    def note(ids: np.ndarray) -> np.ndarray:
        seen.append(ids.tolist())
        return ids

    def step(batch: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([tf.numpy_function(note, [batch["id"]], tf.int64)]):
            return tf.identity(batch["x"]), batch["label"]

    return dataset.map(step), seen


def fit(network: keras.Model, dataset: tf.data.Dataset, epochs: int, **options: Any) -> Any:
    return network.fit(dataset, epochs=epochs, verbose=0, shuffle=False, **options)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("records", [RECORDS, 9])
def test_each_epoch_of_fit_is_the_next(warm: bool, records: int) -> None:
    stream = BatchSampler(RandomSampler(records, seed=1), batch_size=8)
    dataset, seen = recording(make_dataset(packed(records), stream, decode=numbers))
    options = tf.data.Options()
    options.experimental_warm_start = warm
    dataset = dataset.with_options(options)
    next(iter(dataset.take(1)))
    assert (stream.epoch, len(seen)) == (0, 1)
    seen.clear()
    fit(model(), dataset, 3)
    assert seen == ids_of(stream, 0, 1, 2)
    assert stream.epoch == 3


def test_set_epoch() -> None:
    stream = sampler()
    dataset = make_dataset(packed(RECORDS), stream)
    stream.set_epoch(5)
    assert [batch["id"].numpy().tolist() for batch in dataset] == ids_of(stream, 5)
    assert [batch["id"].numpy().tolist() for batch in dataset] == ids_of(stream, 6)


def test_a_peek_at_all_but_the_last_batch_costs_nothing() -> None:
    stream = sampler()
    dataset = make_dataset(packed(RECORDS), stream, prefetch=100)
    assert len(list(dataset.take(len(stream) - 1))) == 7
    assert stream.epoch == 0
    assert len(list(dataset)) == 8
    assert stream.epoch == 1


@pytest.mark.parametrize("engine", ["gather", "choose_from_datasets"])
@pytest.mark.parametrize("step", [1, 5, 7])
def test_a_sampler_in_mid_epoch_gives_the_remainder_alone(engine: Any, step: int) -> None:
    index, stream = packed(RECORDS), sampler()
    stream.load_state_dict(stream.state_at(2, step))
    dataset = make_dataset(index, stream, engine=engine, prefetch=4)
    assert len(dataset) == 8 - step
    want = expected(index, sampler(), [2])[step:]
    assert [noted(batch) for batch in dataset] == want
    assert (stream.epoch, stream.step) == (3, 0)
    with pytest.raises(tf.errors.OpError, match="make another one"):
        list(dataset)
    assert ids_of(stream, 3) == [b["id"].numpy().tolist() for b in make_dataset(index, stream)]


def test_a_moved_sampler_needs_another_dataset() -> None:
    stream = sampler()
    dataset = make_dataset(packed(RECORDS), stream)
    stream.load_state_dict(stream.state_at(0, 3))
    with pytest.raises(tf.errors.OpError, match="stands at step 3 of epoch 0"):
        list(dataset)


def test_fit_evaluate_and_predict_know_their_length(capsys: pytest.CaptureFixture[str]) -> None:
    index, network = packed(RECORDS), model()
    network.fit(make_dataset(index, sampler(), decode=numbers).map(pairs), epochs=1, shuffle=False)
    evaluation = make_dataset(index, ExactOnceBatchSampler(RECORDS, batch_size=8), decode=numbers)
    accuracy = network.evaluate(evaluation.map(pairs))[1]
    predicted = network.predict(evaluation.map(pairs))
    shown = capsys.readouterr().out
    assert shown.count("8/8") >= 3
    assert "1/8" in shown
    assert "Unknown" not in shown
    labels = np.arange(RECORDS) % CLASSES
    assert predicted.shape == (RECORDS, CLASSES)
    assert accuracy == pytest.approx((predicted.argmax(axis=1) == labels).mean())


class Interrupt(keras.callbacks.Callback):
    """Stop, as a killed job would, after some batches."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def train(folder: Path, stream: BatchStream, *callbacks: Any, epochs: int = 3) -> keras.Model:
    network, resume = model(), ResumeCallback(stream, folder, every=3)
    resume.restore(network)
    while stream.epoch < epochs:
        stop = stream.epoch + 1 if stream.step else epochs
        dataset = make_dataset(packed(RECORDS), stream, decode=numbers).map(pairs)
        both = [resume, *callbacks]
        fit(network, dataset, stop, initial_epoch=stream.epoch, callbacks=both)
    return network


@saves_weights
def test_a_resumed_fit_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", sampler(), epochs=2)
    for after in (2, 8, 11):  # resumed at (0, 0), (0, 6) and (1, 3)
        folder = tmp_path / str(after)
        with pytest.raises(KeyboardInterrupt):
            train(folder, sampler(), Interrupt(after), epochs=2)
        last = sampler()
        resumed = train(folder, last, epochs=2)
        for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
            assert np.array_equal(one, other)
        assert (last.epoch, last.step) == (2, 0)
        assert {path.name for path in folder.iterdir()} == {"state.json", "2-0.weights.h5"}


@saves_weights
@pytest.mark.parametrize("at_once", [5, 100])
def test_a_fit_of_several_steps_at_once_ends_with_the_epoch(tmp_path: Path, at_once: int) -> None:
    """Keras counts on to the end of the last execution."""
    network, stream = model(), sampler()
    network.compile("adam", "sparse_categorical_crossentropy", steps_per_execution=at_once)
    assert len(stream) % at_once
    dataset = make_dataset(packed(RECORDS), stream, decode=numbers).map(pairs)
    fit(network, dataset, 2, callbacks=[ResumeCallback(stream, tmp_path, every=2)])
    state = json.loads((tmp_path / "state.json").read_text())
    assert (state["epoch"], state["step"]) == (2, 0)


@saves_weights
def test_a_resumed_fit_refuses_other_data(tmp_path: Path) -> None:
    train(tmp_path, sampler(), epochs=1)
    other = BatchSampler(RandomSampler(RECORDS, seed=2), batch_size=8)
    with pytest.raises(StateMismatchError, match="seed: the state has 1, this sampler has 2"):
        train(tmp_path, other)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        ResumeCallback(other, tmp_path, every=0)


def loop(
    folder: Path, stop_after: int | None, wrap: Callable[[tf.data.Dataset], Any] = lambda d: d
) -> tuple[list[list[int]], np.ndarray]:
    """Train and validate in turn, in a loop of one's own, saving after every batch."""
    keras.utils.set_random_seed(1)
    index, stream = packed(RECORDS), sampler()
    position = Position(stream)
    weights = tf.Variable(tf.zeros([5, CLASSES]))
    checkpoint = tf.train.Checkpoint(weights=weights, position=position)
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

    once = ExactOnceBatchSampler(RECORDS, batch_size=16)
    validation = make_dataset(index, once, decode=numbers)
    seen: list[list[int]] = []
    while stream.epoch < 2:
        for batch in position.counted(wrap(make_dataset(index, stream, decode=numbers))):
            seen.append(batch["id"].numpy().tolist())
            step(batch["x"], batch["label"])
            if len(seen) % 3 == 0:
                assert (
                    sum(len(b["id"]) for b in validation if loss_of(b["x"], b["label"]) > 0) == 61
                )
            manager.save()
            if len(seen) == stop_after:
                return seen, weights.numpy()
    assert (position.epoch, position.step) == (2, 0)
    return seen, weights.numpy()


@pytest.mark.parametrize("after", [3, 8])
def test_a_loop_resumes_from_a_checkpoint(tmp_path: Path, after: int) -> None:
    whole, weights = loop(tmp_path / "whole", None)
    assert whole == ids_of(sampler(), 0, 1)
    first, _ = loop(tmp_path / "cut", after)
    rest, resumed = loop(tmp_path / "cut", None)
    assert first + rest == whole
    assert np.array_equal(weights, resumed)


def test_a_loop_counts_what_it_received_behind_a_device_prefetch(tmp_path: Path) -> None:
    def wrap(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return prefetch_to_device(dataset, device="/CPU:1", buffer_size=4)

    first, _ = loop(tmp_path, 11, wrap)
    rest, _ = loop(tmp_path, None, wrap)
    assert first + rest == ids_of(sampler(), 0, 1)


@pytest.mark.parametrize("how", ["break", "take", "device"])
def test_the_next_dataset_goes_on_with_what_the_loop_has_not_received(how: str) -> None:
    stream = sampler()
    position = Position(stream)
    got: list[list[int]] = []
    for stop in (3, 7, 8, 16):
        dataset = make_dataset(packed(RECORDS), stream, decode=numbers)
        if how == "device":
            dataset = prefetch_to_device(dataset, device="/CPU:1", buffer_size=8)
        if how == "take":
            dataset = dataset.take(stop - len(got))
        for batch in position.counted(dataset):
            got.append(batch["id"].numpy().tolist())
            if how == "device":
                time.sleep(0.05)  # it draws the last batch of the epoch
            if len(got) == stop:
                break
        assert (position.epoch, position.step) == divmod(stop, 8) == (stream.epoch, stream.step)
    assert got == ids_of(sampler(), 0, 1)


def test_a_dataset_that_repeats_is_counted_over_epochs() -> None:
    stream = sampler()
    position = Position(stream)
    for count, _ in enumerate(position.counted(make_dataset(packed(RECORDS), stream).repeat(2)), 1):
        assert (position.epoch, position.step) == divmod(count, 8)
    assert (stream.epoch, stream.step) == (2, 0)


def test_a_fit_in_other_epochs_than_the_samplers_is_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(CLASSES)])
    model.compile("sgd", "mse")
    stream = sampler()
    whole = make_dataset(packed(RECORDS), stream, decode=numbers)
    for dataset, steps in ((whole.repeat(), 3), (whole.take(3), None)):
        with pytest.raises(ValueError, match="an epoch of fit has 3 steps here, the sampler has 8"):
            model.fit(
                dataset.map(lambda b: (b["x"], b["label"])),
                steps_per_epoch=steps, epochs=2, verbose=0, shuffle=False,
                callbacks=[ResumeCallback(stream, tmp_path)],
            )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_states_saved_in_a_row() -> None:
    stream = sampler()
    position = Position(stream)
    states = [position.state_dict()]
    for _ in position.counted(make_dataset(packed(RECORDS), stream)):
        states.append(position.state_dict())
        assert position.state_dict() == states[-1]
    assert [(state["epoch"], state["step"]) for state in states] == [
        *((0, step) for step in range(8)),
        (1, 0),
    ]
    position.load_state_dict(states[5])
    assert position.state_dict() == states[5]
    assert len(make_dataset(packed(RECORDS), stream)) == 3


def test_prefetch_to_device_keeps_length_and_strings() -> None:
    index = packed(RECORDS)
    on_host = make_dataset(index, sampler())
    on_device = prefetch_to_device(make_dataset(index, sampler()), device="/CPU:1")
    assert len(on_device) == len(on_host)
    assert on_device.element_spec == on_host.element_spec
    batches = list(on_device)
    assert [noted(batch) for batch in batches] == [noted(batch) for batch in on_host]
    assert batches[0]["label"].device.endswith("CPU:1")
    assert next(iter(prefetch_to_device(on_host)))["label"].device.endswith(":0")
    with pytest.raises(ValueError, match=r"one that TensorFlow sees.*got '/GPU:7'"):
        prefetch_to_device(on_host, device="/GPU:7")


def test_fit_from_a_device_prefetch() -> None:
    stream = sampler()
    dataset, seen = recording(make_dataset(packed(RECORDS), stream, decode=numbers))
    fit(model(), prefetch_to_device(dataset, device="/CPU:1"), 2)
    assert seen == ids_of(stream, 0, 1)


def test_hide_gpus_says_that_it_is_too_late() -> None:
    tf.zeros([])
    if tf.config.get_visible_devices("GPU"):
        with pytest.raises(RuntimeError, match="before TensorFlow's first operation"):
            hide_gpus()
    else:
        hide_gpus()
        assert tf.config.get_visible_devices("GPU") == []


def test_a_reuse_sampler_decodes_each_image_once() -> None:
    counted: list[bytes] = []

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        counted.append(sample["word"])
        return numbers(sample)

    stream = BatchSampler(ReuseSampler(RECORDS, reuse=3, live=8, seed=1), batch_size=4)
    dataset = make_dataset(packed(RECORDS), stream, decode=decode)
    assert counted == [word(0)]  # the shapes are read off the first record
    counted.clear()
    assert sum(len(batch["id"]) for batch in dataset) == 3 * RECORDS
    assert len(counted) <= RECORDS + 8 - 1
    assert len(set(counted)) == RECORDS


def test_decoding_in_tensorflow_operations() -> None:
    index = packed(RECORDS)
    stream = PKBatchSampler(index.labels, p=4, k={0: 1, 3: 2}, batches_per_epoch=5, seed=0)
    signature = tf.TensorSpec([5], tf.uint8)

    def one(word: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.io.decode_raw(word, tf.uint8)[:5], [5])

    def decode(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "x": tf.map_fn(one, batch["word"], fn_output_signature=signature)}

    dataset = make_dataset(index, stream).map(decode, num_parallel_calls=2)
    assert len(dataset) == 5
    for batch in dataset:
        words = [np.frombuffer(word[:5], np.uint8) for word in batch["word"].numpy()]
        assert np.array_equal(batch["x"], words)
    none = ExactOnceBatchSampler(RECORDS, batch_size=2).shard(2, 3)
    assert {len(batch["x"]) for batch in make_dataset(index, none).map(decode)} == {0, 1}
