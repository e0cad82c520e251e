"""A run of Keras's `fit` that is killed anywhere and resumed ends as a run without a stop."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from support.tensorflow_feeds import CLASSES, RECORDS, loader, numbers, packed

from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler

# Keras 3.15 converts its variables in a way that numpy 2 warns of when it saves weights.
pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Keras's CSVLogger does not close its file where a run is killed.
    pytest.mark.filterwarnings("ignore:.*log.csv:pytest.PytestUnraisableExceptionWarning"),
]

Callbacks = Callable[[Path], list[Any]]


def made(stream: BatchStream | None = None) -> TensorFlowLoader:
    stream = stream or BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=12)
    return loader(packed(RECORDS), stream, decode=numbers)


def pairs(batch: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    return batch["x"], batch["label"]


def model(optimizer: Any = None, *, built: bool = True, **options: Any) -> keras.Model:
    keras.utils.clear_session()  # else layers have other names in each model
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(CLASSES)]
    network = keras.Sequential([keras.Input([5]), *layers] if built else layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or keras.optimizers.Adam(0.1)
    network.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False, **options)
    return network


class Told(keras.callbacks.Callback):
    """A user's callback with `get_state` and `set_state`."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


class Kill(Told):
    """End a run, as Ctrl-C does, in the `count`th call of a method."""

    def __init__(self, method: str, count: int) -> None:
        super().__init__()
        self.left = count
        setattr(self, method, self.end)

    def end(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def kills() -> list[Kill]:
    """Before the first save, within epochs, while evaluating, before saves at the end of epochs."""
    return [
        Kill("on_train_batch_end", 2),
        Kill("on_train_batch_begin", 8),
        Kill("on_test_batch_begin", 2),
        Kill("on_epoch_end", 1),
        Kill("on_train_batch_end", 6),
        Kill("on_epoch_end", 1),
        Kill("on_train_end", 1),
    ]


def run(
    folder: Path, callbacks: Callbacks, network: keras.Model, epochs: int = 3, **options: Any
) -> Any:
    """What a script does, from its first line to its last."""
    evaluation = made(ExactOnceBatchSampler(RECORDS, batch_size=32)).dataset.map(pairs)
    resume = ResumeCallback(made(), folder / "saves", save_freq=3)
    return resume.fit(
        network,
        pairs,
        epochs=epochs,
        callbacks=callbacks(folder),
        validation_data=evaluation,
        verbose=0,
        **options,
    )


def chain(
    folder: Path, callbacks: Callbacks, create: Callable[[], keras.Model], kills: list[Kill]
) -> Any:
    """Run a script again and again, killed elsewhere each time, until the run has ended."""
    for kill in kills:
        with suppress(KeyboardInterrupt):
            run(folder, lambda out, kill=kill: [*callbacks(out), kill], create())  # type: ignore[misc]
            break
    network = create()
    return network, run(folder, callbacks, network)


def variables(network: keras.Model) -> list[np.ndarray]:
    every = [*network.variables, *network.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(one)) for one in every]


def files(folder: Path) -> dict[str, Any]:
    """The content of each file; of HDF5 the arrays, as equal arrays may lie at other places.

    Of a CSV the different rows: a killed run may have written the row of an epoch that comes again.
    """
    return {path.name: content(path) for path in folder.iterdir() if path.is_file()}


def content(path: Path) -> Any:
    if path.suffix == ".csv":
        return list(dict.fromkeys(path.read_bytes().splitlines()))
    if path.suffix != ".h5":
        return path.read_bytes()
    arrays: dict[str, bytes] = {}

    def note(name: str, one: Any) -> None:
        if isinstance(one, h5py.Dataset):
            arrays[name] = one[()].tobytes()

    with h5py.File(path) as file:
        file.visititems(note)
    return arrays


def same(network: keras.Model, other: keras.Model) -> None:
    for mine, theirs in zip(variables(network), variables(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def best(folder: Path) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(
            folder / "best.weights.h5", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.ModelCheckpoint(
            folder / "{epoch}-{batch}.weights.h5", save_freq=5, save_weights_only=True
        ),
        keras.callbacks.CSVLogger(folder / "log.csv", append=True),
        keras.callbacks.ReduceLROnPlateau(
            monitor="loss", patience=1, min_delta=1, cooldown=1, factor=0.5
        ),
    ]


class Warmup(Told):
    """Change the learning rate at each batch, by what the callback counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_state(self) -> dict[str, Any]:
        return {"count": np.int64(self.count)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) + 0.001


def scheduled(folder: Path) -> list[Any]:
    """Change the rate by epoch and by batch, and stop after two epochs."""
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        Warmup(),
        keras.callbacks.EarlyStopping(
            monitor="loss", patience=1, min_delta=9, restore_best_weights=True
        ),
    ]


class Decay(Told):
    """Lower the learning rate at each batch, from the rate at the beginning of the epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.base = float(self.model.optimizer.learning_rate)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = self.base * 0.9 ** (batch + 1)


def decaying(folder: Path) -> list[Any]:
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 2), Decay()]


def averaged(folder: Path) -> list[Any]:
    return [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
    ]


def moving() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.8)


def evaluated_averaged(folder: Path) -> list[Any]:
    return [keras.callbacks.SwapEMAWeights()]


@pytest.mark.parametrize(
    ("callbacks", "optimizer", "eager"),
    [
        (best, None, True),
        pytest.param(best, None, False, marks=pytest.mark.long),
        pytest.param(scheduled, None, True, marks=pytest.mark.long),
        pytest.param(averaged, moving, True, marks=pytest.mark.long),
        pytest.param(decaying, None, True, marks=pytest.mark.long),
        pytest.param(evaluated_averaged, moving, True, marks=pytest.mark.long),
    ],
)
def test_fit_killed_anywhere_and_resumed_equals_uninterrupted_fit(
    tmp_path: Path, callbacks: Callbacks, optimizer: Any, eager: bool
) -> None:
    """Weights, optimizer, random states, history and files are the same, bit by bit.

    What trains in a graph is killed at all places, and the others at every second place.
    """

    def create() -> keras.Model:
        return model(optimizer and optimizer(), run_eagerly=eager)

    whole = create()
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    expected = run(tmp_path / "whole", callbacks, whole)
    resumed, history = chain(
        tmp_path / "cut", callbacks, create, kills()[1::2] if eager else kills()
    )
    same(whole, resumed)
    assert history.history == expected.history
    assert history.epoch == expected.epoch
    assert files(tmp_path / "whole") == files(tmp_path / "cut")
    # Started again, the script trains nothing, and has the same model and history.
    again = create()
    history = run(
        tmp_path / "cut",
        lambda folder: [*callbacks(folder), Kill("on_train_batch_begin", 1)],
        again,
    )
    same(whole, again)
    assert history.history == expected.history
