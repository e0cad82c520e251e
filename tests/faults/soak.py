"""Trainings that are killed, broken off, peeked at and resumed, against a plain loop.

    PYTHONPATH=tests python tests/faults/soak.py --seconds 3600
    PYTHONPATH=tests python tests/faults/soak.py --memory

Each route trains in a child process, which notes every batch that its training step receives, and
saves as its framework does. The parent kills the child at a random moment and starts it again. The
child goes on at its last save, with another number of ranks and workers, and drops the notes after
that save. In the end the notes must be the batches of a plain loop: nothing lost, nothing twice.

Each training has another stream: epochs of 3 to 50 batches, at random, by shard, mixed or P×K, with
weights or K that change, and records that are replaced, from a random step on.

With `--memory`, each route trains for long without a kill, and its memory must not grow.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from support.inside import replace_file

from twinfeed.loaders import Feed, Index, NumpyLoader, open_index, pack, shuffled
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    MixtureSampler,
    PKBatchSampler,
    RandomSampler,
    Sampler,
    SubsetSampler,
    replaced,
)

RECORDS, CLASSES, BATCH, EVERY = 400, 20, 8, 4
AHEAD = min(8, os.cpu_count() or 8)
KINDS = ("random", "shards", "mixture", "pk")


@dataclass(frozen=True)
class Case:
    """What a training draws, for how long, and how it is interrupted."""

    route: str
    steps: int
    epochs: int
    kind: str
    change: int
    """The training step from which weights, or K, are others."""
    replaced: dict[int, dict[int, list[int]]]
    workers: int
    """Of routes that may not change the number of workers."""
    pause: float
    """Seconds of a training step, at most."""

    @classmethod
    def at_random(cls, route: str, total: int = 70, pause: float = 0.005) -> Case:
        """Return the case of one training."""
        kinds = {"choose": KINDS[1:], "ordered": KINDS[:3]}.get(route, KINDS)
        kind = random.choice(kinds)
        steps = random.randint(3, 50)
        if route == "choose" and kind == "shards":
            steps = RECORDS // BATCH  # a dataset for each segment of all records
        epochs = max(2, total // steps)
        change = random.randrange(1, steps * epochs)
        case = cls(route, steps, epochs, kind, change, {}, random.randrange(3), pause)
        if kind in ("random", "pk") and random.random() < 0.7:
            ids = range(0, RECORDS, CLASSES) if kind == "pk" else range(steps * BATCH)
            bad, *goods = random.sample(ids, 3)  # of one class
            return replace(case, replaced={random.randrange(case.total): {bad: goods}})
        return case

    @property
    def total(self) -> int:
        """All steps of the training."""
        return self.steps * self.epochs

    def feed(self, index: Index) -> Feed:
        """Return what a training is fed."""
        stream: BatchStream
        if self.kind == "pk":
            labels, k = np.arange(RECORDS) % CLASSES, {0: 2, self.change: 4}
            stream = PKBatchSampler(labels, p=4, k=k, seed=1, batches_per_epoch=self.steps)
        else:
            count = self.steps * BATCH
            first = RandomSampler(count, seed=1)
            order: Sampler = SubsetSampler(range(count), of=RECORDS, order=first)
            if self.kind == "shards":  # datasets of a feed are segments of a shard-aware shuffle
                order = shuffled(index, seed=1, records=None if count == RECORDS else range(count))
            if self.kind == "mixture":
                parts = [RandomSampler(100, seed=1), RandomSampler(RECORDS - 100, seed=2)]
                weights = {0: [3, 1], self.change: [1, 1]}
                order = MixtureSampler(parts, weights=weights, num_samples=count, seed=3)
            stream = BatchSampler(order, batch_size=BATCH)
        return Feed(index, replaced(stream, self.replaced) if self.replaced else stream)


class Notes:
    """The ids of every batch that a training has received, in a file that survives a kill."""

    def __init__(self, folder: Path, case: Case, step: int) -> None:
        path = folder / "notes"
        lines = path.read_text().splitlines(keepends=True)[:step] if path.exists() else []
        assert len(lines) == step, f"the save is of step {step}, and {len(lines)} were received"
        replace_file(path, "".join(lines).encode(), "notes", bool)
        self._file, self._pause = path.open("a"), case.pause

    def add(self, ids: Any) -> None:
        """Note a batch, and take a moment, as a training step does."""
        self._file.write(json.dumps([int(one) for one in ids]) + "\n")
        self._file.flush()
        time.sleep(random.random() * self._pause)


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
    case: Case,
    loaders: list[Any],
    over: Callable[[Any], Iterator[Any]] = iter,
    look: Callable[[], Any] | None = None,
    save: Callable[[Path], Any] = JsonSave,
) -> None:
    """Train on all ranks by a loop that saves, breaks off, names its epochs and looks at batches.

    All at random. The ranks take a step after each other.
    """
    saves = save(folder)
    state = saves.read()
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    first = loaders[0]
    notes = Notes(folder, case, first.epoch * case.steps + first.step)
    while first.epoch < case.epochs:
        # A look at the last batches of an epoch is a pass, as the page on TensorFlow says: one is
        # taken, three are prefetched, and TensorFlow maps as many more as there are processors.
        if look is not None and first.step < case.steps - 4 - AHEAD and random.random() < 0.5:
            next(iter(look()))
        if first.step == 0 and random.random() < 0.3:
            for loader in loaders:
                loader.set_epoch(first.epoch)
        stop = random.choice([None, None, None, random.randrange(1, case.steps)])
        passes = [over(loader) for loader in loaders]
        for number, batches in enumerate(zip(*passes, strict=True), 1):
            notes.add(np.concatenate([np.asarray(batch["id"]) for batch in batches]))
            states = [loader.state_dict() for loader in loaders]
            assert all(state == states[0] for state in states), states
            done = first.epoch * case.steps + first.step
            if done % EVERY == 0:
                saves.write(states[0], done)
            if number == stop:
                break
    for loader in loaders:
        getattr(loader, "close", bool)()
    saves.close()


def feeds_of(case: Case, index: Index) -> list[Feed]:
    """Return the feed of each rank, of a random number of ranks."""
    feed, world_size = case.feed(index), random.choice([1, 1, 2, 4])
    return [feed.shard(rank, world_size) for rank in range(world_size)]


def numpy_route(folder: Path, index: Index, case: Case) -> None:
    threads, prefetch = random.randrange(3), random.randrange(4)
    options = {"prefetch": prefetch, "threads": threads if prefetch else 0}
    loop(folder, case, [NumpyLoader(feed, **options) for feed in feeds_of(case, index)])


def torch_route(folder: Path, index: Index, case: Case) -> None:
    from twinfeed.loaders.torch import TorchLoader

    loaders = [TorchLoader(feed) for feed in feeds_of(case, index)]
    loop(
        folder,
        case,
        loaders,
        look=lambda: TorchLoader(loaders[0].feed).dataloader(),
        save=TorchSave,
    )


def workers_route(folder: Path, index: Index, case: Case) -> None:
    from twinfeed.loaders.torch import TorchLoader

    options = {"num_workers": random.randint(1, 3), "persistent_workers": random.random() < 0.7}
    feeds = feeds_of(case, index)[:2]
    feeds = feeds if len(feeds) == feeds[0].sampler.world_size else [case.feed(index)]
    loop(folder, case, [TorchLoader(feed, **options) for feed in feeds], save=TorchSave)


def stateful_route(folder: Path, index: Index, case: Case) -> None:
    """torchdata's loader over all batches of the feed, which has the position itself."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from twinfeed.loaders.torch import RecordDataset, RequestSampler

    feed = case.feed(index)
    requests = RequestSampler(feed)
    loader = StatefulDataLoader(
        RecordDataset(feed), batch_sampler=requests, collate_fn=dict, num_workers=case.workers
    )
    saves = TorchSave(folder)
    saved = saves.read()
    done = 0
    if saved is not None:
        done = saved["step"]
        loader.load_state_dict(saved["torchdata"])
    notes = Notes(folder, case, done)
    while done < case.total:
        for batch in loader:
            notes.add(batch["id"])
            done += 1
            if done % EVERY == 0:
                saves.write({"step": done, "torchdata": loader.state_dict()}, done)


