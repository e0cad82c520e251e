"""Side tables: rows by sample id, without loading the table."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinfeed.loaders import DataCorruptionError, Feed, SideTable, StaleIndexError, pack
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


def test_a_feed_puts_the_rows_into_the_batch(tmp_path: Path) -> None:
    index = pack([{"word": f"w{n}"} for n in range(5)], tmp_path)["data"]
    np.save(tmp_path / "t.npy", np.arange(10.0).reshape(5, 2))
    sampler = ExactOnceBatchSampler(5, batch_size=2)
    feed = Feed(index, sampler, side={"features": SideTable(tmp_path / "t.npy")})
    batch = feed[0, 1]
    assert batch["features"].tolist() == [[4, 5], [6, 7]]


def test_rows_and_ids_are_checked_as_a_readers_are(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(10) * 10)
    table = SideTable(tmp_path / "t.npy", rows=[3, 1])
    assert table[[1, 0]].tolist() == [10, 30]
    assert len(SideTable(tmp_path / "t.npy", rows=[])) == 0
    for wrong in ([-1], [2]):
        with pytest.raises(IndexError, match=r"ids must lie in \[0, 2\)"):
            table[wrong]
    for rows in ([0.5], [[0, 1]], [True]):
        with pytest.raises(TypeError, match="rows must be integers in one dimension"):
            SideTable(tmp_path / "t.npy", rows=rows)
    with pytest.raises(IndexError, match=r"rows must lie in \[0, 10\), got 10"):
        SideTable(tmp_path / "t.npy", rows=[0, 10])


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    arrays: list[Any] = [
        np.array([{}], dtype=object),
        np.array(["a"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.zeros(3, [("a", "i4")]),
        np.array(3.0),
    ]
    for array in arrays:
        np.save(path, array, allow_pickle=True)
        with pytest.raises(ValueError, match=r"must be an \.npy file of numbers.*\n.*t\.npy"):
            SideTable(path)
    np.savez(tmp_path / "z.npz", a=np.zeros(3))
    np.save(path, np.zeros(100))
    whole, zipped = path.read_bytes(), (tmp_path / "z.npz").read_bytes()
    no_python = whole.replace(b"}", b" ", 1)  # the head of the file is a dict in Python
    for data in (b"", b"no array", whole[:20], whole[:-1], no_python, zipped):
        path.write_bytes(data)
        with pytest.raises(
            DataCorruptionError, match=r"must be an \.npy file of numbers"
        ) as caught:
            SideTable(path)
        assert caught.value.path == str(path)
        assert "allow_pickle" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        SideTable(tmp_path / "gone.npy")
