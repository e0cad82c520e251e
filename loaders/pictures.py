"""Pictures of streams and batches, drawn by matplotlib (the extra `pictures`).

`plot_mixing` shows how well streams are shuffled, and `show_batch` what a batch holds. Each returns
a figure, which shows itself in a notebook; `figure.savefig("mixing.png")` and `"mixing.svg"` write
it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.feed.collate import Ragged, mode_of
from twinfeed.loaders.index import Index
from twinfeed.loaders.support.array_types import Array, Int64s
from twinfeed.loaders.support.extras import requires_extra
from twinfeed.samplers import (
    BatchStream,
    Sampler,
    diagnose,
    simulate_shuffle_buffer,
)
from twinfeed.samplers.validate import a_type

with requires_extra("twinfeed.loaders.pictures", "pictures"):
    from matplotlib.figure import Figure

__all__ = ["plot_mixing", "show_batch"]

# The images of a batch: their width in inches, the size of captions in points, and how many
# characters and lines a caption has at most.
_IMAGE_WIDTH, _FONT_SIZE, _MAX_CHARACTERS, _MAX_LINES = 1.3, 7, 24, 6
_MAX_POINTS = 20_000  # samples of a stream that are drawn


class _Picture(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG image, which a notebook shows."""
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()


def plot_mixing(
    streams: Mapping[str, BatchStream | Sampler | npt.ArrayLike],
    /,
    *,
    num_records: SupportsIndex | None = None,
    labels: npt.ArrayLike | None = None,
    buffers: Sequence[int] = (),
    epoch: int = 0,
) -> Figure:
    """Draw how streams mix their records: a column for each, with numbers below.

    The upper row has the record number against the position in the epoch, the lower row the label.
    A uniform shuffle fills both evenly. A shuffle of sorted data by a buffer that is smaller than
    the data leaves a wedge.

    Args:
        streams: batch samplers by name, samplers, or record ids, int[samples], in the order a
            pipeline gave them. Ids without batches are cut into batches of the samplers' size.
        num_records: the number of records, if the ids of an array do not have all of them.
        labels: the label of each record, int or str.
        buffers: sizes of `shuffle(buffer)`, in records. Each is simulated, and gets a column.
        epoch: the epoch of the samplers.

    Raises:
        TypeError: `streams` is not a dict, or is empty.
        ValueError: `diagnose` refuses a stream, such as ids that are not integers.

    >>> from twinfeed.samplers import BatchSampler, RandomSampler
    >>> uniform = BatchSampler(RandomSampler(1000, seed=0), batch_size=20)
    >>> labels = [n // 100 for n in range(1000)]
    >>> figure = plot_mixing({"uniform": uniform}, labels=labels, buffers=[50])
    >>> len(figure.axes)
    4
    """
    if not isinstance(streams, Mapping) or not streams:
        raise TypeError("streams must be streams by name, such as {'uniform': sampler}")
    sizes = [stream.batch_size for stream in streams.values() if isinstance(stream, BatchStream)]
    size = max(sizes, default=64)
    found = {}
    for name, stream in streams.items():
        batch_size = None if isinstance(stream, BatchStream) else size
        found[name] = diagnose(
            stream, epoch=epoch, batch_size=batch_size, num_records=num_records, labels=labels
        )
    records = next(iter(found.values())).records
    for buffer in buffers:
        name = f"shuffle({buffer:,}), simulated"
        order = simulate_shuffle_buffer(records, buffer_size=buffer, seed=0)
        found[name] = diagnose(order, batch_size=size, labels=labels)
    classes = None if labels is None else np.unique(np.asarray(labels), return_inverse=True)[1]
    rows = 1 if classes is None else 2
    figure = _Picture(figsize=(3.4 * len(found) + 0.4, 2.7 * rows + 1.3), layout="constrained")
    grid = figure.subplots(rows, len(found), squeeze=False, sharex="col")
    for column, (name, diagnosis) in zip(grid.T, found.items(), strict=True):
        _plot_order(column[0], diagnosis.order)
        column[0].set_title(name)
        if classes is not None:
            _plot_order(column[1], classes[diagnosis.order])
        lines = [f"moves records {diagnosis.displacement.ratio:.0%} as far as uniform"]
        for group, measure in diagnosis.distinct.items():
            lines.append(f"{measure.value:.1f} {group} a batch, uniform {measure.uniform:.1f}")
        column[-1].set_xlabel("\n".join(["position in the epoch", "", *lines]))
    for axes, quantity in zip(grid[:, 0], ("record number", "class"), strict=False):
        axes.set_ylabel(quantity)
    return figure


def _plot_order(axes: Any, values: Int64s) -> None:
    """Plot the value (a record or a class) of each sample of a stream, or of `_MAX_POINTS`."""
    samples = len(values)
    positions = np.unique(np.linspace(0, samples - 1, min(samples, _MAX_POINTS)).astype(int))
    size = max(2, 8000 / samples)  # of a point: smaller if there are many
    axes.scatter(positions, values[positions], s=size, alpha=0.5, linewidths=0, rasterized=True)


