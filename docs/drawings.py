"""Draw the pictures of concepts.md from real streams: `python docs/drawings.py`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from twinfeed.samplers import BatchSampler, BatchStream, PKBatchSampler, RandomSampler

CELL = 34
INK, PALE, LINE = "#1f2937", "#f3f4f6", "#9ca3af"
CLASSES = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fecaca", "#ddd6fe", "#fed7aa")


class Drawing:
    """Collect shapes, and write them as one SVG on a pale ground that suits dark pages too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def box(self, x: float, y: float, width: float, text: str = "", fill: str = "white") -> None:
        """Draw a box one cell high, its text in the middle."""
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{CELL}" rx="4" fill="{fill}" '
            f'stroke="{LINE}"/>'
        )
        self.text(x + width / 2, y + CELL / 2, text, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Write a text at the height of its middle."""
        self.shapes.append(
            f'<text x="{x}" y="{y + 5}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow."""
        self.shapes.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" '
            f'marker-end="url(#head)"/>'
        )

    def bar(self, x: float, y: float, height: float) -> None:
        """Draw a thick upright line."""
        self.shapes.append(
            f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + height}" stroke="{INK}" stroke-width="2"/>'
        )

    def svg(self) -> str:
        """Return the file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="sans-serif" '
            f'font-size="14">\n<title>{escape(self.title)}</title>\n'
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="100%" height="100%" rx="8" fill="{PALE}"/>\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n"
        )


def index() -> Drawing:
    """Shards of records, and the table that says where each record lies."""
    out = Drawing(700, 262, "Three shards of records, and the index: one row for each record")
    shards, labels, record = (4, 3, 2), (0, 1, 0, 2, 1, 1, 2, 0, 2), 0
    out.text(20, 22, "shards")
    out.text(430, 22, "index")
    for shard, length in enumerate(shards):
        y = 44 + shard * 52
        out.text(20, y + CELL / 2, f"{shard}.tar")
        for number in range(length):
            out.box(70 + number * 64, y, 60, str(number), CLASSES[labels[record]])
            record += 1
    for x, name in zip((430, 482, 552, 630), ("id", "shard", "number", "label"), strict=True):
        out.text(x, 44, name)
    record = 0
    for shard, length in enumerate(shards):
        for number in range(length):
            y = 66 + record * 21
            for x, value in zip((430, 482, 552), (record, shard, number), strict=True):
                out.text(x, y, str(value))
            fill = CLASSES[labels[record]]
            out.shapes.append(
                f'<rect x="630" y="{y - 8}" width="40" height="16" rx="3" fill="{fill}"/>'
            )
            out.text(650, y, "abc"[labels[record]], "middle")
            record += 1
    out.arrow(340, 118, 412, 118)
    return out


def epochs(sampler: BatchStream) -> Drawing:
    """Two epochs of a stream, a row each, cut into batches."""
    size = sampler.batch_size
    columns = len(sampler) * size
    out = Drawing(110 + columns * CELL + len(sampler) * 12, 140, f"Two epochs of {sampler!r}")
    for step in range(len(sampler)):
        out.text(106 + step * (size * CELL + 12) + size * CELL / 2, 22, f"step {step}", "middle")
    for epoch in range(2):
        y = 40 + epoch * 48
        out.text(20, y + CELL / 2, f"epoch {epoch}")
        for step in range(len(sampler)):
            row(out, 106 + step * (size * CELL + 12), y, sampler.batch(epoch, step).tolist())
    return out


def ranks(sampler: BatchStream, labels: Sequence[int], world_size: int) -> Drawing:
    """The first global batches of a stream, and which rank gets which part."""
    size = sampler.batch_size
    share = size * CELL // world_size
    out = Drawing(130 + size * CELL, 40 + 3 * 44 + 16, f"Who gets what of {sampler!r}")
    for rank in range(world_size):
        out.text(106 + rank * share + share / 2, 22, f"rank {rank}", "middle")
    for step in range(3):
        y = 40 + step * 44
        out.text(20, y + CELL / 2, f"step {step}")
        drawn = [sampler.shard(rank, world_size).batch(0, step) for rank in range(world_size)]
        ids = [record for part in drawn for record in part.tolist()]
        assert ids == sampler.batch(0, step).tolist()
        row(out, 106, y, ids, [CLASSES[labels[record]] for record in ids])
    for rank in range(1, world_size):
        out.bar(106 + rank * share, 34, 3 * 44 + 2)
    return out


def row(
    out: Drawing, x: float, y: float, ids: Sequence[int], fills: Sequence[str] | None = None
) -> None:
    """Draw ids as cells in a row."""
    for position, record in enumerate(ids):
        fill = "white" if fills is None else fills[position]
        out.box(x + position * CELL, y, CELL, str(record), fill)


def flow() -> Drawing:
    """What is a value, what keeps a position, and who asks whom; narrow, to be read on a phone."""
    out = Drawing(350, 424, "From shards to the loop: values above, a position below")
    out.box(10, 16, 90, "shards")
    out.box(130, 16, 90, "index", CLASSES[0])
    out.box(250, 16, 90, "sampler", CLASSES[0])
    out.box(130, 84, 90, "feed", CLASSES[0])
    out.arrow(100, 33, 126, 33)
    out.arrow(175, 50, 175, 80)
    out.arrow(295, 50, 224, 92)
    out.arrow(175, 118, 175, 148)
    out.shapes.append(
        f'<rect x="10" y="152" width="330" height="102" rx="8" fill="none" stroke="{LINE}"/>'
    )
    loaders = ("NumpyLoader", "TorchLoader", "TensorFlowLoader", "JaxLoader")
    for number, name in enumerate(loaders):
        out.box(22 + number % 2 * 156, 164 + number // 2 * 44, 150, name, CLASSES[1])
    out.arrow(175, 254, 175, 284)
    out.box(115, 288, 120, "your loop")
    out.box(10, 340, 90, "value", CLASSES[0])
    out.text(112, 357, "no position, thread or open file")
    out.box(10, 380, 90, "loader", CLASSES[1])
    out.text(112, 397, "keeps the position")
    return out


def drawings() -> dict[str, str]:
    """Return the files by their names."""
    labels = [record % 4 for record in range(24)]
    pk = PKBatchSampler(labels, p=4, k=2, seed=0)
    random = BatchSampler(RandomSampler(12, seed=0), batch_size=4)
    return {
        "index.svg": index().svg(),
        "epochs.svg": epochs(random).svg(),
        "ranks.svg": ranks(pk, labels, 2).svg(),
        "flow.svg": flow().svg(),
    }


if __name__ == "__main__":
    for name, text in drawings().items():
        (Path(__file__).parent / name).write_text(text)
