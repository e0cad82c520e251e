"""Train one model in TensorFlow, PyTorch and JAX, and say how far the losses part.

You say that frameworks agree, or do not, and a reader asks whether they had the same data. Here
all get the same records in the same order. One Keras model is trained on its three backends, and
by a loop of plain PyTorch, from the same initial weights. Beside it each framework shuffles for
itself: the difference is what one feed removes:

    python compare_frameworks.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from digits import SEED, decode, open_digits
from matplotlib.figure import Figure

from twinfeed import BatchSampler, Feed, Index, PKBatchSampler, RandomSampler, compare

BATCH, RATE = 32, 0.1


def feed_of(index: Index, steps: int) -> Feed:
    """Return the feed of all trainings: batches of 8 classes with 4 images each."""
    sampler = PKBatchSampler(index.labels, p=8, k=4, batches_per_epoch=steps, seed=SEED)
    return Feed(index, sampler, decode=decode)


def weights() -> list[np.ndarray]:
    """Return the initial weights of both layers, 64 to 64 and 64 to 10, and their biases."""
    random = np.random.default_rng(SEED)
    return [random.normal(0, 0.1, shape) for shape in [(64, 64), (64,), (64, 10), (10,)]]


def keras_step(backend: str) -> Callable:
    """Build the model in Keras, and return its training step."""
    os.environ["KERAS_BACKEND"] = backend
    import keras

    model = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
    )
    model.set_weights(weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss)
    return lambda batch: model.train_on_batch(batch["pixels"], batch["label"])


def torch_step() -> Callable:
    """Build the same model in plain PyTorch, and return its training step."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights(), strict=True):
            parameter.copy_(torch.from_numpy(value.T))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step(batch: dict) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch["pixels"]), batch["label"])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# The name of each training, the framework that its batches come in, and its step.
TRAININGS = [
    ("Keras on TensorFlow", "tensorflow", partial(keras_step, "tensorflow")),
    ("Keras on JAX", "jax", partial(keras_step, "jax")),
    ("Keras on PyTorch", "torch", partial(keras_step, "torch")),
    ("plain PyTorch", "torch", torch_step),
]


def own_shuffle(index: Index, backend: str) -> Iterator[dict]:
    """Yield batches without end, as each framework shuffles from the same seed."""
    once = BatchSampler(RandomSampler(len(index), seed=0), batch_size=len(index))
    whole = Feed(index, once, decode=decode)[0, 0]
    if backend == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(whole).shuffle(len(index), seed=SEED)
        yield from dataset.repeat().batch(BATCH)
    elif backend == "torch":
        import torch

        arrays = (torch.from_numpy(whole[name]) for name in ("pixels", "label"))
        seeded = torch.Generator().manual_seed(SEED)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*arrays), BATCH, shuffle=True, generator=seeded
        )
        while True:
            yield from ({"pixels": pixels, "label": label} for pixels, label in loader)
    else:
        import jax

        key = jax.random.key(SEED)
        while True:
            key, epoch = jax.random.split(key)
            order = np.asarray(jax.random.permutation(epoch, len(index)))
            for ids in np.split(order, range(BATCH, len(index), BATCH)):
                yield {name: whole[name][ids] for name in ("pixels", "label")}


def train_apart(backend: str, folder: Path, steps: int) -> list[list[float]]:
    """Train on the framework's own shuffle, and return the losses of its trainings."""
    index, _ = open_digits(folder)
    losses = []
    for step in [make_step() for _, name, make_step in TRAININGS if name == backend]:
        batches = zip(own_shuffle(index, backend), range(steps), strict=False)
        losses.append([float(step(batch)) for batch, _ in batches])
    return losses


def plot_losses(losses: dict[str, list]) -> Figure:
    """Draw the losses step by step, and below how far they are from the first training's."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    for (upper, lower), (way, found) in zip(grid.T, losses.items(), strict=True):
        upper.set_title(f"{way}: the loss of each step")
        lower.set_title(f"difference to {TRAININGS[0][0]}")
        for number, (name, _, _) in enumerate(TRAININGS):
            upper.plot(found[number], label=name, linewidth=0.8)
            apart = np.abs(np.subtract(found[number], found[0]))
            if number:
                lower.semilogy(np.maximum(apart, 1e-9), color=f"C{number}", linewidth=0.8)
        upper.legend()
        lower.set_xlabel("step")
    grid[0, 0].set_ylabel("loss")
    grid[1, 0].set_ylabel("difference of the losses")
    return figure


def main() -> None:
    """Compare what arrives and the losses, train beside it on own shuffles, and draw the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("comparison-data"))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    folder: Path = options.out
    index, _ = open_digits(folder)

    names, backends, steps = zip(*TRAININGS, strict=True)
    found = compare(feed_of(index, options.steps), backends=backends, steps=steps)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        work = partial(train_apart, folder=folder, steps=options.steps)
        apart = [*chain.from_iterable(pool.map(work, dict.fromkeys(backends)))]

    print("the same records and bytes" if found.ok else f"step {found.first} has OTHER bytes")
    print(f"{'losses differ at most by':24}{'one feed':>12}{'own shuffle':>14}")
    for name, one, own in zip(names, found.loss_differences, apart, strict=True):
        print(f"{name:24}{one:12.1g}{np.abs(np.subtract(own, apart[0])).max():14.1g}")
    losses = {"one feed": [run.losses for run in found.runs], "own shuffle": apart}
    plot_losses(losses).savefig(folder / "losses.png")
    print(f"picture: {folder / 'losses.png'}")


if __name__ == "__main__":
    main()
