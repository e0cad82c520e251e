"""Run several ways of doing things, each in a process of its own, and print a table of medians."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from figures import record

Ways = Mapping[str, tuple[Callable[[], dict[str, float]], str | None]]
"""A way by its name: what measures it, and the peer that must be installed."""


def timed(
    make: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[Any, float]:
    """Return what a call gives, and its seconds by this clock."""
    begin = clock()
    made = make()
    return made, clock() - begin


def main(script: str, about: str | None, ways: Ways) -> None:
    """Run every way whose peer is installed, in turns, and print a table of medians."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--record", action="store_true", help="write the medians to figures.json")
    parser.add_argument("--way", choices=ways, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(ways[options.way][0]()))
        return
    chosen = {name: peer for name, (_, peer) in ways.items() if options.only in name}
    there = [n for n, peer in chosen.items() if not peer or importlib.util.find_spec(peer)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in there}
    for _ in range(options.rounds):
        for name in there:
            command = [sys.executable, script, "--way", name]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs[name].append(json.loads(result.stdout.splitlines()[-1]))
    columns = list(dict.fromkeys(c for found in runs.values() for c in found[0]))
    print("| |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    medians = {
        name: {c: statistics.median(run[c] for run in found) for c in found[0]}
        for name, found in runs.items()
    }
    for name, figures in medians.items():
        cells = [f"{figures[c]:,.4g}" if c in figures else "" for c in columns]
        print(f"| {name} |", " | ".join(cells), "|")
    if options.record:
        record(script, medians)
    for name in sorted(chosen.keys() - set(there)):
        print(f"{name}: not installed")
