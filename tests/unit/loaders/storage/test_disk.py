"""The folder of a disk cache: what else may lie there, and file systems that lack something."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import TESTS
from support.formats import no_hang
from support.servers import RangeServer
from support.shards import tfrecords

from twinfeed.loaders import DiskCache, LoaderError, Reader, build_index, open_index
from twinfeed.loaders.storage.disk import Disk

NAME = f"{'a' * 24}/0"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "shards").mkdir()
    with RangeServer(tmp_path / "shards") as serving:
        yield serving


def read_all(tmp_path: Path, server: RangeServer) -> list[list[bytes]]:
    """Read two shards through a cache that has every chunk, or should have."""
    shards = server.folder
    if not list(shards.glob("*.tfrecord")):
        tfrecords(shards, shards=2)
        build_index(shards / "*.tfrecord", tmp_path / "x.index", root=shards)
    cache = DiskCache(tmp_path / "cache", bytes=10**9)
    index = open_index(tmp_path / "x.index", root=server.url, cache=cache)
    with Reader(index) as reader:
        return reader.read(range(len(index)))["image"]


@pytest.mark.parametrize("kind", ["fifo", "device", "endless link", "folder"])
def test_special_file_at_a_chunk_path_warns_and_is_refetched(
    tmp_path: Path, server: RangeServer, kind: str
) -> None:
    expected = read_all(tmp_path, server)
    for chunk in list((tmp_path / "cache").glob("*/*.chunk")):
        chunk.unlink()
        if kind == "fifo":
            os.mkfifo(chunk)
        elif kind == "folder":
            (chunk / "mine").mkdir(parents=True)
        else:
            chunk.symlink_to("/dev/zero" if kind == "device" else chunk)
    with no_hang(10), pytest.warns(RuntimeWarning, match=r"not cached: .*(regular|Too many)"):
        assert read_all(tmp_path, server) == expected
    if kind != "folder":  # which may hold something of the user's
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert read_all(tmp_path, server) == expected
        server.clear()
        assert read_all(tmp_path, server) == expected
        assert server.sent == 0


@pytest.mark.parametrize("name", ["used", "CACHEDIR.TAG"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_special_file_at_a_cache_file_path_is_an_error(
    tmp_path: Path, name: str, kind: str
) -> None:
    cache = DiskCache(tmp_path / "cache", bytes=1000)
    Disk(cache)
    file = tmp_path / "cache" / name
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with no_hang(10), pytest.raises(LoaderError, match=r"cannot be used|not a regular file"):
        Disk(cache)


def test_folder_with_other_files_is_refused_as_cache(tmp_path: Path) -> None:
    """Also if a file of it has the name of an entry: entries are deleted by their names."""
    mine = tmp_path / f"{NAME}.chunk"
    mine.parent.mkdir()
    mine.write_text("mine")
    tmp_path.chmod(0o700)
    with pytest.raises(LoaderError, match="the folder has other files"):
        Disk(DiskCache(tmp_path, bytes=1))
    (tmp_path / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
    with pytest.raises(LoaderError, match="the folder belongs to another program"):
        Disk(DiskCache(tmp_path, bytes=1))
    assert mine.read_text() == "mine"


def test_damaged_byte_count_is_recomputed(tmp_path: Path) -> None:
    """Too low a count would let the cache grow, and too high a count would leave it empty."""
    folder = tmp_path / "cache"
    damage = [b"", b"\xff" * 8, b"\0", (10**9).to_bytes(8, "little")]
    for n, damaged in enumerate(damage):
        disk = Disk(DiskCache(folder, bytes=2 * 112))
        disk.put(f"{n:024x}/0", bytes(100))
        (folder / "used").write_bytes(damaged)
        assert len([*folder.glob("*/*.chunk")]) == min(n + 1, 2)
    for file in folder.glob("*/*.chunk"):
        file.unlink()
    disk = Disk(DiskCache(folder, bytes=2 * 112))
    disk.put(NAME, bytes(100))
    assert disk.get(NAME, 100) == bytes(100)


def test_unwritten_entry_takes_no_room(tmp_path: Path) -> None:
    """A folder is in the way; another process has written the entry; an entry is damaged."""
    folder, other = tmp_path / "cache", f"{'b' * 24}/0"
    disk = Disk(DiskCache(folder, bytes=2 * 112))
    (folder / ("a" * 24)).touch()
    with pytest.warns(RuntimeWarning, match="not cached"):
        disk.put(NAME, bytes(100))
    (folder / ("a" * 24)).unlink()
    for name in (NAME, NAME, other):
        disk.put(name, bytes(100))
        assert disk.get(name, 100) == bytes(100)
    for damaged in (bytes(112), bytes(9), bytes(500)):
        (folder / f"{NAME}.chunk").write_bytes(damaged)
        assert disk.get(NAME, 100) is None
        disk.put(NAME, bytes(100))
        assert disk.get(NAME, 100) == bytes(100)
    assert not disk.full


WITHOUT_LOCKS = """
import sys
from pathlib import Path
from programs.without_locks import take_locks_away
take_locks_away(int(sys.argv[1]))
from support.shards import tfrecords
from twinfeed.loaders import build_index, open_index, pack
from twinfeed.loaders.storage.disk import Disk
from twinfeed.loaders.storage.disk_cache import DiskCache
folder = Path(sys.argv[2])
pack([{"x": 1}, {"x": 2}], folder / "packed")
build_index(tfrecords(folder, shards=1), folder / "x.index")
open_index(folder / "x.index")
cache = DiskCache(folder / "cache", bytes=2 * 112)
disk = Disk(cache)
for n in range(4):
    disk.put("%024x/0" % n, bytes([n]) * 100)
    assert disk.get("%024x/0" % n, 100) == (bytes([n]) * 100 if n < 2 else None)
