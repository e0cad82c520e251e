"""Packers that die before the first change of a folder, before the second, and so on.

Run as a script: it is given a folder, where to copy the folder for each packer, and a number of
shards. The packers are forked from a process that has no threads.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from typing import Any

from twinfeed.loaders import pack

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
WRITES = os.O_WRONLY | os.O_RDWR
KILLED = 9


def samples(state: int, count: int = 12) -> list[dict[str, Any]]:
    return [{"__key__": f"k{n}", "number": n, "state": state} for n in range(count)]


def packed(out: str, shards: int, last: int) -> int:
    """The exit status of a child that packs over what is there and dies before change `last`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    changes = itertools.count(1)

    def count(event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        if (opened or event in CHANGES) and next(changes) == last:
            os._exit(KILLED)

    sys.addaudithook(count)
    split = {"train": 8, "eval": 4}
    try:
        pack(samples(2), out, split=split, seed=2, shards=shards, overwrite=True)
    except BaseException:
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    folder, where, shards = sys.argv[1:]
    for last in itertools.count(1):
        shutil.copytree(folder, f"{where}/{last}")
        status = packed(f"{where}/{last}", int(shards), last)
        if status != KILLED:
            sys.exit(status)
