"""Measure what grows with records, classes, shards, ranks, orders and fields.

Each way runs in a process of its own; the numbers are medians of `--rounds` runs that take turns.
Seconds are of the processor, so that neighbours disturb less, except "s by two processes", which
are by the clock. Memory is the peak beyond what the process held when the data were there.

    python benchmarks/growth.py                     # all of it, about ten minutes a round
    python benchmarks/growth.py --only "a rank"
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from ways import Ways, main, timed

from twinfeed import Reader, TFRecordWriter, build_index, open_index, verify
from twinfeed.loaders import IndexOptions
from twinfeed.loaders.building.writer import index_writer
from twinfeed.loaders.command_line import main as command
from twinfeed.loaders.formats.example import encode
from twinfeed.loaders.index.arrays import StringColumn, row_type
from twinfeed.loaders.index.index import SHARD
from twinfeed.loaders.support.temporary import temporary_folder

Found = dict[str, float]

processor_timed = partial(timed, clock=time.process_time)


def peak() -> float:
    """Return the most memory that this process has held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def draws(sampler: Any, *, steps: int = 300, lead: int = 1) -> Found:
    """Measure single draws of an epoch, after `lead` of them."""
    sampler.batches(0, 0, lead)
    seconds = [processor_timed(partial(sampler.batch, 0, lead + step))[1] for step in range(steps)]
    return {"draw ms": statistics.median(seconds) * 1e3, "slowest draw ms": max(seconds) * 1e3}


def one_rank(name: str) -> Found:
    """Draw the 32 ids of one rank of 10,000."""
    from twinfeed import samplers as s

    ranks, rows = 10_000, 320_000
    if name == "P x K":
        classes = np.arange(10**6) // 10
        stream: Any = s.PKBatchSampler(classes, p=ranks, k=4, seed=0, batches_per_epoch=1000)
    else:
        orders: dict[str, Callable[[], s.Sampler]] = {
            "random": lambda: s.RandomSampler(10**9, seed=0),
            "shard shuffle": lambda: s.ShardShuffleSampler(
                [10**5] * 10_000, block=1024, window=64, seed=0
            ),
            "1,000 sections": lambda: s.ShardShuffleSampler(
                [10**5] * 10_000, seed=0, block=1024, window=10_000, sections=1000
            ),
            "weighted": lambda: s.WeightedSampler(np.arange(10**6), num_samples=10**9, seed=0),
        }
        stream = s.BatchSampler(orders[name](), batch_size=rows)
    return draws(stream.shard(77, ranks))


