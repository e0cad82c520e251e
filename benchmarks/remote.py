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
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
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


def serve(delay: float) -> None:
    """Serve the folder for ever, after the port is printed; `GET /requests` gives their number."""
    requests = itertools.count(-1)  # the question itself is not counted

    def answer(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client:
            while request := client.recv(1 << 16):
                method, url, _ = request.split(b" ", 2)
                count = next(requests)
                if url == b"/requests":
                    body = str(count).encode()
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
                    client.sendall(body)
                    continue
                time.sleep(delay)
                path = FOLDER / url.decode().lstrip("/").partition("?")[0]
                if not path.is_file():
                    client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                _send(client, path, request, with_body=method == b"GET")

    with socket.create_server(("127.0.0.1", 0), backlog=256) as listening:
        print(listening.getsockname()[1], flush=True)
        while True:
            client, _ = listening.accept()
            threading.Thread(target=answer, args=(client,), daemon=True).start()


def _send(client: socket.socket, path: Path, request: bytes, *, with_body: bool) -> None:
    size = path.stat().st_size
    found = re.search(rb"(?i)range: bytes=(\d+)-(\d*)", request)
    start, last = (int(found[1]), int(found[2] or size - 1)) if found else (0, size - 1)
    last = min(last, size - 1)
    status = "206 Partial Content" if found else "200 OK"
    head = (
        f'HTTP/1.1 {status}\r\nETag: "1"\r\nAccept-Ranges: bytes\r\n'
        "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n"
        f"Content-Range: bytes {start}-{last}/{size}\r\nContent-Length: {last + 1 - start}\r\n\r\n"
    )
    client.sendall(head.encode())
    if with_body:
        with open(path, "rb") as file:
            while start <= last:
                start += os.sendfile(client.fileno(), file.fileno(), start, last + 1 - start)


@contextmanager
def server(delay: float) -> Iterator[str]:
    """Yield the address of a server in another process."""
    command = [sys.executable, __file__, "--serve", str(delay)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def measure(delay: float, read: Callable[[str], Iterable[int]]) -> dict[str, float]:
    """Measure one way, which yields how many bytes came: the rate, the requests and the memory."""
    make()
    with server(delay) as url:
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
    if sys.argv[1:2] == ["--serve"]:
        serve(float(sys.argv[2]))
    else:
        main(__file__, __doc__, WAYS)
