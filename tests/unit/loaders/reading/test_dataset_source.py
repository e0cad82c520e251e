"""Datasets of any kind, as a source in one line."""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PROGRAMS
from support.batches import noted, two_epochs
from support.datasets import FRAMEWORKS, KINDS, LABELS, RECORDS, SAMPLES, Buffered, Dicts, Once, X
from support.inside import encode
from support.programs import run

from twinfeed import DatasetSource
from twinfeed.loaders import (
    ByKey,
    DecodeError,
    DecodeImage,
    Feed,
    Index,
    LoaderError,
    NumpyLoader,
    SideTable,
    pack,
)
from twinfeed.loaders.support.array_types import as_array
from twinfeed.samplers import (
    BatchSampler,
    ExactOnceBatchSampler,
    PKBatchSampler,
    RandomSampler,
    SequentialSampler,
    StateMismatchError,
    SubsetSampler,
)
from twinfeed.testing import check_source


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """The same records, packed."""
    return pack(SAMPLES, tmp_path_factory.mktemp("rows"), container="tfrecord")["data"]


def samplers(labels: Any) -> list[Any]:
    return [
        BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=5),
        ExactOnceBatchSampler(RECORDS, batch_size=7, last_batch="pad").shard(1, 2),
        PKBatchSampler(labels, p=2, k=3, seed=1, batches_per_epoch=4),
    ]


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(name, marks=pytest.mark.frameworks) for name in FRAMEWORKS)]
)
def test_dataset_source_equals_the_same_records_packed(
    kind: str, index: Index, tmp_path: Path
) -> None:
    made, fields = {**KINDS, **FRAMEWORKS}[kind]
    rows = DatasetSource(made(tmp_path), label="label", fields=fields)
    if kind != "a dataset of torch":  # a class that no other process can import
        check_source(rows)
    assert RandomSampler(rows, seed=0).fingerprint == RandomSampler(RECORDS, seed=0).fingerprint
    # Where the format is Python's own, so are the numbers.
    spec = {"x": ((4,), np.float32), "word": ((), None)} if kind == "Hugging Face" else None
    for sampler, other in zip(samplers(rows.columns["label"]), samplers(LABELS), strict=True):
        packed = two_epochs(NumpyLoader(Feed(index, other, fields=["word"])))
        assert two_epochs(NumpyLoader(Feed(rows, sampler, spec=spec))) == packed


@pytest.mark.parametrize(
    "kind",
    [
        *(name for name, (_, fields) in KINDS.items() if fields is None),
        *(
            pytest.param(name, marks=pytest.mark.frameworks)
            for name, (_, fields) in FRAMEWORKS.items()
            if fields is None
        ),
    ],
)
def test_feed_wraps_a_dataset_of_dicts(kind: str, tmp_path: Path) -> None:
    made = {**KINDS, **FRAMEWORKS}[kind][0](tmp_path)
    sampler = BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=5)
    loaders = [NumpyLoader(Feed(data, sampler)) for data in (made, DatasetSource(made))]
    assert loaders[0].state_dict() == loaders[1].state_dict()
    assert two_epochs(loaders[0]) == two_epochs(loaders[1])
    if hasattr(made, "__getitem__") and not isinstance(made, dict):
        assert len(RandomSampler(made, seed=0)) == RECORDS


def test_feed_reads_record_0_of_a_dataset_once_when_created() -> None:
    class Counting(Dicts):
        reader = "csv"  # a source has a method of this name; this is a dataset all the same

        def __getitem__(self, record: int) -> Any:
            read.append(record)
            return super().__getitem__(record)

    read: list[int] = []
    feed = Feed(Counting(), BatchSampler(SequentialSampler(RECORDS), batch_size=5))
    assert read == [0]
    assert feed[0, 0]["id"].tolist() == [0, 1, 2, 3, 4]


def test_error_of_record_0_says_why_it_was_read() -> None:
    class Fails(Dicts):
        def __getitem__(self, record: int) -> Any:
            raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk") as raised:
        Feed(Fails(), BatchSampler(SequentialSampler(RECORDS), batch_size=5))
    assert raised.value.__notes__ == ["in record 0 of a Fails, read to find the field names"]


