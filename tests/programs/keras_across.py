"""Runs of `fit`, killed and resumed, each printed as JSON; KERAS_BACKEND is set before.

`python keras_across.py FOLDER FRAMEWORK NAME STEPS …` trains from the loader of
the framework in each run. A run dies after its number of steps, and never of 0. A run of PyTorch or
TensorFlow that is named "whole" evaluates too, and tries batches that are refused. Each run is a
process of its own, forked from a process that has only imported all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from support.own_backend import BOXES, Box

from twinfeed.loaders import BACKENDS, Feed, open_index
from twinfeed.loaders.keras import ResumeCallback
from twinfeed.samplers import BatchSampler, BatchStream, ExactOnceBatchSampler, RandomSampler

EPOCHS, RECORDS = 2, 20
LOADERS = BACKENDS | {"boxes": BOXES}


def loader(framework: str, folder: Path, sampler: BatchStream | None = None) -> Any:
    sampler = sampler or BatchSampler(RandomSampler(RECORDS, seed=5), batch_size=4)
    backend = LOADERS[framework]
    make = getattr(import_module(backend.module), backend.loader)
    return make(Feed(open_index(folder / "data.index"), sampler), **backend.options)


def pairs(batch: dict[str, Any]) -> tuple[Any, Any]:
    """Give a column as input and target, in arrays of the loader's framework."""
    part = batch["part"]
    part = (part.held if isinstance(part, Box) else part)[:, None]
    return part, part


def model() -> keras.Model:
    """Return a compiled model, built in its first step."""
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    if keras.backend.backend() == "torch":  # whose dropout has no state that Keras could save
        del layers[1]
    network = keras.Sequential(layers)
    network.compile("adam", "mse", metrics=["mae"])
    return network


def arranged(loader: Any) -> Any:
    """Give the batches of a loader to a method of Keras."""
    return loader.dataloader(pairs) if hasattr(loader, "dataloader") else loader.dataset.map(pairs)


def evaluates(framework: str, folder: Path) -> None:
    """Predict twice on an evaluation: each pass has every record once, in stored order."""
    network = keras.Sequential([keras.Input([1]), keras.layers.Rescaling(RECORDS)])
    evaluation = arranged(loader(framework, folder, ExactOnceBatchSampler(RECORDS, batch_size=7)))
    for _ in range(2):
        ids = network.predict(evaluation, verbose=0)
        assert np.rint(ids[:, 0]).tolist() == list(range(RECORDS))


def refuses(framework: str, folder: Path) -> None:
    """Refuse the batches of another loader, and those whose order is not the loader's."""
    others = arranged(loader(framework, folder))
    words = "must come from the loader, but fit got others"
    if framework == "tensorflow":
        words = "is not made of this loader's dataset only"
    wrong = [(ValueError, words, lambda batches: others)]
    if framework == "torch":
        from accelerate import skip_first_batches

        words = "give the trainer the TorchLoader itself"
        wrong.append((TypeError, words, skip_first_batches))  # type: ignore[arg-type]
    else:
        words = "has the operator Shuffle, so the loader's position"
        wrong.append((ValueError, words, lambda batches: batches.shuffle(2)))
    for number, (error, words, change) in enumerate(wrong):
        one = loader(framework, folder)
        resume = ResumeCallback(one, folder / f"{framework}-refused-{number}")
        with pytest.raises(error, match=words):
            resume.fit(model(), change(arranged(one)), verbose=0)


def train(framework: str, folder: Path, name: str, steps: int) -> None:
    """Train, and die after this number of steps."""

    class Kill(keras.callbacks.Callback):  # type: ignore[misc]
        get_state, set_state = dict, len
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == steps:
                os.kill(os.getpid(), signal.SIGKILL)

    keras.utils.set_random_seed(1)
    network = model()
    saves = folder / f"{framework}-{name}"
    resume = ResumeCallback(loader(framework, folder), saves, save_freq=2)
    history = resume.fit(network, pairs, epochs=EPOCHS, verbose=0, callbacks=[Kill()])
    print(json.dumps([history.history, [each.tolist() for each in network.get_weights()]]))
    if name == "whole" and framework in ("torch", "tensorflow"):
        evaluates(framework, folder)
        refuses(framework, folder)


def compile_little(folder: Path) -> None:
    """Have JAX compile each function once for all runs, and spend little on it."""
    jax = import_module("jax")
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def main(folder: Path, *runs: str) -> None:
    """Train in forks, one after the other; print how each ended."""
    if keras.backend.backend() == "jax":
        compile_little(folder / "compiled")
    import_module("tensorflow")  # as Keras does for a seed, on any backend
    for framework in set(runs[::3]):
        import_module(LOADERS[framework].module)
    for framework, name, steps in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        child = os.fork()
        if not child:
            train(framework, folder, name, int(steps))
            return
        print(framework, name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