def ordered_route(folder: Path, index: Index, case: Case) -> None:
    """A host that reads in sequence, with its own count of steps."""
    from torch.utils.data import DataLoader

    from twinfeed.loaders.torch import ordered

    saves = JsonSave(folder)
    done = (saves.read() or {"step": 0})["step"]
    notes, feed = Notes(folder, case, done), case.feed(index)
    if done == case.total:
        return
    data = ordered(feed, start=done * BATCH, epochs=case.epochs)
    for batch in DataLoader(data, BATCH, num_workers=random.randrange(3)):
        notes.add(batch["id"])
        done += 1
        if done % EVERY == 0:
            saves.write({"step": done}, done)


def jax_route(folder: Path, index: Index, case: Case) -> None:
    from twinfeed.loaders.jax import JaxLoader

    loop(folder, case, [JaxLoader(case.feed(index))], save=OrbaxSave)


def tensorflow_route(folder: Path, index: Index, case: Case) -> None:
    from twinfeed.loaders.tensorflow import TensorFlowLoader, choose, source_datasets

    if case.route == "choose":
        feed = case.feed(index)
        loaders: list[Any] = [choose(feed.sampler, source_datasets(feed))]
    else:
        loaders = [TensorFlowLoader(feed) for feed in feeds_of(case, index)]
    made = {
        id(loader): loader.dataset.map(lambda batch: {"id": batch["id"]}).prefetch(3)
        for loader in loaders
    }

    def over(loader: Any) -> Iterator[Any]:
        return iter(loader) if random.random() < 0.5 else loader.track(made[id(loader)])

    loop(folder, case, loaders, over, lambda: made[id(loaders[0])])


