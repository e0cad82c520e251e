"""Draw P×K batches from a file for each of 100,000 classes, with 1,024 open files allowed.

You train on people, products or words, and have a TFRecord file for each of them. The classic
recipe makes a dataset for each class and lets `choose_from_datasets` pick: its set-up grows with
the classes, and each dataset that was drawn from holds its file open. An index and a sampler need
neither:

    ulimit -n 1024; python many_classes.py --classes 100000
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tensorflow as tf

from twinfeed import (
    Feed,
    FromFile,
    PKBatchSampler,
    TensorFlowLoader,
    TFRecordWriter,
    build_index,
    open_index,
)
from twinfeed.loaders.formats.example import encode

P, K, BATCHES = 16, 4, 100


def write_classes(folder: Path, classes: int) -> None:
    """Write a TFRecord file for each class, with eight records each."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(classes):
        with TFRecordWriter(folder / f"class-{number:06}.tfrecord") as writer:
            for record in range(8):
                writer.write(encode({"word": b"%d/%d" % (number, record)}))


def held() -> float:
    """Return the MB that this process holds."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) / 1024


def timed(make: Callable[[], tf.data.Dataset]) -> str:
    """Say what the set-up, the first batch and the others took, and how much memory all of it."""
    before, began = held(), time.perf_counter()
    dataset = make()
    built = time.perf_counter()
    batches = iter(dataset)
    next(batches)
    first = time.perf_counter()
    count = sum(1 for _ in islice(batches, BATCHES))
    rate = count / (time.perf_counter() - first)
    return (
        f"set-up {built - began:.1f} s, first batch {first - built:.1f} s, "
        f"then {rate:.0f} batches/s, {held() - before:.0f} MB"
    )


def classic(folder: Path, classes: int) -> tf.data.Dataset:
    """Make one dataset for each class, and draw P classes for each batch."""
    files = [str(folder / f"class-{number:06}.tfrecord") for number in range(classes)]
    sources = [tf.data.TFRecordDataset(file).repeat() for file in files]
    drawn = tf.data.Dataset.range(classes).shuffle(classes, seed=0).repeat()
    chosen = drawn.flat_map(lambda one: tf.data.Dataset.from_tensors(one).repeat(K))
    return tf.data.Dataset.choose_from_datasets(sources, chosen).batch(P * K)


def main() -> None:
    """Compare both ways, the classic one with as many classes as it bears."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("classes-data"))
    parser.add_argument("--classes", type=int, default=1100)
    parser.add_argument("--recipe", type=int, nargs="*", default=[300, 1100], help="its classes")
    options = parser.parse_args()
    folder: Path = options.out / str(options.classes)
    if not (folder / "all.index").exists():
        write_classes(folder, options.classes)
        label = FromFile(r"class-0*(\d+)")
        build_index(str(folder / "class-*.tfrecord"), folder / "all.index", label=label)
    print(f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} open files are allowed")

    def by_index() -> tf.data.Dataset:
        index = open_index(folder / "all.index")
        sampler = PKBatchSampler(index.class_order, p=P, k=K, seed=0, batches_per_epoch=BATCHES + 1)
        return TensorFlowLoader(Feed(index, sampler)).dataset

    print(f"index and sampler, {options.classes:,} classes: {timed(by_index)}")
    for classes in options.recipe:
        try:
            found = timed(partial(classic, folder, classes))
        except tf.errors.OpError as error:
            found = "too many open files" if "Too many open files" in error.message else str(error)
        print(f"a dataset a class, {classes:,} classes: {found}")


if __name__ == "__main__":
    main()
