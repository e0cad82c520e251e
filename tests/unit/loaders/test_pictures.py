"""Pictures say what is true of the streams and batches that they show."""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from twinfeed.loaders import Feed, NumpyLoader, pack
from twinfeed.loaders.command_line import main
from twinfeed.loaders.pictures import plot_mixing, show_batch
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    ShardShuffleSampler,
    diagnose,
    simulate_shuffle_buffer,
)

LABELS = np.repeat(list("abcdefghij"), 100)


def below(figure: Figure) -> list[str]:
    """What is said under each column."""
    return [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()]


def test_plot_mixing_shows_buffer_wedge_but_none_for_shuffle() -> None:
    order = ShardShuffleSampler([500, 500], block=10, window=25, seed=0)
    streams = {
        "stored": BatchSampler(SequentialSampler(1000), batch_size=20),
        "shuffled": BatchSampler(order, batch_size=20),
        "as a pipeline gave it": np.arange(1000)[::-1],
    }
    figure = plot_mixing(streams, labels=LABELS, buffers=[50])
    stored, shuffled, given, _ = below(figure)
    assert "moves records 0% as far" in stored
    assert "1.0 classes a batch" in stored
    assert "moves records 9" in shuffled or "moves records 10" in shuffled
    measure = diagnose(streams["shuffled"], labels=LABELS).distinct["classes"]
    assert f"{measure.value:.1f} classes a batch, uniform {measure.uniform:.1f}" in shuffled
    assert "1.0 classes a batch" in given
    places, records = figure.axes[3].collections[0].get_offsets().T
    assert (records - places).max() < 50  # the wedge: no record leaves earlier
    assert [axes.get_title() for axes in figure.axes[:4]] == [*streams, "shuffle(50), simulated"]


def test_plot_mixing_takes_plain_sampler_and_partial_stream() -> None:
    """A buffer of 500 over 700 records, of which a run has seen 500, beside a sampler."""
    part = simulate_shuffle_buffer(700, buffer_size=500, seed=0)[:500]
    streams = {"part": part, "uniform": RandomSampler(700, seed=0)}
    labels = np.arange(700) // 70
    figure = plot_mixing(streams, num_records=700, labels=labels, buffers=[500])
    drawn, _, _ = below(figure)
    assert "classes a batch, uniform 10.0" in drawn
    error = r"^labels must be given for 500 records, got 700: pass num_records="
    with pytest.raises(ValueError, match=error):
        plot_mixing({"first": np.arange(500)}, labels=labels)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plot_mixing_figure_is_saved(kind: str, tmp_path: pytest.TempPathFactory) -> None:
    path = f"{tmp_path}/mixing.{kind}"
    sampler = BatchSampler(RandomSampler(100, seed=0), batch_size=10)
    plot_mixing({"uniform": sampler}).savefig(path)
    with open(path, "rb") as file:
        assert file.read(5) in (b"\x89PNG\r", b"<?xml")


def test_show_batch_has_a_row_for_each_class(tmp_path: pytest.TempPathFactory) -> None:
    samples = [
        {"pixels": bytes(range(12)), "label": LABELS[n * 10], "text": f"caption {n}".encode()}
        for n in range(100)
    ]
    index = pack(samples, f"{tmp_path}/data")["data"]

    def decode(sample: dict[str, bytes]) -> dict[str, object]:
        image = np.frombuffer(sample["pixels"], np.uint8).reshape(2, 2, 3)
        return {"image": image, "text": sample["text"]}

    sampler = PKBatchSampler(index.labels, p=3, k=4, seed=0)
    figure = show_batch(Feed(index, sampler, decode=decode), step=1)
    captions = [axes.get_xlabel().split("\n") for axes in figure.axes]
    ids = sampler.batch(0, 1)
    assert [caption[0] for caption in captions] == [index.classes[n] for n in index.labels[ids]]
    assert [caption[1] for caption in captions] == [f"record {record}" for record in ids]
    assert all(caption[2].startswith("caption ") for caption in captions)
    rows = [round(axes.get_subplotspec().get_position(figure).y0, 3) for axes in figure.axes]
    assert [rows.count(row) for row in sorted(set(rows))] == [4, 4, 4]