def feed_of(data: Any, **options: Any) -> Feed:
    kept = {name: options.pop(name) for name in ("decode",) if name in options}
    rows = DatasetSource(data, **options)
    return Feed(rows, BatchSampler(RandomSampler(len(rows), seed=0), batch_size=4), **kept)


@pytest.mark.parametrize(
    ("give", "taken"),
    [(lambda x: x, True), (lambda x: {"row": x}, True), (list, False)],
)
def test_batch_does_not_share_memory_with_the_dataset(give: Any, taken: bool) -> None:
    kept = X.copy()
    with NumpyLoader(feed_of(give(kept)), prefetch=0) as loader:
        batches = [batch["row"] for batch in loader]
    assert all(batch.flags.owndata == taken for batch in batches)  # or copied
    for batch in batches:
        batch += 1
    assert np.concatenate(batches).sum() == X.sum() + X.size
    assert (kept == X).all()


def test_dataset_that_reuses_one_buffer_is_refused() -> None:
    """Another batch may be read before the first is copied."""
    for threads in (False, True):
        with pytest.raises(ValueError, match=r"read returned the same buffer again: .* 'row'"):
            feed_of(Buffered(X.copy()), threads=threads)[0, 0]


def test_dataset_may_be_empty() -> None:
    assert (len(DatasetSource([])), DatasetSource([]).fields) == (0, [])
    assert DatasetSource([], fields=["x"]).fields == ["x"]


def test_transform_may_write_to_the_values_of_a_list() -> None:
    """A list of the data set would else grow in each epoch; its arrays are copied anyway."""

    def increment(sample: dict[str, Any]) -> dict[str, Any]:
        sample["x"][0] += 1
        sample["y"] += 1
        return {"x": np.array(sample["x"]), "y": sample["y"]}

    data = [{"x": [float(n)], "y": np.array([n])} for n in range(4)]
    feed = Feed(data, BatchSampler(SequentialSampler(4), batch_size=4), transform=increment)
    loader = NumpyLoader(feed)
    for batch in [*loader, *loader]:
        assert batch["x"].ravel().tolist() == batch["y"].ravel().tolist() == [1, 2, 3, 4]
    assert [sample["x"] for sample in data] == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.parametrize("fields", [{"x", "y"}, {"x": 1, "y": 0}])
def test_fields_have_an_order(fields: Any) -> None:
    """A set has another one in each process; a dict says another than its own."""
    with pytest.raises(TypeError, match=r"fields must be a list of names, got \{"):
        DatasetSource([(1, 2)], fields=fields)


@pytest.mark.parametrize("data", [{"x": [5, 2**63 + 5]}, [{"x": 5}, {"x": 2**63 + 5}]])
def test_a_column_does_not_round_integers(data: Any) -> None:
    with pytest.raises(TypeError, match="float64 cannot hold 9223372036854775813 of a list: give"):
        DatasetSource(data, columns=["x"])


def test_label_is_read_once_and_is_no_field() -> None:
    counted = Once()
    rows = DatasetSource(counted, label="label", columns=["label"])
    assert rows.columns["label"].tolist() == LABELS.tolist()
    assert rows.fields == ["x", "word"]
    given = DatasetSource(SAMPLES, label="label", columns={"label": LABELS[::-1].copy()})
    assert given.columns["label"].tolist() == LABELS[::-1].tolist()


EXACT = 2**53 + 1  # which no float holds


