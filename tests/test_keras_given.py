"""What a `ResumeCallback` is given in error: the message says what to give instead."""

import re
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_help import Interrupt
from tensorflow_help import CLASSES, RECORDS, loader, numbers, packed, word

from twinfeed.loaders import DecodeError, NumpyLoader, pack
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.loaders.torch import TorchLoader
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, RandomSampler, SubsetSampler

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def made() -> TensorFlowLoader:
    stream = BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8)
    return loader(packed(RECORDS), stream, decode=numbers)


def pairs(batch: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    return batch["x"], batch["label"]


def model(*first: keras.layers.Layer, units: int = CLASSES) -> keras.Model:
    network = keras.Sequential([keras.Input([5]), *first, keras.layers.Dense(units)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile("adam", loss, run_eagerly=True)
    return network


def fit(folder: Path, network: keras.Model | None = None, **options: Any) -> Any:
    return ResumeCallback(made(), folder).fit(network or model(), pairs, verbose=0, **options)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"batch_size": 8}, r"no batch_size=: .* BatchSampler\(order, batch_size=32\)"),
        ({"initial_epoch": 1}, "no initial_epoch=: the last save says .*: leave it out"),
        ({"sample_weight": np.ones(8)}, r"\(inputs, targets, weights\)"),
        ({"shuffle": True}, r"no shuffle=: the feed's sampler shuffles"),
        ({"steps_per_epoch": 2}, "no steps_per_epoch=: .* batches_per_epoch="),
        ({"validation_split": 0.2}, r"split\(…\), and give validation_data="),
        ({"x": np.ones(8)}, "no x=: arrange makes"),
    ],
)
def test_an_option_of_the_loader_or_its_sampler_is_refused(
    tmp_path: Path, option: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        fit(tmp_path, **option)


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    assert len(fit(tmp_path, shuffle=False, steps_per_epoch=None).epoch) == 1


@pytest.mark.parametrize("make", [NumpyLoader, TorchLoader])
def test_other_loaders_train_the_same(tmp_path: Path, make: Any) -> None:
    """With weights of classes, and a model that is built in its first step."""

    def arrays(batch: dict[str, Any]) -> tuple[Any, ...]:
        return batch["x"], np.asarray(batch["label"])

    def trained(loader: Any, arrange: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        network = keras.Sequential([keras.layers.Dense(CLASSES)])
        network.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        resume = ResumeCallback(loader, tmp_path / type(loader).__name__)
        weights = {number: 1.0 + number for number in range(CLASSES)}
        resume.fit(network, arrange, epochs=2, verbose=0, class_weight=weights)
        assert (loader.epoch, loader.step) == (2, 0)
        return [each.tolist() for each in network.get_weights()]

    other = trained(make(made().feed), arrays)
    assert other == trained(made(), pairs)
    others = ((batch["x"], batch["label"]) for batch in NumpyLoader(made().feed))
    with pytest.raises(ValueError, match="must come from the loader, got others"):
        ResumeCallback(make(made().feed), tmp_path / "other").fit(model(), others, verbose=0)
    with pytest.raises(ValueError, match="outputs: give the last layer"):
        ResumeCallback(make(made().feed), tmp_path / "few").fit(model(units=2), arrays, verbose=0)


def test_a_feed_or_a_dataset_in_the_place_of_the_loader_is_refused(tmp_path: Path) -> None:
    one: Any
    for one in (made().feed, made().dataset):
        with pytest.raises(TypeError, match=r"as in TensorFlowLoader\(feed\), got a"):
            ResumeCallback(one, tmp_path)


def test_options_of_other_callbacks_are_refused_with_their_counterparts(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="ResumeCallback takes no save_freq=: every= is the number"):
        ResumeCallback(made(), tmp_path, save_freq=5)  # type: ignore[call-arg]


def test_validation_data_is_a_dataset(tmp_path: Path) -> None:
    feed = made().feed
    for one in (made(), TorchLoader(feed), feed):
        with pytest.raises(TypeError, match=r"give loader.dataset.map\(pairs\)"):
            fit(tmp_path, validation_data=one)


def test_whole_batches_as_validation_data_are_refused(tmp_path: Path) -> None:
    says = r"dataset of inputs and targets: give loader.dataset.map\(pairs\)"
    with pytest.raises(TypeError, match=says):
        fit(tmp_path, validation_data=made().dataset)


def test_images_that_are_not_decoded_are_refused(tmp_path: Path) -> None:
    """Strings are not: a model may have layers for them."""
    samples = [{"photo": b"\x89PNG\r\n\x1a\n", "word": b"to", "label": 0}]
    index = pack(samples, tmp_path / "photos")["data"]
    one = loader(index, BatchSampler(RandomSampler(1, seed=0), batch_size=1))
    says = r"field 'photo' holds the bytes of images: .* decode=DecodeImage\('photo', size="
    with pytest.raises(TypeError, match=says):
        ResumeCallback(one, tmp_path).fit(model(), lambda batch: (batch["photo"], batch["label"]))
    one = loader(index, BatchSampler(RandomSampler(1, seed=0), batch_size=1), fields=["word"])
    words = [keras.Input([1], dtype="string"), keras.layers.Hashing(9, output_mode="one_hot")]
    network = keras.Sequential([*words, keras.layers.Dense(1)])
    network.compile("sgd", "mse")
    ResumeCallback(one, tmp_path).fit(
        network, lambda batch: (batch["word"][:, None], batch["label"]), verbose=0
    )


def test_a_label_beyond_the_outputs_of_the_model_is_named(tmp_path: Path) -> None:
    """And is none where the targets are not the labels, or where no such record is drawn."""
    says = r"record \d+ \(.*\) has the label [2-6], and the model has 2 outputs: .* \(7\)"
    with pytest.raises(ValueError, match=says):
        fit(tmp_path, model(units=2))
    one = made()
    ResumeCallback(one, tmp_path / "halves").fit(
        model(units=2), lambda batch: (batch["x"], batch["label"] // 4), verbose=0
    )
    assert (one.epoch, one.step) == (1, 0)
    index = packed(RECORDS)
    some = SubsetSampler(np.flatnonzero(index.labels < 2), of=RECORDS)
    few = loader(index, BatchSampler(some, batch_size=8), decode=numbers)
    ResumeCallback(few, tmp_path / "few").fit(model(units=2), pairs, verbose=0)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["cat", "dog", "owl"], ""),
        (["cat", "dog"], ""),
        (["cat", "owl"], "class 1 is 'dog' in the training and 'owl' in validation_data: .* "),
        (["cat", "dog", "owl", "yak"], "class 3 is None in the training and 'yak' in .* "),
    ],
)
def test_other_class_numbers_in_the_validation_are_told(
    tmp_path: Path, names: list[str], says: str
) -> None:
    def of(name: str, classes: list[str]) -> TensorFlowLoader:
        samples = [{"word": word(n), "label": label} for n, label in enumerate(classes)]
        index = pack(samples, tmp_path / name)["data"]
        return loader(index, ExactOnceBatchSampler(len(index), batch_size=2), decode=numbers)

    one, other = of("train", ["cat", "dog", "owl"]), of("val", names)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        validation = other.dataset.map(pairs).prefetch(1)
        resume = ResumeCallback(one, tmp_path)
        resume.fit(model(), pairs, validation_data=validation, verbose=0)
    said = [str(each.message) for each in told if "validation_data" in str(each.message)]
    assert len(said) == bool(says)
    if says:
        assert re.match(f"{says}.*--classes {tmp_path}/train/data.index", said[0])


