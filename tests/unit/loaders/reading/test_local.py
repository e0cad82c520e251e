"""Open files: few at a time, and closed with their reader."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from support.batches import read_ahead
from support.inside import few_open_files
from support.open_files import open_below
from support.shards import flip, numbered, tfrecords, write_tar

from twinfeed.loaders import (
    DataCorruptionError,
    Index,
    Reader,
    build_index,
)
from twinfeed.loaders.reading.local import Handles

WANT = [sample["image"] for sample in numbered(0, 200)]


def test_many_shards_are_read_through_few_open_files(tmp_path: Path) -> None:
    """A batch that touches more shards than may be open, and one of them damaged."""
    for n in range(300):
        write_tar(tmp_path / f"d-{n:03d}.tar", [(f"k{n}", {"txt": b"%d" % n})])
    index = build_index(tmp_path / "*.tar", tmp_path / "x.index")
    ids = np.random.default_rng(0).permutation(300)
    with few_open_files(8), Reader(index) as reader:
        for _ in range(2):
            assert reader.read(ids)["txt"] == [b"%d" % n for n in ids]
            assert len(open_below(tmp_path)) <= 8
        read_ahead(reader, ids)
        assert len(open_below(tmp_path)) <= 8
    assert open_below(tmp_path) == []
    flip(tmp_path / "d-123.tar", int(index.table("txt")["offset"][123]))
    with (
        few_open_files(8),
        Reader(index) as reader,
        pytest.raises(DataCorruptionError, match=r"record 123 \(d-123\.tar"),
    ):
        reader.read(ids)


def test_shards_take_a_quarter_of_the_open_files() -> None:
    code = textwrap.dedent("""
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from twinfeed.loaders.reading.local import open_limit
        print(open_limit())
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
        with Reader(index) as reader:
            for n in range(30):
                assert reader.read([n])["txt"] == [b"%d" % n]
    """)
    subprocess.run([sys.executable, "-c", code, tmp_path / "x.index"], check=True)


def test_all_readers_together_stay_below_the_limit(tmp_path: Path) -> None:
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


def test_least_recently_used_file_is_closed_first(tmp_path: Path) -> None:
    opened = []

    def open_file(number: int) -> int:
        opened.append(number)
        return os.open(tmp_path, os.O_RDONLY)

    with few_open_files(2):
        handles = Handles(open_file)
        for number in (0, 1, 0, 2, 0):
            handles.get([number])
    handles.close()
    assert opened == [0, 1, 2]
