"""Pack real images, train on P×K batches and evaluate exactly once, on both frameworks.

The images are scikit-learn's handwritten digits, written out as a folder of PNG files, class per
folder. Both frameworks train the same small embedding network with a batch-hard triplet loss, over
the same shards, from one seed. Everything lands in `quickstart-data/`; the exit status is non-zero
if the two did not receive the same records and the same bytes, batch by batch.

    python examples/quickstart.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tqdm import tqdm

from twinfeed import (
    DecodeImage,
    ExactOnceBatchSampler,
    Feed,
    Index,
    Loader,
    PKBatchSampler,
    pack,
)

SEED = 7
CLASSES, PER_CLASS, LATER = 8, 2, 3  # P, K, and K from step `GROWS` on
EPOCHS, STEPS, GROWS = 4, 100, 200
EMBEDDING, MARGIN, RATE = 32, 0.2, 1e-3

Log = list[tuple[int, bytes]]


def write_images(folder: Path) -> None:
    """Write the 1,797 digits as `folder/<class>/<number>.png`."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(path)


_decode = DecodeImage(mode="L")


def decode(sample: dict[str, Any]) -> dict[str, Any]:
    """Give the network its pixels, and keep the encoded bytes to compare what was received."""
    pixels = _decode(sample)["image"].astype(np.float32) / 255
    return {"image": pixels.ravel(), "encoded": sample["image"]}


def training_feed(index: Index) -> Feed:
    """Draw 8 classes with 2 images each, with 3 images each from step 200 on."""
    k = {0: PER_CLASS, GROWS: LATER}
    sampler = PKBatchSampler(index.labels, p=CLASSES, k=k, batches_per_epoch=STEPS, seed=SEED)
    return Feed(index, sampler, decode=decode)


def evaluation_feed(index: Index) -> Feed:
    """Meet each image exactly once."""
    return Feed(index, ExactOnceBatchSampler(len(index), batch_size=128), decode=decode)


def noted(log: Log, ids: Any, encoded: list[bytes]) -> None:
    """Write down which records a batch held, and a checksum of their bytes."""
    log.append((zlib.crc32(b"".join(encoded)), np.asarray(ids).tobytes()))


def train_torch(train: Index, evaluation: Index) -> tuple[Log, dict[str, np.ndarray]]:
    """Train in PyTorch; return what was received, and the embeddings of both sets."""
    import torch

    from twinfeed import TorchLoader

    torch.manual_seed(SEED)
    loader = TorchLoader(training_feed(train))
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, EMBEDDING)
    ).to(loader.device)
    optimiser = torch.optim.Adam(network.parameters(), RATE)
    log: Log = []
    with tqdm(total=EPOCHS * len(loader), desc="PyTorch   ", unit="batch") as bar:
        for _ in range(EPOCHS):
            for batch in loader:
                noted(log, batch["id"].cpu(), batch["encoded"])
                embedding = torch.nn.functional.normalize(network(batch["image"]))
                far = 2 - 2 * embedding @ embedding.T
                same = batch["label"][:, None] == batch["label"]
                hardest = (far * same).amax(1) - (far + 4 * same).amin(1)
                loss = torch.relu(hardest + MARGIN).mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
                bar.update()
    loader.close()

    def embed(index: Index) -> np.ndarray:
        with torch.no_grad(), TorchLoader(evaluation_feed(index)) as batches:
            parts = [torch.nn.functional.normalize(network(batch["image"])) for batch in batches]
            return torch.cat(parts).cpu().numpy()

    return log, {"train": embed(train), "eval": embed(evaluation)}


