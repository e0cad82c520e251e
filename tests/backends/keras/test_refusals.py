"""What a `ResumeCallback` is given in error: the message says what to give instead."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.keras_models import Interrupt, made, model, pairs
from support.refusals import Call, Refused, check_refused
from support.tensorflow_feeds import CLASSES, RECORDS, loader, numbers, packed, word

from twinfeed.loaders import DecodeError, NumpyLoader
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import (
    ExactOnceBatchSampler,
    StateMismatchError,
)

pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def fit(folder: Path, network: keras.Model | None = None, **options: Any) -> Any:
    return ResumeCallback(made(), folder).fit(network or model(), pairs, verbose=0, **options)


def as_arrays(batch: dict[str, Any]) -> tuple[Any, ...]:
    return batch["x"], np.asarray(batch["label"])


class Odd(keras.callbacks.Callback):
    """A callback whose state cannot be saved."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.get_state = lambda: {"odd": state}

    def set_state(self, state: dict[str, Any]) -> None:
        raise AssertionError


def map_of(loader: NumpyLoader) -> Iterator[Any]:
    yield from map(as_arrays, loader)


def on_torch() -> TorchLoader:
    return TorchLoader(made().feed)


@contextmanager
def unmoved(one: TensorFlowLoader, network: keras.Model | None = None) -> Iterator[None]:
    before = network and network.get_weights()
    try:
        yield
    finally:
        assert (one.epoch, one.step) == (0, 0)
        np.testing.assert_equal(network and network.get_weights(), before)


def given(
    arrange: Any = pairs,
    *,
    of: Callable[[Any], Any] | None = None,
    make: Callable[[], Any] = made,
    **options: Any,
) -> Call:
    """Return a `fit` of a new callback; `of` makes `arrange` of the loader."""

    def call(folder: Path) -> None:
        one = make()
        resume = ResumeCallback(one, folder / "new")
        assert repr(resume) == f"ResumeCallback({one!r}, {str(folder / 'new')!r})"
        with unmoved(one):
            resume.fit(model(), of(one) if of else arrange, **{"verbose": 0} | options)

    return call


def own(
    dataset: Callable[[tf.data.Dataset], Any],
    order: Any = "unchecked",
    at: str = "new",
    **options: Any,
) -> Call:
    """Return a `model.fit` of the user's on a dataset made of the loader's."""

    def call(folder: Path) -> None:
        one = made()
        resume = ResumeCallback(one, folder / at, order=order)
        data = dataset(one.dataset.map(pairs))
        with unmoved(one):
            model().fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[resume], **options)

    return call


def restored(network: Callable[[], keras.Model], seed: int = 1) -> Call:
    """Return a `restore` that moves neither the loader nor the model."""

    def call(folder: Path) -> None:
        one, other = made(seed), network()
        with unmoved(one, other):
            ResumeCallback(one, folder / "saved").restore(other)

    return call


def layers(*given: keras.layers.Layer, **options: Any) -> keras.Model:
    network = keras.Sequential([keras.Input([5]), *given])
    if options:
        network.compile(**options)
    return network


LOADER = r"as in TensorFlowLoader\(feed\), got a"
ARRANGE = r"from a batch to \(inputs, targets\), or .* got a"
MAP = r"map .* to \(inputs, targets\)"
UNSAVED = r"callbacks\['Odd'\]\['own'\]\['odd'\] cannot be saved, got .*: get_state must return"
OTHERS = "must come from the loader, but fit got others"
OPTIONS = ["batch_size", "initial_epoch", "sample_weight", "shuffle", "steps_per_epoch", "y"]
OPTIMIZERS: list[Callable[[], Any]] = [
    lambda: "sgd",
    lambda: keras.optimizers.Adam(amsgrad=True),
    lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)),
    lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
]

KERAS_2 = r"models of Keras 3, got tensorflow\S*Module: for Keras 2, call model.fit\(loader.dataset"


