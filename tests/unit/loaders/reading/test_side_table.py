"""Side tables: rows by sample id, without loading the table."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import ByRecord, DatasetSource, Feed, SideTable, pack
from twinfeed.samplers import ExactOnceBatchSampler


def test_rows_are_found_by_sample_id(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(50, 3, 2))
    np.save(tmp_path / "t.npy", values)
    table = SideTable(tmp_path / "t.npy")
    ids = np.array([49, 0, 7, 7])
    assert (table[ids] == values[ids]).all()
    assert (table.shape, table.dtype, len(table)) == ((50, 3, 2), values.dtype, 50)
    assert table[ids].flags.writeable


def test_side_table_pickles_as_its_path(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros((100_000, 16)))
    data = pickle.dumps(SideTable(tmp_path / "t.npy"))
    assert len(data) < 500
    assert pickle.loads(data).shape == (100_000, 16)


def test_feed_adds_side_table_rows_to_the_batch(tmp_path: Path) -> None:
    index = pack([{"word": f"w{n}"} for n in range(5)], tmp_path)["data"]
    np.save(tmp_path / "t.npy", np.arange(10.0).reshape(5, 2))
    sampler = ExactOnceBatchSampler(5, batch_size=2)
    feed = Feed(index, sampler, side={"features": SideTable(tmp_path / "t.npy")})
    batch = feed[0, 1]
    assert batch["features"].tolist() == [[4, 5], [6, 7]]


TEXTS = ["a cat", "", "naïve ☃", "a\0b\0", "🦉"]


def stored_as(kind: str) -> Any:
    """The texts, as a library holds them."""
    import pyarrow

    return {
        "list": lambda: TEXTS,
        "tuple": lambda: tuple(TEXTS),
        "object": lambda: np.array(TEXTS, object),
        "StringDType": lambda: np.array(TEXTS, np.dtypes.StringDType()),
        "Arrow": lambda: pyarrow.array(TEXTS),
        "Arrow chunks": lambda: pyarrow.chunked_array([TEXTS[:2], TEXTS[2:]]),
        "Arrow codes": lambda: pyarrow.array(TEXTS).dictionary_encode(),
    }[kind]()


@pytest.mark.frameworks
@pytest.mark.parametrize(
    "kind",
    ["list", "tuple", "object", "StringDType", "Arrow", "Arrow chunks", "Arrow codes"],
)
def test_texts_are_whole_from_any_library(kind: str) -> None:
    source = DatasetSource({"x": np.arange(5)})
    feed = Feed(source, ExactOnceBatchSampler(5, batch_size=5), side={"caption": stored_as(kind)})
    assert pickle.loads(pickle.dumps(feed))[0, 0]["caption"] == TEXTS


@pytest.mark.frameworks
def test_column_of_a_dataframe_is_refused_with_by_key() -> None:
    """Its rows may have another order than the records, which nobody would see."""
    import pandas
    import polars

    source, sampler = DatasetSource({"x": np.arange(5)}), ExactOnceBatchSampler(5, batch_size=5)
    for frame in (pandas.DataFrame({"c": TEXTS}), polars.DataFrame({"c": TEXTS})):
        for table in (frame, frame["c"], ByRecord(frame["c"])):
            with pytest.raises(TypeError, match=r"side table 'caption' is a .* ByKey\(frame, key="):
                Feed(source, sampler, side={"caption": table})
        batch = Feed(source, sampler, side={"caption": frame["c"].to_list()})[0, 0]
        assert batch["caption"] == TEXTS


def test_numpy_texts_lose_a_trailing_nul() -> None:
    """numpy drops it, before a table is made of them."""
    source = DatasetSource({"x": np.arange(5)})
    side = {"caption": np.array(TEXTS)}
    batch = Feed(source, ExactOnceBatchSampler(5, batch_size=5), side=side)[0, 0]
    assert batch["caption"] == [text.rstrip("\0") for text in TEXTS]


def test_rows_may_have_another_order_than_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(10) * 10)
    table = SideTable(tmp_path / "t.npy", rows=[3, 1])
    assert table[[1, 0]].tolist() == [10, 30]
    assert len(SideTable(tmp_path / "t.npy", rows=[])) == 0
