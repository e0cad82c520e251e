"""Kill packs, builds, caches and saves at random moments, and see that nothing is lost.

    PYTHONPATH=tests python tests/faults/kills.py --seconds 3600
    PYTHONPATH=tests python tests/faults/kills.py --seconds 60 --rooms pack --seed 7

A child does a piece of work, and is killed at a random moment of it. Then the parent looks. What it
finds must be the old state, the new state, or an error that names the file. After that the same
work is done again: it must give the new state with the same bytes as in an empty folder, and leave
nothing else. The saves are those of soak.py: the batches must be those of a plain loop.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from faults import soak
from support.inside import temporary
from support.servers import RangeServer
from support.shards import tree

from twinfeed.loaders import (
    DiskCache,
    Index,
    IndexFormatError,
    Reader,
    build_index,
    open_index,
    pack,
    verify,
)

RECORDS = 60
SPLIT = {"train": 40, "eval": 20}
CACHED = 1 << 16
CONTEXT = multiprocessing.get_context("forkserver")
SAVES = ("keras fit", "keras callback", "torch", "jax")
"""The routes of soak.py that save in a way of their own."""


def samples(state: int) -> list[dict[str, Any]]:
    """Return records that say which state they are of."""
    return [
        {"__key__": f"k{n:03}", "group": n % 5, "bytes": b"%d:%d" % (state, n) * 200}
        for n in range(RECORDS)
    ]


def check_left(folder: Path) -> None:
    """Fail if killed processes have left more than folders that they had not marked yet."""
    for left in folder.glob(".*"):
        assert {path.name for path in left.iterdir()} <= {temporary.MARK}


class Packing:
    """A pack in place of the pack of another state, which is removed, or into an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"

    def work(self, state: int) -> None:
        container: Literal["tar", "tfrecord"] = "tar" if state % 5 else "tfrecord"
        for index in self.out.glob("[!.]*.index"):  # before its shards
            shutil.rmtree(index)
        for shard in self.out.glob("[!.]*"):
            shard.unlink()
        pack(
            samples(state),
            self.out,
            split=SPLIT,
            seed=state,
            shards=state % 3 + 1,
            container=container,
        )

    def wanted(self, state: int) -> Any:
        return {state}

    def look(self) -> Any:
        """Return the states that the records of both splits are of."""
        found = set()
        for name, count in SPLIT.items():
            rows = read(open_index(self.out / f"{name}.index"))
            assert len(rows) == count
            found |= {int(row.partition(b":")[0]) for row in rows}
        return found

    def check(self) -> None:
        for name in SPLIT:
            assert verify(self.out / f"{name}.index").ok
        check_left(self.out)


class Building:
    """A build over the index of other shards, or the first one."""

    def __init__(self, folder: Path) -> None:
        self.shards, self.out = folder / "shards", folder / "x.index"
        for each in range(4):
            pack(samples(each), self.shards / f"d{each}", shards=2)

    def work(self, state: int) -> None:
        pool = None if state % 3 else ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
        shards = [f"{self.shards}/d{each}/*.tfrecord" for each in range(state % 4 + 1)]
        label = "group" if state % 2 else None
        build_index(shards, self.out, label=label, root=self.shards, executor=pool)
        if pool is not None:
            pool.shutdown()

    def wanted(self, state: int) -> Any:
        rows = [row["bytes"] for each in range(state % 4 + 1) for row in samples(each)]
        return bool(state % 2), sorted(rows)

    def look(self) -> Any:
        """Return whether there are labels, and the records."""
        index = open_index(self.out, root=self.shards)
        return "label" in index.columns, sorted(read(index))

    def check(self) -> None:
        assert verify(self.out, root=self.shards).ok
        assert {path.name.partition("-")[0] for path in self.out.glob("[!.]*")} == {
            "columns",
            "manifest.json",
        }
        check_left(self.out)


class Caching:
    """Random reads through a cache that is smaller than the data, and an index at a URL."""

    def __init__(self, folder: Path) -> None:
        pack(samples(0), folder / "data", shards=4)
        server = RangeServer(folder / "data")
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self.url, self.out = f"{server.url}/data.index", folder / "cache"

    def _index(self) -> Index:
        return open_index(self.url, cache=DiskCache(self.out, bytes=CACHED))

    def work(self, state: int) -> None:
        draw = random.Random(state)
        for _ in range(4):
            read(self._index(), draw.sample(range(RECORDS), 20))

    def wanted(self, _: int) -> Any:
        return sorted(row["bytes"] for row in samples(0))

    def look(self) -> Any:
        """Return the records."""
        files = [*self.out.glob("*/*.chunk"), *self.out.glob("writing")]
        used = sum(file.stat().st_size for file in files)
        assert used <= CACHED, f"the cache holds {used} bytes"
        return sorted(read(self._index()))

    def check(self) -> None:
        known = re.compile(
            r"CACHEDIR\.TAG|used|writing|indexes|[0-9a-f]{24}|[0-9a-f]{24}/\d+\.chunk"
        )
        found = [*self.out.glob("*"), *self.out.glob("?" * 24 + "/*")]
        assert all(known.fullmatch(str(file.relative_to(self.out))) for file in found)


