"""Datasets under Keras: the right batches in each epoch, and `fit` resumed at any step."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.keras_models import Interrupt, names, state_of
from support.tensorflow_feeds import CLASSES, RECORDS, ids_of, loader, numbers, packed

from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader, prefetch_to_device
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    RandomSampler,
)

# Keras 3.15 converts its variables in a way that numpy 2 warns of when it saves weights.
saves_weights = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def sampler(records: int = RECORDS, seed: int = 1) -> BatchStream:
    return BatchSampler(RandomSampler(records, seed=seed), batch_size=8)


def made(stream: BatchStream | None = None) -> TensorFlowLoader:
    stream = stream or sampler()
    return loader(packed(stream.num_records), stream, decode=numbers)


def pairs(batch: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    return batch["x"], batch["label"]


def model(**options: Any) -> keras.Model:
    """Make a model that runs eagerly: to trace its steps takes longer than to run them."""
    options = {"run_eagerly": True, **options}
    keras.utils.set_random_seed(1)
    network = keras.Sequential([keras.Input([5]), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **options)
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


def fit(network: keras.Model, dataset: Any, epochs: int, **options: Any) -> Any:
    return network.fit(dataset, epochs=epochs, verbose=0, shuffle=False, **options)


@pytest.mark.parametrize(
    ("warm", "records"), [(False, RECORDS), pytest.param(True, 9, marks=pytest.mark.long)]
)
def test_fit_trains_on_consecutive_epochs(warm: bool, records: int) -> None:
    one = made(sampler(records))
    dataset, seen = recording(one.dataset)
    options = tf.data.Options()
    options.experimental_warm_start = warm
    dataset = dataset.with_options(options)
    next(iter(dataset.take(1)))
    assert (one.epoch, len(seen)) == (0, 1)
    seen.clear()
    fit(model(), dataset, 3)
    assert seen == ids_of(sampler(records), 0, 1, 2)
    assert one.epoch == 3


def test_fit_over_device_prefetch_trains_on_consecutive_epochs() -> None:
    dataset, seen = recording(made().dataset)
    fit(model(), prefetch_to_device(dataset, device="/CPU:1"), 2)
    assert seen == ids_of(sampler(), 0, 1)


def test_fit_evaluate_and_predict_know_their_length(capsys: pytest.CaptureFixture[str]) -> None:
    network = model()
    network.fit(made().dataset.map(pairs), epochs=1, shuffle=False)
    evaluation = made(ExactOnceBatchSampler(RECORDS, batch_size=8)).dataset
    accuracy = network.evaluate(evaluation.map(pairs))[1]
    predicted = network.predict(evaluation.map(pairs))
    shown = capsys.readouterr().out
    assert shown.count("8/8") >= 3
    assert "1/8" in shown
    assert "Unknown" not in shown
    labels = np.arange(RECORDS) % CLASSES
    assert predicted.shape == (RECORDS, CLASSES)
    assert accuracy == pytest.approx((predicted.argmax(axis=1) == labels).mean())


class Places(keras.callbacks.Callback):
    """Note the loader's position after each batch."""

    def __init__(self, one: TensorFlowLoader) -> None:
        super().__init__()
        self.loader = one
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.loader.epoch * len(self.loader) + self.loader.step)


def saved(folder: Path) -> dict[str, Any]:
    """What the last save says of the loader."""
    state: dict[str, Any] = state_of(max(folder.iterdir()))["loader"]
    return state


def train(
    folder: Path, *callbacks: Any, one: TensorFlowLoader | None = None, **options: Any
) -> keras.Model:
    """Train three epochs by one call of fit, from wherever the last call ended."""
    one, network = one or made(), model(**options)
    resume = ResumeCallback(one, folder, save_freq=3, order="unchecked")
    resume.restore(network)
    fit(
        network,
        one.dataset.map(pairs),
        3,
        initial_epoch=one.epoch,
        callbacks=[resume, *callbacks],
    )
    return network


@saves_weights
@pytest.mark.parametrize(
    "after", [pytest.param(2, marks=pytest.mark.long), 11]
)  # resumed at (0, 0) and (1, 3)
def test_resumed_fit_equals_uninterrupted_fit(tmp_path: Path, after: int) -> None:
    whole = train(tmp_path / "whole", run_eagerly=False)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", Interrupt(after), run_eagerly=False)
    last = made()
    places = Places(last)
    resumed = train(tmp_path / "cut", places, one=last, run_eagerly=False)
    for mine, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        assert np.array_equal(mine, other)
    assert int(whole.optimizer.iterations.numpy()) == int(resumed.optimizer.iterations.numpy())
    assert places.seen == list(range({2: 1, 11: 12}[after], 25))
    assert (last.epoch, last.step) == (3, 0)
    last = [name[6:] for name in names(tmp_path / "cut")]
    assert last == ["-epoch2-step6", "-epoch3-step0"]


