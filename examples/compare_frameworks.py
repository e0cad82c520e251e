"""Compare a training in TensorFlow with the same one in PyTorch, step by step.

You say that two frameworks agree, or do not, and a reader asks whether they had the same data.
Here both get the same records in the same order, and one Keras model with the same initial weights
is trained by the TensorFlow and by the torch backend. Beside it each framework shuffles for itself:
the difference is what one feed removes:

    python compare_frameworks.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from digits import SEED, decode, open_digits
from matplotlib.figure import Figure

from twinfeed import BatchSampler, Feed, PKBatchSampler, RandomSampler, compare
from twinfeed.loaders import Index

BATCH, WAYS, BACKENDS = 32, ("one feed", "own shuffle"), ("tensorflow", "torch")


def feed_of(index: Index, steps: int) -> Feed:
    """Return the feed of both trainings: batches of 8 classes with 4 images each."""
    sampler = PKBatchSampler(index.labels, p=8, k=4, batches_per_epoch=steps, seed=SEED)
    return Feed(index, sampler, decode=decode)


def own_shuffle(index: Index, backend: str, steps: int):
    """Yield pixels and labels as each framework shuffles, from the same seed."""
    once = BatchSampler(RandomSampler(len(index), seed=0), batch_size=len(index))
    whole = Feed(index, once, decode=decode)[0, 0]
    arrays = whole["pixels"], whole["label"]
    if backend == "tensorflow":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(index), seed=SEED)
        yield from dataset.repeat().batch(BATCH).take(steps)
    else:
        import torch

        examples = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
        seeded = torch.Generator().manual_seed(SEED)
        loader = torch.utils.data.DataLoader(examples, BATCH, shuffle=True, generator=seeded)
        for _ in range(-(-steps // len(loader))):
            yield from loader


def train(backend: str, folder: Path, steps: int) -> None:
    """Train on each stream in one backend, and write the losses; a process of its own does this."""
    os.environ["KERAS_BACKEND"] = backend
    import keras

    index, _ = open_digits(folder)
    if backend == "tensorflow":
        from twinfeed.loaders.tensorflow import TensorFlowLoader as Loader
    else:
        from twinfeed.loaders.torch import TorchLoader as Loader
    with np.load(folder / "weights.npz") as saved:
        weights = [saved[name] for name in saved.files]
    one_feed = ((one["pixels"], one["label"]) for one in Loader(feed_of(index, steps)))
    losses = {}
    for way, batches in zip(WAYS, (one_feed, own_shuffle(index, backend, steps)), strict=True):
        model = keras.Sequential(
            [keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        model.set_weights(weights)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        step = zip(range(steps), batches, strict=False)
        losses[way] = [float(model.train_on_batch(*batch)) for _, batch in step]
    np.savez(folder / f"{backend}.npz", **losses)


def plot_losses(losses: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw the losses step by step, and below how far apart the two backends are."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    for (upper, lower), way in zip(grid.T, WAYS, strict=True):
        upper.set_title(f"{way}: the loss of each step")
        for backend, style in zip(BACKENDS, ("-", "--"), strict=True):
            upper.plot(losses[backend][way], style, label=backend)
        upper.legend()
        apart = np.abs(losses["torch"][way] - losses["tensorflow"][way])
        lower.semilogy(np.maximum(apart, 1e-9), color="C3", linewidth=0.8)
        lower.set_title(f"difference of the losses, {apart.max():.1g} at most")
        lower.set_xlabel("step")
    return figure


def main() -> None:
    """Compare what arrives, train in four ways, and draw the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("comparison-data"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--train", choices=BACKENDS, help="only train, in this backend")
    options = parser.parse_args()
    folder: Path = options.out
    if options.train:
        train(options.train, folder, options.steps)
        return

    index, _ = open_digits(folder)
    random = np.random.default_rng(SEED)
    shapes = [(64, 64), (64,), (64, 10), (10,)]
    np.savez(folder / "weights.npz", *[random.normal(0, 0.1, shape) for shape in shapes])
    for backend in BACKENDS:
        own = ["--out", str(folder), "--steps", str(options.steps), "--train", backend]
        subprocess.run([sys.executable, __file__, *own], check=True)
    losses = {backend: dict(np.load(folder / f"{backend}.npz")) for backend in BACKENDS}

    found = compare(feed_of(index, options.steps))
    lines = ["the same records and bytes" if found.equal else "OTHER records or bytes"]
    for way in WAYS:
        apart = np.abs(losses["torch"][way] - losses["tensorflow"][way])
        lines.append(
            f"{way}: losses differ by {apart[0]:.1g} at first, by {apart.max():.1g} at most"
        )
    plot_losses(losses).savefig(folder / "losses.png")
    print("\n".join(lines))
    print(f"picture: {folder / 'losses.png'}")


if __name__ == "__main__":
    main()
