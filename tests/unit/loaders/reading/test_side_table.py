"""Side tables: rows by sample id, without loading the table."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from twinfeed.loaders import Feed, SideTable, pack
from twinfeed.samplers import ExactOnceBatchSampler


def test_rows_come_by_sample_id(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(50, 3, 2))
    np.save(tmp_path / "t.npy", values)
    table = SideTable(tmp_path / "t.npy")
    ids = np.array([49, 0, 7, 7])
    assert (table[ids] == values[ids]).all()
    assert (table.shape, table.dtype, len(table)) == ((50, 3, 2), values.dtype, 50)
    assert table[ids].flags.writeable


def test_a_table_travels_as_its_path(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.zeros((100_000, 16)))
    data = pickle.dumps(SideTable(tmp_path / "t.npy"))
    assert len(data) < 500
    assert pickle.loads(data).shape == (100_000, 16)


def test_a_feed_puts_the_rows_into_the_batch(tmp_path: Path) -> None:
    index = pack([{"word": f"w{n}"} for n in range(5)], tmp_path)["data"]
    np.save(tmp_path / "t.npy", np.arange(10.0).reshape(5, 2))
    sampler = ExactOnceBatchSampler(5, batch_size=2)
    feed = Feed(index, sampler, side={"features": SideTable(tmp_path / "t.npy")})
    batch = feed[0, 1]
    assert batch["features"].tolist() == [[4, 5], [6, 7]]


def test_rows_may_have_another_order_than_samples(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(10) * 10)
    table = SideTable(tmp_path / "t.npy", rows=[3, 1])
    assert table[[1, 0]].tolist() == [10, 30]
    assert len(SideTable(tmp_path / "t.npy", rows=[])) == 0