REFUSED: Refused = [
    (lambda path: ResumeCallback(made().feed, path), TypeError, LOADER),  # type: ignore[arg-type]
    (
        lambda path: ResumeCallback(made(), path, order="mine"),
        ValueError,
        "one of None, 'unchecked'",
    ),  # type: ignore[arg-type]
    (
        lambda path: ResumeCallback(made(), path, save_freq=0),
        ValueError,
        "save_freq must be at least 1",
    ),
    (lambda path: ResumeCallback(made(), ""), NotADirectoryError, "folder must be .*, got ''"),
    (lambda path: ResumeCallback(made(), __file__), NotADirectoryError, "folder for checkpoints"),
    (lambda path: fit(path, tf.Module()), TypeError, KERAS_2),  # type: ignore[arg-type]
    (given(epochs="3"), TypeError, "epochs must be an int"),
    *((given(**{name: 1}), ValueError, f"takes no {name}=: ") for name in OPTIONS),
    *(
        (given(wrong), TypeError, ARRANGE)
        for wrong in (np.ones([8, 5]), None, {"x": 1}, "x", ("x",), ("x", 1), ["x", "label"], ())
    ),
    (given(("x", "labels")), KeyError, "'labels'"),
    (given(of=lambda one: one), TypeError, ARRANGE),
    (given(of=lambda one: one.feed), TypeError, ARRANGE),
    (lambda path: fit(path, validation_data=made().feed), TypeError, MAP),
    (
        lambda path: ResumeCallback(one := made(), path).fit(
            model(), one.dataset.map(pairs), validation_data=on_torch()
        ),
        TypeError,
        "a loader if arrange is a function or names",
    ),
    *(
        (lambda path, make=make: model().fit(make()), AttributeError, r"fit\(model, \('x', 'y'\)\)")
        for make in (made, on_torch)
    ),
    (lambda path: np.asarray(made()), TypeError, "a TensorFlowLoader is not an array"),
    (given(callbacks=keras.callbacks.BackupAndRestore("x")), ValueError, "leave BackupAndRestore"),
    *(
        (
            lambda path, x=x: fit(path, callbacks=Odd(x)),
            TypeError,
            UNSAVED,
        )
        for x in ({1}, {1: 2}, np.array({}), np.array("x"), np.zeros(1, "f4,i4"))
    ),
    (given(of=lambda one: map_of(NumpyLoader(one.feed)), make=on_torch), ValueError, OTHERS),
    (
        given(of=lambda one: one.dataset.cache().map(pairs)),
        ValueError,
        "has the operator Cache.*order='unchecked'",
    ),
    (
        given(of=lambda one: one.dataset.map(pairs).repeat()),
        ValueError,
        "8 batches of an epoch",
    ),
    (given(of=lambda one: one.dataset.map(pairs).take(3)), ValueError, "8 batches of an epoch"),
    (own(lambda dataset: dataset.repeat(), steps_per_epoch=3), ValueError, "8 steps of .* got 3: "),
    (own(lambda dataset: dataset.take(3)), ValueError, "8 steps of .* got 3: "),
    (own(lambda dataset: dataset, initial_epoch=1), ValueError, "epoch 1, .* at epoch 0: give"),
    (own(lambda _: made().dataset.map(pairs)), ValueError, OTHERS),
    (
        own(lambda dataset: dataset, order=None),
        ValueError,
        r"resume\.fit\(model.* order='unchecked'",
    ),
    (own(lambda dataset: dataset, at="saved"), ValueError, "not restored.*another folder"),
    (
        restored(model, seed=2),
        StateMismatchError,
        r"(?s)seed: the state has 1, .*the checkpoint is",
    ),
    (restored(lambda: layers(keras.layers.Dense(7))), ValueError, "compiled before restore"),
    (
        restored(lambda: model("adam", keras.layers.Normalization())),
        ValueError,
        r"another model: it has \S+/kernel \(5, 7\) where this model has \S+/mean \(5,\): start",
    ),
    (restored(lambda: model(units=8)), ValueError, r"this model has \S+/kernel \(5, 8\): start"),
    (
        restored(lambda: layers(keras.layers.Dense(7, use_bias=False), optimizer="adam")),
        ValueError,
        r"it has \S+/bias \(7,\) where this model has optimizer Adam\(4 var",
    ),
    *(
        (restored(lambda other=other: model(other())), ValueError, r"it has optimizer Adam\(6 var")
        for other in OPTIMIZERS
    ),
    (
        restored(lambda: model("adam", keras.layers.Dropout(0.1))),
        ValueError,
        "it has random layers of 0 states where this model has random layers of 1 states",
    ),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the saves of a run."""
    folder = tmp_path_factory.mktemp("world")
    fit(folder / "saved")
    return folder


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_resume_callback_refuses_bad_arguments_and_writes_nothing(
    world: Path, call: Call, kind: type[Exception], word: str
) -> None:
    check_refused(world, call, kind, word)


def test_fit_options_that_change_nothing_are_taken(tmp_path: Path) -> None:
    assert len(fit(tmp_path, shuffle=False, steps_per_epoch=None).epoch) == 1


@pytest.mark.parametrize("make", [pytest.param(NumpyLoader, marks=pytest.mark.long), TorchLoader])
def test_other_loaders_train_to_equal_weights(tmp_path: Path, make: Any) -> None:
    """With weights of classes, a validation, and a model that is built in its first step."""
    once = loader(packed(RECORDS), ExactOnceBatchSampler(RECORDS, batch_size=16), decode=numbers)

    def trained(loader: Any, arrange: Any, validation: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        network = keras.Sequential([keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("adam", loss, run_eagerly=True)
        resume = ResumeCallback(loader, tmp_path / str(len(list(tmp_path.iterdir()))))
        weights = {number: 1.0 + number for number in range(CLASSES)}
        options = {"class_weight": weights, "validation_data": validation}
        losses = resume.fit(network, arrange, epochs=2, verbose=0, **options).history["val_loss"]
        assert (loader.epoch, loader.step) == (2, 0)
        return [losses, *(each.tolist() for each in network.get_weights())]

    wanted = trained(made(), pairs, once.dataset.map(pairs))
    assert trained(make(made().feed), as_arrays, make(once.feed)) == wanted
    assert trained(make(made().feed), ("x", "label"), once) == wanted


def test_fit_takes_dataset_of_loader(tmp_path: Path) -> None:
    one = made()
    ResumeCallback(one, tmp_path).fit(model(), one.dataset.map(pairs), verbose=0)


def test_missing_field_error_lists_fields_of_batch(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        ResumeCallback(made(), tmp_path).fit(model(), lambda batch: (batch["y"], batch["label"]))
    assert raised.value.__notes__[-1] == "the fields of a batch are id, label, x"
    with pytest.raises(KeyError) as raised:
        next(iter(TorchLoader(made().feed).dataloader(lambda batch: batch["y"])))
    assert raised.value.__notes__ == ["the fields of a batch are id, label, x"]


@pytest.mark.filterwarnings("error:a resumed")
def test_fit_takes_one_callback_none_or_list_with_resume_callback(tmp_path: Path) -> None:
    resume = ResumeCallback(made(), tmp_path)
    best = keras.callbacks.EarlyStopping("loss", patience=9)
    given: Any
    for epochs, given in enumerate((best, None, [resume, best], resume), start=1):
        history = resume.fit(model(), pairs, epochs=epochs, callbacks=given, verbose=0)
        assert len(history.epoch) == epochs
    assert (resume.loader.epoch, resume.loader.step) == (4, 0)


def test_continued_run_does_not_report_early_stopping(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EarlyStopping has ended it, and is patient now."""

    def run(patience: int) -> str:
        stop = keras.callbacks.EarlyStopping("none", patience=patience, mode="min", verbose=1)
        stop.get_monitor_value = lambda logs: 1.0
        fit(tmp_path, epochs=5, callbacks=[stop])
        return capsys.readouterr().out

    assert "early stopping" in run(patience=1)
    assert "early stopping" not in run(patience=9)


def test_decode_error_in_validation_names_cause(tmp_path: Path) -> None:
    def breaks(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise RuntimeError("cannot be read")
        return numbers(sample)

    once = ExactOnceBatchSampler(RECORDS, batch_size=16)
    validation = loader(packed(RECORDS), once, decode=breaks).dataset.map(pairs)
    with pytest.raises(DecodeError, match="cannot be read"):
        fit(tmp_path, validation_data=validation)


def test_pass_after_interrupted_fit_advances_position(tmp_path: Path) -> None:
    ours = made()
    resume = ResumeCallback(ours, tmp_path)
    with pytest.warns(UserWarning, match="Interrupt"), pytest.raises(KeyboardInterrupt):
        resume.fit(model(), pairs, epochs=2, callbacks=[Interrupt(after=2)], verbose=0)
    assert (ours.epoch, ours.step) == (0, 1)
    assert len(list(ours.dataset)) == len(ours) - 1
    assert (ours.epoch, ours.step) == (1, 0)


class Numbers(keras.callbacks.Callback):
    """Note the numbers of the batches, and hold nothing that a resumed run lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.noted.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.noted.append(("end", batch))

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.filterwarnings("ignore:a resumed run cannot restore")
def test_callbacks_get_batch_numbers_of_whole_epoch(tmp_path: Path) -> None:
    cut = ResumeCallback(made(), tmp_path, save_freq=2)
    with pytest.raises(KeyboardInterrupt):
        cut.fit(model(), pairs, epochs=1, callbacks=[Interrupt(after=4)], verbose=0)
    numbers = Numbers()
    resume = ResumeCallback(made(), tmp_path, save_freq=2)
    resume.fit(model(), pairs, epochs=1, callbacks=[numbers, Interrupt(after=99)], verbose=0)
    first = numbers.noted[0][1]
    assert first > 0
    rest = range(first, len(made()))
    assert numbers.noted == [(when, batch) for batch in rest for when in ("begin", "end")]