def keras_route(folder: Path, index: Index, case: Case) -> None:
    import keras
    import tensorflow as tf

    from twinfeed.loaders.keras import ResumeCallback
    from twinfeed.loaders.tensorflow import TensorFlowLoader

    loader = TensorFlowLoader(case.feed(index))
    resume = ResumeCallback(loader, folder / "saves", save_freq=EVERY, order="unchecked")
    noted: list[Notes] = []

    class Model(keras.Model):  # type: ignore[misc]
        """A model that notes what it is trained on."""

        def train_step(self, data: Any) -> Any:
            ids, _ = data
            if not noted:
                noted.append(Notes(folder, case, loader.epoch * case.steps + loader.step))
            noted[0].add(ids.numpy()[:, 0])
            return super().train_step((tf.cast(ids, tf.float32) / RECORDS, data[1]))

    def arrange(batch: dict[str, tf.Tensor]) -> Any:
        return batch["id"][:, None], tf.ones_like(batch["id"], tf.float32)[:, None]

    inputs = keras.Input([1])
    model = Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    if case.route == "keras fit":
        resume.fit(model, arrange, epochs=case.epochs, verbose=0)
    else:
        resume.restore(model)
        if loader.epoch < case.epochs:
            dataset = loader.dataset.map(arrange).prefetch(2)
            model.fit(
                dataset,
                initial_epoch=loader.epoch,
                epochs=case.epochs,
                callbacks=[resume],
                verbose=0,
            )


