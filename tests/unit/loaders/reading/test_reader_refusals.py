"""What the reader refuses: requests, side tables and sources."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.damage import CUTS
from support.datasets import SAMPLES, Flipped, X
from support.own_source import LABELS, Words, samplers
from support.refusals import Call, Refused

from twinfeed import DatasetSource
from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    Feed,
    Index,
    LoaderError,
    Reader,
    SideTable,
    open_index,
    plan,
)
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, SequentialSampler


def read(ids: list[int], *fields: Any) -> Call:
    return lambda index: Reader(index).read(ids, *fields)


TABLE = np.arange(10.0)


def table(ids: Any = (), saved: Any = TABLE, **options: Any) -> Call:
    """Rows of a side table of ten rows, or of the bytes or the array that is saved in its place."""

    def call(index: Index) -> object:
        path = index.path.with_name("t.npy")
        np.save(path, TABLE if callable(saved) else saved, allow_pickle=True)
        if callable(saved):
            path.write_bytes(saved(path.read_bytes()))
        return SideTable(path, **options)[ids]

    return call


def changed(index: Index) -> object:
    """A side table that travels while it is written anew."""
    np.save(index.path.with_name("t.npy"), np.zeros((9, 16)))
    data = pickle.dumps(SideTable(index.path.with_name("t.npy")))
    table()(index)
    return pickle.loads(data)


def rows(data: Any, **options: Any) -> Call:
    return lambda _: DatasetSource(data, **options)


def batch(data: Any, step: int = 0, **options: Any) -> Call:
    sampler = BatchSampler(SequentialSampler(24), batch_size=8)
    return lambda _: Feed(data, sampler, **options)[0, step]


class Unfinished:
    """A source that lacks methods. That it could be a dataset too does not make it one."""

    fields, columns, digests = ["x"], dict[str, Any](), dict[str, str]()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, record: int) -> dict[str, int]:
        return {"x": record}

    def describe(self, record: int) -> str:
        return f"record {record}"


class Giving(Words):
    """A source with another column, or whose `read` returns this for ids."""

    def __init__(self, found: Callable[[Any], Any] | None = None, column: Any = LABELS) -> None:
        super().__init__()
        self.columns, self.found = {"label": column}, found

    def read(self, ids: Any, fields: Any) -> Any:
        assert self.found
        return self.found(ids)


NPY = r"must be an \.npy file of numbers.*\n.*path: .*t\.npy"

NO_LIST = r"no list of 1 value for the field 'word'(.|\n)*found: "

REFUSED: Refused = [
    (
        lambda index: open_index(index.path, checksums="no"),  # type: ignore[arg-type]
        TypeError,
        "checksums must be True or False, got 'no'",
    ),
    (lambda _: Reader("x.index"), TypeError, r"an Index, got a str: open_index\(path\) gives"),  # type: ignore[arg-type]
    (read([0], "jpg"), TypeError, "list of names, got 'jpg'"),
    (read([0], ["nothing"]), KeyError, "no field 'nothing'"),
    (read([200]), IndexError, "ids must lie in"),
    # Side tables
    (table([-1], rows=[3, 1]), IndexError, r"ids must lie in \[0, 2\)"),
    (table(rows=[0.5]), TypeError, "rows must be integers in one dimension"),
    (table(rows=[0, 10]), IndexError, r"rows must lie in \[0, 10\), got 10"),
    *(
        (table(saved=given), DataCorruptionError, NPY)
        for given in (
            *(np.array([{}], dtype=object), np.zeros(3, [("a", "i4")]), np.array(3.0)),
            *CUTS.values(),
            lambda whole: b"PK\3\4" + whole,  # the head of a zip
            lambda whole: whole.replace(b"}", b" ", 1),  # the head of the file is a dict in Python
        )
    ),
    (lambda index: SideTable(index.path.with_name("gone")), FileNotFoundError, "gone"),
    (changed, OSError, "the file changed after an array mapped it.*t.npy"),
    (table(rows=np.ma.masked_equal([0, 1], 1)), ValueError, "rows must have no masked entry"),
    # Datasets
    (rows(iter(SAMPLES)), TypeError, "must be a map-style dataset"),
    (rows({"x": X, "y": X[1:]}), ValueError, r"lengths \{'x': 24, 'y': 23\}"),
    (rows({"train": "shard"}), TypeError, "'train' must be an array or a list, got a str"),
    (rows({"x": np.ma.masked_less(X, 3)}), TypeError, "got a MaskedArray"),
    (
        rows(SAMPLES, columns={"n": np.ma.masked_less(LABELS, 1)}),
        ValueError,
        "'n' must have no masked entry, got one at 0: fill it",
    ),
    *(
        (rows([(1, 2)], fields=fields), ValueError, "fields must name the 2 parts of each tuple")
        for fields in (None, ["a"], ["a", "b", "c"])
    ),
    *(
        (
            rows(data, fields=["a", "b"]),
            ValueError,
            rf"must be one name for a {name}",
        )
        for data, name in (([[1, 2]], "list"), ([SimpleNamespace(a=1, b=2)], "Simple"), (X, "nda"))
    ),
    *(
        (rows(data, fields=["nope"]), KeyError, r"no field 'nope': the fields are \['x'")
        for data in (SAMPLES, {"x": X})
    ),
    (rows([(1, 2)], fields=["a", "a"]), ValueError, "fields must be different names, got"),
    (rows("photos"), TypeError, r"must not be a path, got 'photos': open_index\(path\)"),
    (rows(X, digest=5), TypeError, "digest must be a string, got 5"),
    (rows(SAMPLES, label="word"), TypeError, "column 'word' must hold numbers.*unique"),
    (rows([{"y": 0.5}], label="y"), TypeError, "label 'y' must hold integers, got float64"),
    (rows(SAMPLES, columns="word"), TypeError, "columns must be a list of names"),
    (rows([{"x": 1}, {"y": 1}], columns=["x"]), KeyError, "some records lack 'x'"),
    (rows({"x": X}, label="y"), KeyError, r"some records lack 'y': record 0 has \['x'\]"),
    (
        lambda _: pickle.dumps(DatasetSource(np.zeros((40, 1 << 20), np.uint8))),
        LoaderError,
        r"a copy of 42 MB of rows(.|\n)*mmap_mode='r'",
    ),
    (
        batch(DatasetSource([{"x": 1}] * 23 + [{"y": 1}]), 2),
        LoaderError,
        "record 23 of a list: .*KeyError",
    ),
    (
        batch(DatasetSource([{"x": 1}] * 23 + [{"x": None}]), 2),
        LoaderError,
        "record 23 of a list lacks the field 'x'",
    ),
    (
        batch(DatasetSource(Flipped())),
        ValueError,
        r"read returned different results for one record",
    ),
    # Sources of one's own
    (batch("x"), TypeError, r"must not be a path, got 'x': open_index\(path\) opens an index"),
    (batch(Unfinished()), TypeError, "must be an Index, got a .*needs reader"),
    # A dataset that a feed is to take as it is
    *(
        (batch(dataset), TypeError, f"must be a map-style dataset, .*got a {word}: of a Data")
        for dataset, word in (
            (None, "NoneType"),
            (iter(SAMPLES), "list_iterator"),
            (SimpleNamespace(dataset=SAMPLES), "SimpleNamespace"),
        )
    ),
    *(
        (batch(dataset), TypeError, rf"record 0 of a .* is of type {word}, not a dict.* fields=")
        for dataset, word in ((["a.tfrecord"], "str"), ([[1, 2]], "list"), (X, "ndarray"))
    ),
    (batch([(X, 1)]), ValueError, r'name the 2 parts .*\(dataset, fields=\("image", "label"\)\)'),
    (batch({"x": X, "y": X[1:]}), ValueError, r"lengths \{'x': 24, 'y': 23\}"),
    (batch({}), ValueError, r"must be arrays of one length, got the lengths \{\}"),
    (batch([{}] * 24), ValueError, "record 0 of a list must have a field, got none"),
    (batch({"x": np.ones(())}), ValueError, "'x' must have a row for each record, got a single"),
    *(
        (batch(wrong), TypeError, rf"must be the data, got an? {name}: write Feed\(data, sampler\)")
        for wrong, name in (
            (SequentialSampler(24), "SequentialSampler"),
            (ExactOnceBatchSampler(24, batch_size=8), "ExactOnceBatchSampler"),
            (Feed({"x": X}, ExactOnceBatchSampler(24, batch_size=8)), "Feed"),
        )
    ),
    (batch({0: X}), TypeError, "fields of a sample must be a list of names"),
    (batch({"id": X}), ValueError, "'id' has a name that the loader itself gives"),
    (
        lambda _: plan(Feed(Words(), next(samplers()))),
        TypeError,
        "plan needs an index.* has a Words",
    ),
    (
        batch(Words(), missing={"wrod": b""}),
        ValueError,
        r"missing has the fields \['wrod'\], .*'word'",
    ),
    (batch(Words(), missing={"word": None}), TypeError, "a value for the field 'word', got None"),
    (
        batch(Words(), side={"n": np.ma.masked_less(LABELS, 1)}),
        ValueError,
        "side table 'n' must have no masked entry",
    ),
    (batch(Giving(column=np.ma.masked_less(LABELS, 1))), ValueError, "'label' of .* masked entry"),
    (batch(Words(), fields=["wrod"]), KeyError, "no field 'wrod': the fields are"),
    (batch(Giving(column=[3])), TypeError, "'label' of a Giving must be a numpy array, got a list"),
    (batch(Giving(column=LABELS[:-1])), ValueError, "'label' .* a row for each of its 24 records"),
    (batch(Giving(column=np.array(3))), ValueError, r"got the shape \(\)"),
    (batch(Giving(lambda ids: [b""] * 8)), LoaderError, NO_LIST + r"\[b''"),
    (
        batch(Giving(lambda ids: {"a": []})),
        LoaderError,
        NO_LIST + ".'a'",
    ),
    (batch(Giving(lambda ids: {"word": b"x"})), LoaderError, NO_LIST + ".'word': b"),
    (batch(Giving(lambda ids: {"word": iter(ids)})), LoaderError, NO_LIST),
    (batch(Giving(lambda ids: {"word": None})), LoaderError, NO_LIST + ".'word': None"),
    (
        batch(Giving(lambda ids: {"word": [b""] * 7})),
        LoaderError,
        NO_LIST + ".'word': .b'', b",
    ),
    (
        batch(Giving(lambda ids: {"word": [None if n == 7 else b"" for n in ids]})),
        LoaderError,
        "word number 7 lacks the field 'word'",
    ),
    (
        batch(Giving(lambda ids: {"word": [{}[n] if n == 7 else b"" for n in ids]})),
        LoaderError,
        "word number 7: read of a Giving failed: KeyError",
    ),
    (
        batch(Giving(lambda ids: {"word": X[ids][:, : 4 - int(ids[0] > 0)]}), 1),
        DecodeError,
        r"word number 8: .*shape \(3,\)",
    ),
]


@pytest.mark.parametrize(("call", "kind", "word"), REFUSED)
def test_reader_refuses_bad_requests(
    index: Index, call: Call, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word) as caught:
        call(index)
    assert "allow_pickle" not in str(caught.value)
