"""Which entries of a disk cache are evicted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from twinfeed.loaders import DiskCache
from twinfeed.loaders.reading.prefetch.eviction import Eviction
from twinfeed.loaders.storage.disk import Disk


def test_failed_search_of_the_folder_leaves_nothing_to_evict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes once. Later calls evict nothing, instead of failing in another way."""

    def fail(_: Disk) -> Iterator[tuple[str, float]]:
        raise PermissionError("the folder cannot be listed")

    monkeypatch.setattr(Disk, "entries", fail)
    eviction = Eviction(Disk(DiskCache(tmp_path, bytes=1 << 20)), set())
    with pytest.raises(PermissionError):
        list(eviction.victims(0, 0, str))
    assert list(eviction.victims(0, 0, str)) == []
