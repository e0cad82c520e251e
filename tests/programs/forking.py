"""Fork in mid-pass; run as `python forking.py <loader> [URL of an index]`.

The children try what a child may do with what it inherits, and end as any program does. The parent
prints what they said, and the batches that the parent itself got. Only the loader's framework is
imported, as each child takes what the parent has.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from twinfeed.loaders import Feed, NumpyLoader, open_index, pack
from twinfeed.samplers import (
    BatchSampler,
    BatchStream,
    ExactOnceBatchSampler,
    ShardShuffleSampler,
)

RECORDS, BATCH = 96, 4
# In stored order within blocks, so that sequential readers of files serve it too.
SHUFFLE = ShardShuffleSampler([RECORDS], seed=5, block=8, window=2, order_within="stored")
SAMPLER = BatchSampler(SHUFFLE, batch_size=BATCH)
ONCE = ExactOnceBatchSampler(RECORDS, batch_size=BATCH)


def torch(**options: Any) -> Callable[[Feed], Any]:
    loader = import_module("twinfeed.loaders.torch").TorchLoader
    return lambda feed: loader(feed, device="cpu", **options)


def tensorflow() -> Callable[[Feed], Any]:
    return import_module("twinfeed.loaders.tensorflow").TensorFlowLoader  # type: ignore[no-any-return]


def choosing() -> Callable[[Feed], Any]:
    backend = import_module("twinfeed.loaders.tensorflow")
    return lambda feed: backend.choose(feed.sampler, backend.source_datasets(feed))


LOADERS: dict[str, Callable[[], Callable[[Feed], Any]]] = {
    "numpy": lambda: lambda feed: NumpyLoader(feed, threads=2),
    "numpy, copied": lambda: lambda feed: deepcopy(NumpyLoader(feed)),
    "numpy, nothing ahead": lambda: lambda feed: NumpyLoader(feed, prefetch=0),
    "torch": torch,
    "torch, workers": lambda: torch(num_workers=2),
    "torch, workers that stay": lambda: torch(num_workers=2, persistent_workers=True),
    "tensorflow": tensorflow,
    "tensorflow, choose": choosing,
}


def main(name: str, *url: str) -> None:
    """Fork a child for each thing that a child may do; go on with the pass between the children."""
    samples = ({"word": b"%d" % number} for number in range(RECORDS))
    index = open_index(*url) if url else pack(samples, Path(tempfile.mkdtemp()))["data"]
    sampler: BatchStream = ONCE if name.endswith(", evaluation") else SAMPLER
    name = name.removesuffix(", evaluation")
    loader = LOADERS[name]()(Feed(index, sampler))
    batches = iter(loader)
    got = [ids(next(batches))]

    def goes_on() -> None:
        next(batches)

    def drops() -> None:
        nonlocal batches, loader
        loader.close()
        del batches, loader

    def begins() -> None:
        rest = [ids(batch) for batch in loader]
        print(rest == wanted(sampler)[len(got) :], loader.epoch, loader.step)
        loader.close()

    for does in (goes_on, drops, begins):
        print(does.__name__, in_child(does), flush=True)
        got.append(ids(next(batches)))
    got += [ids(batch) for batch in batches]
    print("parent", got == wanted(sampler), loader.epoch, loader.step)
    # Between two passes workers may stay, and are the parent's still.
    print(drops.__name__, in_child(drops), flush=True)
    print("parent", len(list(loader)), loader.epoch, loader.step)


def in_child(does: Callable[[], None]) -> int:
    """Do something in a forked child; return how the child ended."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            does()
        except RuntimeError as error:
            print("RuntimeError:", error)
        sys.exit()
    return os.waitpid(child, 0)[1]


def ids(batch: Any) -> list[int]:
    return [int(number) for number in batch["id"]]


def wanted(sampler: BatchStream = SAMPLER) -> list[list[int]]:
    return [batch.tolist() for batch in sampler.batches(0, 0, len(sampler))]


if __name__ == "__main__":
    main(*sys.argv[1:])
