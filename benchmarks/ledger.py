"""Measure what a ledger costs: processor time of a batch, and bytes of a million steps.

Each round measures as many plain writes of 16 bytes as batches: the floor of the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from twinfeed import BatchSampler, Ledger, RandomSampler

STEPS = 100_000


def measured(folder: Path) -> tuple[float, float]:
    """Return the processor time of a delivered batch and of a plain write, in µs."""
    sampler = BatchSampler(RandomSampler(1_000_000, seed=0), batch_size=100)
    with Ledger(folder / "ledger.jsonl", sampler) as ledger:
        ledger.delivered(0)
        begin = process_time()
        for step in range(1, STEPS):
            ledger.delivered(step)
        noted = process_time() - begin
    descriptor = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT)
    begin = process_time()
    for _ in range(1, STEPS):
        os.pwrite(descriptor, bytes(16), 0)
    plain = process_time() - begin
    os.close(descriptor)
    return 1e6 * noted / STEPS, 1e6 * plain / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="a million steps; default 10")
    with TemporaryDirectory() as folder:
        rounds = [measured(Path(folder)) for _ in range(parser.parse_args().rounds)]
        size = sum(Path(folder, f"ledger.jsonl{end}").stat().st_size for end in ("", ".position"))
    noted, plain = (statistics.median(times) for times in zip(*rounds, strict=True))
    print(f"a batch {noted:.2f} µs, a plain write {plain:.2f} µs: {noted / plain:.1f} times")
    print(f"{len(rounds) * STEPS:,} steps, in {len(rounds)} runs of one ledger: {size:,} bytes")


if __name__ == "__main__":
    main()
