"""Draw P×K batches from a file for each of very many classes, with 1,024 open files allowed.

The classic recipe opens a dataset for each class and lets `choose_from_datasets` pick. The set-up
grows with the classes, and each dataset that was drawn from holds its file open. An index and a
sampler need neither:

    python examples/many_classes.py --classes 100000
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from itertools import islice
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from twinfeed.loaders import Feed, build_index, open_index
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.formats.tfrecord import TFRecordWriter
from twinfeed.loaders.tensorflow import TensorFlowLoader
from twinfeed.samplers import PKBatchSampler

P, K, BATCHES, OPEN_FILES = 16, 4, 100, 1024


def write_classes(folder: Path, classes: int) -> None:
    """Write a TFRecord file for each class, with eight records each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(classes):
        with TFRecordWriter(folder / f"class-{number:06}.tfrecord") as writer:
            for record in range(8):
                writer.write(encode({"word": b"%d/%d" % (number, record), "label": number}))


def timed(dataset: tf.data.Dataset, began: float) -> str:
    """Say how long the set-up and the first batch took, and how many batches came in a second."""
    built = time.perf_counter()
    batches = iter(dataset)
    next(batches)
    first = time.perf_counter()
    count = sum(1 for _ in islice(batches, BATCHES))
    rate = count / (time.perf_counter() - first)
    return (
        f"set-up {built - began:.1f} s, first batch after {first - built:.1f} s, "
        f"then {rate:.0f} batches/s"
    )


def classic(files: list[str], sampler: PKBatchSampler) -> tf.data.Dataset:
    """Make one dataset for each class, and choose from them as the sampler does."""
    classes = [tf.data.TFRecordDataset(file).repeat() for file in files]
    choices = [sampler.batch(0, step) // 8 for step in range(len(sampler))]
    chosen = tf.data.Dataset.from_tensor_slices(choices).unbatch()
    return tf.data.Dataset.choose_from_datasets(classes, chosen).batch(P * K)


def main() -> None:
    """Compare both ways, the classic one with as many classes as it bears."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("classes-data"))
    parser.add_argument("--classes", type=int, default=20_000)
    options = parser.parse_args()
    folder: Path = options.out / str(options.classes)
    if not (folder / "all.index").exists():
        write_classes(folder, options.classes)
        build_index(str(folder / "class-*.tfrecord"), folder / "all.index", label="label")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))

    began = time.perf_counter()
    index = open_index(folder / "all.index")
    sampler = PKBatchSampler(index.labels, p=P, k=K, seed=0, batches_per_epoch=BATCHES + 1)
    found = timed(TensorFlowLoader(Feed(index, sampler)).dataset, began)
    print(f"index and sampler, {options.classes:,} classes: {found}")

    for classes in (500, 2000):
        if classes > options.classes:
            break
        files = [str(folder / f"class-{number:06}.tfrecord") for number in range(classes)]
        some = PKBatchSampler(
            index.labels[: classes * 8], p=P, k=K, seed=0, batches_per_epoch=BATCHES + 1
        )
        try:
            began = time.perf_counter()
            print(f"a dataset a class, {classes:,} classes: {timed(classic(files, some), began)}")
        except tf.errors.OpError as error:
            what = "too many open files" if "Too many open files" in error.message else error
            print(f"a dataset a class, {classes:,} classes: {what}")


if __name__ == "__main__":
    main()