def test_epochs_are_a_number(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="epochs must be an int"):
        ResumeCallback(made(), tmp_path).fit(model(), pairs, epochs="3")  # type: ignore[arg-type]


def test_arrange_is_a_function_or_a_dataset(tmp_path: Path) -> None:
    one = made()
    for wrong in (np.ones([8, 5]), one, one.feed, None, [1], {"x": 1}):
        with pytest.raises(TypeError, match=r"makes \(inputs, targets\) of a batch .* got a"):
            ResumeCallback(one, tmp_path).fit(model(), wrong)
    ResumeCallback(one, tmp_path).fit(model(), one.dataset.map(pairs), verbose=0)


def test_a_field_that_batches_lack_is_told_from_those_they_have(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        ResumeCallback(made(), tmp_path).fit(model(), lambda batch: (batch["y"], batch["label"]))
    assert raised.value.__notes__[-1] == "the fields of a batch are id, label, x"
    with pytest.raises(KeyError) as raised:
        next(iter(TorchLoader(made().feed).dataloader(lambda batch: batch["y"])))
    assert raised.value.__notes__ == ["the fields of a batch are id, label, x"]


@pytest.mark.filterwarnings("error:a resumed")
def test_callbacks_may_be_one_or_none_or_hold_the_callback_itself(tmp_path: Path) -> None:
    resume = ResumeCallback(made(), tmp_path)
    best = keras.callbacks.EarlyStopping("loss", patience=9)
    given: Any
    for epochs, given in enumerate((best, None, [resume, best], resume), start=1):
        history = resume.fit(model(), pairs, epochs=epochs, callbacks=given, verbose=0)
        assert len(history.epoch) == epochs
    assert (resume.loader.epoch, resume.loader.step) == (4, 0)


@pytest.mark.parametrize(
    ("first", "units", "says"),
    [
        (
            keras.layers.Dense(5),
            CLASSES,
            r"this model 4, of which \S+/kernel \(5, 5\) is in the place of \S+/kernel",
        ),
        (keras.layers.Normalization(), CLASSES, r"this model 5, of which \S+/mean \(5,\) is in"),
        (None, CLASSES + 1, rf"this model 2, of which \S+/kernel \(5, {CLASSES + 1}\) is in the"),
    ],
)
def test_what_a_model_has_other_than_the_saved_one_is_named(
    tmp_path: Path, first: Any, units: int, says: str
) -> None:
    fit(tmp_path)
    with pytest.raises(ValueError, match=rf"is of another model: it has 2 weights, {says}"):
        fit(tmp_path, model(*filter(None, [first]), units=units))


def test_a_layer_that_a_model_lacks_is_named(tmp_path: Path) -> None:
    fit(tmp_path, model(keras.layers.Dense(CLASSES)))
    says = rf"of which nothing is in the place of \S+/kernel \({CLASSES}, {CLASSES}\)"
    with pytest.raises(ValueError, match=says):
        fit(tmp_path)


def test_random_layers_that_the_saved_model_lacks_are_told_once(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.warns(UserWarning, match="its random layers begin anew") as told:
        fit(tmp_path, model(keras.layers.Dropout(0.1)), epochs=2)
    assert sum("random layers" in str(one.message) for one in told) == 1


def test_a_run_that_goes_on_does_not_say_that_it_has_stopped(
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


def test_a_broken_record_in_the_validation_is_named(tmp_path: Path) -> None:
    def breaks(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["word"] == word(40):
            raise RuntimeError("cannot be read")
        return numbers(sample)

    once = ExactOnceBatchSampler(RECORDS, batch_size=16)
    validation = loader(packed(RECORDS), once, decode=breaks).dataset.map(pairs)
    with pytest.raises(DecodeError, match="cannot be read"):
        fit(tmp_path, validation_data=validation)


def test_a_pass_after_a_fit_that_failed_moves_the_position_itself(tmp_path: Path) -> None:
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


@pytest.mark.filterwarnings("ignore:a resumed run cannot tell")
def test_callbacks_hear_the_numbers_of_the_batches_of_the_whole_epoch(tmp_path: Path) -> None:
    cut = ResumeCallback(made(), tmp_path, every=2)
    with pytest.raises(KeyboardInterrupt):
        cut.fit(model(), pairs, epochs=1, callbacks=[Interrupt(after=4)], verbose=0)
    numbers = Numbers()
    resume = ResumeCallback(made(), tmp_path, every=2)
    resume.fit(model(), pairs, epochs=1, callbacks=[numbers, Interrupt(after=99)], verbose=0)
    first = numbers.noted[0][1]
    assert first > 0
    rest = range(first, len(made()))
    assert numbers.noted == [(when, batch) for batch in rest for when in ("begin", "end")]
