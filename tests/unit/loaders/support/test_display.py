"""What objects show of themselves: one line, made of names and sizes, and a table in a notebook."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import twinfeed
from twinfeed import (
    BatchSampler,
    DatasetSource,
    DecodeExample,
    DecodeImage,
    Feed,
    Index,
    NumpyLoader,
    Reader,
    Results,
    Seeded,
    Selector,
    SequentialSampler,
    SideTable,
    pack,
)


def plain(sample: Any) -> Any:
    return sample


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("display")
    records = [{"<b>": b"w%d" % n, "label": n % 3} for n in range(7)]
    (folder / "photos" / "cat").mkdir(parents=True)
    (folder / "photos" / "cat" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "x.tfrecord.gz").write_bytes(b"\x1f\x8b")
    np.save(folder / "t.npy", np.zeros((7, 2)))
    return pack(records, folder, container="tfrecord")["data"]


def sampler(records: int = 7) -> BatchSampler:
    return BatchSampler(SequentialSampler(records), batch_size=2)


def feed(index: Index) -> Feed:
    return Feed(index, sampler(), decode=DecodeExample("<b>"), transform=plain)


def selector(index: Index) -> Selector:
    return Selector(sampler(), 2, source=lambda ids: ids % 2)


def results(index: Index) -> Results:
    found = Results(7)
    found.add([0, 1], score=np.array([0.5, 1]), word=["a", "bc"])
    return found


SHOWN: dict[str, tuple[Callable[[Index], object], str]] = {
    "index": (
        lambda index: index,
        "<Index '{path}/data.index': 7 records, 1 shard",
    ),
    "columns": (lambda index: index.columns, "<Columns {'label': 'int64[7]'}>"),
    "feed": (feed, "Feed(<Index .*, decode=DecodeExample(field='<b>'), transform=plain)"),
    "loader": (
        lambda index: NumpyLoader(Feed(index, sampler())),
        "<NumpyLoader of Feed(<Index .*>, BatchSampler(.*)): epoch 0, step 0 of 4>",
    ),
    "rank": (
        lambda index: NumpyLoader(feed(index).shard(1, 2)),
        "<NumpyLoader of Feed(<Index .*>, rank 1 of 2 of BatchSampler(.*): epoch 0, step 0 of 4>",
    ),
    "selector": (selector, "<Selector of BatchSampler(.*): epoch 0, step 0 of 4>"),
    "reader": (Reader, "Reader(<Index .*>)"),
    "dataset": (
        lambda _: DatasetSource({"x": np.ones(3), "y": np.ones(3, int)}, label="y"),
        "<DatasetSource of a dict: 3 records, fields ['x'], columns ['y']>",
    ),
    "decode": (
        lambda _: DecodeImage("jpg", size=(2, 3), mode="L"),
        "DecodeImage(field='jpg', mode='L', size=(2, 3))",
    ),
    "seeded": (lambda _: Seeded(plain), "Seeded(plain)"),
    "side table": (
        lambda index: SideTable(index.path.parent / "t.npy"),
        "<SideTable '{path}/t.npy': float64[7, 2]>",
    ),
    "results": (results, "<Results: 2 of 7 records, score, word>"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_repr_shows_contents_in_one_line(name: str, index: Index) -> None:
    make, pattern = SHOWN[name]
    shown = repr(make(index))
    pattern = re.escape(pattern.replace("{path}", str(index.path.parent))).replace(r"\.\*", ".*")
    assert re.match(pattern, shown), shown
    assert " at 0x" not in shown


@pytest.mark.frameworks
def test_repr_of_framework_loader_shows_feed_and_position(index: Index) -> None:
    for name in ("TorchLoader", "JaxLoader"):
        loader = getattr(twinfeed, name)(Feed(index, sampler(), fields=[]))
        next(iter(loader))
        assert re.fullmatch(rf"<{name} of Feed\(.*\): epoch 0, step 1 of 4>", repr(loader))
        loader.close()
    assert repr(twinfeed.TorchSampler(sampler())) == f"<TorchSampler of {sampler()!r}>"
    assert repr(twinfeed.RequestSampler(feed(index))) == f"<RequestSampler of {sampler()!r}>"


@pytest.mark.parametrize("name", ["index", "feed", "results"])
def test_html_repr_escapes_names_of_the_data(name: str, index: Index) -> None:
    html: str = SHOWN[name][0](index)._repr_html_()  # type: ignore[attr-defined]
    assert html.startswith("<table>")
    assert "<b>" not in html
    assert (name == "results") != ("&lt;b&gt;" in html)
    if name == "results":
        assert "<td>score</td><td>float64</td>" in html
