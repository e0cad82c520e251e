"""A dataset is walked where somebody counts: its position is known, or the pass is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.cases import mark_long
from support.tensorflow_feeds import CLASSES, RECORDS, ids_of, loader, numbers, packed, word

from twinfeed.loaders import DecodeError
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader, prefetch_to_device
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    RandomSampler,
    SequentialSampler,
)

pytestmark = pytest.mark.usefixtures("graphs_as_written")
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


def mixed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return tf.data.Dataset.sample_from_datasets([dataset, dataset], [0.5, 0.5], seed=1)


REFUSED: dict[str, Made] = {
    "Cache": lambda d: d.cache(),
    "Shuffle": lambda d: d.shuffle(10),
    "Batch": lambda d: d.take(7).batch(1),
    "Unbatch": lambda d: d.unbatch(),
    "Rebatch": lambda d: d.rebatch(4),
    "PaddedBatch": lambda d: d.padded_batch(2),
    "Filter": lambda d: d.filter(kept),
    "TakeWhile": lambda d: d.take_while(kept),
    "Skip": lambda d: d.skip(2),
    "Shard": lambda d: d.shard(2, 0),
    "Concatenate": lambda d: d.concatenate(d),
    "Interleave": lambda d: d.interleave(as_dataset),
    "FlatMap": lambda d: d.flat_map(as_dataset),
    "Zip": lambda d: d.enumerate(),
    "Window": lambda d: d.window(2),
    "Scan": lambda d: d.scan(0, counted_on),
    "GroupByWindow": lambda d: d.group_by_window(one_key, lambda key, window: window, 2),
    "IgnoreErrors": lambda d: d.ignore_errors(),
    "Repeat": lambda d: d.take(3).repeat(),
    "Shuffle ": lambda d: d.apply(lambda own: own.map(same).shuffle(10)),
    "DirectedInterleave": mixed,
    "deterministic=False": lambda d: d.map(same, num_parallel_calls=2, deterministic=False),
    "deterministic=False ": unordered,
}


@pytest.mark.parametrize("name", mark_long(REFUSED, but_every=5))
def test_operators_that_lose_position_are_refused_by_name(name: str) -> None:
    """Before anything is read, with map and prefetch before and after it."""
    one = made()
    dataset = REFUSED[name](one.dataset.map(same)).prefetch(1)
    said = f"{re.escape(name.strip())}.*position after each batch is not known.*order='unchecked'"
    with pytest.raises(ValueError, match=said):
        next(one.track(dataset))
    assert (one.epoch, one.step, one.report().batches) == (0, 0, 0)
    assert ids(one) == ids_of(sampler(), 0)


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


@pytest.mark.parametrize("name", mark_long(KEPT, but_every=3, first=2))
def test_operators_that_keep_batches_keep_position(name: str) -> None:
    one, got = made(), []
    dataset = KEPT[name](one.dataset).map(same)
    for batch in one.track(dataset):
        got += ids([batch])
        assert (one.epoch, one.step) == divmod(len(got), 8)
        if len(got) == 5:
            break
    assert (one.epoch, one.step) == (0, 5)
    assert got + ids(one.track(dataset)) == ids_of(sampler(), 0, 1)[: 16 if name == "repeat" else 8]


UNKNOWN: dict[str, Callable[[TensorFlowLoader], Any]] = {
    "two loaders": lambda one: one.dataset.concatenate(made().dataset),
    "another loader": lambda one: made().dataset,
    "a generator": lambda one: (batch for batch in one.dataset),
    "a list": lambda one: [{"id": np.arange(3)}],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_pipeline_of_other_datasets_is_refused(name: str) -> None:
    one = made()
    with pytest.raises(
        ValueError, match=r"not made of this loader's dataset only.*order='unchecked'"
    ):
        next(one.track(UNKNOWN[name](one)))
    assert (one.epoch, one.step) == (0, 0)


def full() -> BatchStream:
    return BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8, last_batch="drop")


BATCHED_AGAIN: list[Made] = [
    lambda d: d.unbatch().map(same).prefetch(3).batch(8, num_parallel_calls=2),
    lambda d: d.take(5).unbatch().batch(8).unbatch().batch(8, drop_remainder=True),
]


@pytest.mark.parametrize("make", BATCHED_AGAIN)
def test_records_of_full_batches_may_be_mapped(make: Made) -> None:
    """By a host's parser of one record; the position after each batch is known."""
    one = loader(packed(RECORDS), full(), decode=numbers)
    for step, batch in enumerate(one.track(make(one.dataset).map(same)), 1):
        assert ids([batch]) == ids_of(full(), 0)[step - 1 : step]
        assert one.global_step == step
    assert step >= 5
    resumed = loader(packed(RECORDS), full(), decode=numbers)
    resumed.load_state_dict(one.state_at(1, 3))
    assert ids([next(resumed.track(make(resumed.dataset)))]) == ids_of(full(), 1)[3:4]


