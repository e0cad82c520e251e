"""Packers and builds that die before the first change of a folder, before the second, and so on.

Run as a script: it is given a folder, where to copy the folder for each process, "pack" or "build",
a number of shards or the pattern of the shards, and 3 to die before every third change only. The
processes are forked from a process without threads.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from twinfeed.loaders import build_index, pack

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
WRITES = os.O_WRONLY | os.O_RDWR
KILLED = 9


def samples(state: int, count: int = 12) -> list[dict[str, Any]]:
    return [{"__key__": f"k{n}", "number": n, "state": state} for n in range(count)]


def pack_split(out: str, shards: str) -> None:
    """Pack two splits."""
    pack(samples(2), out, split={"train": 8, "eval": 4}, seed=2, shards=int(shards))


def build_anew(out: str, pattern: str) -> None:
    """Build the index of the shards that fit the pattern."""
    build_index(f"{out}/{pattern}", f"{out}/x.index", label="label")


def killed(work: Callable[[], None], last: int) -> int:
    """The exit status of a child that works and dies before change `last`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    changes = itertools.count(1)

    def count(event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        if (opened or event in CHANGES) and next(changes) == last:
            os._exit(KILLED)

    sys.addaudithook(count)
    try:
        work()
    except BaseException:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    folder, where, what, value, step = sys.argv[1:]
    for last in itertools.count(1, int(step)):
        out = shutil.copytree(folder, f"{where}/{last}")
        status = killed(partial({"pack": pack_split, "build": build_anew}[what], out, value), last)
        if status != KILLED:
            sys.exit(status)
