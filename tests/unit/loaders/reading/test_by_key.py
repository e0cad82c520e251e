"""`ByKey`: rows of a table in any order come with the record that has their key."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shards import write_tar

from twinfeed.loaders import ByKey, DatasetSource, Feed, Index, LoaderError, build_index
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    RandomSampler,
    SequentialSampler,
    ViewSampler,
)

KEYS = ["b/2", "a/1", "a/10", "é 7"]
FILES = ["é 7", "a/10", "elsewhere", "b/2", "a/1"]
"""The keys of the table, in another order than the records, with one that no record has."""


@pytest.fixture
def index(tmp_path: Path) -> Index:
    samples = [(key, {"txt": key.encode()}) for key in KEYS]
    return build_index(write_tar(tmp_path / "a.tar", samples), tmp_path / "a.index")


def table_of(kind: str, folder: Path) -> Any:
    """A table of the keys and of two columns, as a library or a file holds it."""
    columns = {
        "file": FILES,
        "caption": [f"of {file}, or\n“not”" for file in FILES],
        "size": np.array([len(file) for file in FILES], np.float32),
    }
    if kind == "dict":
        return columns
    import pandas
    import polars
    import pyarrow

    frame = pandas.DataFrame(columns, index=range(5, 0, -1))
    if kind == "csv":
        frame.to_csv(folder / "a.csv", index=False, encoding="utf-8-sig")  # as Excel writes it
        return folder / "a.csv"
    if kind == "tsv":
        frame.to_csv(folder / "a.tsv", index=False, sep="\t")
        return str(folder / "a.tsv")
    return {"pandas": frame, "polars": polars.DataFrame(columns), "Arrow": pyarrow.table(columns)}[
        kind
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "dict",
        *(
            pytest.param(kind, marks=pytest.mark.frameworks)
            for kind in ("csv", "tsv", "pandas", "polars", "Arrow")
        ),
    ],
)
def test_rows_are_joined_by_the_keys_of_records(index: Index, tmp_path: Path, kind: str) -> None:
    table = table_of(kind, tmp_path)
    side = {name: ByKey(table, key="file", value=name) for name in ("caption", "size")}
    feed = Feed(
        index, ExactOnceBatchSampler(4, batch_size=4), side=pickle.loads(pickle.dumps(side))
    )
    batch = pickle.loads(pickle.dumps(feed))[0, 0]
    assert batch["caption"] == [f"of {key}, or\n“not”" for key in KEYS]
    sizes = [len(key) for key in KEYS]
    if kind in ("csv", "tsv"):  # in a file, all are texts
        assert list(map(float, batch["size"])) == sizes
    else:
        assert (batch["size"].tolist(), batch["size"].dtype) == (sizes, np.float32)


@given(st.data())
def test_several_rows_of_a_key_are_views_in_the_order_of_the_table(data: st.DataObject) -> None:
    """By a column of numbers: each view of each record has its own row, once."""
    ids = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    rows = [n for n in {*ids} for _ in range(data.draw(st.integers(1, 3)))] + [77]
    rows = data.draw(st.permutations(rows))
    texts = [f"row {row} of {key}" for row, key in enumerate(rows)]
    keys: Any = data.draw(st.sampled_from([rows, [*map(str, rows)], [*map(float, rows)]]))
    captions = ByKey({"n": keys, "text": texts}, key="n", value="text", column="number")
    source = DatasetSource({"x": np.array(ids), "number": np.array(ids)}, columns=["number"])
    counts = captions.counts(source)
    order = ViewSampler(RandomSampler(counts.sum(), seed=3), counts, per_epoch="all", seed=1)
    feed = Feed(source, BatchSampler(order, batch_size=3), side={"text": captions})
    found: list[tuple[int, str]] = []
    for step in range(len(feed)):
        batch = feed[0, step]
        found += zip(batch["number"].tolist(), batch["text"], strict=True)
    want = [(n, text) for n in ids for text, row in zip(texts, rows, strict=True) if row == n]
    assert sorted(found) == sorted(want)
    assert counts.tolist() == [rows.count(n) for n in ids]


def test_dict_of_keys_gives_one_value_or_several(index: Index) -> None:
    whole = ExactOnceBatchSampler(4, batch_size=4)
    one = ByKey({key: key.upper() for key in FILES})
    vectors = ByKey({key: np.arange(2) + len(key) for key in KEYS})
    batch = Feed(index, whole, side={"one": one, "vector": vectors})[0, 0]
    assert batch["one"] == [key.upper() for key in KEYS]
    assert batch["vector"].tolist() == [[3, 4], [3, 4], [4, 5], [3, 4]]
    several = ByKey({key: [f"{key} {n}" for n in range(len(key))] for key in KEYS})
    order = ViewSampler(SequentialSampler(13), several.counts(index), per_epoch="all", seed=0)
    feed = Feed(index, BatchSampler(order, batch_size=13), side={"text": several})
    assert feed[0, 0]["text"] == [f"{key} {n}" for key in KEYS for n in range(len(key))]
    with pytest.raises(
        ValueError, match=r"'b/2'.* has 3 rows in side table 'text', .*draws 1 view:"
    ):
        feed.with_sampler(whole)
    same_number = ViewSampler(SequentialSampler(13), [3, 3, 3, 4], per_epoch="all", seed=0)
    with pytest.raises(ValueError, match=r"'a/10'.* has 4 rows .* draws 3 views"):
        feed.with_sampler(BatchSampler(same_number, batch_size=2))


def test_first_record_without_a_row_and_first_with_two_are_named(index: Index) -> None:
    whole = ExactOnceBatchSampler(4, batch_size=4)
    lacking = ByKey(dict.fromkeys(("b/2", "a/1.jpg"), "text"))
    with pytest.raises(
        ValueError, match=r"number 1, .*'a/1'\): the table has no row .*'a/1\.jpg'\]"
    ):
        Feed(index, whole, side={"text": lacking})
    double = ByKey({"k": [*KEYS, "a/10", "é 7"], "v": [*"abcdef"]}, key="k", value="v")
    with pytest.raises(ValueError, match=r"number 2, .*'a/10'\) has 2 rows in side table 'text'"):
        Feed(index, whole, side={"text": double})


def test_tables_that_do_not_fit_are_refused(index: Index, tmp_path: Path) -> None:
    whole = ExactOnceBatchSampler(4, batch_size=4)
    columns = {"k": KEYS, "v": [1, 2, 3, 4]}
    for options, word in (
        ({}, "key=None is no column"),
        ({"key": "k"}, "value=None is no column"),
        ({"key": "K", "value": "v"}, r"key='K' is no column of the table: it has \['k', 'v'\]"),
    ):
        with pytest.raises(KeyError, match=word):
            ByKey(columns | {"k": KEYS} if options else _Table(), **options)
    with pytest.raises(ValueError, match="the table has 4 keys and 3 values"):
        ByKey({"k": KEYS, "v": [1, 2, 3]}, key="k", value="v")
    with pytest.raises(KeyError, match=r"no column 'photo': the columns are \[\]"):
        Feed(index, whole, side={"n": ByKey(columns, key="k", value="v", column="photo")})
    source = DatasetSource({"x": np.arange(4)})
    with pytest.raises(TypeError, match=r"have no keys: give ByKey\(…, column='id'\)"):
        Feed(source, whole, side={"n": ByKey(columns, key="k", value="v")})
    mixed = ByKey({"k": KEYS, "v": ["a", None, "c", "d"]}, key="k", value="v")
    with pytest.raises(TypeError, match="side table 'n' must be an array of numbers or a list of"):
        Feed(index, whole, side={"n": mixed})
    large = ByKey({"k": KEYS, "v": [1, 2, 3, 2**63 + 1]}, key="k", value="v")
    with pytest.raises(TypeError, match="float64 cannot hold 9223372036854775809 of a list"):
        Feed(index, whole, side={"n": large})
    masked = ByKey(
        {"k": KEYS, "v": np.ma.array([1, 2, 3, 4], mask=[0, 0, 1, 0])}, key="k", value="v"
    )
    with pytest.raises(ValueError, match="'value' must have no masked entry, got one at 2"):
        Feed(index, whole, side={"n": masked})
    path = tmp_path / "a.csv"
    for text, error, word in (
        ("", KeyError, r"key='k' is no column of .*a\.csv: it has \[\]"),
        ("k,v\n1,2\n3\n", ValueError, "a.csv: row 2 has 1 cells, not 2"),
        ('k,v\n1,"a dog\n2,a cat\n', ValueError, "a.csv is not a table: unexpected end of data"),
        ('k,v\n1,"5" disc"\n', ValueError, "a.csv is not a table: ',' expected after '\"'"),
        ("k,v\n\udcff,2\n", ValueError, "a.csv is not a table"),
        ("k,v,v\n1,2,3\n", ValueError, r"a.csv: two columns have one name, of \['k', 'v', 'v'\]"),
    ):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(error, match=word):
            ByKey(path, key="k", value="v")
    for table in ([{"k": "b/2", "v": 1}], None, 3, np.zeros((2, 2)), ByKey({"a": 1})):
        with pytest.raises(TypeError, match="table must be a path, a dataframe, an Arrow table or"):
            ByKey(table, key="k", value="v")
    path.write_text("k,v\n")
    with pytest.raises(ValueError, match=r"has no row of its key 'b/2', but of \[\]"):
        ByKey(path, key="k", value="v").counts(index)
    with pytest.raises(LoaderError, match="a regular file"):
        ByKey(tmp_path, key="k", value="v")


class _Table:
    """A table of columns that is no dict."""

    columns = ("k", "v")