def train_tensorflow(train: Index, evaluation: Index) -> tuple[Log, dict[str, np.ndarray]]:
    """Train in TensorFlow; return what was received, and the embeddings of both sets."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's notes about this processor
    import keras
    import tensorflow as tf

    from twinfeed import TensorFlowLoader

    keras.utils.set_random_seed(SEED)
    loader = TensorFlowLoader(training_feed(train))
    network = keras.Sequential(
        [
            keras.Input([64]),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(EMBEDDING),
            keras.layers.UnitNormalization(),
        ]
    )
    optimiser = keras.optimizers.Adam(RATE)

    @tf.function(reduce_retracing=True)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            embedding = network(images, training=True)
            far = 2 - 2 * tf.matmul(embedding, embedding, transpose_b=True)
            same = tf.cast(labels[:, None] == labels, tf.float32)
            hardest = tf.reduce_max(far * same, 1) - tf.reduce_min(far + 4 * same, 1)
            loss = tf.reduce_mean(tf.nn.relu(hardest + MARGIN))
        variables = network.trainable_variables
        optimiser.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    log: Log = []
    with tqdm(total=EPOCHS * len(loader), desc="TensorFlow", unit="batch") as bar:
        for _ in range(EPOCHS):
            for batch in loader:
                noted(log, batch["id"], batch["encoded"].numpy().tolist())
                loss = step(batch["image"], batch["label"])
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()

    def embed(index: Index) -> np.ndarray:
        batches = TensorFlowLoader(evaluation_feed(index))
        return np.concatenate([network(batch["image"]).numpy() for batch in batches])

    return log, {"train": embed(train), "eval": embed(evaluation)}


def receive(loader: Loader) -> Log:
    """Take the training batches from a loader without training."""
    log: Log = []
    with loader:
        for _ in range(EPOCHS):
            for batch in loader:
                noted(log, batch["id"], list(np.asarray(batch["encoded"])))
    return log


def nearest_neighbour_accuracy(
    embeddings: dict[str, np.ndarray], train: Index, evaluation: Index
) -> float:
    """Classify each image of the evaluation set as its nearest neighbour in the training set."""
    nearest = np.argmax(embeddings["eval"] @ embeddings["train"].T, axis=1)
    return float(np.mean(train.labels[nearest] == evaluation.labels))


def draw(path: Path, train: Index, evaluation: Index, found: dict[str, np.ndarray]) -> None:
    """Draw one P×K batch, a row for each class, and both embeddings of the evaluation set."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from twinfeed import Reader

    ids = training_feed(train).sampler.batch(EPOCHS - 1, 0)
    with Reader(train) as reader:
        pixels = [
            _decode({"image": data})["image"] for data in reader.read(ids, ["image"])["image"]
        ]
    tiles = [np.pad(image, 1, constant_values=255) for image in pixels]
    sheet = np.block([tiles[row * LATER : (row + 1) * LATER] for row in range(CLASSES)])
    figure, (batch, *scatters) = plt.subplots(1, 3, figsize=(13, 5))
    batch.imshow(sheet, cmap="gray")
    batch.set_title(f"one batch: P={CLASSES} classes × K={LATER}")
    batch.set_xticks([])
    names = [f"class {train.labels[record]}" for record in ids[::LATER]]
    batch.set_yticks(np.arange(CLASSES) * 10 + 4.5, names)
    for axes, (name, embedding) in zip(scatters, found.items(), strict=True):
        centred = embedding - embedding.mean(0)
        plane = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
        axes.scatter(*plane.T, c=evaluation.labels, cmap="tab10", s=6)
        axes.set_title(f"{name}: the {len(evaluation)} evaluation images")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def packed_as(container: Any, out: Path) -> dict[str, Index]:
    """Pack the images, and split them into those to train with and those to evaluate with."""
    shutil.rmtree(out / container, ignore_errors=True)  # of an earlier run
    return pack(
        out / "images",
        out / container,
        container=container,
        split={"train": 1036, "eval": 761},
        shards=4,
        seed=SEED,
        progress=True,
    )


def logs_of_tar(train: Index) -> dict[str, Log]:
    """Receive the same stream from tar files, in both frameworks."""
    from twinfeed import TensorFlowLoader, TorchLoader

    feed = training_feed(train)
    torch_log = receive(TorchLoader(feed, device="cpu"))
    return {"PyTorch, tar": torch_log, "TensorFlow, tar": receive(TensorFlowLoader(feed))}


def compared(logs: dict[str, Log]) -> bool:
    """Compare every log with the first, say what was found, and return whether all are the same."""
    first = next(iter(logs.values()))
    for name, log in logs.items():
        found = "the same" if log == first else "OTHER"
        print(f"{name}: {found} record ids and bytes in {len(log)} batches")
    return all(log == first for log in logs.values())


def main() -> int:
    """Run the whole quickstart; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("quickstart-data"))
    out: Path = parser.parse_args().out
    started = time.monotonic()

    write_images(out / "images")
    packed = {container: packed_as(container, out) for container in ("tfrecord", "tar")}
    train, evaluation = packed["tfrecord"]["train"], packed["tfrecord"]["eval"]
    print(f"{train}\n{evaluation}\n{training_feed(train).sampler}")

    results = {
        "PyTorch": train_torch(train, evaluation),
        "TensorFlow": train_tensorflow(train, evaluation),
    }
    for name, (log, embeddings) in results.items():
        accuracy = nearest_neighbour_accuracy(embeddings, train, evaluation)
        print(
            f"{name}: {len(log)} training batches; nearest-neighbour accuracy on "
            f"{len(embeddings['eval'])} images, each met once: {accuracy:.1%}"
        )
    print("The data were the same; floating point and the initial weights were not.")
    logs = {f"{name}, TFRecord, while training": log for name, (log, _) in results.items()}
    same = compared(logs | logs_of_tar(packed["tar"]["train"]))
    draw(
        out / "quickstart.png",
        train,
        evaluation,
        {name: embeddings["eval"] for name, (_, embeddings) in results.items()},
    )
    print(f"picture: {out / 'quickstart.png'}; {time.monotonic() - started:.0f} s in all")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
