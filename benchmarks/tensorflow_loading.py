"""Measure the TensorFlow backend against what TensorFlow does by itself, in one process.

Every figure is a ratio: the two ways take turns, each pair gives a ratio, and the median counts.
Pages are warm, checksums are on, and nothing is decoded but where JPEG is said.

    python benchmarks/tensorflow_loading.py                 # all of it, about ten minutes
    python benchmarks/tensorflow_loading.py reading --record-bytes 10000
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from figures import record

from twinfeed import (
    BatchSampler,
    DatasetSource,
    DecodeImage,
    Feed,
    Index,
    PKBatchSampler,
    RandomSampler,
    ShardShuffleSampler,
    TensorFlowLoader,
    TFRecordWriter,
    build_index,
    choose,
    open_index,
    pack,
    source_datasets,
)
from twinfeed.loaders.formats.example import encode

BATCH = 128
FEATURES = {
    "image": tf.io.FixedLenFeature([], tf.string),
    "label": tf.io.FixedLenFeature([], tf.int64),
}
Make = Callable[[], Iterable[Any]]


def dataset(index: Any, sampler: Any, *, decode: Any = None, **options: Any) -> tf.data.Dataset:
    """Make the dataset of a loader."""
    return TensorFlowLoader(Feed(index, sampler, decode=decode), **options).dataset


def shards(index: Index) -> list[str]:
    """Return the paths of the shards."""
    return [str(Path(index.root) / path) for path in index.shard_paths.tolist()]


class Rate(NamedTuple):
    """Records per second of the clock, and per second of processor time."""

    clock: float
    processor: float


def rate(make: Make, batches: int, records: int) -> Rate:
    """Measure some batches, after the first."""
    iterator = iter(make())
    next(iterator)
    start, used = time.perf_counter(), time.process_time()
    count = sum(1 for _ in itertools.islice(iterator, batches)) * records
    return Rate(count / (time.perf_counter() - start), count / (time.process_time() - used))


def compare(
    name: str, ways: dict[str, Make], *, batches: int, pairs: int, records: int = BATCH
) -> None:
    """Print every way's rate, and its ratio to the first, which runs before each of the others.

    The ratio by processor time, in brackets, also means something where others use the machine.
    """
    floor_name, floor = next(iter(ways.items()))
    floors: list[Rate] = []
    print(f"\n{name}")
    for way, make in list(ways.items())[1:]:
        rates: list[Rate] = []
        for _ in range(pairs):
            floors.append(rate(floor, batches, records))
            rates.append(rate(make, batches, records))
        ratios = list(zip(rates, floors[-pairs:], strict=True))
        by_clock = statistics.median(one.clock / other.clock for one, other in ratios)
        by_use = statistics.median(one.processor / other.processor for one, other in ratios)
        clock = statistics.median(one.clock for one in rates)
        print(f"  {way:<44} {clock:>9,.0f}/s   {by_clock:5.2f} ({by_use:.2f})", flush=True)
    print(f"  {floor_name:<44} {statistics.median(one.clock for one in floors):>9,.0f}/s")


def packed(folder: Path, size: int, total: int) -> Index:
    """Pack random bytes of one size, in 20 shards."""
    count = min(total // size, 200_000) // BATCH * BATCH
    pool = np.random.default_rng(0).bytes(size + count)
    samples = ({"image": pool[n : n + size], "label": n % 100} for n in range(count))
    return pack(list(samples), folder / f"records-{size}", shards=20)["data"]


def sequential(index: Index) -> tf.data.Dataset:
    """Read, batch and parse as every tutorial does."""
    records = tf.data.TFRecordDataset(shards(index))
    return records.batch(BATCH, drop_remainder=True).map(
        lambda batch: tf.io.parse_example(batch, FEATURES)
    )


def reading(options: argparse.Namespace, folder: Path) -> None:
    """Compare random reads, and those of one dataset a lane, with a sequential read."""
    for size in options.record_bytes:
        index = packed(folder, size, options.megabytes * 1_000_000)
        count = len(index)
        block = max(1, 4_000_000 // size)

        def lanes(index: Index = index, block: int = block) -> BatchSampler:
            order = ShardShuffleSampler(index.shard_lengths, seed=0, block=block, window=8)
            return BatchSampler(order, batch_size=BATCH, last_batch="drop")

        def chosen(index: Index = index, lanes: Any = lanes) -> tf.data.Dataset:
            feed = Feed(index, lanes())
            return choose(feed.sampler, source_datasets(feed)).dataset

        def make(sampler: Any, index: Index = index) -> Make:
            return lambda: dataset(index, sampler())

        def uniform(count: int = count) -> BatchSampler:
            return BatchSampler(RandomSampler(count, seed=0), batch_size=BATCH, last_batch="drop")

        def looped(index: Index = index, uniform: Any = uniform) -> TensorFlowLoader:
            return TensorFlowLoader(Feed(index, uniform()), device="/CPU:0")

        compare(
            f"records of {size:,} bytes, {count:,} of them",
            {
                "TFRecordDataset, batch, parse_example": lambda index=index: sequential(index),
                "loader, fully random": make(uniform),
                "a loop over the loader, fully random": looped,
                "loader, fully random, no checksums": make(
                    uniform, open_index(index.path, checksums=False)
                ),
                "loader, shard-aware shuffle": make(lanes),
                "choose over source_datasets, the same": chosen,
            },
            batches=min(count // BATCH - 1, options.batches),
            pairs=options.pairs,
        )


def numbers(options: argparse.Namespace, folder: Path) -> None:
    """Compare random reads of lists of numbers, which are decoded, and of rows of an array."""
    count = 40_000 // BATCH * BATCH
    random = np.random.default_rng(0)
    floats = random.normal(size=(count, 256)).astype(np.float32)
    sampler = BatchSampler(RandomSampler(count, seed=0), batch_size=BATCH)
    ways: dict[str, Make]
    for name, rows in (("floats", floats), ("tokens", random.integers(0, 32_000, floats.shape))):
        index = pack(({"row": row} for row in rows), folder / name, shards=8)["data"]
        features = {"row": tf.io.FixedLenFeature([256], tf.as_dtype(rows.dtype))}

        def in_order(index: Index = index, features: Any = features) -> tf.data.Dataset:
            records = tf.data.TFRecordDataset(shards(index)).batch(BATCH)
            return records.map(lambda batch: tf.io.parse_example(batch, features))

        ways = {
            "TFRecordDataset, batch, parse_example": in_order,
            "loader, fully random": lambda index=index: dataset(index, sampler),
        }
        compare(f"lists of 256 {name}", ways, batches=count // BATCH - 1, pairs=options.pairs)

    def gathered() -> tf.data.Dataset:
        ids = tf.data.Dataset.range(count).shuffle(count, seed=0).batch(BATCH)
        tensor = tf.constant(floats)
        return ids.map(lambda batch: tf.gather(tensor, batch))

    ways = {
        "tf.gather of shuffled ids": gathered,
        "loader, fully random": lambda: dataset(DatasetSource(floats), sampler),
    }
    compare("an array", ways, batches=count // BATCH - 1, pairs=options.pairs)


def stages(options: argparse.Namespace, folder: Path) -> None:
    """Print the microseconds of a batch, with one stage of the loader after the other added."""
    for size in options.record_bytes:
        index = packed(folder / "stages", size, options.megabytes * 1_000_000)
        sampler = BatchSampler(
            RandomSampler(len(index), seed=0), batch_size=BATCH, last_batch="drop"
        )
        print(f"\nrecords of {size:,} bytes, microseconds of a batch: by the clock (processor)")
        source = dataset(index, sampler).twinfeed_owner
        for way, (make, each) in staged(source).items():
            calls = min(len(sampler) - 3 * each, options.batches) // each
            rates = [rate(make, calls, each) for _ in range(options.pairs)]
            clock = statistics.median(1e6 / one.clock for one in rates)
            used = statistics.median(1e6 / one.processor for one in rates)
            print(f"  {way:<44} {clock:9.0f} ({used:.0f})", flush=True)


def staged(source: Any) -> dict[str, tuple[Make, int]]:
    """Return each stage of a pass, and how many batches an element of the stage has."""
    index, sampler, size = source.feed.index, source.feed.sampler, source.batches_per_call
    first = (int(size) - 1).bit_length()  # calls that read fewer batches

    def arrays() -> Iterable[Any]:
        with closing(source.read_pass()) as calls:
            yield from itertools.islice(calls, first, None)

    return {
        "sequential": (lambda: sequential(index), 1),
        "reading by id and checks, in Python": (arrays, size),
        "and its tensors, in TensorFlow": (lambda: source.elements().skip(first), size),
        "and rows of them, a call ahead": (lambda: source.elements().prefetch(1).unbatch(), 1),
        "the dataset": (lambda: dataset(index, sampler), 1),
    }


def class_files(folder: Path, classes: int, each: int, size: int) -> Index:
    """Write one TFRecord file for each class."""
    folder = folder / f"classes-{classes}"
    folder.mkdir()
    image = np.random.default_rng(0).bytes(size)
    for label in range(classes):
        with TFRecordWriter(folder / f"class-{label:05}.tfrecord") as writer:
            for _ in range(each):
                writer.write(encode({"image": image, "label": label}))
    return build_index(str(folder / "class-*.tfrecord"), folder / "all.index", label="label")


def classic(index: Index, p: int, k: int) -> tf.data.Dataset:
    """Balance classes as the tutorials do: a dataset for each class, chosen from at random."""

    def choices() -> Iterable[int]:
        rng = np.random.default_rng(0)
        while True:
            for label in rng.choice(len(index.shard_lengths), p, replace=False):
                yield from [label] * k

    datasets = [tf.data.TFRecordDataset(path).repeat() for path in shards(index)]
    selector = tf.data.Dataset.from_generator(choices, output_signature=tf.TensorSpec([], tf.int64))
    chosen = tf.data.Dataset.choose_from_datasets(datasets, selector)
    return chosen.batch(p * k).map(lambda batch: tf.io.parse_example(batch, FEATURES))


def classes(options: argparse.Namespace, folder: Path) -> None:
    """Compare P×K over one file a class with the classic recipe: set-up, first batch, rate."""
    print(f"\nP x K over {options.classes:,} class files, records of 10,000 bytes, P=32, K=4")
    index = class_files(folder, options.classes, 10, 10_000)

    def loader() -> tf.data.Dataset:
        sampler = PKBatchSampler(index.labels, p=32, k=4, seed=0, batches_per_epoch=100_000)
        return dataset(index, sampler)

    figures = {}
    for way, make in {"classic": lambda: classic(index, 32, 4), "loader": loader}.items():
        start = time.perf_counter()
        made = make()
        built = time.perf_counter()
        iterator = iter(made)
        next(iterator)
        first = time.perf_counter()
        count = sum(1 for _ in itertools.islice(iterator, 60))
        each = count * BATCH / (time.perf_counter() - first)
        figures[way] = built - start, first - built, each
        del iterator, made
        print(
            f"  {way:<10} built in {figures[way][0]:7.3f} s, first batch after "
            f"{figures[way][1]:7.3f} s, {each:9,.0f} records/s",
            flush=True,
        )
    if options.record:
        record(__file__, {"class files": figures})
    setup, first, speed = (
        a / b for a, b in zip(figures["classic"], figures["loader"], strict=True)
    )
    print(
        f"  the loader is set up {setup:.0f} times faster, gives its first batch {first:.0f} times"
    )
    print(f"  faster, and reads {1 / speed:.1f} times as many records a second")


def datasets(options: argparse.Namespace, folder: Path) -> None:
    """Compare the time to a first batch of `choose` with that of the classic recipe."""
    print("\nP x K over a dataset for each of 1,000 class files of 1,000 bytes a record, P=16, K=4")
    index = class_files(folder, 1000, 20, 1000)
    own = [tf.data.TFRecordDataset(path).repeat() for path in shards(index)]
    feed = Feed(index, PKBatchSampler(index.labels, p=16, k=4, seed=0, batches_per_epoch=200))

    def by_hand() -> tf.data.Dataset:
        classes = tf.data.Dataset.range(1000).shuffle(1000, seed=0).repeat()
        chosen = classes.flat_map(lambda one: tf.data.Dataset.from_tensors(one).repeat(4))
        return tf.data.Dataset.choose_from_datasets(own, chosen).batch(64)

    def by_choose(replay: bool = False) -> Any:
        sampler = PKBatchSampler.of_classes(1000, p=16, k=4, seed=0, batches_per_epoch=200)
        return choose(sampler, own, replay=replay)

    ways: dict[str, Make] = {
        "by hand": by_hand,
        "choose": by_choose,
        "choose, replay": lambda: by_choose(replay=True),
        "choose over source_datasets": lambda: choose(feed.sampler, source_datasets(feed)),
        "loader": lambda: dataset(index, feed.sampler),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.pairs + 1):
        for way, make in ways.items():
            start = time.perf_counter()
            next(iter(make()))
            times[way].append(time.perf_counter() - start)
    for way, found in times.items():
        pairs = zip(found[1:], times["by hand"][1:], strict=True)
        ratios = sorted(one / hand for one, hand in pairs)
        print(
            f"  {way:<30} first batch after {statistics.median(found[1:]):6.2f} s, "
            f"{statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of by hand"
        )


def photos() -> list[bytes]:
    """Return 64 JPEG files of 256 x 256."""
    from PIL import Image

    rng = np.random.default_rng(0)
    files = []
    for _ in range(64):
        file = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        small.resize((256, 256), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
        files.append(file.getvalue())
    return files


def jpeg(options: argparse.Namespace, folder: Path) -> None:
    """Compare pipelines that decode 256 x 256 JPEG with decoding alone, two threads each."""
    files = photos()
    count = 64 * 64
    samples = [{"image": files[n % 64], "label": n % 100} for n in range(count)]
    index = pack(samples, folder / "jpeg", shards=4)["data"]
    spec = tf.TensorSpec([256, 256, 3], tf.uint8)

    def sampler() -> BatchSampler:
        return BatchSampler(RandomSampler(count, seed=0), batch_size=64)

    def one(data: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.io.decode_jpeg(data, channels=3), spec.shape)

    def in_operations() -> tf.data.Dataset:
        return dataset(index, sampler()).map(
            lambda batch: {
                **batch,
                "image": tf.map_fn(one, batch["image"], fn_output_signature=spec),
            },
            num_parallel_calls=2,
        )

    def unbatched() -> tf.data.Dataset:
        decoded = (
            dataset(index, sampler())
            .unbatch()
            .map(lambda b: {**b, "image": one(b["image"])}, num_parallel_calls=2)
        )
        return decoded.batch(64)

    def decoding_alone() -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(files).repeat(64)
        return data.map(one, num_parallel_calls=2).batch(64)

    compare(
        f"JPEG of 256 x 256, {len(files[0]):,} bytes, batches of 64",
        {
            "decode_jpeg alone": decoding_alone,
            "loader, decode_jpeg by map_fn": in_operations,
            "loader, decode_jpeg unbatched": unbatched,
            "loader, DecodeImage (simplejpeg)": lambda: dataset(
                index, sampler(), decode=DecodeImage(), threads=2
            ),
        },
        batches=count // 64 - 2,
        pairs=options.pairs,
        records=64,
    )


def main() -> None:
    """Run what was asked for."""
    parts = {
        "reading": reading,
        "numbers": numbers,
        "stages": stages,
        "classes": classes,
        "datasets": datasets,
        "jpeg": jpeg,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help=", ".join(parts))
    parser.add_argument("--record-bytes", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--megabytes", type=int, default=200, help="of records of each size")
    parser.add_argument("--batches", type=int, default=400, help="at most, of each measurement")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write figures.json")
    parser.add_argument("--classes", type=int, default=5000, help="files of `classes`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.parts or parts:
            parts[name](options, Path(folder))


if __name__ == "__main__":
    main()
