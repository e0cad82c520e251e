"""Builds that are interrupted, killed or fail, and several at once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from support.inside import (
    MANIFEST,
    BuildPlan,
    temporary,
)
from support.shards import (
    flip,
    numbered,
    tfrecords,
    tree,
    write_tfrecord,
)

from twinfeed.loaders import (
    DataCorruptionError,
    IndexFormatError,
    Reader,
    build_index,
    open_index,
)


def test_fault_35_processes_building_one_index_leave_it_whole(tmp_path: Path) -> None:
    """While a third opens it again and again: it sees an index or none, never half of one."""
    tfrecords(tmp_path, shards=8, each=50)
    code = """
        import sys
        from twinfeed.loaders.building.build import build_index
        folder, label = sys.argv[1:]
        for _ in range(4):
            build_index(f"{folder}/*.tfrecord", f"{folder}/x.index", label=label or None)
    """
    builders = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path), label])
        for label in ("label", "label", "")
    ]
    opened: set[str] = set()
    while any(builder.poll() is None for builder in builders):
        if opened:
            opened.add(open_index(tmp_path / "x.index").fingerprint)
        else:
            with suppress(FileNotFoundError, IndexFormatError):
                opened.add(open_index(tmp_path / "x.index").fingerprint)
    assert [builder.wait() for builder in builders] == [0, 0, 0]
    alone = {
        build_index(tmp_path / "*.tfrecord", tmp_path / "y.index", label=label).fingerprint
        for label in ("label", None)
    }
    assert opened <= alone
    open_index(tmp_path / "x.index")
    left = sorted(path.name.split("-")[0] for path in (tmp_path / "x.index").iterdir())
    assert left == ["columns", MANIFEST]


@pytest.mark.usefixtures("kept_parts")
def test_interrupted_build_keeps_finished_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tfrecords(tmp_path, shards=5)
    flip(shards[3], 30)
    with pytest.raises(DataCorruptionError):
        build_index(shards, tmp_path / "x.index")
    assert len(list((tmp_path / "x.index" / "parts").glob("*.part"))) == 3
    with pytest.raises(IndexFormatError, match="its build was interrupted") as caught:
        open_index(tmp_path / "x.index")
    assert "keeps finished shards" in str(caught.value)
    flip(shards[3], 30)
    (part, *_) = (tmp_path / "x.index" / "parts").glob("*.part")
    part.write_bytes(part.read_bytes()[:-20])  # it was damaged meanwhile
    read = []
    scan = BuildPlan.scan
    monkeypatch.setattr(
        BuildPlan,
        "scan",
        lambda plan, job, *rest: (read.append(job.shard), scan(plan, job, *rest))[1],
    )
    index = build_index(shards, tmp_path / "x.index")
    assert len(read) == 3
    assert set(read) >= {shards[3].name, shards[4].name}
    assert len(index) == 50
    assert not (tmp_path / "x.index" / "parts").exists()


def test_failed_build_keeps_only_previous_index(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path)
    out = tmp_path / "x.index"
    bad: list[dict[str, Any]] = [{"label": "nope"}, {"classes": ["a"]}, {"fields": ["nope"]}]
    for options in bad:
        with pytest.raises(ValueError, match=r"label|field"):
            build_index(shards, out, **options)
        assert not out.exists()
    out.mkdir()
    with pytest.raises(DataCorruptionError):
        build_index(shards, out, label="nope")
    assert list(out.iterdir()) == []
    build_index(shards, out)
    before = tree(out)
    with pytest.raises(DataCorruptionError):
        build_index(shards, out, label="nope")
    assert sorted(path.name.partition("-")[0] for path in out.iterdir()) == ["columns", MANIFEST]
    assert tree(out) == before


@pytest.mark.usefixtures("kept_parts")
def test_worker_that_lives_on_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked worker has the descriptors of the process that builds."""
    monkeypatch.setattr(temporary, "_TRIES", 1)
    shards = tfrecords(tmp_path, shards=2)
    flip(shards[1], 30)
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        with pytest.raises(DataCorruptionError):
            build_index(shards, tmp_path / "x.index", executor=pool)
        flip(shards[1], 30)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(build_index(shards, tmp_path / "x.index", executor=pool)) == 20


@pytest.mark.usefixtures("kept_parts")
def test_shard_changed_since_interruption_is_indexed_anew(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=2)
    flip(shards[1], 30)
    with pytest.raises(DataCorruptionError):
        build_index(shards, tmp_path / "x.index")
    samples = numbered(0, 10)
    write_tfrecord(shards[0], [samples[1], samples[0], *samples[2:]])
    flip(shards[1], 30)
    index = build_index(shards, tmp_path / "x.index")
    with Reader(index) as reader:
        assert reader.read([0], ["key"]) == {"key": [b"k1"]}
