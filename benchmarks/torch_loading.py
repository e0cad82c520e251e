"""Compare the torch loader with its floor and its peers, all in one run.

Records of 10 KB to batches of 128 byte strings, and JPEG images of 256 × 256 to batches of uint8;
each way in a process of its own, medians of `--rounds` runs that take turns. A peer that is not
installed is left out, and said to be.

    pip install -c constraints.txt ".[bench]"
    python benchmarks/torch_loading.py
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from figures import record

BATCH = 128
RECORDS, NBYTES, SHARDS = 40_000, 10_000, 8
IMAGES, SIDE = 20_000, 256
MOST_SECONDS = 6

Batches = Iterable[Any]


# The data


def payload(number: int) -> bytes:
    """Bytes that do not compress, another for each record."""
    return np.random.default_rng(number).bytes(NBYTES)


def photo(number: int) -> bytes:
    """A JPEG about as large as a photograph of its size: smooth shapes and some noise."""
    from PIL import Image

    random = np.random.default_rng(number)
    coarse = random.integers(0, 256, (12, 12, 3), np.uint8)
    image = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.int16) + random.integers(-12, 13, (SIDE, SIDE, 3), np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=85)
    return file.getvalue()


def make(folder: Path) -> None:
    """Write the same records in every format whose writer is there; once."""
    from twinfeed import TarWriter, TFRecordWriter, build_index
    from twinfeed.loaders.formats.example import encode

    if (folder / "images.index").exists():
        return
    per_shard = RECORDS // SHARDS
    for shard in range(SHARDS):
        tf_path = folder / f"bytes-{shard:05}-of-{SHARDS:05}.tfrecord"
        with TFRecordWriter(tf_path) as tf, TarWriter(folder / f"bytes-{shard}.tar") as tar:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                data = payload(number)
                tf.write(encode({"data": data}))
                tar.write(f"{number:08}", {"bin": data})
    build_index(str(folder / "bytes-*.tfrecord"), folder / "bytes.index")
    with TFRecordWriter(folder / "images.tfrecord") as tf:
        (folder / "images").mkdir(exist_ok=True)
        for number in range(IMAGES):
            data = photo(number)
            tf.write(encode({"image": data}))
            (folder / "images" / f"{number:06}.jpg").write_bytes(data)
    try:
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(folder / "bytes.arrayrecord"), "group_size:1,uncompressed")
        for number in range(RECORDS):
            writer.write(payload(number))
        writer.close()
    except ImportError:
        pass
    try:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"data": "bytes"}) as mds:
            for number in range(RECORDS):
                mds.write({"data": payload(number)})
    except ImportError:
        pass
    build_index(str(folder / "images.tfrecord"), folder / "images.index")


# Bytes: each way yields lists of 128 byte strings


def floor_pread(folder: Path) -> Batches:
    """Random reads in a plain loop, with nothing around them but the heap that a reader keeps."""
    from twinfeed import Reader, open_index

    index = open_index(folder / "bytes.index")
    Reader(index).read([0])
    rows = index.rows(["data"], np.random.default_rng(0).permutation(RECORDS)).tolist()
    files = [os.open(Path(index.root) / name, os.O_RDONLY) for name in index.files.tolist()]
    while True:
        for first in range(0, RECORDS, BATCH):
            yield [
                os.pread(files[file], length, offset)
                for offset, length, file, _ in rows[first : first + BATCH]
            ]


def loader(folder: Path, *, checksums: bool = True, **options: Any) -> Batches:
    from twinfeed import BatchSampler, Feed, RandomSampler, TorchLoader, open_index

    index = open_index(folder / "bytes.index", checksums=checksums)
    sampler = BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=BATCH)
    loader = TorchLoader(Feed(index, sampler), **options)
    while True:
        for batch in loader:
            yield batch["data"]


def plain_dataloader(folder: Path, workers: int) -> Batches:
    from torch.utils.data import DataLoader

    from twinfeed import (
        BatchSampler,
        Feed,
        RandomSampler,
        RecordDataset,
        RequestSampler,
        as_tensors,
        open_index,
    )

    index = open_index(folder / "bytes.index", checksums=False)
    sampler = BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=BATCH)
    feed = Feed(index, sampler)
    dataset = RecordDataset(feed)
    given: Any = {"batch_sampler": RequestSampler(feed), "collate_fn": as_tensors}
    loader = DataLoader(dataset, **given, num_workers=workers, persistent_workers=workers > 0)
    while True:
        for batch in loader:
            yield batch["data"]


def vahidk(folder: Path, workers: int) -> Batches:
    """Sequential: it has no other order."""
    from tfrecord.torch.dataset import MultiTFRecordDataset
    from torch.utils.data import DataLoader

    share = {f"bytes-{n:05}-of-{SHARDS:05}": 1 / SHARDS for n in range(SHARDS)}
    dataset = MultiTFRecordDataset(
        str(folder / "{}.tfrecord"), None, share, {"data": "byte"}, infinite=False
    )
    for batch in DataLoader(dataset, BATCH, collate_fn=list, num_workers=workers):
        yield [sample["data"] for sample in batch]


def webdataset(folder: Path, workers: int) -> Batches:
    """Sequential, its fastest."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    shards = [str(folder / f"bytes-{number}.tar") for number in range(SHARDS)]
    dataset = wds.WebDataset(shards, shardshuffle=False).batched(BATCH, collation_fn=list)
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        yield [sample["bin"] for sample in batch]