NOT_BATCHED_AGAIN: dict[str, Made] = {
    "Batch": lambda d: d.unbatch().batch(4),
    "Batch without unbatch": lambda d: d.batch(8),
    "Take between unbatch and batch": lambda d: d.unbatch().take(9).batch(8),
    "Repeat between unbatch and batch": lambda d: d.take(2).unbatch().repeat().batch(8),
    "Filter": lambda d: d.unbatch().filter(kept).batch(8),
    "Shuffle": lambda d: d.unbatch().shuffle(9).batch(8),
    "PaddedBatch": lambda d: d.unbatch().padded_batch(8),
    "deterministic=False": lambda d: d.unbatch().batch(8, False, 2, deterministic=False),
}


@pytest.mark.parametrize("name", NOT_BATCHED_AGAIN)
def test_records_that_become_other_batches_are_refused(name: str) -> None:
    one = loader(packed(RECORDS), full(), decode=numbers)
    with pytest.raises(ValueError, match=rf"{name}, so .*unbatch\(\).map"):
        next(one.track(NOT_BATCHED_AGAIN[name](one.dataset.map(same)).prefetch(1)))
    unequal = made()
    with pytest.raises(ValueError, match="operator Batch, so"):
        next(unequal.track(unequal.dataset.unbatch().batch(8)))


def test_track_takes_any_operator_with_order_unchecked() -> None:
    one = made()
    zipped = tf.data.Dataset.zip(one.dataset, tf.data.Dataset.range(8)).map(lambda b, _: b)
    assert ids(one.track(zipped, order="unchecked")) == ids_of(sampler(), 0)
    assert (one.epoch, one.step) == (1, 0)
    again = one.track(one.dataset.filter(kept), order="unchecked")
    assert ids(again) == ids_of(sampler(), 1)


def test_tracked_numpy_iterator_advances_position() -> None:
    """It was made before the counting, and begins in it."""
    one = made()
    assert ids(one.track(one.dataset.map(same), order="unchecked")) == ids_of(sampler(), 0)
    numpy = one.dataset.as_numpy_iterator()
    assert ids(one.track(numpy, order="unchecked")) == ids_of(sampler(), 1)
    assert (one.epoch, one.step) == (2, 0)


def test_dataset_behaves_as_tensorflow_dataset(tmp_path: Path) -> None:
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


def test_untracked_dataset_takes_any_operator() -> None:
    one = made()
    list(one)
    zipped = tf.data.Dataset.zip(one.dataset.unbatch(), tf.data.Dataset.range(RECORDS + 1))
    assert len(list(zipped)) == RECORDS
    assert (one.epoch, one.step) == (2, 0)
    assert sorted(ids(one.dataset.shuffle(8))) == sorted(ids_of(sampler(), 2))
    assert (one.epoch, one.step) == (3, 0)


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_zip_draws_one_extra_batch_of_longer_loader(first: bool) -> None:
    """As the page says. Here it is the last batch of an epoch, which nobody receives."""
    shorter = BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8, batches_per_epoch=7)
    one, other = made(), loader(packed(RECORDS), shorter, decode=numbers)
    pair = [one.dataset, other.dataset]
    assert len(list(tf.data.Dataset.zip(*(pair if first else pair[::-1])))) == 7
    assert (one.epoch, one.step) == (other.epoch, other.step) == (1, 0)


