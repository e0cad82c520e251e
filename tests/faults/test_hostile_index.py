"""An index whose checksums are right and whose values are not, from a disk and from a URL."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import mark_long
from support.damage import rewrite
from support.inside import LIMITS, manifest
from support.servers import RangeServer
from support.shards import tars

from twinfeed.loaders import (
    DiskCache,
    Index,
    IndexFormatError,
    StaleIndexError,
    build_index,
    open_index,
)


def made(folder: Path) -> Index:
    names = [f"class {n}" for n in range(7)]
    return build_index(
        tars(folder, shards=1), folder / "x.index", label="cls", classes=names, digest=True
    )


@pytest.mark.parametrize("cached", [True, False])
def test_fault_78_manifest_changing_at_each_request_is_refused(
    tmp_path: Path, server: RangeServer, cached: bool
) -> None:
    """And whose arrays are not there: a few attempts, then an error."""
    index = made(tmp_path)

    def changes(path: str, _: int) -> int | None:
        if path != "manifest.json":
            return 404
        rewrite(
            index.path, lambda manifest: manifest["options"].update(left_out=len(server.ranges))
        )
        return None

    server.fail = changes
    cache = DiskCache(tmp_path / "c", bytes=10**6) if cached else None
    with pytest.raises(StaleIndexError, match="replaced 3 times during its download") as caught:
        open_index(f"{server.url}/x.index", cache=cache)
    assert caught.value.path == f"{server.url}/x.index"
    asked = [name for name, _, _ in server.ranges]
    assert asked.count("x.index/manifest.json") < 10


@pytest.mark.parametrize("values", mark_long(["[]", "{}", '"ab"', "[[1,1]]", "1.5"], but_every=3))
def test_fault_79_huge_manifest_takes_little_memory(
    tmp_path: Path, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list takes twenty times its bytes: of 45 MB of lists 900 MB, and so a manifest is short.

    The longest manifest is tried in an eighth of its size.
    """
    for part, size in ((1, 45 << 20), (8, LIMITS.manifest_bytes // 8 - 10)):
        limits = replace(LIMITS, manifest_bytes=LIMITS.manifest_bytes // part)
        monkeypatch.setattr(manifest, "LIMITS", limits)
        many = ",".join([values] * (size // (len(values) + 1)))
        (tmp_path / "manifest.json").write_text(f"[{many}]")
        tracemalloc.start()
        with pytest.raises(IndexFormatError, match=r"a file has too many bytes|of another kind"):
            open_index(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak * part < 300 << 20