def stored_as(kind: str, values: Any) -> Any:
    """A column x, in a table of pyarrow or in a dataset of Hugging Face with a format."""
    if kind == "pyarrow":
        import pyarrow

        return pyarrow.table({"x": values})
    import datasets

    data = datasets.Dataset.from_dict({"x": [[7, 7], *values]})
    return data.select(range(1, len(data))).with_format(None if kind == "python" else kind)


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["pyarrow", "python", "numpy", "torch"])
@pytest.mark.parametrize(
    ("values", "value"),
    [([[EXACT, 1], None, [3, EXACT]], [0, 5]), ([None, [EXACT, EXACT]], [EXACT, 0])],
)
def test_null_is_a_missing_value(kind: str, values: Any, value: Any) -> None:
    data, whole = (
        stored_as(kind, values),
        BatchSampler(SequentialSampler(len(values)), batch_size=3),
    )
    with pytest.raises(ValueError, match=rf"a null.* in the field 'x' \(1 of {len(values)}\).*"):
        Feed(DatasetSource(data), whole)
    with pytest.raises(LoaderError, match=rf"^record {values.index(None)} .*'x'(.|\n)*missing="):
        Feed(DatasetSource(data), whole, missing="late")[0, 0]
    for wrong in (["a", 1], None, [0.5, 1]):
        with pytest.raises(TypeError, match="missing must have a value"):
            Feed(DatasetSource(data), whole, missing={"x": wrong})
    batch = Feed(DatasetSource(data), whole, missing={"x": value})[0, 0]
    assert batch["x"].dtype == np.int64
    assert batch["x"].tolist() == [value if row is None else row for row in values]


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["pyarrow", "python", "numpy"])
def test_null_within_a_list_is_refused(kind: str) -> None:
    whole = BatchSampler(SequentialSampler(3), batch_size=3)
    rows = DatasetSource(stored_as(kind, [[1, 2], [EXACT, EXACT], [None, 2]]))
    if kind == "python":  # which a decode may fill
        with pytest.raises(DecodeError, match=r"^record 2 .*'x' holds a list with None in it"):
            Feed(rows, whole)[0, 0]
    else:
        with pytest.raises(ValueError, match=r"null in a list, in the field 'x' \(1 of 3\)"):
            Feed(rows, whole)
        batch = Feed(rows, whole, missing={"x": [0, 0]})[0, 0]
        assert batch["x"].tolist() == [[1, 2], [EXACT, EXACT], [0, 0]]


def columns_with_a_null() -> dict[str, tuple[Any, str]]:
    """Columns of libraries, of which numpy makes NaN of a null; and what the error says."""
    import pandas
    import polars
    import pyarrow

    return {
        "pyarrow": (pyarrow.array([EXACT, None]), f"float64 cannot hold {EXACT} of a list"),
        "pandas": (pandas.array([1, None], "Int64"), "float64 cannot hold <NA> of a list: fill it"),
        "pandas series": (pandas.Series([1, None], dtype="int64[pyarrow]"), "cannot hold <NA>"),
        "polars": (polars.Series([0.5, None], dtype=polars.Float32), "float32 cannot hold None of"),
        "lists": (pyarrow.array([[1, 2], [3, None]]), "got object|array of numbers|has a null"),
    }


@pytest.mark.frameworks
def test_numbers_of_other_libraries_become_arrays_and_nulls_are_refused() -> None:
    """In lists of numbers and of columns, and in tables and columns of rows."""
    import pandas
    import polars
    import pyarrow
    import tensorflow as tf

    for good in (
        [tf.constant(np.nan), tf.constant(1e20)],
        pyarrow.table({"a": [1.0, np.nan], "b": [1e20, 2.0]}),
        [pyarrow.array([1.0, np.nan]), pyarrow.array([1e20, 2.0])],
        pandas.Series([np.nan, 1.0]),
    ):
        assert np.array_equal(as_array(good), np.asarray(good), equal_nan=True)
    rows = polars.Array(polars.Float64, 2)
    for bad in (
        [pyarrow.array([1, None]), pyarrow.array([1, 2])],
        [polars.Series([1, None]), polars.Series([1, 2])],
        [pandas.Series([1, None], dtype="Int64")],
        polars.Series([None, [3.0, 4.0]], dtype=rows),
        pyarrow.array([np.float16(1), None], pyarrow.float16()),
    ):
        with pytest.raises(TypeError, match=r"cannot hold .*: fill it first"):
            as_array(bad)


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["pyarrow", "pandas", "pandas series", "polars", "lists"])
def test_null_of_a_given_column_is_refused(kind: str) -> None:
    """In columns=, by ByKey and in Examples; NaN is a number."""
    column, word = columns_with_a_null()[kind]
    with pytest.raises(TypeError, match=word):
        DatasetSource({"x": np.arange(2)}, columns={"v": column})
    rows = DatasetSource({"x": np.arange(2)}, columns={"k": np.arange(2)}, digest="2")
    table = ByKey({"k": [0, 1], "v": column}, key="k", value="v", column="k")
    with pytest.raises(TypeError, match=word):
        Feed(rows, ExactOnceBatchSampler(2, batch_size=2), side={"v": table})
    with pytest.raises(TypeError, match=f"{word}|must hold bytes, str, integers or floats"):
        encode({"v": column})
    column = type(column)([0.5, np.nan]) if kind == "polars" else [0.5, np.nan]
    assert np.isnan(DatasetSource({"x": [1, 2]}, columns={"v": column}).columns["v"][1])