@pytest.mark.parametrize("decode", [None, pytest.param(numbers, marks=pytest.mark.long)])
def test_tf1_graph_advances_epoch_at_last_batch(decode: Any) -> None:
    """In such a graph, `==` compares tensors as objects."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one = loader(packed(RECORDS), once(), decode=decode)
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
        self.compile("sgd", loss, run_eagerly=True)

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


def fit(resume: ResumeCallback, dataset: Any, epochs: int, **options: Any) -> list[int]:
    model = Trained()
    resume.fit(model, dataset, epochs=epochs, verbose=0, **options)
    return model.seen()


def flat(*epochs: int) -> list[int]:
    return [number for batch in ids_of(sampler(), *epochs) for number in batch]


@pytest.mark.parametrize("warm", [False, pytest.param(True, marks=pytest.mark.long)])
@saves_weights
def test_validation_on_training_dataset_skips_no_epoch(tmp_path: Path, warm: bool) -> None:
    one = made()
    options = tf.data.Options()
    options.experimental_warm_start = warm
    dataset = one.dataset.map(with_ids).prefetch(1).with_options(options)
    resume = ResumeCallback(one, tmp_path)
    assert fit(resume, dataset, 3, validation_data=dataset) == flat(0, 1, 2)
    assert (one.epoch, one.step) == (3, 0)


@saves_weights
def test_plain_keras_fit_runs_with_order_unchecked(tmp_path: Path) -> None:
    """The callback does not see its dataset, which here is one of many looks."""
    one, model = made(), Trained()
    dataset = one.dataset.map(with_ids)
    resume = ResumeCallback(one, tmp_path, order="unchecked")
    options: dict[str, Any] = {"shuffle": False, "verbose": 0, "validation_data": dataset}
    model.fit(dataset, epochs=2, callbacks=[resume], **options)
    assert model.seen() == flat(0, 1)
    assert (one.epoch, one.step) == (2, 0)


def test_resumed_evaluation_predicts_remainder_then_every_record() -> None:
    stream = ExactOnceBatchSampler(RECORDS, batch_size=8)
    one = loader(packed(RECORDS), stream, decode=numbers)
    one.load_state_dict({**one.state_dict(), "step": 3})
    model = keras.Sequential([keras.layers.Flatten()])
    inputs = one.dataset.map(lambda batch: batch["x"])
    with pytest.warns(UserWarning, match="ran out of data"):
        assert len(model.predict(inputs, verbose=0)) == RECORDS - 24
    assert (one.epoch, one.step) == (0, 0)
    assert len(model.predict(inputs, verbose=0)) == RECORDS


@saves_weights
def test_fit_takes_any_operator_with_order_unchecked(tmp_path: Path) -> None:
    one = made()
    zipped = tf.data.Dataset.zip(one.dataset, tf.data.Dataset.range(8))
    dataset = zipped.map(lambda b, _: with_ids(b))
    assert fit(ResumeCallback(one, tmp_path, order="unchecked"), dataset, 2) == flat(0, 1)
    assert (one.epoch, one.step) == (2, 0)


class Stateless(keras.callbacks.Callback):
    """Has nothing to save."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Any) -> None:
        """Take nothing."""


class Shows(Stateless):
    """Show pictures of single records, as people do, in the middle of an epoch."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        super().__init__()
        self.dataset = dataset

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            assert len(list(self.dataset.unbatch().take(20))) == 20
            assert len(list(self.dataset.take(2))) == 2


@saves_weights
def test_callback_reading_batches_keeps_training_order(tmp_path: Path) -> None:
    one = made()
    resume = ResumeCallback(one, tmp_path, save_freq=3)
    dataset = one.dataset.map(with_ids)
    assert fit(resume, dataset, 2, callbacks=[Shows(one.dataset)]) == flat(0, 1)
    assert (one.epoch, one.step) == (2, 0)


class Compares(Stateless):
    """Compare what the loader counts as trained with what the pipeline delivered."""

    def __init__(self, one: TensorFlowLoader, delivered: list[int]) -> None:
        super().__init__()
        self.one, self.delivered = one, delivered

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self.one.epoch * 8 + self.one.step <= len(self.delivered)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert (self.one.epoch, self.one.step) == (epoch + 1, 0)
        assert len(self.delivered) == 8 * (epoch + 1)


@pytest.mark.parametrize(
    "at_once", [3, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 8))]
)
@saves_weights
def test_fit_position_never_exceeds_delivered_batches(tmp_path: Path, at_once: int) -> None:
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
    resume = ResumeCallback(one, tmp_path, save_freq=2)
    dataset = one.dataset.prefetch(4).map(noting)
    resume.fit(model, dataset, epochs=2, callbacks=[Compares(one, delivered)], verbose=0)
    assert model.seen() == flat(0, 1)


@saves_weights
def test_fit_raises_decode_error_of_record(tmp_path: Path) -> None:

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise OSError("cannot read this")
        return numbers(sample)

    one = loader(packed(RECORDS), sampler(), decode=decode)
    with pytest.raises(DecodeError, match=r"record 40 .*cannot read this"):
        ResumeCallback(one, tmp_path).fit(Trained(), with_ids, verbose=0)
