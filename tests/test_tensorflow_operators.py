"""Datasets know the operators applied to them: a position is known, or the pass is refused."""

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_help import CLASSES, RECORDS, ids_of, loader, numbers, packed, word

from twinfeed.loaders import DecodeError
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader, original_errors, prefetch_to_device
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    RandomSampler,
    SequentialSampler,
)

saves_weights = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

Made = Callable[[tf.data.Dataset], tf.data.Dataset]


def sampler() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8)


def once() -> BatchStream:
    """Batches in stored order, which TensorFlow's own readers can give."""
    return BatchSampler(SequentialSampler(RECORDS), batch_size=8)


def made(**options: Any) -> TensorFlowLoader:
    return loader(packed(RECORDS), sampler(), decode=numbers, **options)


def ids(batches: Any) -> list[list[int]]:
    return [np.asarray(batch["id"]).tolist() for batch in batches]


def unordered(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return dataset.map(same).with_options(options)


def same(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def as_dataset(batch: dict[str, Any]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(batch)


def kept(batch: dict[str, Any]) -> tf.Tensor:
    return tf.size(batch["id"]) > 0


def one_key(batch: dict[str, Any]) -> tf.Tensor:
    return tf.constant(0, tf.int64)


def counted_on(state: tf.Tensor, batch: dict[str, Any]) -> tuple[tf.Tensor, Any]:
    return state, batch


REFUSED: dict[str, Made] = {
    "cache": lambda d: d.cache(),
    "shuffle": lambda d: d.shuffle(10),
    "batch": lambda d: d.take(7).batch(1),
    "unbatch": lambda d: d.unbatch(),
    "rebatch": lambda d: d.rebatch(4),
    "ragged_batch": lambda d: d.ragged_batch(2),
    "padded_batch": lambda d: d.padded_batch(2),
    "filter": lambda d: d.filter(kept),
    "take_while": lambda d: d.take_while(kept),
    "skip": lambda d: d.skip(2),
    "shard": lambda d: d.shard(2, 0),
    "concatenate": lambda d: d.concatenate(d),
    "interleave": lambda d: d.interleave(as_dataset),
    "flat_map": lambda d: d.flat_map(as_dataset),
    "enumerate": lambda d: d.enumerate(),
    "window": lambda d: d.window(2),
    "scan": lambda d: d.scan(0, counted_on),
    "group_by_window": lambda d: d.group_by_window(one_key, lambda key, window: window, 2),
    "ignore_errors": lambda d: d.ignore_errors(),
    "repeat": lambda d: d.take(3).repeat(),
    "shuffle()": lambda d: d.apply(lambda own: own.map(same).shuffle(10)),
    "deterministic=False": lambda d: d.map(same, num_parallel_calls=2, deterministic=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_loses_the_position_is_refused_by_name(name: str) -> None:
    """Before anything is read, with map and prefetch before and after it."""
    one = made()
    dataset = REFUSED[name](one.dataset.map(same)).prefetch(1)
    with pytest.raises(ValueError, match=f"{re.escape(name)}.*position after them is not known"):
        next(one.counted(dataset))
    assert (one.epoch, one.step, one.report().batches) == (0, 0, 0)
    assert ids(one) == ids_of(sampler(), 0)


def test_options_that_lose_the_order_are_refused() -> None:
    one = made()
    with pytest.raises(ValueError, match=r"deterministic=False.*any order"):
        next(one.counted(unordered(one.dataset)))


def test_a_snapshot_is_refused_by_its_own_name(tmp_path: Path) -> None:
    one = loader(packed(RECORDS), sampler())
    with pytest.raises(ValueError, match=r"dataset\.snapshot\(\)"):
        next(one.counted(one.dataset.snapshot(str(tmp_path))))


KEPT: dict[str, Made] = {
    "map": lambda d: d.map(same, num_parallel_calls=2),
    "prefetch": lambda d: d.prefetch(20),
    "take": lambda d: d.take(8),
    "repeat": lambda d: d.repeat(2),
    "with_options": lambda d: d.with_options(tf.data.Options()),
    "device": lambda d: prefetch_to_device(d, device="/CPU:1"),
    "copy": lambda d: d.apply(tf.data.experimental.copy_to_device("/CPU:1")),
    "function": lambda d: d.apply(lambda own: own.map(same).prefetch(2)),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_operator_that_keeps_the_batches_keeps_the_position(name: str) -> None:
    one, got = made(), []
    dataset = KEPT[name](one.dataset).map(same)
    for batch in one.counted(dataset):
        got += ids([batch])
        assert (one.epoch, one.step) == divmod(len(got), 8)
        if len(got) == 5:
            break
    assert (one.epoch, one.step) == (0, 5)
    assert (
        got + ids(one.counted(dataset)) == ids_of(sampler(), 0, 1)[: 16 if name == "repeat" else 8]
    )


def mixed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return tf.data.Dataset.sample_from_datasets([dataset, dataset], [0.5, 0.5], seed=1)


UNKNOWN: dict[str, Callable[[TensorFlowLoader], Any]] = {
    "sample_from_datasets": lambda one: mixed(one.dataset),
    "zip": lambda one: tf.data.Dataset.zip(one.dataset, tf.data.Dataset.range(8)).map(
        lambda batch, _: batch
    ),
    "another loader": lambda one: made().dataset,
    "a generator": lambda one: (batch for batch in one.dataset),
    "a list": lambda one: [{"id": np.arange(3)}],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_pipeline_that_the_loader_does_not_know_is_refused(name: str) -> None:
    one = made()
    with pytest.raises(ValueError, match=r"does not know.*order='mine'"):
        next(one.counted(UNKNOWN[name](one)))
    assert (one.epoch, one.step) == (0, 0)


def test_two_loaders_in_one_pipeline_are_refused() -> None:
    one = made()
    with pytest.raises(ValueError, match="from 2 loaders"):
        next(one.counted(one.dataset.concatenate(made().dataset)))


def test_the_user_may_answer_for_the_order() -> None:
    one = made()
    zipped = UNKNOWN["zip"](one)
    assert ids(one.counted(zipped, order="mine")) == ids_of(sampler(), 0)
    assert (one.epoch, one.step) == (1, 0)
    again = one.counted(one.dataset.filter(kept), order="mine")
    assert ids(again) == ids_of(sampler(), 1)


def test_a_numpy_iterator_is_counted() -> None:
    """It was made before the counting, and begins in it."""
    one = made()
    assert ids(one.counted(one.dataset.map(same), order="mine")) == ids_of(sampler(), 0)
    numpy = one.dataset.as_numpy_iterator()
    assert ids(one.counted(numpy, order="mine")) == ids_of(sampler(), 1)
    assert (one.epoch, one.step) == (2, 0)


def test_a_dataset_stays_one_of_tensorflow(tmp_path: Path) -> None:
    """For `tf.function`, iterators, NumPy, copies on disk, and whoever asks for its class."""
    one = made()
    plain, dataset = tf.data.Dataset.range(8).map(lambda n: n), one.dataset.map(same)
    assert isinstance(dataset, type(plain))
    assert repr(dataset).startswith("<_MapDataset element_spec={")
    assert len(dataset) == int(dataset.cardinality()) == 8
    assert dataset.element_spec == one.dataset.element_spec
    assert dataset.options().deterministic is True
    expected = ids_of(sampler(), *range(6))
    got = ids(dataset.as_numpy_iterator())

    @tf.function
    def total(batches: tf.data.Dataset) -> tf.Tensor:
        sum_of_ids = tf.constant(0, tf.int64)
        for batch in batches:
            sum_of_ids += tf.reduce_sum(batch["id"])
        return sum_of_ids

    assert int(total(dataset)) == RECORDS * (RECORDS - 1) // 2
    assert (
        int(dataset.reduce(np.int64(0), lambda n, batch: n + tf.size(batch["id"], tf.int64))) == 61
    )
    got += expected[8:24]

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        return next(iterator)["id"]

    iterator = iter(dataset)
    got += [step(iterator).numpy().tolist() for _ in range(8)]
    captured = iter(dataset)
    get = tf.function(captured.get_next_as_optional)
    got += [get().get_value()["id"].numpy().tolist() for _ in range(8)]
    assert not get().has_value()
    dataset.save(str(tmp_path / "saved"))
    got += ids(tf.data.Dataset.load(str(tmp_path / "saved")))
    assert got == expected
    assert (one.epoch, one.step) == (6, 0)


def test_an_iterator_within_a_function_is_made_at_each_call() -> None:
    one = made()
    dataset = one.dataset

    @tf.function
    def first() -> tf.Tensor:
        return next(iter(dataset))["id"]

    assert [first().numpy().tolist() for _ in range(2)] == ids_of(sampler(), 0)[:1] * 2
    batches = one.counted(dataset)
    next(batches)
    with pytest.raises(ValueError, match="does not know"), original_errors():
        first()


def test_while_nobody_counts_every_operator_is_allowed() -> None:
    one = made()
    list(one)
    zipped = tf.data.Dataset.zip(one.dataset.unbatch(), tf.data.Dataset.range(RECORDS + 1))
    assert len(list(zipped)) == RECORDS
    assert (one.epoch, one.step) == (2, 0)
    assert sorted(ids(one.dataset.shuffle(8))) == sorted(ids_of(sampler(), 2))
    assert (one.epoch, one.step) == (3, 0)


@pytest.mark.parametrize("first", [False, True])
def test_a_zip_draws_one_batch_too_many_of_the_longer_loader(first: bool) -> None:
    """As the page says. Here it is the last batch of an epoch, which nobody receives."""
    shorter = BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8, batches_per_epoch=7)
    one, other = made(), loader(packed(RECORDS), shorter, decode=numbers)
    pair = [one.dataset, other.dataset]
    assert len(list(tf.data.Dataset.zip(*(pair if first else pair[::-1])))) == 7
    assert (one.epoch, one.step) == (other.epoch, other.step) == (1, 0)


def test_a_pass_belongs_to_the_iterator_that_was_used_last() -> None:
    one = made()
    nothing = iter(one.dataset.take(0))
    assert ids(nothing) == []
    predict(one)
    assert (one.epoch, one.step) == (0, 0)


def test_a_look_is_one_beside_an_iterator_that_will_begin_more_passes() -> None:
    one = made()
    repeating = iter(one.dataset.repeat(2))
    got = ids([next(repeating) for _ in range(3)])
    predict(one)
    assert (one.epoch, one.step) == (0, 0)
    assert got + ids(repeating) == ids_of(sampler(), 0, 1)


def test_an_iterator_that_nobody_uses_begins_nothing() -> None:
    """Keras makes one at the end of each epoch. With a warm start it would begin at once."""
    one = made()
    options = tf.data.Options()
    options.experimental_warm_start = True
    dataset = one.dataset.prefetch(8).with_options(options)
    unused = iter(dataset)
    assert ids(dataset) == ids_of(sampler(), 0)
    known = weakref.ref(unused)
    assert ids(unused) == ids_of(sampler(), 1)
    del unused
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("engine", ["gather", "choose_from_datasets"])
@pytest.mark.parametrize("decode", [None, numbers])
def test_the_last_batch_moves_on_in_a_graph_of_tf1(engine: str, decode: Any) -> None:
    """In such a graph, `==` compares tensors as objects."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one = loader(packed(RECORDS), once(), engine=engine, decode=decode)
        iterator = tf.compat.v1.data.make_initializable_iterator(one.dataset)
        batch, got = iterator.get_next(), []
        for epoch in range(3):
            assert one.epoch == epoch
            session.run(iterator.initializer)
            got += [session.run(batch["id"]).tolist() for _ in range(8)]
    assert got == ids_of(once(), 0, 1, 2)


class Trained(keras.Model):
    """Note the ids that are trained on, which come as the weights of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
        self.layer = keras.layers.Dense(CLASSES)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.compile("sgd", loss)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.layer(inputs)

    def train_step(self, data: Any) -> Any:
        x, label, ids = data
        self.ids.assign(tf.concat([self.ids, ids], 0))
        return super().train_step((x, label))

    def test_step(self, data: Any) -> Any:
        return super().test_step(data[:2])

    def seen(self) -> list[int]:
        return self.ids.numpy().tolist()


def with_ids(batch: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    return batch["x"], batch["label"], batch["id"]


def fit(dataset: Any, epochs: int, *callbacks: Any, **options: Any) -> list[int]:
    model = Trained()
    model.fit(dataset, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False, **options)
    return model.seen()


def flat(*epochs: int) -> list[int]:
    return [number for batch in ids_of(sampler(), *epochs) for number in batch]


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@saves_weights
def test_a_validation_on_the_same_dataset_costs_no_epoch(
    tmp_path: Path, counts: bool, warm: bool
) -> None:
    one = made()
    options = tf.data.Options()
    options.experimental_warm_start = warm
    dataset = one.dataset.map(with_ids).prefetch(1).with_options(options)
    callbacks = [ResumeCallback(one, tmp_path)] if counts else []
    assert fit(dataset, 3, *callbacks, validation_data=dataset) == flat(0, 1, 2)
    assert (one.epoch, one.step) == (3, 0)


def adapt(one: TensorFlowLoader) -> None:
    layer = keras.layers.Normalization()
    layer.adapt(one.dataset.map(lambda batch: batch["x"]))
    whole = np.concatenate([batch["x"].numpy() for batch in made().dataset])
    assert np.allclose(layer.mean, whole.mean(0), atol=1e-5)


def predict(one: TensorFlowLoader) -> None:
    found = keras.Sequential([keras.layers.Flatten()]).predict(
        one.dataset.map(lambda batch: batch["x"]), verbose=0
    )
    assert len(found) == RECORDS


def evaluate(one: TensorFlowLoader) -> None:
    Trained().evaluate(one.dataset.map(with_ids), verbose=0)


def split(one: TensorFlowLoader) -> None:
    inputs = one.dataset.map(lambda batch: batch["x"]).unbatch()
    assert sum(map(len, keras.utils.split_dataset(inputs, 0.5))) == RECORDS


LOOKS = (adapt, predict, evaluate, split)


@pytest.mark.parametrize("counts", [False, True])
@saves_weights
def test_a_look_of_keras_is_whole_and_moves_nothing(tmp_path: Path, counts: bool) -> None:
    """At the beginning of the training, and in the middle of an epoch."""
    one = made()
    callbacks = [ResumeCallback(one, tmp_path)] if counts else []
    for look in LOOKS:
        look(one)
        assert (one.epoch, one.step) == (0, 0), look
    assert fit(one.dataset.map(with_ids), 1, *callbacks) == flat(0)
    one.load_state_dict({**one.state_dict(), "epoch": 1, "step": 3})
    for look in LOOKS * 3:
        look(one)
        assert (one.epoch, one.step) == (1, 3), look
    assert ids(one) == ids_of(sampler(), 1)[3:]


def test_a_loaded_evaluation_is_a_remainder_once_and_then_whole() -> None:
    stream = ExactOnceBatchSampler(RECORDS, batch_size=8)
    one = loader(packed(RECORDS), stream, decode=numbers)
    one.load_state_dict({**one.state_dict(), "step": 3})
    model = keras.Sequential([keras.layers.Flatten()])
    inputs = one.dataset.map(lambda batch: batch["x"])
    with pytest.warns(UserWarning, match="ran out of data"):
        assert len(model.predict(inputs, verbose=0)) == RECORDS - 24
    assert (one.epoch, one.step) == (0, 0)
    assert len(model.predict(inputs, verbose=0)) == RECORDS


@pytest.mark.parametrize("name", ["cache", "shuffle", "filter", "rebatch"])
@saves_weights
def test_fit_with_a_callback_refuses_before_the_first_batch(tmp_path: Path, name: str) -> None:
    one = made()
    with pytest.raises(ValueError, match=rf"dataset\.{name}\(\)"):
        fit(REFUSED[name](one.dataset).map(with_ids), 2, ResumeCallback(one, tmp_path))
    assert (one.epoch, one.step, list(tmp_path.iterdir())) == (0, 0, [])


@saves_weights
def test_fit_with_a_callback_refuses_a_pipeline_that_the_loader_does_not_know(
    tmp_path: Path,
) -> None:
    one = made()
    with pytest.raises(ValueError, match="sample_from_datasets"), original_errors():
        fit(mixed(one.dataset).map(with_ids), 2, ResumeCallback(one, tmp_path), steps_per_epoch=8)
    assert (one.epoch, one.step, list(tmp_path.iterdir())) == (0, 0, [])


@saves_weights
def test_the_user_may_answer_for_the_order_in_fit(tmp_path: Path) -> None:
    one = made()
    zipped = tf.data.Dataset.zip(one.dataset, tf.data.Dataset.range(8))
    seen = fit(zipped.map(lambda b, _: with_ids(b)), 2, ResumeCallback(one, tmp_path, order="mine"))
    assert seen == flat(0, 1)
    assert (one.epoch, one.step) == (2, 0)


class Shows(keras.callbacks.Callback):
    """Show pictures of single records, as people do, in the middle of an epoch."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        super().__init__()
        self.dataset = dataset

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        assert len(list(self.dataset.unbatch())) == RECORDS

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            assert len(list(self.dataset.unbatch().take(20))) == 20
            assert len(list(self.dataset.take(2))) == 2


@saves_weights
def test_a_callback_may_look_at_batches(tmp_path: Path) -> None:
    one = made()
    callbacks = [ResumeCallback(one, tmp_path, every=3), Shows(one.dataset)]
    assert fit(one.dataset.map(with_ids), 2, *callbacks) == flat(0, 1)
    assert (one.epoch, one.step) == (2, 0)


class Compares(keras.callbacks.Callback):
    """Compare what the loader counts as trained with what the pipeline delivered."""

    def __init__(self, one: TensorFlowLoader, delivered: list[int]) -> None:
        super().__init__()
        self.one, self.delivered = one, delivered

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self.one.epoch * 8 + self.one.step <= len(self.delivered)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert (self.one.epoch, self.one.step) == (epoch + 1, 0)
        assert len(self.delivered) == 8 * (epoch + 1)


@pytest.mark.parametrize("at_once", [1, 3, 8])
@saves_weights
def test_what_is_trained_was_delivered(tmp_path: Path, at_once: int) -> None:
    """At each step, and all of an epoch at its end."""
    one, delivered = made(), []

    def note(ids: np.ndarray) -> np.ndarray:
        delivered.append(len(ids))
        return ids

    def noting(batch: dict[str, Any]) -> Any:
        x, label, ids = with_ids(batch)
        noted = tf.numpy_function(note, [ids], tf.int64)
        return x, label, tf.ensure_shape(noted, ids.shape)

    model = Trained()
    model.compile("adam", model.loss, steps_per_execution=at_once)
    callbacks = [ResumeCallback(one, tmp_path, every=2), Compares(one, delivered)]
    dataset = one.dataset.prefetch(4).map(noting)
    model.fit(dataset, epochs=2, callbacks=callbacks, verbose=0, shuffle=False)
    assert model.seen() == flat(0, 1)


@saves_weights
def test_the_door_raises_what_was_raised(tmp_path: Path) -> None:
    """An error of decode, and the refusal of a pipeline that the loader does not know."""

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise OSError("cannot read this")
        return numbers(sample)

    one = loader(packed(RECORDS), sampler(), decode=decode)
    with pytest.raises(DecodeError, match=r"record 40 .*cannot read this"):
        ResumeCallback(one, tmp_path).fit(Trained(), with_ids, verbose=0)
    one = made()
    data = mixed(one.dataset).take(8).map(with_ids)
    with pytest.raises(ValueError, match="does not know"):
        ResumeCallback(one, tmp_path).fit(Trained(), data, verbose=0)
