"""What a cluster of two processes may share out of a loader's dataset, and what is refused."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from support.programs import PYTHON

from twinfeed.loaders import Feed, open_index, pack
from twinfeed.loaders.tensorflow import TensorFlowLoader, original_errors
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    processes,
)

RECORDS = 80


def given(strategy: tf.distribute.Strategy, loader: TensorFlowLoader) -> dict[str, Any]:
    """Return the ids of a distributed epoch that come to this process, or what is said instead."""
    ids: list[list[int]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with original_errors():
                distributed = strategy.experimental_distribute_dataset(loader.dataset)
                parts = (strategy.experimental_local_results(one["id"]) for one in distributed)
                ids.extend(part.numpy().tolist() for (part,) in parts)
        except ValueError as error:
            return {"error": str(error), "ids": ids}
    return {"ids": ids, "warned": [str(w.message) for w in caught if "processes" in str(w.message)]}


def tracked(strategy: tf.distribute.Strategy, loader: TensorFlowLoader, how: str) -> dict[str, Any]:
    """Return the ids of an epoch that `track` gives to this process, and what it warns of."""
    processes._warned.clear()
    dataset: Any = {
        "cut": lambda: strategy.experimental_distribute_dataset(loader.dataset),
        "by rank": lambda: strategy.distribute_datasets_from_function(loader.dataset_for),
        "all": lambda: strategy.distribute_datasets_from_function(lambda _: loader.dataset),
    }[how]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ids = [batch["id"] for batch in loader.track(dataset)]
    parts = [strategy.experimental_local_results(batch) for batch in ids]
    warned = [str(warning.message) for warning in caught if "ranks" in str(warning.message)]
    return {"ids": [part.numpy().tolist() for (part,) in parts], "warned": warned}


def work(folder: Path) -> None:
    """Distribute each kind of feed, as one of the two processes."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = open_index(folder / "data.index")
    random = BatchSampler(RandomSampler(RECORDS, seed=1), batch_size=8)
    samplers = {
        "training": random,
        "rank": random.shard(1, 2),
        "classes": PKBatchSampler(np.arange(RECORDS) % 8, p=4, k=2, seed=0),
        "evaluation": ExactOnceBatchSampler(RECORDS, batch_size=8),
        "own files": random.shard(0, 1),
    }
    found = {
        name: given(strategy, TensorFlowLoader(Feed(index, sampler)))
        for name, sampler in samplers.items()
    }
    found |= {
        f"tracked {how}": tracked(strategy, TensorFlowLoader(Feed(index, random)), how)
        for how in ("cut", "by rank", "all")
    }
    # A loop over the loader shares nothing out.
    rank = TensorFlowLoader(Feed(index, samplers["rank"]))
    found["loop"] = {"ids": [batch["id"].numpy().tolist() for batch in rank.track(rank.dataset)]}
    task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    (folder / f"worker-{task}.json").write_text(json.dumps(found))


def main() -> int:
    """Run as one of the processes, or start them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    folder: Path = parser.parse_args().out
    if "TF_CONFIG" in os.environ:
        work(folder)
        return 0
    pack([{"word": b"%d" % number} for number in range(RECORDS)], folder)
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    cluster = {"worker": [f"localhost:{one.getsockname()[1]}" for one in sockets]}
    for one in sockets:
        one.close()
    workers = [
        subprocess.Popen(
            [PYTHON, __file__, "--out", str(folder)],
            env=os.environ
            | {
                "TF_CONFIG": json.dumps(
                    {"cluster": cluster, "task": {"type": "worker", "index": n}}
                )
            },
        )
        for n in range(2)
    ]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
