"""Read ranges of a file from a local web server, against obstore's HTTPStore.

The server is a process of its own, and sends bytes straight from the page cache. The two clients
take turns: the ratio is the median of the pairs, and its range stands in brackets.

    python benchmarks/web.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from range_server import server

from twinfeed.loaders.storage.open_store import store_of
from twinfeed.loaders.storage.url import Location

RANGES = {"10 KB": 10_000, "1 MB": 1_000_000, "8 MB": 8_000_000}
FILE_BYTES = 64_000_000
NAME = "shard.tar"

Read = Callable[[int, int], int]
"""Read a range, and return how many bytes came."""


def rate(read: Read, length: int, threads: int, seconds: float) -> float:
    """Return how many ranges a second come, read by so many threads."""
    done = [0] * threads
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        while time.perf_counter() < end:
            start = (number * 7919 + done[number]) * length % (FILE_BYTES - length + 1)
            if read(start, start + length) != length:
                raise RuntimeError("a short range")
            done[number] += 1

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return sum(done) / (time.perf_counter() - begin)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, NAME).write_bytes(os.urandom(FILE_BYTES))
        with server(folder) as url:
            compare(url, options)


def compare(url: str, options: argparse.Namespace) -> None:
    """Print a row for each length of a range, and each number of threads."""
    ours, theirs = (
        store_of(Location.of(url)),
        obstore.store.from_url(url, client_options={"allow_http": True}),
    )
    clients: tuple[Read, Read] = (
        lambda start, stop: len(ours.read(NAME, start, stop).data),
        lambda start, stop: len(obstore.get_range(theirs, NAME, start=start, end=stop)),
    )
    print("| range | threads | twinfeed: MB/s, requests/s | obstore | twinfeed / obstore |")
    print("|---|---|---|---|---|")
    for name, length in RANGES.items():
        for threads in (1, 16):
            pairs = [
                [rate(read, length, threads, options.seconds) for read in clients]
                for _ in range(options.pairs + 1)
            ][1:]  # the first pair opens the connections
            mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratios = [one / two for one, two in pairs]
            cells = [f"{one * length / 1e6:,.0f}, {one:,.0f}" for one in (mine, other)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(
                f"| {name} | {threads} | {cells[0]} | {cells[1]} "
                f"| {statistics.median(ratios):.2f} ({spread}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