def read(index: Index, ids: Iterable[int] | None = None) -> list[bytes]:
    """Return the bytes of some records, or of all."""
    with Reader(index) as reader:
        return [bytes(row) for row in reader.read(ids or range(len(index)))["bytes"]]


ROOMS: dict[str, Callable[[Path], Any]] = {"pack": Packing, "build": Building, "cache": Caching}


def be(room: Any, state: int, sender: Any) -> None:
    """Work as a child, which leads a session of its own and its workers."""
    os.setsid()
    sender.send(True)
    room.work(state)


def killed(room: Any, state: int, delay: float) -> bool:
    """Work in a child that is killed after so many seconds; return whether it was still running."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=be, args=(room, state, sender))
    child.start()
    sender.close()
    assert child.pid is not None
    assert receiver.recv()
    child.join(delay)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    # Its own children may hold locks until they have ended too, and close the pipe then.
    assert receiver.poll(60)
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), f"the work ended with {child.exitcode}"
    return child.exitcode != 0


class Campaign:
    """Take the room with the least time so far, again and again."""

    def __init__(self, place: Path, names: list[str]) -> None:
        self.place = place
        self.seen, self.spent = Counter[str](), dict.fromkeys(names, 0.0)
        self.rooms = {name: ROOMS[name](self._new(name)) for name in names if name in ROOMS}
        self.took = {name: self._measured(room) for name, room in self.rooms.items()}
        self.states = dict.fromkeys(self.rooms, 0)
        words = [{"word": b"%d" % n} for n in range(soak.RECORDS)]
        self.index = pack(words, place / "trainings")["data"]

    def _new(self, name: str) -> Path:
        folder = self.place / name
        folder.mkdir()
        return folder

    def _measured(self, room: Any) -> float:
        start = time.monotonic()
        room.work(0)
        return time.monotonic() - start

    def turn(self) -> None:
        """Do and kill one piece of work."""
        name = min(self.spent, key=self.spent.__getitem__)
        start = time.monotonic()
        try:
            if name in SAVES:
                self._train(name)
            else:
                self._kill(name)
        finally:
            self.spent[name] += time.monotonic() - start

    def _train(self, route: str) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.place / "trainings"))
        case = soak.Case.at_random(route)
        kills, _ = soak.train(case, folder, random.randrange(2, 7))
        self.seen[f"{route}: as a plain loop"] += kills
        soak.check(case, self.index, folder)
        shutil.rmtree(folder)

    def _kill(self, name: str) -> None:
        room, old = self.rooms[name], self.states[name]
        if gone := random.random() < 0.1:
            shutil.rmtree(room.out, ignore_errors=True)
        self.states[name] = new = old + 1
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            alive = killed(room, new, random.uniform(0, 1.1 * self.took[name]))
            states = {"new": room.wanted(new)} | ({} if gone else {"old": room.wanted(old)})
            found = self._looked(name, states)
            # The old pack is removed before the new one is made.
            assert not found.endswith("Error") or gone or name == "pack", found
            self.seen[f"{name}: {found}"] += alive
        room.work(new)
        assert room.look() == room.wanted(new)
        room.check()
        if name != "cache" and random.random() < 0.2:
            whole = tree(room.out)
            shutil.rmtree(room.out)
            room.work(new)
            same = whole.items() >= tree(room.out).items()  # a kill may leave arrays of other work
            assert same, "not the bytes of the same work in an empty folder"

    def _looked(self, name: str, states: dict[str, Any]) -> str:
        """Say which state is there."""
        room = self.rooms[name]
        try:
            found = room.look()
        except (FileNotFoundError, IndexFormatError) as error:
            if str(room.out) not in str(error):
                raise
            return type(error).__name__
        for each, wanted in states.items():
            if found == wanted:
                return each
        raise AssertionError(f"neither old nor new: {str(found)[:200]}")


def main() -> int:
    """Kill until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    every = [*ROOMS, *SAVES]
    parser.add_argument("--rooms", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    random.seed(options.seed)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    frameworks = ["tensorflow", "torch"] if set(options.rooms) & {*SAVES} else []
    CONTEXT.set_forkserver_preload(["soak", "twinfeed.loaders", *frameworks])
    findings = 0
    with tempfile.TemporaryDirectory() as place:
        campaign, end = Campaign(Path(place), options.rooms), time.monotonic() + options.seconds
        while time.monotonic() < end:
            try:
                campaign.turn()
            except Exception:
                findings += 1
                traceback.print_exc()
                sys.stderr.flush()
        for what, count in sorted(campaign.seen.items()):
            print(f"{what}, after {count} kills")
        print(
            f"{campaign.seen.total()} kills in {options.seconds:.0f} seconds, {findings} findings"
        )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