@pytest.mark.frameworks
def test_integers_beside_a_null_stay_integers() -> None:
    import pyarrow

    table = pyarrow.table({"n": pyarrow.array([None, 1, 3, 4], pyarrow.int32())})
    table = table.append_column(
        "pair", [[{"n": EXACT, "path": None}, {"n": None, "path": "x"}] * 2]
    )
    with pytest.raises(TypeError, match="column 'n' must hold numbers, got object"):
        DatasetSource(table, label="n")
    floats = pyarrow.table({"n": pyarrow.array([None, 1.5], pyarrow.float32())})
    with pytest.raises(TypeError, match=r"must have a value of float, got 1e\+300 \(too large\)"):
        Feed(floats, BatchSampler(SequentialSampler(2), batch_size=2), missing={"n": 1e300})
    decode = {"decode": lambda sample: {"n": sample["n"], "m": sample["pair"]["n"] or 0}}
    sampler = BatchSampler(SequentialSampler(4), batch_size=4)
    batch = Feed(DatasetSource(table), sampler, missing={"n": 7}, **decode)[0, 0]
    assert (batch["n"].tolist(), batch["n"].dtype) == ([7, 1, 3, 4], np.int32)
    assert batch["m"].tolist() == [EXACT, 0, EXACT, 0]


@pytest.mark.frameworks
def test_hugging_face_dataset_decodes_only_fields_read() -> None:
    import datasets

    broken = {"image": [{"bytes": b"no image", "path": None}] * 4, "t": [1, 2, 3, 4]}
    features = {"image": datasets.Image(), "t": datasets.Value("int64")}
    data = datasets.Dataset.from_dict(broken, features=datasets.Features(features))
    for dataset in (data, data.with_format("numpy")):
        batch = feed_of(dataset, fields=["t"])[0, 0]
        assert sorted(batch["t"].tolist()) == [1, 2, 3, 4]
    plain = data.cast_column("image", datasets.Image(decode=False))
    with pytest.raises(
        DecodeError, match="field 'image' is not an image, it begins with b'no image'"
    ):
        feed_of(plain, decode=DecodeImage())[0, 0]
    elsewhere = [{"image": {"bytes": None, "path": "a.png"}}] * 4
    with pytest.raises(DecodeError, match=r"'image' must hold the bytes of an image, got {.*a.png"):
        feed_of(elsewhere, decode=DecodeImage())[0, 0]


@pytest.mark.frameworks
def test_dataset_without_records_by_number_is_refused() -> None:
    import datasets

    data = datasets.Dataset.from_dict({"n": [1, 2]})
    for given, word in (
        (data.with_format("arrow"), "'arrow' returns tables: give dataset.with_format"),
        (data.with_format("polars"), "'polars' returns tables"),
        (data.to_iterable_dataset(), "a map-style dataset, .* got an IterableDataset"),
        (datasets.DatasetDict(train=data), r"as in DatasetSource\(data\['train'\]\)"),
    ):
        with pytest.raises(TypeError, match=word):
            DatasetSource(given)


class Plays:
    """Samples of a file, as the decoders of audio: two of them are never equal."""

    def __init__(self, number: int) -> None:
        self.number, self.lock = number, threading.Lock()

    def samples(self) -> Any:
        return np.full(3, self.number)


@dataclass
class Boxes:
    array: Any

    def samples(self) -> Any:
        return self.array