def many_blocks(blocks: int) -> Found:
    """Draw 128 ids at a time from shards of 400 blocks; the first batch is that of epoch 1."""
    from twinfeed import BatchSampler, ShardShuffleSampler

    lengths = [400 * 256 - 7] * (blocks // 400)
    order = ShardShuffleSampler(lengths, block=256, window=256, seed=0)
    stream = BatchSampler(order, batch_size=128)
    stream.batch(0, 0)
    first = processor_timed(lambda: stream.batch(1, 0))[1]
    seconds = processor_timed(
        lambda: [stream.batches(1, at, at + 256) for at in range(0, 2560, 256)]
    )[1]
    return {"first batch ms": first * 1e3, "µs a batch": seconds / 2560 * 1e6}


def epochs_of(shards: int) -> Found:
    """Draw from shards of a block each, at 1,000 steps of epoch 0 and at the start of epoch 1.

    A block has 900 to 1,000 records.
    """
    from twinfeed import BatchSampler, ShardShuffleSampler

    lengths = np.random.default_rng(0).integers(900, 1001, shards)
    order = ShardShuffleSampler(lengths, block=1024, window=64, seed=0)
    stream = BatchSampler(order, batch_size=64)
    steps = np.linspace(0, len(stream) - 1, 1001).astype(int).tolist()
    times = [time.process_time()]
    for epoch, step in [*((0, step) for step in steps), (1, 0)]:
        stream.batch(epoch, step)
        times.append(time.process_time())
    first, *others, later = np.diff(times) * 1e3
    return {
        "first batch ms": first,
        "draw ms": statistics.median(others),
        "slowest draw ms": max(others),
        "first batch of epoch 1 ms": later,
    }


def mixture_of_many() -> Found:
    """Draw 64 ids of 1,000 orders."""
    from twinfeed import BatchSampler, MixtureSampler, RandomSampler

    orders = [RandomSampler(10_000, seed=seed) for seed in range(1000)]
    mixture = MixtureSampler(orders, weights=[1] * 1000, num_samples=10**8, seed=0)
    return draws(BatchSampler(mixture, batch_size=64), steps=2000)


def reuse_of_many() -> Found:
    """Draw 100 ids with 100,000 records live."""
    from twinfeed import BatchSampler, ReuseSampler

    order = ReuseSampler(10**6, reuse=10, live=10**5, seed=0)
    return draws(BatchSampler(order, batch_size=100), steps=2000)


def weighted_epochs() -> Found:
    """Draw 10 million without replacement: the slowest draw is where an epoch begins."""
    from twinfeed import BatchSampler, WeightedSampler

    weights = np.random.default_rng(0).random(10_000_000)
    stream = BatchSampler(WeightedSampler(weights, replacement=False, seed=0), batch_size=1000)
    before = peak()
    first = processor_timed(lambda: stream.batch(0, 0))[1]
    seconds = [processor_timed(partial(stream.batch, 0, step))[1] for step in range(len(stream))]
    seconds += [processor_timed(partial(stream.batch, 1, step))[1] for step in range(100)]
    return {
        "first batch ms": first * 1e3,
        "draw ms": statistics.median(seconds) * 1e3,
        "slowest draw ms": max(seconds) * 1e3,
        "extra memory MB": peak() - before,
    }


def private() -> float:
    """Return what this process holds for itself alone, in MB: not what is mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def drawn_there(pickled: bytes, steps: int) -> float:
    """Draw from a pickled sampler; return what that takes of this process, in MB."""
    before = private()
    sampler = pickle.loads(pickled)
    for step in range(steps):
        sampler.batch(0, step)
    return private() - before


def mapped(folder: str, **arrays: np.ndarray) -> dict[str, Any]:
    """Save arrays and map them."""
    for name, array in arrays.items():
        np.save(Path(folder) / f"{name}.npy", array)
    return {name: np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in arrays}


def held_for(make: Callable[[], Any], *, steps: int) -> Found:
    """Measure what a process holds for a sampler over mapped arrays, and another process."""
    before = private()
    sampler, construction = processor_timed(make)
    made = private() - before
    first = processor_timed(lambda: sampler.batch(0, 0))[1]
    found = draws(sampler, steps=steps)
    drawn, pickled = private() - before, pickle.dumps(sampler)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        there = pool.submit(drawn_there, pickled, steps).result()
    return {
        "construction s": construction,
        "first batch ms": first * 1e3,
        **found,
        "private MB when made": made,
        "private MB": drawn,
        "in another process MB": there,
        "pickled KB": len(pickled) / 1024,
        "state KB": len(json.dumps(sampler.state_dict())) / 1024,
    }


def pk_mapped() -> Found:
    """P x K of 10^9 records in 10^7 classes, from a class order that is mapped; a sparse file."""
    from twinfeed import PKBatchSampler
    from twinfeed.samplers import ClassOrder

    classes, size = 10**7, 100
    with tempfile.TemporaryDirectory() as folder:
        sizes = np.full(classes, size)
        arrays = mapped(folder, starts=np.cumsum(sizes) - sizes, sizes=sizes)
        path = Path(folder) / "records.npy"
        np.lib.format.open_memmap(path, "w+", np.int32, (classes * size,)).flush()
        arrays["records"] = np.load(path, mmap_mode="r")
        order = ClassOrder.from_arrays(**arrays, digest="")
        return held_for(partial(PKBatchSampler, order, p=64, k=4, seed=0), steps=10_000)


def weights_mapped() -> Found:
    """Draw from 10^8 mapped weights."""
    from twinfeed import BatchSampler, WeightedSampler

    with tempfile.TemporaryDirectory() as folder:
        weights = mapped(folder, weights=np.tile(np.arange(100, dtype=np.uint8), 10**6))["weights"]
        return held_for(
            lambda: BatchSampler(WeightedSampler(weights, seed=0), batch_size=64), steps=10_000
        )


def views_mapped() -> Found:
    """Draw one of five views of 10^8 records."""
    from twinfeed import BatchSampler, RandomSampler, ViewSampler

    with tempfile.TemporaryDirectory() as folder:
        views = mapped(folder, views=np.full(10**8, 5, np.uint8))["views"]
        order = RandomSampler(10**8, seed=0)
        return held_for(
            lambda: BatchSampler(ViewSampler(order, views, per_epoch="one", seed=0), batch_size=64),
            steps=10_000,
        )


def subset_mapped() -> Found:
    """Draw from 10^8 ids of records."""
    from twinfeed import BatchSampler, RandomSampler, SubsetSampler

    with tempfile.TemporaryDirectory() as folder:
        ids = mapped(folder, ids=np.arange(10**8, dtype=np.int32))["ids"]
        order = RandomSampler(10**8, seed=0)
        return held_for(
            lambda: BatchSampler(SubsetSampler(ids, of=len(ids), order=order), batch_size=64),
            steps=10_000,
        )


def shards_mapped() -> Found:
    """Draw from 10^6 shards of 1,000 records, a block each."""
    from twinfeed import BatchSampler, ShardShuffleSampler

    with tempfile.TemporaryDirectory() as folder:
        lengths = mapped(folder, lengths=np.full(10**6, 1000))["lengths"]
        return held_for(
            lambda: BatchSampler(
                ShardShuffleSampler(lengths, block=1024, window=64, seed=0), batch_size=64
            ),
            steps=10_000,
        )


def mixture_of_ten_thousand() -> Found:
    """Draw 64 ids of 10,000 orders."""
    from twinfeed import BatchSampler, MixtureSampler, RandomSampler

    orders = [RandomSampler(100_000, seed=seed) for seed in range(10_000)]
    return held_for(
        lambda: BatchSampler(
            MixtureSampler(orders, weights=[1] * 10_000, num_samples=10**9, seed=0), batch_size=64
        ),
        steps=1000,
    )


def states() -> Found:
    """Take a state with four million weights."""
    from twinfeed import BatchSampler, WeightedSampler

    sampler = BatchSampler(WeightedSampler(np.arange(4_000_000), seed=0), batch_size=64)
    sampler.state_dict()
    return {"draw ms": min(processor_timed(sampler.state_dict)[1] for _ in range(100)) * 1e3}


def write_shards(folder: Path, shards: int, samples: Callable[[int], list[dict[str, Any]]]) -> str:
    """Write the `samples` of each shard; return a pattern of all shards."""
    for shard in range(shards):
        with TFRecordWriter(folder / f"s-{shard:06d}.tfrecord") as writer:
            for sample in samples(shard):
                writer.write(encode(sample))
    return str(folder / "s-*.tfrecord")


def labels_by_name() -> Found:
    """Build an index of 1,000 shards with 100 records each, whose labels are 100,000 names."""

    def samples(shard: int) -> list[dict[str, Any]]:
        return [{"x": b"1", "name": f"class {(shard * 100 + n) % 100_000:06d}"} for n in range(100)]

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shards = write_shards(folder, 1000, samples)
        plain = processor_timed(lambda: build_index(shards, folder / "a.index", fields=["x"]))[1]
        named = partial(build_index, shards, folder / "b.index", fields=["x"], label="name")
        return {"s": processor_timed(named)[1], "s without labels": plain}


def building(shards: int) -> Found:
    """Build an index of shards of one record each: what is held beside the records."""
    with tempfile.TemporaryDirectory() as temporary:
        pattern = write_shards(Path(temporary), shards, lambda _: [{"x": b"1"}])
        before = peak()
        seconds = processor_timed(lambda: build_index(pattern, Path(temporary, "a.index")))[1]
        return {"s": seconds, "KB a shard": (peak() - before) * 1024 / shards}


def readers_and_verify(shards: int) -> Found:
    """Make a reader, and verify shards of 10 records, alone and by two processes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pattern = write_shards(folder, shards, lambda _: [{"x": bytes(100)}] * 10)
        index = build_index(pattern, folder / "a.index")
        Reader(index).close()
        reader = processor_timed(lambda: Reader(index).close())[1]
        serial = processor_timed(lambda: verify(index))[1]
        with ProcessPoolExecutor(2) as pool:
            pool.submit(int).result()
            side_by_side = timed(lambda: verify(index, executor=pool))[1]
        return {"reader ms": reader * 1e3, "s": serial, "s by two processes": side_by_side}


def fields(number: int) -> Found:
    """Index and read records that have this many fields."""
    count = 20_000
    sample = {f"field{n}": bytes(20) for n in range(number)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pattern = write_shards(folder, 1, lambda _: [sample] * count)
        index, seconds = processor_timed(lambda: build_index(pattern, folder / "a.index"))
        stored = sum(file.stat().st_size for file in (folder / "a.index").rglob("*.npy"))
        ids = np.random.default_rng(0).permutation(count).reshape(-1, 100)
        with Reader(index) as reader:
            taken = processor_timed(lambda: [reader.read(some) for some in ids])[1]
        return {
            "s": seconds,
            "index bytes a record": stored / count,
            "records/s": count / taken,
        }


def held() -> float:
    """Return what this process holds now, in MB, since a new process inherits its parent's peak."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def opened(path: Path, record: int) -> Found:
    """Open an index, and read one record."""
    before, own = held(), private()
    index, seconds = processor_timed(lambda: open_index(path))
    found = {"open ms": seconds * 1e3, "private MB": private() - own}
    if record >= 0:
        with Reader(index) as reader:
            found["read ms"] = processor_timed(lambda: reader.read([record]))[1] * 1e3
    return {**found, "extra memory MB": held() - before}


def asked(path: Path) -> Found:
    """Ask of an index what it holds, what an epoch requests, and whether it is whole."""
    found = {}
    for name, more in (("info", []), ("plan", ["--batch-size", "64"]), ("verify", [])):
        before = peak()
        with redirect_stdout(io.StringIO()):
            found[f"{name} s"] = processor_timed(partial(command, [name, str(path), *more]))[1]
        found[f"{name} MB"] = peak() - before
    return found


def many_shards(shards: int) -> Found:
    """Open an index of very many shards of one record in a new process, and ask about it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pattern = write_shards(folder, shards, lambda _: [{"x": b"1"}])
        build_index(pattern, folder / "a.index")
        found = {}
        for task in (partial(opened, record=shards // 2), asked):
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found |= pool.submit(task, folder / "a.index").result()
        return found


def many_names(number: int) -> Found:
    """Open an index of as many classes, shards and tags, in a new process."""
    stops = np.arange(number + 1)
    arrays = {
        "shards": np.zeros(number, SHARD),
        "shardstops": stops[1:],
        "shardlengths": np.diff(stops),
        "field-0": np.zeros(number, row_type(0, 0, whole_files=False)),
        "column-0": stops[:-1],
        **StringColumn.of(f"d-{n:07d}.tar" for n in range(number)).arrays("shardpaths"),
        **StringColumn.of(f"class {n:07d}" for n in range(number)).arrays("classes"),
        **StringColumn.of(f'"{n:032x}"' for n in range(number)).arrays("tags"),
    }
    facts = {"container": "tar", "records": number, "columns": ["label"], "digests": {}}
    facts |= {"fields": [{"name": "x", "kind": "bytes", "missing": 0}], "class_order": None}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "a.index"
        with temporary_folder(path) as work, index_writer(path, work) as store:
            store.add(arrays)
            store.finish(facts, vars(IndexOptions(container="tar")))
        for n in np.linspace(0, number - 1, 16).astype(int):
            (folder / f"d-{n:07d}.tar").touch()
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(opened, folder / "a.index", -1).result()


SCALE = ("random", "shard shuffle", "1,000 sections", "P x K", "weighted")
WAYS: Ways = {
    **{f"a rank of 10,000: {name}": (partial(one_rank, name), None) for name in SCALE},
    "shuffle of 500,000 blocks": (partial(many_blocks, 500_000), None),
    "shuffle of 4 million blocks": (partial(many_blocks, 4_000_000), None),
    "epochs of 10^6 shards": (partial(epochs_of, 10**6), None),
    "epochs of 4 million shards": (partial(epochs_of, 4 * 10**6), None),
    "mixture of 1,000 orders": (mixture_of_many, None),
    "reuse, 100,000 live": (reuse_of_many, None),
    "weighted, no replacement, 10 million": (weighted_epochs, None),
    "P x K, 10^9 records in 10^7 classes": (pk_mapped, None),
    "10^8 weights": (weights_mapped, None),
    "one view each of 10^8 records": (views_mapped, None),
    "10^8 records of an index": (subset_mapped, None),
    "shuffle of 10^6 shards": (shards_mapped, None),
    "mixture of 10,000 orders": (mixture_of_ten_thousand, None),
    "a state, 4 million weights": (states, None),
    "labels by name, 1,000 shards, 100,000 classes": (labels_by_name, None),
    "build 40,000 shards": (partial(building, 40_000), None),
    "verify 1,000 shards": (partial(readers_and_verify, 1000), None),
    "verify 10,000 shards": (partial(readers_and_verify, 10_000), None),
    "1 field": (partial(fields, 1), None),
    "20 fields": (partial(fields, 20), None),
    "100,000 shards": (partial(many_shards, 100_000), None),
    "10^6 classes, shards and tags": (partial(many_names, 10**6), None),
}


if __name__ == "__main__":
    main(__file__, __doc__, WAYS)
