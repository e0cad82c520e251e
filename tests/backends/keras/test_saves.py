"""The saves of Keras's `fit`: never half a save, never a bad save in the place of a good save."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs import keras_child
from support import PROGRAMS
from support.damage import CUTS, mutated
from support.keras_models import Interrupt, made, model, names, pairs, state_of
from support.programs import PYTHON, QUIET
from support.tensorflow_feeds import CLASSES, loader, numbers, packed

from twinfeed.loaders.keras import ResumeCallback, _checkpoints
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import PKBatchSampler, StateMismatchError

pytestmark = [
    pytest.mark.usefixtures("graphs_as_written"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def train(folder: Path, network: keras.Model, *callbacks: Any, **options: Any) -> TensorFlowLoader:
    """Train two epochs with `model.fit`."""
    one = made()
    resume = ResumeCallback(one, folder, order="unchecked", **options)
    resume.restore(network)
    network.fit(
        one.dataset.map(pairs),
        initial_epoch=one.epoch,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[*callbacks, resume],
    )
    return one


UNFINISHED = ".unfinished.weights.h5"


class Spoil(keras.callbacks.Callback):
    """Make a weight of the model no number, after some batches: as a step does that overflows."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.left = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if not self.left:
            kernel = self.model.trainable_variables[0]
            kernel.assign(kernel * np.nan)


