"""Measure the formats: scans against `cat`, the Example parser against protobuf and TensorFlow.

Everything runs in one process on one shard of random images with an integer label and a short name,
its pages warm; each figure is the best of several runs, and only ratios within one run mean
something.

    python benchmarks/formats.py --megabytes 200 --record-bytes 1000 10000 100000
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from twinfeed import TarWriter, TFRecordWriter
from twinfeed.loaders.formats import tar, tfrecord
from twinfeed.loaders.formats.example import encode, locate, parse_sequence
from twinfeed.loaders.support.checksum import crc32c

RUNS = 5
FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
    "name": tf.io.FixedLenFeature([], tf.string),
}


def write_shards(folder: Path, count: int, record_bytes: int) -> tuple[Path, Path]:
    """Write the same records as TFRecord and as tar."""
    rng = np.random.default_rng(0)
    paths = folder / "a.tfrecord", folder / "a.tar"
    with TFRecordWriter(paths[0]) as records, TarWriter(paths[1]) as samples:
        for number in range(count):
            image, label, name = rng.bytes(record_bytes), number % 1000, f"{number:08d}"
            records.write(encode({"image": image, "label": label, "name": name}))
            samples.write(name, {"jpg": image, "cls": str(label).encode()})
    return paths


def consume(items: Iterator[Any]) -> None:
    """Run through an iterator."""
    for _ in items:
        pass


def seconds(run: Callable[[], object]) -> float:
    """Return the least time of several runs, the one that others disturbed least."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def scans(record: Path, sample: Path) -> dict[str, Callable[[], object]]:
    """Return what reads whole shards."""

    def dataset() -> tf.data.Dataset:
        return tf.data.TFRecordDataset(str(record), buffer_size=1 << 20)

    def parsed() -> tf.data.Dataset:
        return dataset().batch(128).map(lambda batch: tf.io.parse_example(batch, FEATURES))

    return {
        "cat (TFRecord)": lambda: subprocess.run(
            f"cat {record} > /dev/null", shell=True, check=True
        ),
        "tfrecord.scan, raw": lambda: consume(tfrecord.scan(record, example=False)),
        "tfrecord.scan, Examples": lambda: consume(tfrecord.scan(record)),
        "TensorFlow: TFRecordDataset, batch(128)": lambda: consume(iter(dataset().batch(128))),
        "TensorFlow: batch(128), parse_example": lambda: consume(iter(parsed())),
        "cat (tar)": lambda: subprocess.run(f"cat {sample} > /dev/null", shell=True, check=True),
        "tar.scan": lambda: consume(tar.scan(sample)),
    }


def parsers(messages: list[bytes]) -> dict[str, Callable[[], object]]:
    """Return what parses messages that are in memory."""
    batches = [tf.constant(messages[at : at + 128]) for at in range(0, len(messages), 128)]
    return {
        "example.locate": lambda: consume(map(locate, messages)),
        "example.parse_sequence": lambda: consume(map(parse_sequence, messages)),
        "protobuf (upb) FromString": lambda: consume(map(tf.train.Example.FromString, messages)),
        "TensorFlow parse_example, 128 at once": lambda: consume(
            tf.io.parse_example(batch, FEATURES) for batch in batches
        ),
        "CRC-32C alone": lambda: consume(map(crc32c, messages)),
    }


def table(runs: dict[str, Callable[[], object]], count: int, size: int) -> None:
    """Run and print a table, the first line being the floor of its ratios."""
    floor = 0.0
    print("| | records/s | GB/s | time against the first |\n|---|---|---|---|")
    for name, run in runs.items():
        took = seconds(run)
        floor = floor or took
        rate, gigabytes = count / took / 1e3, size / took / 1e9
        print(f"| {name} | {rate:,.0f}k | {gigabytes:.2f} | {took / floor:.2f} |", flush=True)


def main() -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=200, help="size of each shard")
    parser.add_argument("--record-bytes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    arguments = parser.parse_args()
    for record_bytes in arguments.record_bytes:
        count = arguments.megabytes * 1_000_000 // record_bytes
        with tempfile.TemporaryDirectory() as folder:
            record, sample = write_shards(Path(folder), count, record_bytes)
            print(f"\n### {record_bytes:,} bytes, {count:,} records\n")
            table(scans(record, sample), count, record.stat().st_size)
            messages = [r.fields["data"].data for r in tfrecord.scan(record, example=False)]
            print()
            table(parsers(messages), count, record.stat().st_size)


if __name__ == "__main__":
    main()
