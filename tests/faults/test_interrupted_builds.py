"""Builds that are interrupted, killed or fail, and several at once."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.inside import (
    MANIFEST,
)
from support.shards import (
    tfrecords,
    tree,
)

from twinfeed.loaders import (
    DataCorruptionError,
    IndexFormatError,
    build_index,
    open_index,
)


def test_fault_35_processes_building_one_index_leave_it_whole(tmp_path: Path) -> None:
    """While a third opens it again and again: it sees an index or none, never half of one."""
    tfrecords(tmp_path, shards=8, each=50)
    code = """
        import sys
        from twinfeed.loaders.building.build import build_index
        folder = sys.argv[1]
        for _ in range(4):
            build_index(f"{folder}/*.tfrecord", f"{folder}/x.index", label="label")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    builders = [subprocess.Popen(command) for _ in range(3)]
    opened: set[str] = set()
    while any(builder.poll() is None for builder in builders):
        if opened:
            opened.add(open_index(tmp_path / "x.index").fingerprint)
        else:
            with suppress(FileNotFoundError, IndexFormatError):
                opened.add(open_index(tmp_path / "x.index").fingerprint)
    assert [builder.wait() for builder in builders] == [0, 0, 0]
    alone = build_index(tmp_path / "*.tfrecord", tmp_path / "y.index", label="label")
    assert opened == {alone.fingerprint}
    open_index(tmp_path / "x.index")
    left = sorted(path.name.split("-")[0] for path in (tmp_path / "x.index").iterdir())
    assert left == ["columns", MANIFEST]


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
