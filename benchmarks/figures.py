"""The tables of figures in README.md and docs/index.md, from figures.json.

A benchmark writes what it measures to figures.json if it is called with `--record`.
`python benchmarks/figures.py` then writes both tables anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("figures.json")
PAGES = ("README.md", "docs/index.md")
HEADER = "| what | alternative | twinfeed |"


def record(script: str, measured: Mapping[str, Any]) -> None:
    """Write what a script has measured, under its name."""
    figures = json.loads(FILE.read_text())
    figures.setdefault(Path(script).name, {}).update(measured)
    FILE.write_text(json.dumps(figures, indent=1) + "\n")


def seconds(value: float) -> str:
    """Return a time in seconds, or in milliseconds."""
    return f"{value:.2g} s" if value >= 0.1 else f"{value * 1e3:.2g} ms"


def rate(value: float) -> str:
    """Return a number per second, in thousands or in millions."""
    if value >= 1e6:
        return f"{value / 1e6:.2g}M/s"
    return f"{value / 1e3:.{1 if value < 2e4 else 0}f}k/s"


def tables() -> dict[str, str]:
    """Return the table of each page."""
    figures = json.loads(FILE.read_text())
    samplers = figures["samplers.py"]
    read, images = (figures["torch_loading.py"][kind] for kind in ("bytes", "images"))
    classes = figures["tensorflow_loading.py"]["class files"]
    small, large = figures["tensorflow_loading.py"]["random order, of TFRecordDataset in order"]
    # Until the first batch is there: what is built, and the batch itself.
    classic, ours = (seconds(sum(classes[way][:2])) for way in ("classic", "loader"))

    def construction(way: str) -> str:
        found = samplers[f"P x K: {way}"]
        return f"{seconds(found['construction s'])}, {seconds(found['first batch ms'] / 1e3)}"

    def order(way: str) -> str:
        found = samplers[f"random order: {way}"]
        return f"{seconds(found['first batch ms'] / 1e3)}, {rate(found['ids per s'])}"

    grain = rate(read["Grain's array_record source alone, random batches"])
    vahidk = rate(read["vahidk/tfrecord, sequential, workers=0"])
    decoder = rate(images["limit: decode only, 2 threads"])
    bytes_row = (
        "random records of 10 KB in PyTorch",
        f"Grain's bare source: {grain}; vahidk/tfrecord, in order: {vahidk}",
        f"{rate(read['TorchLoader'])}, checked",
    )
    in_order = "`TFRecordDataset`, in file order, no shuffle"
    proportion = "{:.0%} of its records per second; {:.0%} per processor second"
    ranks_row = ("761 records over 4 ranks", "`DistributedSampler`: 764", "761")
    rows = {
        "README.md": [
            (
                "P×K over 5,000 class files of TFRecord: first batch, rate",
                f"`choose_from_datasets`: {classic}, {rate(classes['classic'][2])}",
                f"{ours}, {rate(classes['loader'][2])}",
            ),
            (
                "P×K of 10 million labels: construction, first batch",
                f"pytorch-metric-learning: {construction('pytorch-metric-learning')}",
                construction("twinfeed"),
            ),
            (
                "random order of 10 million: first batch, ids",
                f"Grain: {order('Grain')}; torch: {order('torch')}",
                order("twinfeed"),
            ),
            bytes_row,
            (
                "JPEG 256 × 256 in PyTorch, two cores",
                f"`DataLoader` and Pillow: {rate(images['DataLoader + Pillow, workers=2'])} "
                f"(the decoder alone: {decoder})",
                rate(images["TorchLoader, 2 threads"]),
            ),
            ("random records of 1 KB in TensorFlow", in_order, proportion.format(*small)),
            ("random records of 10 KB in TensorFlow", in_order, proportion.format(*large)),
            ranks_row,
        ],
        "docs/index.md": [
            (
                "P×K over 5,000 class files, first batch",
                f"`choose_from_datasets`: {classic}",
                ours,
            ),
            bytes_row,
            ranks_row,
        ],
    }
    lines = {page: [f"| {' | '.join(row)} |" for row in found] for page, found in rows.items()}
    return {page: "\n".join([HEADER, "|---|---|---|", *found]) for page, found in lines.items()}


if __name__ == "__main__":
    for page, table in tables().items():
        path = FILE.parents[1] / page
        before, _, after = path.read_text().partition(HEADER)
        path.write_text(before + table + after[after.index("\n\n") :])