def show_batch(feed: Feed, /, *, epoch: int = 0, step: int = 0) -> Figure:
    """Draw a batch of a feed as a contact sheet: its images, with their captions below.

    Images are the first field whose samples are uint8 or float arrays [height, width] or [height,
    width, 1, 3 or 4]. A row has the samples of one class where a batch is made of classes. Below an
    image are its class, its record, and other short values: strings and numbers.

    Args:
        feed: whose batch is drawn.
        epoch: the epoch of the batch.
        step: the step of the batch.

    Raises:
        TypeError: `feed` is not a feed, but a loader for example.
        ValueError: a feed without images. Errors of reading and decoding are raised too.

    >>> import numpy as np
    >>> from tempfile import mkdtemp
    >>> from twinfeed.loaders import Feed, pack
    >>> from twinfeed.samplers import PKBatchSampler
    >>> index = pack([{"x": bytes(12), "label": n // 3} for n in range(12)], mkdtemp())["data"]
    >>> def decode(sample):
    ...     return {"image": np.frombuffer(sample["x"], np.uint8).reshape(3, 4)}
    >>> feed = Feed(index, PKBatchSampler(index.labels, p=2, k=3, seed=0), decode=decode)
    >>> len(show_batch(feed).axes)
    6
    """
    if not isinstance(feed, Feed):
        raise TypeError(f"show_batch takes a Feed, got {a_type(feed)}: give loader.feed")
    batch = feed[epoch, step]
    images = next((name for name, value in batch.items() if _are_images(value)), None)
    if images is None:
        raise ValueError(f"no field of {', '.join(batch)} has images: set decode=DecodeImage()")
    sizes = _row_sizes(batch.get("label"), len(batch["id"]))
    widest = max(sizes)
    captions = [_caption(feed, batch, number, images) for number in range(sum(sizes))]
    lines = max(caption.count("\n") + 1 for caption in captions)
    height = _IMAGE_WIDTH + (lines + 1) * 1.4 * _FONT_SIZE / 72
    figure = _Picture(figsize=(_IMAGE_WIDTH * widest, height * len(sizes)), layout="constrained")
    cells = [(row, column) for row, size in enumerate(sizes) for column in range(size)]
    for number, (row, column) in enumerate(cells):
        axes = figure.add_subplot(len(sizes), widest, row * widest + column + 1)
        image = batch[images][number]
        if mode_of(feed.collate, images) == "pad" and f"{images}_shape" in batch:
            image = image[tuple(map(slice, batch[f"{images}_shape"][number]))]
        axes.imshow(_to_display(image), cmap="gray")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_xlabel(captions[number], fontsize=_FONT_SIZE, labelpad=2)
    return figure


def _are_images(value: Any) -> bool:
    """Return whether a field of a batch is an array of images, [batch, height, width(, n)]."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "uf"
        and (value.ndim == 3 or (value.ndim == 4 and value.shape[3] in (1, 3, 4)))
    )


def _to_display(image: Array) -> Array:
    """Return an image as matplotlib shows it: grey without a channel axis, floats in [0, 1]."""
    image = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if image.dtype.kind == "u":
        return image
    low, high = float(image.min()), float(image.max())
    return (image - low) / max(high - low, 1e-12)


def _row_sizes(labels: Array | None, count: int) -> list[int]:
    """Return the number of images in each row: the images of each class, if they follow one
    another, as [2, 3] of labels [7, 7, 4, 4, 4]. Otherwise the sheet is about square.
    """
    if labels is not None and count:
        starts = np.flatnonzero(np.diff(labels, prepend=labels[0] - 1))  # where the label changes
        sizes = np.diff(np.append(starts, count))
        if sizes.min() > 1 and len(np.unique(labels)) == len(starts):
            return [int(size) for size in sizes]
    width = max(1, int(np.ceil(np.sqrt(count))))
    return [min(width, count - start) for start in range(0, count, width)]


def _caption(feed: Feed, batch: Mapping[str, Any], number: int, images: str) -> str:
    """Return the text below an image, row `number` of a batch: class, record, and short values."""
    lines = [f"record {feed.sampler.records(batch['id'][number : number + 1])[0]}"]
    classes = feed.index.classes if isinstance(feed.index, Index) else ()
    for name, values in batch.items():
        if name in ("id", "mask", images) or isinstance(values, Ragged) or np.ndim(values[number]):
            continue
        value = values[number]
        if name == "label" and classes:
            lines.insert(0, classes[int(value)])
            continue
        text = value.decode(errors="replace") if isinstance(value, bytes) else value
        lines.append(text if isinstance(text, str) else f"{name} {text}")
    shown = [
        line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 1]}…"
        for line in lines[:_MAX_LINES]
    ]
    return "\n".join(line.replace("\n", " ").replace("$", r"\$") for line in shown)