Disk(cache).put("%024x/0" % 9, bytes(100))
assert len([*cache.path.glob("*/*.chunk")]) == 2
"""


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_file_system_without_locks_works(tmp_path: Path, error: str) -> None:
    """The kernel itself refuses `flock`; the packer and the index go on as well."""
    subprocess.run(
        [sys.executable, "-c", WITHOUT_LOCKS, str(getattr(errno, error)), tmp_path],
        check=True,
        cwd=TESTS,
    )


READ_ONLY = """
import os, sys
from twinfeed.loaders import DiskCache
from twinfeed.loaders.storage.disk import Disk
if os.geteuid() == 0:
    os.seteuid(os.stat(sys.argv[1]).st_uid)
Disk(DiskCache(sys.argv[1], bytes=1000))
"""


def test_read_only_cache_is_an_error(tmp_path: Path) -> None:
    """One sentence that says what to do; root, who may write everything, becomes nobody."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:
        shutil.chown(folder, 65534)
        for above in folder.parents:
            if above.stat().st_uid == 0 and above.stat().st_mode & 0o005 != 0o005:
                above.chmod(above.stat().st_mode | 0o005)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, folder], capture_output=True, text=True, check=False
    )
    assert "LoaderError: the disk cache cannot be used: Permission denied" in done.stderr
    assert "give another folder by cache= or TWINFEED_CACHE" in done.stderr


def test_home_directory_is_not_needed(tmp_path: Path) -> None:
    code = "import twinfeed.loaders as l, sys; l.pack([{'x': 1}], sys.argv[1])"
    environment = {"PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", code, tmp_path / "out"], check=True, env=environment)


@pytest.mark.parametrize("kind", ["fifo", "link", "file", "folder"])
@pytest.mark.parametrize("level", [1, 2])
def test_special_file_at_an_index_copy_is_replaced_or_refused(
    tmp_path: Path, server: RangeServer, level: int, kind: str
) -> None:
    """The copy itself is fetched anew. What is above it is in the way, and an error says so."""
    tfrecords(server.folder, shards=1)
    build_index(server.folder / "*.tfrecord", server.folder / "x.index")
    cache = DiskCache(tmp_path / "cache", bytes=10**9)
    open_index(f"{server.url}/x.index", cache=cache)
    (place,) = (tmp_path / "cache" / "indexes").glob("/".join(["*"] * (level + 1)))
    shutil.rmtree(place)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(place)
    else:
        place.mkdir() if kind == "folder" else place.touch()
    with no_hang(10):
        if level == 2 or kind == "folder":
            assert len(open_index(f"{server.url}/x.index", cache=cache)) == 10
        else:
            with pytest.raises(LoaderError, match="the disk cache cannot be used"):
                open_index(f"{server.url}/x.index", cache=cache)