class Nested(Dicts):
    """Items that hold what `make` makes of their number."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, number: int) -> Any:
        return {"x": self.make(number)}


def ragged(number: int) -> Any:
    return np.fromiter([np.full(3, number), np.zeros(number)], object, 2)


@pytest.mark.parametrize("by", ["decode", "transform"])
@pytest.mark.parametrize(
    ("make", "array"),
    [
        (Plays, Plays.samples),
        (lambda number: Boxes(np.full(3, number)), Boxes.samples),
        (ragged, lambda value: value[0]),
        (lambda number: lambda: np.full(3, number), lambda value: value()),
    ],
)
def test_items_may_hold_objects_that_decode_converts(make: Any, array: Any, by: str) -> None:
    function: Any = {by: lambda sample: {"x": array(sample["x"])}}
    feed = Feed(
        DatasetSource(Nested(make)),
        BatchSampler(SequentialSampler(RECORDS), batch_size=4),
        **function,
    )
    assert feed[0, 1]["x"].tolist() == [[number] * 3 for number in range(4, 8)]


def test_objects_that_differ_between_reads_are_refused() -> None:
    random = Nested(lambda number: Boxes(np.random.random(3)))
    with pytest.raises(ValueError, match="read returned different results for one record"):
        feed_of(random, decode=lambda sample: {"x": sample["x"].array})[0, 0]
    random = Nested(lambda number: Plays(np.random.randint(1 << 30)))
    with pytest.raises(ValueError, match="decode returned different results"):
        feed_of(random, decode=lambda sample: {"x": sample["x"].samples()})[0, 0]


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["grad", "sparse", pytest.param("meta", marks=pytest.mark.long)])
def test_tensors_without_values_are_named(kind: str) -> None:
    import torch

    tensor = {
        "grad": torch.ones(RECORDS, 2, requires_grad=True) * 1,
        "sparse": torch.ones(RECORDS, 2).to_sparse(),
        "meta": torch.ones(RECORDS, 2, device="meta"),
    }[kind]
    items = Nested(lambda number: tensor[number])
    with pytest.raises(
        DecodeError, match=r"^record \d+ .*field 'x' holds a Tensor that is not an arr"
    ):
        feed_of(items)[0, 0]
    for by in ("decode", "transform"):
        function: Any = {by: lambda sample: {"x": [*sample["x"].shape]}}
        sampler = BatchSampler(SequentialSampler(RECORDS), batch_size=2)
        assert Feed(DatasetSource(items), sampler, **function)[0, 0]["x"].tolist() == [[2], [2]]
    with pytest.raises(TypeError, match=r"'x' must be an array: (C|c)an't"):
        DatasetSource({"x": tensor})


@pytest.mark.frameworks
def test_dataframe_is_refused_with_advice() -> None:
    import pandas

    frame = pandas.DataFrame({"a": [5, 6], "b": ["x", "y"]}, index=[1, 0])
    with pytest.raises(TypeError, match=r"to_arrow\(\) \(polars\), or frame.to_dict\('list'\)"):
        DatasetSource(frame)
    batch = Feed(frame.to_dict("list"), ExactOnceBatchSampler(2, batch_size=2))[0, 0]
    assert (batch["a"].tolist(), batch["b"]) == ([5, 6], ["x", "y"])


def test_states_compare_the_digest_of_the_source() -> None:
    with NumpyLoader(feed_of(SAMPLES, digest="1")) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with NumpyLoader(feed_of(SAMPLES, digest="1")) as again:
        again.load_state_dict(state)
        assert again.step == 1
    with (
        NumpyLoader(feed_of(SAMPLES, digest="2")) as other,
        pytest.raises(StateMismatchError, match="has the digest '1' in the state"),
    ):
        other.load_state_dict(state)
    with (
        NumpyLoader(feed_of(SAMPLES)) as none,
        pytest.warns(UserWarning, match="share no digest"),
    ):
        none.load_state_dict(none.state_dict())


def test_dataset_is_read_by_one_thread_unless_allowed() -> None:
    expected = two_epochs(NumpyLoader(feed_of(SAMPLES, decode=dict)))
    for allowed in (False, True):
        data = Once()
        with NumpyLoader(feed_of(data, decode=dict, threads=allowed), threads=4) as loader:
            got = [noted(batch) for batch in loader]
        assert (data.most > 1) == allowed
        assert allowed or got == expected[: len(got)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_child_forked_during_a_read_can_read() -> None:
    reads, ends = threading.Event(), threading.Event()

    class Waits(Dicts):
        def __getitem__(self, number: int) -> Any:
            if number == 1:
                reads.set()
                ends.wait()
            return SAMPLES[number]

    rows = DatasetSource(Waits())
    thread = threading.Thread(target=rows.read, args=(np.array([1]), ["x"]))
    thread.start()
    reads.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        rows.read(np.array([2]), ["x"])
        os._exit(0)
    ended = os.waitpid(child, 0)
    ends.set()
    thread.join()
    assert ended == (child, 0)


def test_ids_are_checked_before_the_data_are_read() -> None:
    class Below(RandomSampler):
        def draw(self, epoch: int, positions: Any) -> Any:
            return super().draw(epoch, positions) - 3

    loader = NumpyLoader(Feed(DatasetSource(X), BatchSampler(Below(RECORDS, seed=0), batch_size=4)))
    with pytest.raises(ValueError, match="correct its draw"):
        list(loader)


def test_large_arrays_are_memory_mapped_in_a_new_process(tmp_path: Path) -> None:
    large = np.zeros((40, 1 << 20), np.uint8)
    np.save(tmp_path / "x.npy", large)
    mapped = DatasetSource(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert len(pickle.dumps(mapped)) < 10_000
    check_source(mapped)
    assert len(pickle.dumps(DatasetSource(large[:2]))) > 1 << 20
    np.save(tmp_path / "columns.npy", np.asfortranarray(large[:, :100]))
    columns = DatasetSource(np.load(tmp_path / "columns.npy", mmap_mode="r"))
    assert len(pickle.dumps(columns)) < 10_000
    check_source(columns)


@pytest.mark.parametrize("when", ["before the rows", "before the pickle", "after the pickle"])
@pytest.mark.parametrize("source", [DatasetSource, SideTable, lambda x: SubsetSampler(x, of=4)])
def test_replaced_memory_mapped_file_is_an_error(source: Any, when: str, tmp_path: Path) -> None:
    """Else the parent would read the old values, and a spawned worker the new ones."""

    def replace() -> None:
        np.save(tmp_path / "new.npy", np.array([1, 0, 2]))
        os.replace(tmp_path / "new.npy", path)

    np.save(path := tmp_path / "x.npy", np.arange(3))
    mapped = path if source is SideTable else np.load(path, mmap_mode="r")
    if when == "before the rows":
        if source is SideTable or sys.platform != "linux":
            pytest.skip("a side table maps its file itself; other systems do not say")
        replace()
    made = source(mapped)
    if when == "before the pickle":
        replace()
    with pytest.raises(OSError, match=r"the file changed after an array mapped it: .*x\.npy"):  # noqa: PT012
        data = pickle.dumps(made)
        replace()
        pickle.loads(data)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_spawned_torch_workers_read_memory_mapped_arrays(tmp_path: Path) -> None:
    from twinfeed.loaders.torch import TorchLoader

    spawn: Any = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    with pytest.raises(LoaderError, match="a copy of 42 MB"):
        next(iter(TorchLoader(feed_of(np.zeros((40, 1 << 20), np.uint8)), **spawn)))
    mapped = DatasetSource(KINDS["mapped arrays"][0](tmp_path))
    np.save(tmp_path / "side.npy", X)
    sampler = BatchSampler(RandomSampler(RECORDS, seed=0), batch_size=4)
    expected = two_epochs(NumpyLoader(Feed(DatasetSource(SAMPLES), sampler, side={"side": X})))
    feed = Feed(mapped, sampler, side={"side": SideTable(tmp_path / "side.npy")})
    assert two_epochs(TorchLoader(feed, **spawn)) == expected


@pytest.mark.frameworks
@pytest.mark.skipif(sys.platform != "linux", reason="array-record is for Linux")
def test_array_record_equals_the_same_records_packed(tmp_path: Path) -> None:
    from array_record.python.array_record_data_source import ArrayRecordDataSource
    from array_record.python.array_record_module import ArrayRecordWriter

    records = [b"record %d" % number for number in range(RECORDS)]
    writer = ArrayRecordWriter(str(tmp_path / "data.array_record"), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    rows = DatasetSource(
        ArrayRecordDataSource([str(tmp_path / "data.array_record")]), fields=["row"]
    )
    check_source(rows)
    packed = pack([{"row": record} for record in records], tmp_path)["data"]
    for sampler in samplers(LABELS):
        expected = two_epochs(NumpyLoader(Feed(packed, sampler)))
        assert two_epochs(NumpyLoader(Feed(rows, sampler))) == expected


@pytest.mark.long
@pytest.mark.frameworks
def test_polars_and_grain_workers_give_same_rows() -> None:
    """Among others, workers that would hang after a fork."""
    assert run(PROGRAMS / "polars_rows.py") == "the same polars_rows\n"