@pytest.mark.parametrize("lines", [1, 6, 30])
def test_show_batch_captions_lie_below_images(tmp_path: Path, lines: int) -> None:
    texts = {f"text {n:02d}": f"a long caption of {'many ' * 30}words" for n in range(lines)}
    index = pack([{"x": b"1", **texts} for _ in range(6)], tmp_path)["data"]

    def decode(sample: Any) -> dict[str, Any]:
        return {**sample, "x": np.zeros((20, 60, 3), np.uint8)}

    figure = show_batch(Feed(index, ExactOnceBatchSampler(6, batch_size=6), decode=decode))
    figure.savefig(io.BytesIO(), format="png")
    drawn = [axes.images[0].get_window_extent() for axes in figure.axes]
    below = [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    for image, caption in zip(drawn, below, strict=True):
        assert image.width / image.height == pytest.approx(3, rel=0.02)
        assert caption.y1 <= image.y0
    boxes = [*drawn, *below]
    for place, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_show_batch_removes_padding_of_images(tmp_path: Path) -> None:
    index = pack([{"x": bytes([n])} for n in (3, 7)], tmp_path)["data"]

    def decode(sample: Any) -> dict[str, Any]:
        return {"x": np.ones((5, sample["x"][0], 3), np.uint8)}

    sampler = ExactOnceBatchSampler(2, batch_size=2)
    figure = show_batch(Feed(index, sampler, decode=decode, collate="pad"))
    assert [axes.images[0].get_size() for axes in figure.axes] == [(5, 3), (5, 7)]

    def own(sample: Any) -> dict[str, Any]:
        return {"x": np.ones((5, 6, 3), np.uint8), "x_shape": [2, 2, 3]}  # of no padding

    figure = show_batch(Feed(index, sampler, decode=own))
    assert [axes.images[0].get_size() for axes in figure.axes] == [(5, 6)] * 2


def test_pictures_refuse_bad_arguments(tmp_path: pytest.TempPathFactory) -> None:
    index = pack([{"x": b"1"}], f"{tmp_path}/data")["data"]
    feed = Feed(index, ExactOnceBatchSampler(1, batch_size=1))
    with pytest.raises(ValueError, match="no field of id, x has images"):
        show_batch(feed)
    with pytest.raises(TypeError, match=r"got a NumpyLoader: give loader\.feed"):
        show_batch(NumpyLoader(feed))  # type: ignore[arg-type]
    for nothing in ({}, [0, 1]):
        with pytest.raises(TypeError, match="streams must be streams by name, such as"):
            plot_mixing(nothing)  # type: ignore[arg-type]


def test_show_command_draws_a_feed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("train.py").write_text(
        "import numpy as np\nfrom twinfeed import *\n"
        "images, labels = np.zeros((12, 9, 7, 3), np.uint8), np.arange(12) % 2\n"
        "sampler = PKBatchSampler(labels, p=2, k=3, seed=0)\n"
        "feed = Feed({'image': images, 'label': labels}, sampler)\n"
    )
    for out in ("batch.svg", "a.b.png"):
        assert main(["show", "--feed", "train.py:feed", "--step", "1", "--out", out]) == 0
        assert capsys.readouterr().out == f"{out}\n"
    assert Path("batch.svg").read_text().count("<image") == 6
    assert main(["show", "--feed", "train.py:feed", "--out", "picture"]) == 2
    assert "--out must end in .png" in capsys.readouterr().err


def test_figure_shows_itself_in_a_notebook() -> None:
    """Jupyter asks an object that pyplot has not made for `_repr_png_`."""
    sampler = BatchSampler(RandomSampler(100, seed=0), batch_size=10)
    assert plot_mixing({"uniform": sampler})._repr_png_().startswith(b"\x89PNG\r")  # type: ignore[attr-defined]
