"""The reader: any ids in any order, through few files, from threads, processes and far away."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import read_ahead
from support.datasets import SAMPLES, Flipped, X
from support.open_files import open_below
from support.own_source import LABELS, Words, samplers
from support.servers import RangeServer
from support.shards import flip, numbered, tars, tfrecords, total_bytes, write_tar

from twinfeed import DatasetSource
from twinfeed.loaders import (
    DataCorruptionError,
    DecodeError,
    Feed,
    Index,
    IndexFormatError,
    LoaderError,
    Reader,
    SideTable,
    StaleIndexError,
    TruncatedShardError,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    plan,
    verify,
)
from twinfeed.loaders.building import sources
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.index import arrays
from twinfeed.loaders.reading import local
from twinfeed.loaders.reading.handles import Handles
from twinfeed.loaders.reading.local import is_near_previous
from twinfeed.loaders.support.limits import Limits
from twinfeed.samplers import BatchSampler, SequentialSampler

Call = Callable[[Index], object]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    folder = tmp_path_factory.mktemp("data")
    return build_index(tfrecords(folder, shards=5, each=40), folder / "x.index")


WANT = [sample["image"] for sample in numbered(0, 200)]
KEYS = [sample["key"].encode() for sample in numbered(0, 200)]


def reader(**options: Any) -> Call:
    return lambda index: Reader(index, **options)


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


class Giving(Words):
    """A source with another column, or whose `read` returns this for ids."""

    def __init__(self, found: Callable[[Any], Any] | None = None, column: Any = LABELS) -> None:
        super().__init__()
        self.columns, self.found = {"label": column}, found

    def read(self, ids: Any, fields: Any) -> Any:
        assert self.found
        return self.found(ids)


NPY = r"must be an \.npy file of numbers.*\n.*path: .*t\.npy"
NO_LIST = r"no list for the field 'word'(.|\n)*found: "

REFUSED: list[tuple[Call, type[Exception], str]] = [
    (reader(max_open_files=0), ValueError, "max_open_files must be at least 1, got 0"),
    (reader(max_open_files=1.5), TypeError, "max_open_files must be an integer, got 1.5"),
    (reader(checksums="no"), TypeError, "checksums must be True or False, got 'no'"),
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
            *(lambda _: b"", lambda whole: whole[:20], lambda whole: whole[:-1]),
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
    (rows([(1, 2)]), ValueError, "fields must name the 2 parts of each tuple"),
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
        "record 23 of a list: .*None",
    ),
    (
        batch(DatasetSource(Flipped())),
        ValueError,
        r"read returned .* results for record \d+ of a Flipped",
    ),
    # Sources of one's own
    (batch("x"), TypeError, r"must be an Index, got a str: open_index\(path\) gives one"),
    (batch(Unfinished()), TypeError, "must be an Index, got a .*lacks describe, reader"),
    # A dataset that a feed is to take as it is
    *(
        (batch(dataset), TypeError, f"must be a map-style dataset, .*got a {word}$")
        for dataset, word in (
            (None, "NoneType"),
            (iter(SAMPLES), "list_iterator: pack.* writes an index"),
            (SimpleNamespace(dataset=SAMPLES), r"SimpleNamespace: pass its \.dataset"),
        )
    ),
    *(
        (batch(dataset), TypeError, rf"record 0 of a .* is of type {word}, not a dict.* fields=")
        for dataset, word in ((["a.tfrecord"], "str"), ([[1, 2]], "list"), (X, "ndarray"))
    ),
    (batch([(X, 1)]), ValueError, r'name the 2 parts .*\(dataset, fields=\("image", "label"\)\)'),
    (batch({"x": X, "y": X[1:]}), ValueError, r"lengths \{'x': 24, 'y': 23\}"),
    (batch({}), ValueError, r"a row for each record, got the lengths \{\}"),
    (batch({0: X}), TypeError, "the name of a field must be a str, got 0"),
    (batch({"id": X}), ValueError, "'id' has a name that the loader itself gives"),
    (
        lambda _: plan(Feed(Words(), next(samplers()))),
        TypeError,
        "plan needs an index.* has a Words",
    ),
    (batch(Words(), missing={"wrod": b""}), ValueError, r"missing names \['wrod'\], .*'word'"),
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
    (batch(Giving(lambda ids: [b""] * 8)), LoaderError, r"than dict(.|\n)*found: list"),
    (
        batch(Giving(lambda ids: {"a": []})),
        LoaderError,
        r"no values for the field 'word'(.|\n)*'a'",
    ),
    (batch(Giving(lambda ids: {"word": b"x"})), LoaderError, f"{NO_LIST}bytes"),
    (batch(Giving(lambda ids: {"word": iter(ids)})), LoaderError, NO_LIST),
    (batch(Giving(lambda ids: {"word": None})), LoaderError, f"{NO_LIST}NoneType"),
    (
        batch(Giving(lambda ids: {"word": [b""] * 7})),
        LoaderError,
        "too few values(.|\n)*7 values",
    ),
    (
        batch(Giving(lambda ids: {"word": [None if n == 7 else b"" for n in ids]})),
        LoaderError,
        "word number 7: read returned None for the field 'word'",
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


@settings(max_examples=60)
@given(
    ids=st.lists(st.integers(0, 199), max_size=60)
    | st.integers(0, 180).map(lambda n: list(range(n, n + 20))),
    files=st.integers(1, 8),
    verify=st.booleans(),
)
def test_any_ids_in_any_order_read_as_one_by_one(
    index: Index, ids: list[int], files: int, verify: bool
) -> None:
    with Reader(index, checksums=verify, max_open_files=files) as reader:
        got = reader.read(np.array(ids, np.int64))
    assert got["image"] == [WANT[n] for n in ids]
    assert got["key"] == [KEYS[n] for n in ids]


def test_repeated_record_is_read_once_and_neighbours_together(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads.append(length)
        return pread(fd, length, offset)

    monkeypatch.setattr(local.os, "pread", counted)
    with Reader(index) as reader:
        assert reader.read([7, 150, 7, 7], ["image"])["image"] == [WANT[n] for n in (7, 150, 7, 7)]
        assert len(reads) == 2
        reads.clear()
        reader.read(range(40))
        assert len(reads) == 1


def test_fields_and_columns_come_in_requested_order(index: Index) -> None:
    with Reader(index) as reader:
        got = reader.read([3, 1], ["label", "image", "key"])
        assert list(got) == ["label", "image", "key"]
        assert got["label"] == [3, 1]
        assert reader.read([], ["image"]) == {"image": []}
        assert reader.read([3], []) == {}


def test_many_shards_are_read_through_few_open_files(tmp_path: Path) -> None:
    """A batch that touches more shards than may be open, and one of them damaged."""
    for n in range(300):
        write_tar(tmp_path / f"d-{n:03d}.tar", [(f"k{n}", {"txt": b"%d" % n})])
    index = build_index(tmp_path / "*.tar", tmp_path / "x.index")
    ids = np.random.default_rng(0).permutation(300)
    with Reader(index, max_open_files=8) as reader:
        for _ in range(2):
            assert reader.read(ids)["txt"] == [b"%d" % n for n in ids]
            assert len(open_below(tmp_path)) <= 8
        read_ahead(reader, ids)
        assert len(open_below(tmp_path)) <= 8
    assert open_below(tmp_path) == []
    flip(tmp_path / "d-123.tar", int(index.table("txt")["offset"][123]))
    with (
        Reader(index, max_open_files=8) as reader,
        pytest.raises(DataCorruptionError, match=r"record 123 \(d-123\.tar"),
    ):
        reader.read(ids)


def test_default_max_open_files_is_a_quarter_of_the_limit() -> None:
    code = textwrap.dedent("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from twinfeed.loaders.reading.handles import default_limit
        print(default_limit())
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "16\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64


def test_reader_closes_files_at_the_limit_of_the_process(tmp_path: Path) -> None:
    for n in range(30):
        write_tar(tmp_path / f"d-{n:03d}.tar", [(f"k{n}", {"txt": b"%d" % n})])
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    code = textwrap.dedent("""
        import os, resource, sys
        from twinfeed.loaders import Reader, open_index
        index = open_index(sys.argv[1])
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(400)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(others) + 12,) * 2)
        with Reader(index, max_open_files=29) as reader:
            for n in range(30):
                assert reader.read([n])["txt"] == [b"%d" % n]
    """)
    subprocess.run([sys.executable, "-c", code, tmp_path / "x.index"], check=True)


def test_all_readers_together_stay_below_max_open_files(tmp_path: Path) -> None:
    """Readers kept alive, as TensorFlow does with those of a dataset, must not use up the files."""
    for n in range(30):
        write_tar(tmp_path / f"d-{n:03d}.tar", [(f"k{n}", {"txt": b"%d" % n})])
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    code = textwrap.dedent("""
        import os, resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from twinfeed.loaders import Reader, open_index
        index = open_index(sys.argv[1])
        before = len(os.listdir("/proc/self/fd"))
        readers = [Reader(index) for _ in range(8)]
        for _ in range(2):
            for reader in readers:
                assert reader.read(range(30))["txt"] == [b"%d" % n for n in range(30)]
        print(len(os.listdir("/proc/self/fd")) - before)
    """)
    command = [sys.executable, "-c", code, str(tmp_path / "x.index")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 8 < int(done.stdout) <= 16


def test_threads_share_a_reader(tmp_path: Path) -> None:
    """With files opened and closed under each other's hands, every thread still gets its bytes."""
    index = build_index(tfrecords(tmp_path, shards=12, each=20), tmp_path / "x.index")
    want = [sample["image"] for sample in numbered(0, 240)]
    with Reader(index, checksums=False, max_open_files=3) as reader:

        def one(seed: int) -> bool:
            ids = np.random.default_rng(seed).integers(0, 240, 50)
            return reader.read(ids, ["image"])["image"] == [want[n] for n in ids]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(200)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_reader_works_in_other_processes(index: Index, method: str) -> None:
    want = sum(map(len, WANT))
    with Reader(index) as reader:
        assert total_bytes(reader) == want
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map_async(total_bytes, [reader] * 4).get(60) == [want] * 4


