"""Pack and index on a cluster, lose a worker on the way, and read on several ranks.

A data set that outgrows one machine is packed part by part, and its shards are indexed by many
workers. Machines fail, and a worker that dies must cost no more than its own task. The same code
runs on Dask, here a cluster of processes, and in a pool that Python brings along:

    python cluster.py
    python cluster.py --pool
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client, LocalCluster
from PIL import Image
from sklearn.datasets import load_digits

from twinfeed import (
    ExactOnceBatchSampler,
    Feed,
    NumpyLoader,
    build_index,
    open_index,
    pack,
)

WORKERS, PARTS, RANKS = 3, 9, 4


def write_images(folder: Path) -> None:
    """Write the digits as `part-3/7/0042.png`: a folder for each part, and in it for each class."""
    data = load_digits()
    for number, (pixels, digit) in enumerate(zip(data.images, data.target, strict=True)):
        path = folder / f"part-{number % PARTS}" / str(digit) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(path)


def pack_part(folder: Path, part: int) -> int:
    """Pack the images of a part into two shards; a worker does this."""
    images = folder / "images" / f"part-{part}"
    out = folder / f"shards-{part}"
    shutil.rmtree(out, ignore_errors=True)  # of an earlier run
    return len(pack(images, out, shards=2)["data"])


def label_of(record: dict[str, Any], deadly: Path) -> int:
    """Give the label; a worker does this. The first to scan one of the shards is killed there."""
    if "shards-4/data-00000" in record["__shard__"] and deadly.exists():
        deadly.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return int(record["label"][0])


def read_rank(path: Path, rank: int) -> list[int]:
    """Read what one rank is given of an epoch; a process of the training does this."""
    index = open_index(path)
    feed = Feed(index, ExactOnceBatchSampler(len(index), batch_size=64))
    with NumpyLoader(feed.shard(rank, RANKS)) as loader:
        return [int(number) for batch in loader for number in batch["id"]]


def pack_all(folder: Path, executor: Executor) -> None:
    """Pack every part, a task for each."""
    packed = list(executor.map(pack_part, [folder] * PARTS, range(PARTS)))
    print(f"packed {sum(packed)} images in {PARTS} tasks")
    (folder / "deadly").touch()


def index_all(folder: Path, executor: Executor) -> None:
    """Index every shard, a task for each."""
    label = partial(label_of, deadly=folder / "deadly")
    shards = str(folder / "shards-*" / "*.tfrecord")
    index = build_index(
        shards, folder / "all.index", fields=["image"], label=label, executor=executor
    )
    print(f"indexed {len(index)} records in {len(index.shard_lengths)} shards")


def read_all(folder: Path, executor: Executor) -> None:
    """Read on several ranks, and see that each record comes once."""
    ranks = list(executor.map(read_rank, [folder / "all.index"] * RANKS, range(RANKS)))
    met = sorted(number for ids in ranks for number in ids)
    assert met == list(range(len(met)))
    print(f"{RANKS} ranks read {', '.join(str(len(ids)) for ids in ranks)}: each record once")


def on_dask(folder: Path) -> None:
    """Run on a cluster. A real one is `Client("scheduler:8786")`, and a folder that all see."""
    with (
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        executor = client.get_executor()
        pack_all(folder, executor)
        before = set(client.run(os.getpid).values())
        index_all(folder, executor)
        lost = before - set(client.run(os.getpid).values())
        print(f"{len(lost)} of {WORKERS} workers was killed, another took over its shards")
        read_all(folder, executor)


def on_a_pool(folder: Path) -> None:
    """Run in a pool of processes, which ends with any of its workers."""
    with ProcessPoolExecutor(WORKERS) as executor:
        pack_all(folder, executor)
        try:
            index_all(folder, executor)
        except BrokenProcessPool:
            print("a worker was killed, and the pool with it: the same call in another pool")
    with ProcessPoolExecutor(WORKERS) as executor:
        index_all(folder, executor)
        read_all(folder, executor)


def main() -> None:
    """Go from a folder of images to what the ranks of a training read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("cluster-data"))
    parser.add_argument("--pool", action="store_true", help="a pool in place of Dask")
    options = parser.parse_args()
    folder = options.out.resolve()
    write_images(folder / "images")
    (on_a_pool if options.pool else on_dask)(folder)


if __name__ == "__main__":
    main()
