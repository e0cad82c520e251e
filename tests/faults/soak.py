"""Trainings that are killed, broken off, peeked at and resumed, against a plain loop.

    PYTHONPATH=tests python tests/faults/soak.py --seconds 3600

Each route trains in a child process, which notes every batch that its training step receives, and
saves as its framework does. The parent kills the child at a random moment and starts it again. The
child goes on at its last save, and drops the notes after that save. In the end the notes must be
the batches of a plain loop: nothing lost, nothing twice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from support.inside import replace_file

from twinfeed.loaders import Feed, Index, NumpyLoader, open_index, pack, shuffled
from twinfeed.samplers import BatchSampler, RandomSampler

RECORDS, BATCH, EPOCHS, EVERY = 120, 8, 4, 4
STEPS = RECORDS // BATCH
AHEAD = min(8, os.cpu_count() or 8)


class Notes:
    """The ids of every batch that a training has received, in a file that survives a kill."""

    def __init__(self, folder: Path, step: int) -> None:
        path = folder / "notes"
        lines = path.read_text().splitlines(keepends=True)[:step] if path.exists() else []
        assert len(lines) == step, f"the save is of step {step}, and {len(lines)} were received"
        replace_file(path, "".join(lines).encode(), "notes", bool)
        self._file = path.open("a")

    def add(self, ids: Any) -> None:
        """Note a batch, and take a moment, as a training step does."""
        self._file.write(json.dumps([int(one) for one in ids]) + "\n")
        self._file.flush()
        time.sleep(random.random() / 200)


def feed_of(index: Index, route: str) -> Feed:
    """What a route is fed: datasets of a feed are segments of a shard-aware shuffle."""
    order = shuffled(index, seed=1) if "choose" in route else RandomSampler(RECORDS, seed=1)
    return Feed(index, BatchSampler(order, batch_size=BATCH))


class JsonSave:
    """A state in a file of JSON."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"

    def read(self) -> dict[str, Any] | None:
        return json.loads(self._file.read_text()) if self._file.exists() else None

    def write(self, state: dict[str, Any], _: int) -> None:
        replace_file(self._file, json.dumps(state).encode(), "a state", bool)

    def close(self) -> None:
        """Wait for nothing: the file is there."""


class TorchSave(JsonSave):
    """A state beside weights in a checkpoint of torch, written as docs/torch.md says."""

    def read(self) -> dict[str, Any] | None:
        import torch

        if not self._file.exists():
            return None
        saved = torch.load(self._file, weights_only=True)
        assert saved["weights"].eq(saved["loader"]["step"]).all()
        return dict(saved["loader"])

    def write(self, state: dict[str, Any], _: int) -> None:
        import torch

        new = self._file.with_suffix(".new")
        torch.save({"loader": state, "weights": torch.full([50_000], state["step"])}, new)
        os.replace(new, self._file)


