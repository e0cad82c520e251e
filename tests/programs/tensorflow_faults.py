"""What must end by itself, each in a fork of a process that has imported all and done nothing.

`python tensorflow_faults.py HOW HOW …` runs all at once, and says how each ended, after what it
said.
"""

import os
import sys
import time

import numpy as np
from support import tensorflow_feeds

from twinfeed.samplers import BatchSampler, RandomSampler


def slow(sample):  # type: ignore[no-untyped-def]
    time.sleep(0.02)
    return {"x": np.zeros(1000)}


def failing_slowly(sample):  # type: ignore[no-untyped-def]
    time.sleep(0.005)
    return failing(sample)


def failing(sample):  # type: ignore[no-untyped-def]
    if sample["word"] == tensorflow_feeds.word(40):
        raise RuntimeError("this one is bad")
    return {"x": np.zeros(10)}


def main(how: str) -> None:
    sampler = BatchSampler(RandomSampler(61, seed=1), batch_size=4)
    decode = {"error": failing, "slow error": failing_slowly}.get(how, slow)
    index = tensorflow_feeds.packed(61)
    loaders = [
        tensorflow_feeds.loader(index, sampler, decode=decode, prefetch=8, readahead=readahead)
        for readahead in (3000, 0)  # with the planner on, and off
    ]
    both = zip(*(iter(loader.dataset) for loader in loaders), strict=True)
    if how == "kept":
        sys.kept = both  # type: ignore[attr-defined]
        next(both)
        return
    for number, _ in enumerate(both):
        if how == "live iterator" and number == 2:
            return
        if how == "exit" and number == 2:
            sys.exit(3)


if __name__ == "__main__":
    running = []
    for way in sys.argv[1:]:
        output = os.memfd_create(way)
        child = os.fork()
        if not child:
            os.dup2(output, sys.stderr.fileno())
            main(way)
            break
        running.append((way, child, output))
    else:
        for way, child, output in running:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(sys.stderr.fileno(), os.pread(output, 1 << 20, 0))
            print(f"{way}: status {status}", file=sys.stderr, flush=True)