def test_process_killed_while_saving_keeps_previous_save(tmp_path: Path) -> None:
    """The second write of weights is ended by SIGKILL, when a part of its file is on the disk."""
    child = PROGRAMS / "keras_child.py"
    command = [PYTHON, str(child), str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | QUIET
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        while process.poll() is None:
            whole = max(map(size, tmp_path.glob("0*.weights.h5")), default=0)
            if 1 << 20 < size(tmp_path / UNFINISHED) < 0.9 * whole:
                os.kill(pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL
    network, one = keras_child.run(tmp_path, train=False)
    assert (one.epoch, one.step) == (1, 0)
    assert int(network.optimizer.iterations.numpy()) == 8
    assert all(np.isfinite(part).all() and part.any() for part in network.get_weights())


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_save_is_synced_before_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine loses power, too: weights and state are synced, and then renamed."""
    resume = ResumeCallback(made(), tmp_path)
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def syncing(fd: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def renaming(source: Path, target: Path) -> None:
        done.append(f"{source.name} -> {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", renaming)
    resume.fit(model(), pairs, verbose=0)
    rename_first = f"{UNFINISHED} -> 000001-epoch1-step0.weights.h5"
    assert done == [UNFINISHED, rename_first, tmp_path.name]


def test_leftovers_of_killed_process_are_removed_and_two_saves_kept(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).write_bytes(b"half")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, model(), Interrupt(15), save_freq=2)
    assert names(tmp_path) == ["000006-epoch1-step4", "000007-epoch1-step6"]


def test_keras_loads_the_weights_of_a_save(tmp_path: Path) -> None:
    network, other = model(), model()
    ResumeCallback(made(), tmp_path).fit(network, pairs, verbose=0)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "000001-epoch1-step0.weights.h5")
    for mine, theirs in zip(network.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_position_is_saved_once(tmp_path: Path) -> None:
    """`save_freq` divides the epoch, so that its end is due twice.

    The save of an epoch's end has what the end of the epoch brings.
    """
    for save_freq in (8, "epoch"):
        resume = ResumeCallback(made(), tmp_path, save_freq=save_freq)  # type: ignore[arg-type]
        history = resume.fit(model(), pairs, epochs=2, verbose=0)
        resume.save()
        assert history.epoch == [0, 1]
        assert names(tmp_path) == ["000001-epoch1-step0", "000002-epoch2-step0"]
        state = state_of(tmp_path / "000002-epoch2-step0.weights.h5")
        assert state["callbacks"]["History"]["attributes"]["epoch"] == [0, 1]


def test_files_that_are_no_saves_are_kept(tmp_path: Path) -> None:
    """Folders, files and links of others, whatever their names."""
    saves = tmp_path / "saves"
    ResumeCallback(made(), saves).fit(model(), pairs, verbose=0)
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    (saves / "notes").mkdir()
    (saves / "0-epoch1-step0.weights.h5").mkdir()
    (saves / "00-epoch0-step2.weights.h5").write_text("mine")
    (saves / "000-epoch0-step2.weights.h5").symlink_to(*saves.glob("000001-*"))
    (saves / ".1-epoch0-step2.weights.h5").write_text("mine")
    others = {path: path.lstat().st_ino for path in saves.iterdir() if "00000" not in path.name}
    (saves / UNFINISHED).symlink_to(thesis)
    one = made()
    ResumeCallback(one, saves).fit(model(), pairs, epochs=3, verbose=0)
    assert one.epoch == 3
    assert len(others) == 5
    assert others == {path: path.lstat().st_ino for path in others}
    assert thesis.read_text() == "mine"


def test_damaged_save_raises_one_error_and_keeps_position(tmp_path: Path) -> None:
    """Any other bytes are found before they are parsed. The save before is restored without it."""
    one, network, draw = made(), model("adam", keras.layers.Dropout(0.5)), random.Random(0)
    ResumeCallback(made(), tmp_path).fit(network, pairs, epochs=2, verbose=0)
    last = max(tmp_path.iterdir())
    whole = last.read_bytes()
    for data in (mutated(whole, draw) for _ in range(60)):
        last.write_bytes(data)
        with pytest.raises(OSError, match=f"{last.name}: .* its checksum is wrong: delete the"):
            ResumeCallback(one, tmp_path).restore(network)
        assert (one.epoch, one.step) == (0, 0)
    for cut in CUTS.values():
        last.write_bytes(cut(whole))
        with pytest.raises(OSError, match=f"{last.name}: .* its checksum is wrong: delete the"):
            ResumeCallback(one, tmp_path).restore(network)
    last.unlink()
    assert ResumeCallback(one, tmp_path).restore(network)
    assert (one.epoch, one.step) == (1, 0)


def test_save_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(_checkpoints, "VERSION", 99)
        ResumeCallback(made(), tmp_path).fit(model(), pairs, verbose=0)
    with pytest.raises(
        ValueError, match=r"epoch1.* of version 99, .* version 5: .* another folder"
    ):
        ResumeCallback(made(), tmp_path).restore(model())


def test_arrays_that_numpy_lacks_are_saved_as_float32(tmp_path: Path) -> None:
    """The values of callbacks come back as they were, beside that."""
    arrays = [np.array(True), np.zeros([0, 3], ">i2"), np.array([1 + 2j])]

    class Keeps(keras.callbacks.Callback):
        got: Any = None

        def get_state(self) -> dict[str, Any]:
            numbers = (None, False, 3, np.uint8(4), 0.5, "a\0é")
            half = keras.ops.convert_to_numpy(keras.ops.ones([2], "bfloat16"))
            return {"arrays": arrays, "numbers": numbers, "bfloat16": half}

        def set_state(self, state: dict[str, Any]) -> None:
            self.got = state

    ResumeCallback(made(), tmp_path).fit(model(), pairs, callbacks=Keeps(), verbose=0)
    keeps = Keeps()
    ResumeCallback(made(), tmp_path).fit(model(), pairs, epochs=2, callbacks=keeps, verbose=0)
    assert keeps.got["numbers"] == [None, False, 3, 4, 0.5, "a\0é"]
    assert keeps.got["bfloat16"].dtype == np.float32
    for mine, theirs in zip(arrays, keeps.got["arrays"], strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:a resumed run cannot restore:UserWarning")
def test_k_schedule_changed_after_save_resumes(tmp_path: Path) -> None:
    """A schedule that differs only after the position is of the same stream."""

    def classes(k: Any) -> TensorFlowLoader:
        labels = np.arange(61) % CLASSES
        stream = PKBatchSampler(labels, p=2, k=k, seed=0, batches_per_epoch=10)
        return loader(packed(61), stream, decode=numbers)

    one = classes(2)
    resume = ResumeCallback(one, tmp_path, save_freq=1)
    with pytest.raises(KeyboardInterrupt):
        resume.fit(model(), pairs, callbacks=[Interrupt(7)], verbose=0)
    assert (one.epoch, one.step) == (0, 6)
    with pytest.raises(StateMismatchError, match="k from step 5: the state has"):
        ResumeCallback(classes({0: 2, 5: 3}), tmp_path).restore(model())
    one = classes({0: 2, 6: 3})
    resume = ResumeCallback(one, tmp_path)
    assert resume.restore(model())
    assert (one.epoch, one.step) == (0, 6)
    assert len(next(iter(one))["id"]) == 6


def test_nothing_is_saved_after_nan_loss(tmp_path: Path) -> None:
    """The epoch's loss is still a number at the step that spoils the weights."""
    with pytest.warns(RuntimeWarning, match="not finite at epoch 0, step 4.*000001-epoch0-step2"):
        train(tmp_path, model(), Spoil(4), save_freq=2)
    network, one = model(), made()
    assert ResumeCallback(one, tmp_path).restore(network)
    assert (one.epoch, one.step) == (0, 2)
    assert all(np.isfinite(part).all() for part in network.get_weights())


def test_nothing_is_saved_while_the_loss_is_infinite(tmp_path: Path) -> None:
    one, network = made(), model()

    def loss(targets: Any, outputs: Any) -> Any:
        return keras.ops.sum(outputs) * 0.0 + np.inf

    network.compile("sgd", loss, run_eagerly=True)
    resume = ResumeCallback(one, tmp_path)
    with pytest.warns(RuntimeWarning, match="the last checkpoint is None"):
        resume.fit(network, pairs, verbose=0)
    assert not list(tmp_path.iterdir())


def test_fit_again_goes_on_from_its_own_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Progress is shown as by `fit`."""
    resume = ResumeCallback(made(), tmp_path)
    resume.fit(model(), pairs, verbose=0)
    assert capsys.readouterr().out == ""
    assert resume.fit(model(), pairs, epochs=2, verbose=2).epoch == [0, 1]
    assert "8/8" in capsys.readouterr().out
    assert names(tmp_path) == ["000001-epoch1-step0", "000002-epoch2-step0"]


class Own(keras.callbacks.Callback):
    """A callback that keeps something, and cannot be asked."""


class OwnStopping(keras.callbacks.EarlyStopping):
    """One of Keras's, with something added that nobody knows."""


def test_callbacks_without_state_are_named_in_one_warning(tmp_path: Path) -> None:
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    resume = ResumeCallback(made(), tmp_path / "saves")
    others = [keras.callbacks.TerminateOnNaN(), logger, Own(), OwnStopping("loss")]
    with pytest.warns(
        UserWarning, match=r"cannot restore the states of Own, CSVLogger, Own 2, OwnSt"
    ) as warned:
        resume.fit(model(), pairs, callbacks=[Own(), *others])
    assert len([one for one in warned if "cannot restore the states" in str(one.message)]) == 1


class Leave(keras.callbacks.Callback):
    """Stop in mid-epoch, as before a time limit."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 4:
            self.model.stop_training = True

    def get_state(self) -> dict[str, Any]:
        return {}

    set_state = print


def test_run_stopped_by_callback_resumes_at_next_batch(tmp_path: Path) -> None:
    """It goes on with the next batch, as though the epoch had not been ended early."""
    whole, parts = model(), model()
    expected = ResumeCallback(made(), tmp_path / "whole").fit(whole, pairs, epochs=2, verbose=0)
    resume = ResumeCallback(made(), tmp_path / "parts")
    resume.fit(parts, pairs, epochs=2, verbose=0, callbacks=[Leave()])
    assert (resume.loader.epoch, resume.loader.step) == (0, 5)
    parts, resume = model(), ResumeCallback(made(), tmp_path / "parts")
    history = resume.fit(parts, pairs, epochs=2, verbose=0)
    assert history.history == expected.history
    for mine, theirs in zip(whole.get_weights(), parts.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_fit_prints_where_it_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ResumeCallback(made(), tmp_path).fit(model(), pairs, verbose=2, callbacks=[Leave()])
    assert "resuming" not in capsys.readouterr().out
    ResumeCallback(made(), tmp_path).fit(model(), pairs, verbose=2)
    assert capsys.readouterr().out.startswith(f"resuming {tmp_path} at epoch 0, step 5\n")
    ResumeCallback(made(), tmp_path).fit(model(), pairs, verbose=2)
    assert capsys.readouterr().out == f"{tmp_path}: already trained 1 of 1 epochs\n"


def test_more_epochs_resume_from_weights_before_averaging(tmp_path: Path) -> None:
    """At the end of `fit`, Keras puts the moving averages in the place of the weights."""

    def create() -> keras.Model:
        return model(keras.optimizers.SGD(0.5, momentum=0.9, use_ema=True, ema_momentum=0.5))

    whole = create()
    ResumeCallback(made(), tmp_path / "whole").fit(whole, pairs, epochs=3, verbose=0)
    for epochs in (2, 2, 3):
        network, one = create(), made()
        ResumeCallback(one, tmp_path / "parts").fit(network, pairs, epochs=epochs, verbose=0)
        assert (one.epoch, one.step) == (epochs, 0)
    for mine, theirs in zip(whole.get_weights(), network.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.long
def test_raised_patience_resumes_early_stopped_run(tmp_path: Path) -> None:
    for patience, trained in ((1, 2), (1, 2), (2, 3)):
        stopping = keras.callbacks.EarlyStopping("loss", patience=patience, min_delta=9)
        one = made()
        resume = ResumeCallback(one, tmp_path)
        history = resume.fit(model(), pairs, epochs=9, verbose=0, callbacks=[stopping])
        assert history.epoch == list(range(trained))
        assert (one.epoch, one.step) == (trained, 0)


def test_unbuilt_model_is_built_before_restore(tmp_path: Path) -> None:
    def create() -> keras.Model:
        keras.utils.set_random_seed(1)
        network = keras.Sequential([keras.layers.Dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("adam", loss, metrics=["accuracy"], run_eagerly=True)
        return network

    whole = create()
    expected = ResumeCallback(made(), tmp_path / "whole").fit(whole, pairs, epochs=2, verbose=0)

    class Ctrl(Interrupt):
        get_state, set_state = dict, print

    with pytest.raises(KeyboardInterrupt):
        ResumeCallback(made(), tmp_path / "cut", save_freq=3).fit(
            create(), pairs, epochs=2, verbose=0, callbacks=[Ctrl(13)]
        )
    network = create()
    history = ResumeCallback(made(), tmp_path / "cut").fit(network, pairs, epochs=2, verbose=0)
    assert history.history == expected.history
    for mine, theirs in zip(whole.get_weights(), network.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_fit_takes_inputs_targets_and_sample_weights(tmp_path: Path) -> None:
    def weighted(batch: dict[str, Any]) -> tuple[tf.Tensor, ...]:
        return *pairs(batch), tf.cast(batch["id"] % 2, tf.float32)

    one, other = model(), model()
    for folder, arrange, network in (("pairs", pairs, one), ("weighted", weighted, other)):
        ResumeCallback(made(), tmp_path / folder).fit(network, arrange, verbose=0)
    same = model()
    same.fit(made().dataset.map(weighted), verbose=0, shuffle=False)
    for mine, theirs, without in zip(
        other.get_weights(), same.get_weights(), one.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
        assert (mine != without).any()


def test_fit_trains_on_own_dataset_unchanged(tmp_path: Path) -> None:
    one, network, same = made(), model(), model()
    ResumeCallback(one, tmp_path / "hand").fit(network, one.dataset.map(pairs), verbose=0)
    ResumeCallback(made(), tmp_path / "fit").fit(same, pairs, verbose=0)
    assert (one.epoch, one.step) == (1, 0)
    for mine, theirs in zip(network.get_weights(), same.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