class OrbaxSave:
    """A state beside weights, by a manager of orbax that writes behind the loop."""

    def __init__(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager((folder / "saves").resolve(), options=options)

    def read(self) -> dict[str, Any] | None:
        last = self._manager.latest_step()
        if last is None:
            return None
        kept = {"weights": self._args.StandardRestore(), "loader": self._args.JsonRestore()}
        saved = self._manager.restore(last, args=self._args.Composite(**kept))
        assert (saved["weights"] == saved["loader"]["step"]).all()
        return dict(saved["loader"])

    def write(self, state: dict[str, Any], done: int) -> None:
        kept = {
            "weights": self._args.StandardSave(np.full(50_000, state["step"])),
            "loader": self._args.JsonSave(state),
        }
        self._manager.save(done, args=self._args.Composite(**kept))

    def close(self) -> None:
        self._manager.close()


def loop(
    folder: Path,
    loader: Any,
    over: Callable[[], Iterator[Any]],
    look: Any = None,
    save: Callable[[Path], Any] = JsonSave,
) -> None:
    """Train by a loop that saves, breaks off, names its epochs and looks at batches at random."""
    saves = save(folder)
    state = saves.read()
    if state is not None:
        loader.load_state_dict(state)
    notes = Notes(folder, loader.epoch * STEPS + loader.step)
    while loader.epoch < EPOCHS:
        # A look at the last batches of an epoch is a pass, as the page on TensorFlow says: one is
        # taken, three are prefetched, and TensorFlow maps as many more as there are processors.
        if look is not None and loader.step < STEPS - 4 - AHEAD and random.random() < 0.5:
            next(iter(look()))
        if loader.step == 0 and random.random() < 0.5:
            loader.set_epoch(loader.epoch)
        stop = random.choice([None, None, random.randrange(1, STEPS)])
        for number, batch in enumerate(over(), 1):
            notes.add(
                batch["id"].tolist() if hasattr(batch["id"], "tolist") else batch["id"].numpy()
            )
            if loader.step % EVERY == 0:
                saves.write(loader.state_dict(), loader.epoch * STEPS + loader.step)
            if number == stop:
                break
    saves.close()


def numpy_route(folder: Path, index: Index) -> None:
    loader = NumpyLoader(feed_of(index, "numpy"), prefetch=3)
    loop(folder, loader, lambda: iter(loader))


def torch_route(folder: Path, index: Index, workers: int) -> None:
    from twinfeed.loaders.torch import TorchLoader

    loader = TorchLoader(
        feed_of(index, "torch"), num_workers=workers, persistent_workers=workers > 0
    )
    look = None if workers else lambda: TorchLoader(loader.feed).dataloader()
    loop(folder, loader, lambda: iter(loader), look, TorchSave)


def jax_route(folder: Path, index: Index) -> None:
    from twinfeed.loaders.jax import JaxLoader

    loader = JaxLoader(feed_of(index, "jax"))
    loop(folder, loader, lambda: iter(loader), save=OrbaxSave)


def tensorflow_route(folder: Path, index: Index, route: str) -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader, choose, source_datasets

    feed = feed_of(index, route)
    choosing = "choose" in route
    loader = choose(feed.sampler, source_datasets(feed)) if choosing else TensorFlowLoader(feed)
    made = loader.dataset.map(lambda batch: {"id": batch["id"]}).prefetch(3)

    def over() -> Iterator[Any]:
        return iter(loader) if random.random() < 0.5 else loader.track(made)

    loop(folder, loader, over, lambda: made)


def keras_route(folder: Path, index: Index, route: str) -> None:
    import keras
    import tensorflow as tf

    from twinfeed.loaders.keras import ResumeCallback
    from twinfeed.loaders.tensorflow import TensorFlowLoader

    loader = TensorFlowLoader(feed_of(index, route))
    resume = ResumeCallback(loader, folder / "saves", save_freq=EVERY, order="unchecked")
    noted: list[Notes] = []

    class Model(keras.Model):  # type: ignore[misc]
        """A model that notes what it is trained on."""

        def train_step(self, data: Any) -> Any:
            ids, _ = data
            if not noted:
                noted.append(Notes(folder, loader.epoch * STEPS + loader.step))
            noted[0].add(ids.numpy()[:, 0])
            return super().train_step((tf.cast(ids, tf.float32) / RECORDS, data[1]))

    def arrange(batch: dict[str, tf.Tensor]) -> Any:
        return batch["id"][:, None], tf.ones_like(batch["id"], tf.float32)[:, None]

    inputs = keras.Input([1])
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    if route == "keras fit":
        resume.fit(model, arrange, epochs=EPOCHS, verbose=0)
    else:
        resume.restore(model)
        if loader.epoch < EPOCHS:
            dataset = loader.dataset.map(arrange).prefetch(2)
            model.fit(
                dataset, initial_epoch=loader.epoch, epochs=EPOCHS, callbacks=[resume], verbose=0
            )


def lightning_route(folder: Path, index: Index) -> None:
    import logging

    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from twinfeed.loaders.torch import TorchLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = TorchLoader(feed_of(index, "lightning"), device="cpu")
    noted: list[Notes] = []

    class Module(lightning.LightningModule):
        """A module that notes what it is trained on."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            if not noted:
                noted.append(Notes(folder, self.global_step))
            noted[0].add(batch["id"].tolist())
            return self.weight * 2

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    saves = folder / "saves"
    saver = ModelCheckpoint(saves, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for last in sorted(saves.glob("*.ckpt"), key=lambda path: -int(path.stem[5:])):
        try:
            torch.load(last, weights_only=True)
        except (EOFError, RuntimeError, OSError):  # killed while Lightning wrote it
            last.unlink()
            continue
        trainer.fit(Module(), loader, ckpt_path=last, weights_only=True)
        return
    trainer.fit(Module(), loader)


def accelerate_route(folder: Path, index: Index) -> None:
    from accelerate import Accelerator

    from twinfeed.loaders.torch import TorchLoader

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(TorchLoader(feed_of(index, "accelerate"), device="cpu"))
    loop(folder, loader, lambda: iter(loader))


ROUTES: dict[str, Callable[[Path, Index], None]] = {
    "numpy": numpy_route,
    "torch": lambda folder, index: torch_route(folder, index, 0),
    "torch workers": lambda folder, index: torch_route(folder, index, 2),
    "jax": jax_route,
    "tensorflow": lambda folder, index: tensorflow_route(folder, index, "tensorflow"),
    "choose": lambda folder, index: tensorflow_route(folder, index, "choose"),
    "keras fit": lambda folder, index: keras_route(folder, index, "keras fit"),
    "keras callback": lambda folder, index: keras_route(folder, index, "keras callback"),
    "lightning": lightning_route,
    "accelerate": accelerate_route,
}


def be(route: str, folder: Path) -> None:
    """Train as a child, which leads a session of its own and its workers."""
    os.setsid()
    ROUTES[route](folder, open_index(folder.parent / "data.index"))


def train(route: str, folder: Path, kills: int) -> int:
    """Train to the end, through some kills; return how many there were.

    A child is a fork of a process that has imported the frameworks and done nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "torch"])
    notes, killed = folder / "notes", 0
    while True:
        before = notes.stat().st_mtime_ns if notes.exists() else 0
        child = context.Process(target=be, args=(route, folder))
        child.start()
        assert child.pid is not None
        while child.is_alive() and killed < kills:
            if notes.exists() and notes.stat().st_mtime_ns != before:
                time.sleep(random.random() * 0.4)
                with suppress(ProcessLookupError):  # the training has ended meanwhile
                    os.killpg(child.pid, signal.SIGKILL)
                    killed += 1
                break
            time.sleep(0.01)
        child.join(timeout=300)
        if child.exitcode == 0:
            return killed
        assert child.exitcode == -signal.SIGKILL, f"{route} ended with {child.exitcode}"


def check(route: str, index: Index, folder: Path) -> None:
    """Compare what a training has received with the batches of a plain loop."""
    received = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    sampler = feed_of(index, route).sampler
    plain = [ids.tolist() for epoch in range(EPOCHS) for ids in sampler.batches(epoch, 0, STEPS)]
    assert received == plain, f"{route}, {folder}: other batches than a plain loop"


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    options = parser.parse_args()
    random.seed(options.seed)
    end, trainings, kills = time.monotonic() + options.seconds, 0, 0
    with tempfile.TemporaryDirectory() as place:
        index = pack([{"word": b"%d" % n} for n in range(RECORDS)], place)["data"]
        for number, route in enumerate(options.routes * 10**6):
            folder = Path(place, str(number))
            folder.mkdir()
            kills += train(route, folder, random.randrange(1, 5))
            check(route, index, folder)
            trainings += 1
            print(f"{route}: as a plain loop, after {kills} kills in all", flush=True)
            if time.monotonic() > end and trainings >= len(options.routes):
                break
    print(f"{trainings} trainings through {kills} kills: nothing lost, nothing twice")


if __name__ == "__main__":
    main()
