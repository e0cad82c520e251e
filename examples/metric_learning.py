"""Learn embeddings from a folder of images with P×K batches, K growing, in both frameworks.

You train a network that puts images of one class close together: faces, products, speakers. The
triplet loss needs several images of each class in every batch, every class as often as the others,
and more images of a class later in the training. The folder is indexed as it is:

    python metric_learning.py
"""

from __future__ import annotations

import argparse
import os
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import keras
import numpy as np
import tensorflow as tf
import torch
from digits import SEED, write_images

from twinfeed import (
    DecodeImage,
    ExactOnceBatchSampler,
    Feed,
    FromFolder,
    Index,
    NumpyLoader,
    PKBatchSampler,
    TensorFlowLoader,
    TorchLoader,
    build_index,
    split,
)

MARGIN, RATE = 0.2, 1e-3
as_gray = DecodeImage(mode="L")


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Give the pixels as 64 numbers between 0 and 1."""
    return {"pixels": as_gray(sample)["image"].ravel().astype(np.float32) / 255}


def feeds(index: Index, options: argparse.Namespace) -> tuple[Feed, Feed]:
    """Return what is trained on, and what is embedded to evaluate: images that no training saw."""
    training, held_out = split(index.keys(), fraction=0.4, seed=SEED)
    batches = PKBatchSampler(
        index.labels,
        records=training,
        p=options.p,
        k={0: 2, options.grows: 3},
        batches_per_epoch=options.steps,
        seed=SEED,
    )
    once = ExactOnceBatchSampler(len(index), batch_size=128, records=held_out)
    return Feed(index, batches, decode=decode), Feed(index, once, decode=decode)


def with_torch(training: Feed, held_out: Feed) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Train in PyTorch; return the records drawn, and the embeddings before and after."""
    torch.manual_seed(SEED)
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
    )
    optimiser = torch.optim.Adam(network.parameters(), RATE)

    def embed() -> np.ndarray:
        with torch.no_grad(), TorchLoader(held_out, device="cpu") as loader:
            return np.concatenate([network(batch["pixels"]) for batch in loader])

    before, met = embed(), []
    for batch in TorchLoader(training, device="cpu"):
        points = torch.nn.functional.normalize(network(batch["pixels"]))
        far = 2 - 2 * points @ points.T
        same = batch["label"][:, None] == batch["label"]
        hardest = (far * same).amax(1) - (far + 4 * same).amin(1)
        optimiser.zero_grad()
        torch.relu(hardest + MARGIN).mean().backward()
        optimiser.step()
        met.append(batch["id"].numpy())
    return met, before, embed()


def with_tensorflow(
    training: Feed, held_out: Feed
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Train in TensorFlow; return the records drawn, and the embeddings before and after."""
    keras.utils.set_random_seed(SEED)
    network = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(128, "relu"), keras.layers.Dense(32)]
    )
    optimiser = keras.optimizers.Adam(RATE)

    @tf.function(reduce_retracing=True)
    def step(pixels: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            points = tf.math.l2_normalize(network(pixels), axis=1)
            far = 2 - 2 * tf.matmul(points, points, transpose_b=True)
            same = tf.cast(labels[:, None] == labels, tf.float32)
            hardest = tf.reduce_max(far * same, 1) - tf.reduce_min(far + 4 * same, 1)
            loss = tf.reduce_mean(tf.nn.relu(hardest + MARGIN))
        variables = network.trainable_variables
        optimiser.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def embed() -> np.ndarray:
        return np.concatenate([network(batch["pixels"]) for batch in TensorFlowLoader(held_out)])

    before, met = embed(), []
    for batch in TensorFlowLoader(training):
        step(batch["pixels"], batch["label"])
        met.append(batch["id"].numpy())
    return met, before, embed()


def recall_at_1(points: np.ndarray, labels: np.ndarray) -> float:
    """Return for how many images the nearest other image is of the same class."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    near = points @ points.T
    np.fill_diagonal(near, -1)
    return float((labels[near.argmax(1)] == labels).mean())


def main() -> None:
    """Train in both frameworks, and evaluate before and after."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("metric-data"))
    parser.add_argument("--p", type=int, default=8, help="classes in a batch")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--grows", type=int, default=500, help="the step from which K is 3")
    options = parser.parse_args()
    write_images(options.out / "images")
    index = build_index(options.out / "images", options.out / "images.index", label=FromFolder())
    training, held_out = feeds(index, options)
    labels = index.labels[np.concatenate([batch["id"] for batch in NumpyLoader(held_out)])]

    sums = []
    for name, train in (("PyTorch", with_torch), ("TensorFlow", with_tensorflow)):
        met, before, after = train(training, held_out)
        sums.append(zlib.crc32(np.concatenate(met).tobytes()))
        print(
            f"{name}: batches of {len(met[0])}, then of {len(met[-1])} images; "
            f"recall@1 on {len(labels)} others {recall_at_1(before, labels):.1%} before, "
            f"{recall_at_1(after, labels):.1%} after"
        )
    print("the same batches" if len(set(sums)) == 1 else "OTHER batches")


if __name__ == "__main__":
    main()