def test_forked_child_does_not_wait_for_a_lock_of_its_parent(index: Index) -> None:
    with Reader(index) as reader:
        reader.read([0])
        lock = reader._files.handles._lock  # type: ignore[attr-defined]
        with lock():
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                os._exit(0 if reader.read([0], ["image"])["image"] == WANT[:1] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_closed_reader_reopens_its_files(index: Index) -> None:
    reader = Reader(index)
    reader.read([0])
    reader.close()
    assert reader.read([0], ["image"])["image"] == WANT[:1]
    reader.close()
    reader.close()


def test_deleted_reader_closes_its_shards(tmp_path: Path) -> None:
    index = build_index(tfrecords(tmp_path), tmp_path / "x.index")
    gc.disable()
    try:
        reader = Reader(index)
        reader.read([0])
        assert open_below(tmp_path)
        del reader
        assert open_below(tmp_path) == []
    finally:
        gc.enable()


def test_unclosed_reader_prints_nothing_at_exit(index: Index) -> None:
    code = """
        import sys
        from twinfeed.loaders import Reader, open_index
        reader = Reader(open_index(sys.argv[1]))
        reader.read([0, 100])
    """
    command = [sys.executable, "-X", "dev", "-c", textwrap.dedent(code), os.fspath(index.path)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert done.stderr == b""


def test_reading_ahead_does_not_change_results(index: Index) -> None:
    with Reader(index) as reader:
        read_ahead(reader, [5, 3, 199], ["image", "label"])
        read_ahead(reader, [])
        assert reader.read([5], ["image"])["image"] == [WANT[5]]


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


def upload(memory: Any, paths: list[Path]) -> None:
    for path in paths:
        memory.pipe_file(f"/bucket/{path.name}", path.read_bytes())


def test_remote_shards_are_indexed_and_read_by_ranges(tmp_path: Path, memory: Any) -> None:
    upload(memory, tfrecords(tmp_path, shards=3, each=10))
    index = build_index(
        [f"memory://bucket/d-{n:05d}-of-00003.tfrecord" for n in range(3)], tmp_path / "x.index"
    )
    assert index.root == "memory://bucket"
    again = open_index(index.path, root="memory://bucket")
    assert verify(again).ok
    with Reader(again) as reader:
        assert reader.read([29, 3, 3, 4], ["image"])["image"] == [WANT[n] for n in (29, 3, 3, 4)]
        read_ahead(reader, [1])
    with Reader(pickle.loads(pickle.dumps(again))) as reader:
        assert reader.read([29], ["image"])["image"] == [WANT[29]]


def test_remote_shards_are_named_by_a_glob(tmp_path: Path, memory: Any) -> None:
    upload(memory, tars(tmp_path))
    index = build_index("memory://bucket/*-00000{0,2}.t*", tmp_path / "x.index")
    assert index.keys([0, 19]) == ["k0", "k29"]
    with Reader(index) as reader:
        assert len(reader.read(range(20))["png"]) == 20


def test_file_url_equals_path(tmp_path: Path) -> None:
    tars(tmp_path)
    for name in ("d-000000.tar", "*.tar"):
        index = build_index(f"file://{tmp_path}/{name}", tmp_path / "x.index")
        assert index.root == f"file://{tmp_path}"
        with Reader(index) as reader:
            assert reader.read([3], ["png"])["png"] == [b"000003" * 3]


def test_changed_remote_shard_is_refused(tmp_path: Path, memory: Any) -> None:
    shards = tars(tmp_path, shards=1)
    upload(memory, shards)
    index = build_index(["memory://bucket/d-000000.tar"], tmp_path / "x.index")
    data = bytearray(shards[0].read_bytes())
    offset = int(index.table("png")["offset"][4])
    data[offset] ^= 1
    memory.pipe_file("/bucket/d-000000.tar", bytes(data))
    with Reader(index) as reader:
        reader.read([3])
        with pytest.raises(ValueError, match="corrupted bytes"):
            reader.read([3, 4])
    with Reader(index, checksums=False) as reader:
        reader.read([3])
        memory.pipe_file("/bucket/d-000000.tar", bytes(data[: offset + 1]))
        with pytest.raises(TruncatedShardError):
            reader.read([4], ["png"])
    memory.pipe_file("/bucket/d-000000.tar", bytes(data) + b"more")
    index = open_index(index.path, root="memory://bucket")
    with Reader(index) as reader, pytest.raises(StaleIndexError):
        reader.read([3])


def test_missing_field_of_a_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a", {"jpg": b"1", "txt": b"x"}), ("b", {"jpg": b"2"})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index")
    assert index.fields["txt"].missing == 1
    with Reader(index) as reader:
        assert reader.read([1, 0], ["jpg"])["jpg"] == [b"2", b"1"]
        with pytest.raises(LoaderError, match=r"record 1 \(a.tar, number 1.*'b'\) lacks .*'txt'"):
            reader.read([0, 1], ["txt", "jpg"])


def test_loose_files_are_closed_after_each_read(tmp_path: Path) -> None:
    for n in range(20):
        path = tmp_path / "images" / f"c{n % 2}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % n)
    index = build_index(tmp_path / "images", tmp_path / "x.index")

    folder = tmp_path / "images"
    with Reader(index) as reader:
        assert reader.read([19, 0, 19])["image"] == [b"9", b"0", b"9"]
        assert open_below(folder) == []
        read_ahead(reader, range(20))  # on a thread, which has one file open until it has ended
        assert reader.read([19, 0, 19])["image"] == [b"9", b"0", b"9"]
    assert open_below(folder) == []


@pytest.mark.usefixtures("mapped_arrays")
def test_row_with_wrong_file_number_is_an_index_error(tmp_path: Path) -> None:
    """A bit of a large table flipped on the disk: opening checks only sizes, reading finds it."""
    (tmp_path / "to.txt").write_bytes(b"to")
    index = build_index([Entry("to", {"word": "to.txt"})], tmp_path / "x.index")
    (table,) = index.path.glob("columns-*/field-0.npy")
    rows = np.load(table, mmap_mode="r+")
    rows["file"] = 7
    rows.flush()
    told = r"a file number below 1\n  found: 7\n  what to do: "
    with Reader(open_index(index.path)) as reader, pytest.raises(IndexFormatError, match=told):
        reader.read([0])
    with pytest.raises(IndexFormatError, match="field-0 do not match their digests"):
        verify(open_index(index.path))


def test_short_preads_are_continued(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """One os.pread gives at most 2 GiB."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 3), at))
    for ids in ([7, 150], range(40)):
        with Reader(index) as reader:
            assert reader.read(ids, ["image"])["image"] == [WANT[n] for n in ids]


@pytest.mark.parametrize("container", ["tar", "files"])
def test_shard_replaced_by_special_file_is_refused_at_once(tmp_path: Path, container: str) -> None:
    """Opening a FIFO waits for a writer, and a device may never end."""
    (tmp_path / "images" / "c").mkdir(parents=True)
    (tmp_path / "images" / "c" / "1.png").write_bytes(b"png")
    source = tmp_path / "images" if container == "files" else tars(tmp_path, shards=1)[0]
    index = build_index(source, tmp_path / "x.index")
    file = tmp_path / index.files[0]
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink()
        make(file)
        refused = "not a regular file|leads out of its folder|leaves its root"
        with Reader(index) as reader, pytest.raises(LoaderError, match=refused):
            reader.read([0])


@pytest.mark.parametrize("container", ["tar", "files"])
def test_link_out_of_the_root_is_not_followed(tmp_path: Path, container: str) -> None:
    root = tmp_path / "root"
    (root / "images" / "c").mkdir(parents=True)
    (root / "images" / "c" / "1.png").write_bytes(b"png")
    source = root / "images" if container == "files" else tars(root, shards=1)[0]
    index = build_index(source, root / "x.index")
    file = root / index.files[0]
    file.rename(tmp_path / "secret")
    file.symlink_to(tmp_path / "secret")
    with Reader(index) as reader, pytest.raises(UnsafeContentError):
        reader.read([0])
    with pytest.raises(UnsafeContentError):
        build_index(source, root / "y.index")
    file.unlink()
    (tmp_path / "secret").rename(root / "real")
    file.symlink_to(root / "real")
    with Reader(index) as reader:
        assert len(reader.read([0])["image" if container == "files" else "png"]) == 1


def test_batch_larger_than_its_shards_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where all rows of a hostile index are of one large record."""
    samples = [{"x": bytes(1 << 20)}] + [{"x": b"x"}] * 99
    index = pack(samples, tmp_path / "a", container="tar")["data"]
    (file,) = index.path.glob("columns-*/field-0.npy")
    rows = np.load(file, mmap_mode="r+")
    rows[:] = rows[0]
    rows.flush()
    monkeypatch.setattr(arrays.Arrays, "_check_digest", lambda *_: None)
    with Reader(open_index(index.path)) as reader:
        with pytest.raises(LoaderError, match="a batch has too many bytes") as caught:
            reader.read(range(100))
        assert caught.value.found == f"{100 << 20} bytes"
        assert len(reader.read(range(10))["x"]) == 10


def test_download_stops_at_download_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LIMITS", Limits(download_bytes=1 << 20))
    (shard,) = tars(tmp_path, shards=1)
    os.truncate(shard, 1 << 26)
    with RangeServer(tmp_path) as server:
        with pytest.raises(LoaderError, match="a file is too large") as caught:
            build_index(f"{server.url}/{shard.name}", tmp_path / "x.index")
        assert server.sent < 1 << 25
    assert caught.value.expected == "at most 1048576 bytes"


def test_least_recently_used_file_is_closed_first(tmp_path: Path) -> None:
    opened = []

    def open_file(number: int) -> int:
        opened.append(number)
        return os.open(tmp_path, os.O_RDONLY)

    handles = Handles(open_file, 2)
    for number in (0, 1, 0, 2, 0):
        handles.get([number])
    handles.close()
    assert opened == [0, 1, 2]


def test_rows_in_one_file_within_the_gap_are_near() -> None:
    dtype = [("file", np.int64), ("offset", np.int64), ("length", np.int64)]
    places = [(0, 0, 10), (0, 4106, 10), (0, 8213, 10), (1, 8223, 10), (1, 8233, 1 << 15)]
    assert is_near_previous(np.array(places, dtype)).tolist() == [True, False, False, False]