def samples(folder: Path, workers: int) -> Batches:
    """The pipeline of webdataset over samples of a feed, in random order."""
    import webdataset as wds

    from twinfeed import BatchSampler, Feed, RandomSampler, build_index, open_index
    from twinfeed.loaders.webdataset import samples

    path = folder / "tars.index"
    index = open_index(path) if path.exists() else build_index(str(folder / "bytes-*.tar"), path)
    source = samples(Feed(index, BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=BATCH)))
    pipeline = wds.DataPipeline(source, wds.batched(BATCH, collation_fn=list))
    for batch in source.track(wds.WebLoader(pipeline, batch_size=None, num_workers=workers)):
        yield [sample["bin"] for sample in batch]


def grain(folder: Path, threads: int) -> Batches:
    import grain

    source = array_record(folder)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=500 if threads else 0)
    dataset = grain.MapDataset.source(source).shuffle(seed=0).to_iter_dataset(options)
    yield from dataset.batch(BATCH, batch_fn=list)


def array_record(folder: Path) -> Any:
    from grain.sources import ArrayRecordDataSource

    return ArrayRecordDataSource([str(folder / "bytes.arrayrecord")])


def grain_source(folder: Path) -> Batches:
    """Its source alone, asked for whole batches of random ids, with no pipeline around it."""
    source, order = array_record(folder), np.random.default_rng(0).permutation(RECORDS).tolist()
    for first in range(0, RECORDS, BATCH):
        yield source.__getitems__(order[first : first + BATCH])


def mosaic(folder: Path, workers: int) -> Batches:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=BATCH)
    for batch in DataLoader(dataset, BATCH, collate_fn=list, num_workers=workers):
        yield [sample["data"] for sample in batch]