@saves_weights
def test_steps_per_execution_are_counted(tmp_path: Path) -> None:
    """Keras counts on to the end of the last execution."""
    one = made()
    assert len(one) % 5
    graph = {"run_eagerly": False, "steps_per_execution": 5}
    whole = train(tmp_path / "whole", one=one, **graph)
    state = saved(tmp_path / "whole")
    assert (state["epoch"], state["step"]) == (one.epoch, one.step) == (3, 0)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", Interrupt(1), **graph)
    resumed = train(tmp_path / "cut", **graph)
    for mine, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        assert np.array_equal(mine, other)


class StopEarly(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


@saves_weights
@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.long)])
def test_callback_may_stop_resumed_fit(tmp_path: Path, first: bool) -> None:
    one, network = made(), model()
    one.load_state_dict({**one.state_dict(), "step": 5})
    callbacks = [ResumeCallback(one, tmp_path, order="unchecked"), StopEarly()]
    fit(network, one.dataset.map(pairs), 3, callbacks=callbacks[:: -1 if first else 1])
    assert (one.epoch, one.step) == (1, 0)


@saves_weights
def test_two_epochs_over_evaluation_are_refused(tmp_path: Path) -> None:
    one = made(ExactOnceBatchSampler(RECORDS, batch_size=8))
    resume = ResumeCallback(one, tmp_path, order="unchecked")
    with pytest.raises(ValueError, match="ExactOnceBatchSampler never leaves its epoch"):
        fit(model(), one.dataset.map(pairs), 2, callbacks=[resume])


class Killed(keras.callbacks.Callback):
    """End `fit` in the third batch, as Ctrl-C does; `on_train_end` is not called."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise KeyboardInterrupt


@saves_weights
def test_pass_after_killed_fit_starts_at_first_untrained_batch(tmp_path: Path) -> None:
    one = made()
    callbacks = [ResumeCallback(one, tmp_path, order="unchecked"), Killed()]
    with pytest.raises(KeyboardInterrupt):
        fit(model(), one.dataset.map(pairs), 2, callbacks=callbacks)
    assert (one.epoch, one.step) == (0, 3)
    for expected in (ids_of(sampler(), 0)[3:], ids_of(sampler(), 1)):
        assert [batch["id"].numpy().tolist() for batch in one.dataset] == expected


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    """One for all tests: the reductions of a second strategy would have the keys of the first."""
    return tf.distribute.MirroredStrategy(["/CPU:0", "/CPU:1"])


@saves_weights
def test_fit_over_two_replicas_resumes_in_mid_epoch(
    tmp_path: Path, strategy: tf.distribute.Strategy
) -> None:
    """All its steps are run, resumed or not, and each replica gets its slice."""
    one = made()
    with strategy.scope():
        network = model(run_eagerly=False)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: one.dataset_for(context).map(pairs)
    )
    one.load_state_dict({**one.state_dict(), "step": 5})
    places = Places(one)
    fit(
        network,
        distributed,
        2,
        callbacks=[ResumeCallback(one, tmp_path, order="unchecked"), places],
    )
    assert places.seen == list(range(6, 17))


@saves_weights
@pytest.mark.parametrize(
    ("records", "ahead"), [pytest.param(9, 0, marks=pytest.mark.long), (17, 20)]
)
def test_epochs_drawn_ahead_completely_are_not_skipped(
    tmp_path: Path, strategy: tf.distribute.Strategy, records: int, ahead: int
) -> None:
    """Under a strategy `fit` looks at a batch first; the callback knows what was trained on."""
    one, seen = made(sampler(records)), []

    def loss(ids: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        note = tf.numpy_function(lambda ids: seen.extend(ids.ravel().tolist()), [ids], [])
        with tf.control_dependencies([note]):
            return tf.reduce_sum(tf.square(predicted))  # a mean over no record is no number

    with strategy.scope():
        network = keras.Sequential([keras.Input([5]), keras.layers.Dense(1)])
        network.compile("sgd", loss)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: (
            one.dataset_for(context).map(lambda batch: (batch["x"], batch["id"])).prefetch(ahead)
        )
    )
    fit(network, distributed, 3, callbacks=[ResumeCallback(one, tmp_path, order="unchecked")])
    assert (one.epoch, one.step) == (3, 0)
    assert sorted(seen) == sorted(n for ids in ids_of(sampler(records), 0, 1, 2) for n in ids)


@pytest.mark.long
@saves_weights
@pytest.mark.filterwarnings("ignore:a resumed run cannot restore:UserWarning")
def test_resume_callback_under_strategy_resumes_in_mid_epoch(
    tmp_path: Path, strategy: tf.distribute.Strategy
) -> None:
    """A run over two replicas that is stopped in mid-epoch ends as a run without a stop."""
    ended = []
    for folder, after in (("whole", 99), ("cut", 12), ("cut", 99)):
        with strategy.scope():
            network = model(run_eagerly=False)
        one = made()
        resume = ResumeCallback(one, tmp_path / folder, save_freq=3)
        with suppress(KeyboardInterrupt):
            history = resume.fit(network, pairs, epochs=2, verbose=0, callbacks=[Interrupt(after)])
            ended.append((network.get_weights(), history.history))
            assert (one.epoch, one.step) == (2, 0)
    assert ended[0][1] == ended[1][1]
    for mine, other in zip(ended[0][0], ended[1][0], strict=True):
        np.testing.assert_array_equal(mine, other)
