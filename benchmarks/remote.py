"""Read records of 10 KB from a local web server that answers after 5 or 50 ms, beside its peers.

A random order of single records, and a shuffle by blocks or chunks of 4 MB. By hand means: the
ranges are known before, and 32 threads request them with obstore, in order. Each way runs in a
process of its own; the numbers are medians of `--rounds` runs that take turns. The server is a
process of its own as well. It counts requests, and sends from the page cache. Memory is the peak
beyond what the process held before the first batch was asked for.

    pip install obstore litdata
    python benchmarks/remote.py
"""

from __future__ import annotations

import itertools
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from range_server import server
from ways import Ways, main

RECORDS, NBYTES, SHARDS, BATCH = 60_000, 10_000, 8, 128
RANDOM_RECORDS = 24 * BATCH  # of the random order; blocks are read to the end of an epoch
REQUESTS, AHEAD = 32, 64_000_000  # in flight, and bytes, as in this library
BLOCK_BYTES = 1 << 22
FOLDER = Path(tempfile.gettempdir(), "twinfeed-remote-benchmark")


def make() -> None:
    """Write the records as TFRecords with an index, and as chunks of litData; once."""
    from twinfeed import TFRecordWriter, build_index
    from twinfeed.loaders.formats.example import encode

    if (FOLDER / "all.index").exists():
        return
    (FOLDER / "lit").mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    records = [draw.bytes(NBYTES) for _ in range(RECORDS)]
    for shard in range(SHARDS):
        with TFRecordWriter(FOLDER / f"{shard}.tfrecord") as writer:
            for data in records[shard::SHARDS]:
                writer.write(encode({"data": data}))
    try:
        from litdata.streaming.writer import BinaryWriter

        lit = BinaryWriter(str(FOLDER / "lit"), chunk_bytes=BLOCK_BYTES)
        for number, data in enumerate(records):
            lit[number] = data
        lit.done()
        lit.merge()
    except ImportError:
        pass
    build_index(str(FOLDER / "*.tfrecord"), FOLDER / "all.index")


def measure(delay: float, read: Callable[[str], Iterable[int]]) -> dict[str, float]:
    """Measure one way, which yields how many bytes came: the rate, the requests and the memory."""
    make()
    with server(FOLDER, delay=delay) as url:
        pieces = read(url)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.perf_counter()
        nbytes = sum(pieces)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with urlopen(f"{url}/requests") as answer:
            requests = int(answer.read())
    return {
        "MB/s": nbytes / seconds / 1e6,
        "MB": nbytes / 1e6,
        "requests": requests,
        "memory MB": (peak - before) / 1024,
    }


def by_twinfeed(url: str, *, blocks: bool) -> Iterator[int]:
    """Read by a loader without a framework, over an index of shards at a URL."""
    from twinfeed import BatchSampler, Feed, NumpyLoader, RandomSampler, open_index, shuffled

    index = open_index(FOLDER / "all.index", root=url)
    order = shuffled(index, seed=0, memory=1 << 30) if blocks else RandomSampler(len(index), seed=0)
    loader = NumpyLoader(Feed(index, BatchSampler(order, batch_size=BATCH)))
    batches = len(loader) if blocks else RANDOM_RECORDS // BATCH
    return (sum(map(len, batch["data"])) for batch in itertools.islice(loader, batches))


def by_obstore(url: str, *, blocks: bool) -> Iterator[int]:
    """Read the same ranges by hand: threads request them in order, as far ahead as this library."""
    import obstore

    from twinfeed import open_index

    index = open_index(FOLDER / "all.index")
    if blocks:
        sizes = {name: (FOLDER / name).stat().st_size for name in index.files.tolist()}
        ranges = [
            (name, start, min(start + BLOCK_BYTES, size))
            for name, size in sizes.items()
            for start in range(0, size, BLOCK_BYTES)
        ]
    else:
        ids = np.random.default_rng(0).permutation(RECORDS)[:RANDOM_RECORDS]
        rows = index.rows(["data"], ids)
        stops = rows["offset"] + rows["length"]
        names = [index.files[number] for number in rows["file"].tolist()]
        ranges = list(zip(names, rows["offset"].tolist(), stops.tolist(), strict=True))
    store = obstore.store.from_url(url, client_options={"allow_http": True})

    def get(name: str, start: int, end: int) -> int:
        return len(bytes(obstore.get_range(store, name, start=start, end=end)))

    ahead = AHEAD // (BLOCK_BYTES if blocks else NBYTES)
    with ThreadPoolExecutor(REQUESTS) as pool:
        futures = deque(pool.submit(get, *bounds) for bounds in ranges[:ahead])
        for bounds in ranges[ahead:]:
            yield futures.popleft().result()
            futures.append(pool.submit(get, *bounds))
        yield from (future.result() for future in futures)


def by_litdata(url: str) -> Iterator[int]:
    """Read by litData's reader, which loads chunks as whole files to a disk, in shuffled order."""
    from litdata import StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # litData has no option for it
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none"}
    with tempfile.TemporaryDirectory() as cache:
        data = StreamingDataset(
            "s3://lit",
            cache_dir=cache,
            shuffle=True,
            storage_options={"endpoint_url": url, "region_name": "us-east-1", **keys},
        )
        yield from map(len, data)


WAYS: Ways = {
    f"{delay * 1e3:.0f} ms, {order}: {name}": (partial(measure, delay, read), peer)
    for delay in (0.005, 0.05)
    for order, ways in {
        "random 10 KB": {
            "twinfeed": (partial(by_twinfeed, blocks=False), None),
            "obstore by hand": (partial(by_obstore, blocks=False), "obstore"),
        },
        "blocks of 4 MB": {
            "twinfeed": (partial(by_twinfeed, blocks=True), None),
            "obstore by hand, in stored order": (partial(by_obstore, blocks=True), "obstore"),
            "litData": (by_litdata, "litdata"),
        },
    }.items()
    for name, (read, peer) in ways.items()
}


if __name__ == "__main__":
    main(__file__, __doc__, WAYS)