def mosaic_items(folder: Path) -> Batches:
    """Item by item, without its own order."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=False, batch_size=BATCH)
    order = np.random.default_rng(0).permutation(RECORDS).tolist()
    for first in range(0, RECORDS, BATCH):
        yield [dataset[number]["data"] for number in order[first : first + BATCH]]


# Images: each way yields uint8[128, 256, 256, 3]


def decode_only(folder: Path, threads: int) -> Batches:
    """The limit: nothing but the decoder, on bytes that are in memory, into the same buffers."""
    import simplejpeg

    files = [path.read_bytes() for path in sorted((folder / "images").iterdir())] * 3
    buffers = [np.empty((SIDE, SIDE, 3), np.uint8) for _ in range(threads)]

    def work(part: int) -> None:
        for data in files[part::threads]:
            simplejpeg.decode_jpeg(data, buffer=buffers[part])

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    print(json.dumps(len(files) / (time.perf_counter() - started)))
    sys.exit()
    yield


def image_loader(folder: Path, *, checksums: bool = True, **options: Any) -> Batches:
    from twinfeed import BatchSampler, DecodeImage, Feed, RandomSampler, TorchLoader, open_index

    index = open_index(folder / "images.index", checksums=checksums)
    sampler = BatchSampler(RandomSampler(IMAGES, seed=0), batch_size=BATCH)
    loader = TorchLoader(Feed(index, sampler, decode=DecodeImage()), **options)
    while True:
        for batch in loader:
            yield batch["image"]


def pillow(folder: Path, workers: int) -> Batches:
    """What most people write."""
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    class Photos(Dataset[Any]):
        paths = sorted((folder / "images").iterdir())

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, number: int) -> Any:
            return np.array(Image.open(self.paths[number]).convert("RGB"))

    loader = DataLoader(Photos(), BATCH, shuffle=True, num_workers=workers, persistent_workers=True)
    while True:
        yield from loader


WAYS: dict[str, dict[str, Callable[[Path], Batches]]] = {
    "bytes": {
        "floor: random pread in a loop": floor_pread,
        "TorchLoader, CRC off": lambda f: loader(f, checksums=False),
        "TorchLoader, CRC off, prefetch=0": lambda f: loader(f, checksums=False, prefetch=0),
        "TorchLoader": loader,
        "TorchLoader, prefetch=0": lambda f: loader(f, prefetch=0),
        "DataLoader + RecordDataset, CRC off, workers=0": lambda f: plain_dataloader(f, 0),
        "DataLoader + RecordDataset, CRC off, workers=2": lambda f: plain_dataloader(f, 2),
        "vahidk/tfrecord, sequential, workers=0": lambda f: vahidk(f, 0),
        "vahidk/tfrecord, sequential, workers=2": lambda f: vahidk(f, 2),
        "webdataset, sequential, workers=0": lambda f: webdataset(f, 0),
        "webdataset, sequential, workers=2": lambda f: webdataset(f, 2),
        "webdataset over samples(feed), random, workers=0": lambda f: samples(f, 0),
        "webdataset over samples(feed), random, workers=2": lambda f: samples(f, 2),
        "Grain over array_record, no threads": lambda f: grain(f, 0),
        "Grain over array_record, 16 threads": lambda f: grain(f, 16),
        "Grain's array_record source alone, random batches": grain_source,
        "MosaicML Streaming, shuffled, workers=0": lambda f: mosaic(f, 0),
        "MosaicML Streaming, shuffled, workers=2": lambda f: mosaic(f, 2),
        "MosaicML Streaming, item by item": mosaic_items,
    },
    "images": {
        "limit: decode only, 2 threads": lambda f: decode_only(f, 2),
        "TorchLoader, 2 threads, CRC off": lambda f: image_loader(f, threads=2, checksums=False),
        "TorchLoader, 2 threads": lambda f: image_loader(f, threads=2),
        "TorchLoader, 2 workers": lambda f: image_loader(f, num_workers=2),
        "DataLoader + Pillow, workers=2": lambda f: pillow(f, 2),
    },
}


def measure(batches: Iterator[Any]) -> float:
    """Return records per second from the first batch's arrival on, of seconds of what has no end;
    the peers' one epoch of byte strings takes about as long.
    """
    held = next(batches)
    count, started = 0, time.perf_counter()
    for held in batches:
        count += len(held)
        if time.perf_counter() - started > MOST_SECONDS:
            break
    return count / (time.perf_counter() - started)


def run(kind: str, name: str, folder: Path) -> float | None:
    """Measure one way in a process of its own; None where a peer is not installed."""
    command = [sys.executable, __file__, "--data", str(folder), "--one", kind, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        print(f"left out: {name}: {last}")
        return None
    return float(json.loads(done.stdout.strip().rpartition("\n")[2]))


def main() -> None:
    """Measure every way in turns, and print a table for each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("benchmark-data"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="write the rates to figures.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.data
    if arguments.one:
        kind, name = arguments.one
        print(json.dumps(measure(iter(WAYS[kind][name](folder)))))
        return
    folder.mkdir(exist_ok=True)
    make(folder)
    for kind, ways in WAYS.items():
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, found in rates.items():
                rate = run(kind, name, folder) if found is not None else None
                if rate is not None:
                    found.append(rate)
        medians = {name: statistics.median(found) for name, found in rates.items() if found}
        first = next(iter(medians.values()))
        print(f"\n| {kind} | records per second | of the first line |\n|---|---|---|")
        for name, rate in medians.items():
            print(f"| {name} | {rate:,.0f} | {rate / first:.2f} |")
        if arguments.record:
            record(__file__, {kind: medians})


if __name__ == "__main__":
    main()
