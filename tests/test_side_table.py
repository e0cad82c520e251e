"""Side tables: rows by sample id, without loading the table."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from twinfeed.loaders.errors import StaleIndexError
from twinfeed.loaders.feed import Feed
from twinfeed.loaders.packing.pack import pack
from twinfeed.loaders.reading.side_table import SideTable
from twinfeed.loaders.request import request_of
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
    np.save(tmp_path / "t.npy", np.zeros((3, 16)))
    with pytest.raises(StaleIndexError, match="changed while it was in use"):
        pickle.loads(data)


def test_a_table_in_another_order_is_joined_by_key(tmp_path: Path) -> None:
    samples = [{"__key__": f"k{n}", "x": n} for n in range(6)]
    index = pack(samples, tmp_path, seed=1)["data"]
    np.save(tmp_path / "t.npy", np.arange(10) * 10)
    table = SideTable.by_key(tmp_path / "t.npy", [f"k{n}" for n in range(10)], index)
    assert table[np.arange(6)].tolist() == (index.columns["x"] * 10).tolist()
    assert pickle.loads(pickle.dumps(table))[np.arange(6)].tolist() == table[np.arange(6)].tolist()
    with pytest.raises(ValueError, match=r"3 of 6 records have no row \(first: "):
        SideTable.by_key(tmp_path / "t.npy", ["k0", "k1", "k2"], index)
    with pytest.raises(ValueError, match="1 of the 2 keys are there twice"):
        SideTable.by_key(tmp_path / "t.npy", ["k0", "k0"], index)
    with pytest.raises(ValueError, match=r"rows must lie in \[0, 10\), not in \[0, 10\]"):
        SideTable(tmp_path / "t.npy", rows=np.array([0, 10]))


def test_a_feed_puts_the_rows_into_the_batch(tmp_path: Path) -> None:
    index = pack([{"word": f"w{n}"} for n in range(5)], tmp_path)["data"]
    np.save(tmp_path / "t.npy", np.arange(10.0).reshape(5, 2))
    sampler = ExactOnceBatchSampler(5, batch_size=2)
    feed = Feed(index, sampler, side={"features": SideTable(tmp_path / "t.npy")})
    batch = feed(request_of(sampler, epoch=0, step=1))
    assert batch["features"].tolist() == [[4, 5], [6, 7]]


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"allow_pickle|Python object"):
        SideTable(tmp_path / "o.npy")
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match=r"must be an \.npy file"):
        SideTable(tmp_path / "z.npz")
    with pytest.raises(FileNotFoundError):
        SideTable(tmp_path / "gone.npy")