def lightning_route(folder: Path, index: Index, case: Case) -> None:
    import logging

    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    from twinfeed.loaders.torch import TorchLoader

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = TorchLoader(case.feed(index), device="cpu")
    noted: list[Notes] = []

    class Module(lightning.LightningModule):
        """A module that notes what it is trained on."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            if not noted:
                noted.append(Notes(folder, case, self.global_step))
            noted[0].add(batch["id"].tolist())
            return self.weight * 2

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Saver(ModelCheckpoint):
        """Do not save at the end of an epoch, where Lightning miscounts: docs/trainers.md."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step % case.steps:
                super().on_train_batch_end(trainer, *args)

    saves = folder / "saves"
    saver = Saver(saves, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=case.epochs,
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


def accelerate_route(folder: Path, index: Index, case: Case) -> None:
    from accelerate import Accelerator

    from twinfeed.loaders.torch import TorchLoader

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(TorchLoader(case.feed(index), device="cpu"))
    loop(folder, case, [loader])


ROUTES: dict[str, Callable[[Path, Index, Case], None]] = {
    "numpy": numpy_route,
    "torch": torch_route,
    "torch workers": workers_route,
    "stateful": stateful_route,
    "ordered": ordered_route,
    "jax": jax_route,
    "tensorflow": tensorflow_route,
    "choose": tensorflow_route,
    "keras fit": keras_route,
    "keras callback": keras_route,
    "lightning": lightning_route,
    "accelerate": accelerate_route,
}


def be(case: Case, folder: Path) -> None:
    """Train as a child, which leads a session of its own and its workers."""
    os.setsid()
    ROUTES[case.route](folder, open_index(folder.parent / "data.index"), case)


def train(case: Case, folder: Path, kills: int) -> tuple[int, list[int]]:
    """Train to the end, through some kills; return how many there were, and the memory at times.

    A child is a fork of a process that has imported the frameworks and done nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorflow", "torch"])
    notes, killed, used = folder / "notes", 0, []
    while True:
        before = notes.stat().st_mtime_ns if notes.exists() else 0
        child = context.Process(target=be, args=(case, folder))
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
        while not kills and child.is_alive():
            if notes.exists() and notes.stat().st_mtime_ns != before:
                used.append(memory_of(child.pid))
            child.join(timeout=0.5)
        child.join(timeout=300)
        if child.exitcode == 0:
            return killed, used
        assert child.exitcode == -signal.SIGKILL, f"{case} ended with {child.exitcode}"


def memory_of(session: int) -> int:
    """Return the bytes of memory of a child and its workers; shared pages are divided."""
    total = 0
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError, StopIteration):
            if os.getsid(int(process.name)) == session:
                lines = (process / "smaps_rollup").read_text().splitlines()
                pss = next(line for line in lines if line.startswith("Pss:"))
                total += int(pss.split()[1]) << 10
    return total


def check(case: Case, index: Index, folder: Path) -> None:
    """Compare what a training has received with the batches of a plain loop."""
    received = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    sampler = case.feed(index).sampler
    plain = [
        ids.tolist()
        for epoch in range(case.epochs)
        for ids in sampler.batches(epoch, 0, case.steps)
    ]
    assert received == plain, f"{case}, {folder}: other batches than a plain loop"


def main() -> None:
    """Soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--memory", action="store_true", help="train for long, without a kill")
    options = parser.parse_args()
    random.seed(options.seed)
    end, trainings, kills = time.monotonic() + options.seconds, 0, 0
    with tempfile.TemporaryDirectory() as place:
        index = pack([{"word": b"%d" % n} for n in range(RECORDS)], place)["data"]
        if options.memory:
            for route in options.routes:
                folder = Path(place, route)
                folder.mkdir()
                steps = 800 if route == "stateful" else 5000  # its workers start anew each epoch
                case = Case.at_random(route, total=steps, pause=0)
                _, used = train(case, folder, 0)
                check(case, index, folder)
                early, late = (max(part) >> 20 for part in np.array_split(used, 2))
                print(f"{route}: {case.total} steps, at most {early} MiB, then {late}", flush=True)
            return
        for number, route in enumerate(options.routes * 10**6):
            folder = Path(place, str(number))
            folder.mkdir()
            case = Case.at_random(route)
            kills += train(case, folder, random.randrange(1, 5))[0]
            check(case, index, folder)
            trainings += 1
            print(f"{case}: as a plain loop, after {kills} kills in all", flush=True)
            if time.monotonic() > end and trainings >= len(options.routes):
                break
    print(f"{trainings} trainings through {kills} kills: nothing lost, nothing twice")


if __name__ == "__main__":
    main()
