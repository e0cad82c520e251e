"""Limits of the machine: full disks, read-only folders, few open files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from support.inside import (
    MANIFEST,
)
from support.programs import run_code
from support.shards import (
    made_parts,
    tfrecords,
    tree,
    write_tar,
)

from twinfeed.loaders import (
    Reader,
    Results,
    build_index,
    open_index,
    pack,
)


@pytest.mark.parametrize("full", ["part", "array", "manifest"])
def test_fault_36_disk_full_while_indexing_keeps_old_index(tmp_path: Path, full: str) -> None:
    """A limit on the size of files acts as a full disk: the old index stays as it was."""
    shards = tfrecords(tmp_path, shards=20, each=1 if full == "manifest" else 200)
    index = build_index(shards, tmp_path / "x.index", label="label")
    before = tree(index.path)
    (part, *_) = made_parts(shards, tmp_path / "parts", label="label")
    sizes = {"part": part.stat().st_size, "manifest": len(before[MANIFEST])}
    sizes["array"] = max(len(data) for data in before.values())
    if full != "part":  # or it would end there
        assert sizes[full] - 1 > sizes["part"]
    code = """
        import resource, signal, sys
        from twinfeed.loaders.building.build import build_index
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
        build_index(f"{sys.argv[1]}/*.tfrecord", f"{sys.argv[1]}/x.index", label="label")
    """
    done = run_code(code, tmp_path, sizes[full] - 1)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert f"[Errno {errno.EFBIG}]" in last
    assert "make room there" in last
    assert str(index.path) in last
    assert tree(index.path) == before
    assert open_index(index.path).fingerprint == index.fingerprint


def test_fault_36_disk_full_while_packing_leaves_nothing(tmp_path: Path) -> None:
    code = """
        import resource, signal, sys
        from twinfeed.loaders import pack
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        samples = pack([{"x": bytes(90)}] * 1000, sys.argv[1] + "/few", shard_bytes=50_000)["data"]
        sources = {"list": [{"x": bytes(1000)}] * 1000, "index": samples}
        sources["many"] = ({"x": bytes(1000)} for _ in range(1000))
        pack(sources[sys.argv[2]], sys.argv[1] + "/out", seed=1)
    """
    for source in ("list", "many", "index"):
        done = run_code(code, tmp_path / source, source)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last == (
            f"OSError: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: make room there, or raise "
            f"the limit of file sizes (ulimit -f): '{tmp_path}/{source}/out'"
        )
        assert not (tmp_path / source / "out").exists()


def test_fault_36_no_byte_can_be_written(tmp_path: Path) -> None:
    code = """
        import resource, signal, sys
        from twinfeed.loaders import pack
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        pack([{"x": 1}], sys.argv[1] + "/out")
    """
    done = run_code(code, tmp_path)
    assert done.stderr.strip().endswith(f"(ulimit -f): '{tmp_path}/out'")
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "out"])


def test_fault_36_disk_full_while_saving_keeps_old_file(tmp_path: Path) -> None:
    """The folder is named, and no temporary file stays."""
    code = """
        import resource, signal, sys
        import numpy as np
        from twinfeed.loaders import Results
        results = Results(1000)
        results.save(sys.argv[1] + "/r.npz")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        results.add(np.arange(1000), score=np.ones((1000, 9)))
        results.save(sys.argv[1] + "/r.npz")
    """
    done = run_code(code, tmp_path)
    assert done.stderr.strip().endswith(f"(ulimit -f): '{tmp_path}'")
    assert list(tmp_path.iterdir()) == [tmp_path / "r.npz"]
    assert len(Results.load(tmp_path / "r.npz").part()) == 0


def test_fault_37_read_only_data_is_indexed_to_another_folder(tmp_path: Path) -> None:
    """The message names the way out, and the way out works."""
    data = tmp_path / "data"
    data.mkdir()
    tfrecords(data)
    data.chmod(0o555)
    closed = data if os.geteuid() else Path("/sys")  # for root, only a file system that refuses
    try:
        with pytest.raises(OSError, match=r"--out.*give root= the folder"):
            build_index(data / "*.tfrecord", closed / "x.index", root=data)
        for out in (closed, closed / "out"):
            with pytest.raises(OSError, match="give another folder to pack to") as caught:
                pack([{"x": 1}], out)
            assert caught.value.filename == str(out)
        index = build_index(data / "*.tfrecord", tmp_path / "mine" / "x.index", root=data)
        with Reader(open_index(index.path, root=data)) as reader:
            assert reader.read([3], ["key"]) == {"key": [b"k3"]}
        assert stat.S_IMODE(data.stat().st_mode) == 0o555
        assert sorted(data.iterdir()) == sorted(data.glob("*.tfrecord"))
    finally:
        data.chmod(0o755)


def test_fault_53_thousand_shards_are_read_under_ulimit_64(tmp_path: Path) -> None:
    for n in range(1000):
        write_tar(tmp_path / f"d-{n:03d}.tar", [(f"k{n}", {"txt": b"%d" % n})])
    code = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        import numpy as np
        from concurrent.futures import ThreadPoolExecutor
        from twinfeed.loaders.building.build import build_index
        from twinfeed.loaders.reading.reader import Reader
        from twinfeed.loaders.reading.prefetch.schedule import Schedule
        from twinfeed.loaders.reading.reader import plan_of_pass
        from twinfeed.samplers import BatchSampler, RandomSampler
        index = build_index(f"{sys.argv[1]}/*.tar", f"{sys.argv[1]}/x.index")
        ids = np.random.default_rng(0).permutation(1000)
        with Reader(index) as reader, ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda part: reader.read(part)["txt"], np.split(ids, 20)))
            stream = Schedule(BatchSampler(RandomSampler(1000, seed=0), batch_size=500))
            with plan_of_pass(reader, stream, ["txt"], 0, 10**9).step(0):
                pass
        assert sum(got, []) == [b"%d" % n for n in ids]
        print("all", len(index))
    """
    done = run_code(code, tmp_path)
    assert done.stdout == "all 1000\n", done.stderr
