"""What goes wrong with an index, its shards, readers and machine: each fault made for real."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from support import TESTS
from support.damage import with_array
from support.inside import (
    MANIFEST,
    REBUILD,
    BuildPlan,
    ShardPart,
    StringColumn,
    load_part,
)
from support.programs import run_code
from support.shards import (
    flip,
    made_parts,
    merged,
    numbered,
    tars,
    tfrecords,
    tree,
    write_tar,
    write_tfrecord,
)

from twinfeed.loaders import (
    DataCorruptionError,
    Index,
    IndexFormatError,
    Reader,
    StaleIndexError,
    TruncatedShardError,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return build_index(tfrecords(tmp_path), tmp_path / "x.index", label="label")


# Part A as an index meets it.


# Part C.


def test_fault_29_shard_changed_after_indexing_is_refused(index: Index) -> None:
    shard = Path(index.root, index.shard_paths[2])
    with open(shard, "ab") as file:
        file.write(b"more")
    with pytest.raises(StaleIndexError, match="the file has changed since") as caught:
        open_index(index.path)
    size = shard.stat().st_size
    assert caught.value.path == str(shard)
    assert (caught.value.expected, caught.value.found) == (f"{size - 4} bytes", f"{size} bytes")
    assert REBUILD in str(caught.value)
    with Reader(index) as reader, pytest.raises(StaleIndexError, match="has changed"):
        reader.read([29])


def test_fault_29_shard_of_same_size_with_other_records_is_refused(tmp_path: Path) -> None:
    shard = write_tfrecord(tmp_path / "a.tfrecord", numbered(0, 10))
    index = build_index(shard, tmp_path / "x.index")
    size = shard.stat().st_size
    samples = numbered(0, 10)
    write_tfrecord(shard, [samples[1], samples[0], *samples[2:]])
    assert shard.stat().st_size == size
    again = open_index(index.path)  # the size tells nothing
    with Reader(again) as reader:
        reader.read([5])
        with pytest.raises((DataCorruptionError, StaleIndexError)):
            reader.read([0])
    assert not verify(again).ok
    assert any(
        "the checksum over its records is not" in bad.problem for bad in verify(again).findings
    )


def test_fault_29_changed_loose_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "images" / "c" / "a.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"12345")
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    file.write_bytes(b"123456")
    with Reader(index) as reader:
        with pytest.raises(StaleIndexError, match="the file has changed"):
            reader.read([0])
        file.write_bytes(b"12354")
        with pytest.raises(DataCorruptionError, match=r"a\.png"):
            reader.read([0])
    assert [bad.record for bad in verify(index).findings] == [0]


@pytest.mark.parametrize("workers", [0, 2])
def test_fault_30_verify_reports_missing_and_changed_shards(tmp_path: Path, workers: int) -> None:
    shards = tfrecords(tmp_path, shards=4)
    index = build_index(shards, tmp_path / "x.index")
    flip(shards[3], int(index.table("image")["offset"][35]))
    size = shards[0].stat().st_size
    os.truncate(shards[0], size - 1)
    shards[1].unlink()
    with ThreadPoolExecutor(2) as pool:
        report = verify(index.path, executor=pool if workers else None)
    assert (report.shards, report.records) == (4, 40)
    assert [
        (bad.shard, bad.record, bad.problem.partition(" at")[0]) for bad in report.findings
    ] == [
        (
            shards[0].name,
            -1,
            f"the file has changed since it was indexed: {size - 1} bytes, not {size} bytes",
        ),
        (shards[1].name, -1, "No such file or directory"),
        (shards[3].name, 5, "corrupted data"),
    ]
    plain = verify(shards, root=tmp_path).findings
    assert [bad.shard for bad in plain] == [shards[0].name, shards[1].name, shards[3].name]
    for shard in shards[2:] + shards[:1]:
        shard.rename(shard.with_suffix(".old"))
    with pytest.raises(FileNotFoundError, match=r"4 of 4 shards are missing.* give root= "):
        verify(index.path)


def test_fault_30_verify_reports_missing_and_changed_loose_files(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "images" / "c"
    folder.mkdir(parents=True)
    for n in range(5):
        (folder / f"{n}.png").write_bytes(b"12345")
    index = build_index(tmp_path / "images", tmp_path / "x.index")
    (folder / "1.png").unlink()
    (folder / "2.png").write_bytes(b"123456")
    (folder / "4.png").write_bytes(b"54321")
    report = verify(index)
    assert [
        (bad.shard, bad.record, bad.problem.partition(" in field")[0]) for bad in report.findings
    ] == [
        (
            str(folder / "1.png"),
            -1,
            "no such file any more: restore the file, or build the index again",
        ),
        (
            str(folder / "2.png"),
            -1,
            "the file has changed since it was indexed: 6 bytes, not 5 bytes",
        ),
        ("files-00000", 4, "corrupted bytes"),
    ]
    with Reader(index) as reader, pytest.raises(DataCorruptionError) as caught:
        reader.read([4])
    assert caught.value.offset is None, "a field is a whole file"


def test_fault_30_loose_files_in_another_folder_are_missed_on_open(tmp_path: Path) -> None:
    """Opening names root=, as it does for shards. A single missing file is missed when read."""
    folder = tmp_path / "photos" / "c"
    folder.mkdir(parents=True)
    for n in range(3):
        (folder / f"{n}.png").write_bytes(b"12345")
    path = tmp_path / "kept" / "x.index"
    path.parent.mkdir()
    build_index(tmp_path / "photos", path, root=tmp_path)
    with pytest.raises(FileNotFoundError, match="give root= the folder") as caught:
        open_index(path)
    assert caught.value.filename == str(path.parent)
    (folder / "1.png").unlink()
    with Reader(open_index(path, root=tmp_path)) as reader:
        assert reader.read([2])["image"] == [b"12345"]


def test_fault_31_shard_deleted_while_reading_is_named(index: Index) -> None:
    """Open files go on; a file to be opened is missed."""
    with Reader(index) as reader:
        reader.read([0])
        for name in index.shard_paths.tolist():
            Path(index.root, name).unlink()
        assert reader.read([5], ["image"])["image"] == [numbered(5, 6)[0]["image"]]
        gone = r"no such file any more: restore the file, or build the index again: '.*tfrecord'"
        with pytest.raises(FileNotFoundError, match=gone):
            reader.read([15])
        reader.close()
        with pytest.raises(FileNotFoundError, match=gone):
            reader.read([0])


def test_fault_33_index_file_cut_or_missing_is_refused(index: Index, tmp_path: Path) -> None:
    """Every file of an index, cut to several lengths or gone; and bits flipped in the manifest."""
    whole = tree(index.path)
    for name, data in whole.items():
        for size in {0, 1, len(data) // 2, len(data) - 2}:  # the last byte may be a mere newline
            (index.path / name).write_bytes(data[:size])
            with pytest.raises(IndexFormatError):
                open_index(index.path)
        (index.path / name).unlink()
        with pytest.raises((IndexFormatError, FileNotFoundError)):
            open_index(index.path)
        (index.path / name).write_bytes(data)
    manifest = whole[MANIFEST]
    for place in range(0, len(manifest), 7):
        flip(index.path / MANIFEST, place, place % 8)
        if json_or_none(index.path / MANIFEST) != json.loads(manifest):
            with pytest.raises(IndexFormatError):
                open_index(index.path)
        (index.path / MANIFEST).write_bytes(manifest)
    open_index(index.path)


def json_or_none(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_fault_33_changed_small_array_is_found_on_open(
    index: Index,
) -> None:
    for file in index.path.glob("columns-*/*.npy"):
        flip(file, file.stat().st_size - 1)
        with pytest.raises(
            IndexFormatError, match=f"the bytes of {file.name} have changed"
        ) as told:
            open_index(index.path)
        assert (told.value.path, told.value.advice) == (str(file), REBUILD)
        flip(file, file.stat().st_size - 1)


@pytest.mark.usefixtures("mapped_arrays")
def test_fault_33_changed_large_array_is_found_before_use(
    tmp_path: Path,
) -> None:
    """Of the shards, a column and the keys when they are first asked for; of where the fields lie
    by each reading, and by verify.
    """
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    for file in index.path.glob("columns-*/*.npy"):
        at = file.stat().st_size - (
            9 if file.stem.endswith(("ends", "stops")) else 1
        )  # the last end is read
        flip(file, at)
        changed = f"the bytes of {file.name} have changed"
        if file.stem.startswith("shard"):
            with pytest.raises(IndexFormatError, match=changed):
                _ = attrgetter("shard_paths", "shard_stops", "shards", "shard_lengths")(
                    open_index(index.path)
                )
            flip(file, at)
            continue
        again = open_index(index.path)
        if file.stem == "column-0":
            assert "label" in again.columns
            with pytest.raises(IndexFormatError, match=changed):
                _ = again.labels
            with pytest.raises(IndexFormatError, match=changed):
                list(again.columns.values())
        elif file.stem.startswith("keys"):
            assert again.describe(0)  # a message says what it can
            with pytest.raises(IndexFormatError, match=changed):
                again.keys([0])
        elif file.stem.startswith("classorder"):
            with pytest.raises(IndexFormatError, match=changed):
                _ = again.class_order
        else:
            assert file.stem.startswith("field")
            with Reader(again) as reader, pytest.raises(DataCorruptionError):
                reader.read(range(30))
        with pytest.raises(IndexFormatError, match=f"{file.stem} do not match"):
            verify(again)
        flip(file, at)


@pytest.mark.usefixtures("mapped_arrays")
def test_array_is_checked_once(tmp_path: Path) -> None:
    """Not again by the same index, nor by a process that it is sent to."""
    index = build_index(tars(tmp_path), tmp_path / "x.index", label="cls")
    labels = index.labels.tolist()
    (file,) = index.path.glob("columns-*/column-0.npy")
    flip(file, file.stat().st_size - 8)
    again = pickle.loads(pickle.dumps(index))
    assert len(again.labels) == len(index.labels) == len(labels)
    with pytest.raises(IndexFormatError, match=r"column-0\.npy have changed"):
        _ = open_index(index.path).labels


@pytest.mark.usefixtures("mapped_arrays")
@pytest.mark.parametrize("container", ["tfrecord", "tar"])
@pytest.mark.parametrize(
    ("column", "value"),
    [("offset", (1 << 32) - 1), ("offset", 1 << 20), ("length", -9), ("length", (1 << 31) - 1)],
)
def test_fault_33_row_outside_its_shard_is_refused(
    tmp_path: Path, container: str, column: str, value: int
) -> None:
    """A bit of a large table flipped on the disk: opening checks only sizes, reading finds it."""
    made = tfrecords(tmp_path) if container == "tfrecord" else tars(tmp_path)
    index = build_index(made, tmp_path / "x.index")
    number = list(index.fields).index("image" if container == "tfrecord" else "png")
    rows = np.load(next(index.path.glob(f"columns-*/field-{number}.npy")), mmap_mode="r+")
    rows[column][13] = value
    rows.flush()
    for verified in (True, False):
        with Reader(open_index(index.path), checksums=verified) as reader:
            for ids in ([13], [12, 13, 14], [20, 13, 2]):
                with pytest.raises(IndexFormatError, match="does not lie within its shard") as told:
                    reader.read(ids, [list(index.fields)[number]])
                assert told.value.record == 3
                assert f"of record 13 ({index.shard_paths[1]}, number 3)" in str(told.value)
                assert REBUILD in str(told.value)


@pytest.mark.usefixtures("mapped_arrays")
def test_fault_33_damaged_length_is_no_missing_field(tmp_path: Path) -> None:
    """Though both are negative: it is neither filled up nor left out."""
    samples = [*numbered(0, 5), {"label": 0, "key": "none"}]
    shard = write_tfrecord(tmp_path / "a.tfrecord", samples)
    index = build_index(shard, tmp_path / "x.index", fields=["image", "key"], missing="empty")
    assert index.fields["image"].missing == 1
    rows = np.load(next(index.path.glob("columns-*/field-0.npy")), mmap_mode="r+")
    rows["length"][3] ^= np.int32(-1) << 31  # the sign bit
    rows.flush()
    again = open_index(index.path)
    with Reader(again) as reader:
        assert reader.read([5], ["image"]) == {"image": [b""]}
        with pytest.raises(IndexFormatError, match="does not lie within its shard"):
            reader.read([3], ["image"])
    with pytest.raises(IndexFormatError, match="does not lie within its shard"):
        pack(again, tmp_path / "out")


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
            f"OSError: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: make room there: "
            f"'{tmp_path}/{source}/out'"
        )
        assert not (tmp_path / source / "out").exists()


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


def test_fault_38_pickled_arrays_are_not_loaded(index: Index, tmp_path: Path) -> None:
    """Neither in the index nor in a part, even with digests that fit."""
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    bomb = np.array([Bomb()], dtype=object)
    with_array(index.path, "column-0", bomb)
    with pytest.raises(IndexFormatError, match="cannot be read"):
        open_index(index.path)
    (part,) = made_parts(tfrecords(tmp_path, shards=1), tmp_path / "parts")
    with ZipFile(part) as whole:
        facts = whole.read("facts.json")
    with ZipFile(part, "w") as changed:
        changed.writestr("facts.json", facts)
        for name in json.loads(facts)["block_arrays"][0][1]:
            with changed.open(f"0/{name}.npy", "w") as entry:
                np.lib.format.write_array(entry, bomb)
    with pytest.raises(ValueError, match="missing or damaged"):
        merged([part], tmp_path / "y.index")
    assert not marker.exists()


# Part F.


def test_kills_at_random_moments_lose_nothing() -> None:
    """A short form of `tests/faults/kills.py`: packs, builds and caches."""
    script = TESTS / "faults" / "kills.py"
    command = [sys.executable, script, "--seconds", "5", "--rooms", "pack", "build", "cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert ", 0 findings" in done.stdout


@pytest.mark.usefixtures("kept_parts")
def test_interrupted_build_keeps_finished_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tfrecords(tmp_path, shards=5)
    flip(shards[3], 30)
    with pytest.raises(DataCorruptionError):
        build_index(shards, tmp_path / "x.index")
    assert len(list((tmp_path / "x.index" / "parts").iterdir())) == 3
    with pytest.raises(IndexFormatError, match="its build was interrupted") as caught:
        open_index(tmp_path / "x.index")
    assert "keeps finished shards" in str(caught.value)
    flip(shards[3], 30)
    (part, *_) = (tmp_path / "x.index" / "parts").iterdir()
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


@pytest.mark.usefixtures("kept_parts")
def test_part_with_changed_or_cut_byte_is_built_again(tmp_path: Path) -> None:
    shards = tfrecords(tmp_path, shards=1, each=2)
    (part,) = made_parts(shards, tmp_path / "parts")
    whole, known = part.read_bytes(), load_part(part)
    expected = known, [*map(str, known.blocks())]
    for place in range(len(whole)):
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        found = ShardPart.load(part)
        assert found is None or (found, [*map(str, found.blocks())]) == expected
        part.write_bytes(whole[:place])
        assert ShardPart.load(part) is None
    with pytest.raises(IndexFormatError, match="unfinished index is missing or damaged"):
        merged([part], tmp_path / "x.index")
    assert made_parts(shards, tmp_path / "parts") == [part]
    assert part.read_bytes() == whole
    assert len(merged([part], tmp_path / "x.index")) == 2


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
        from twinfeed.loaders.reading.read_step import ReadStep, start_pass
        from twinfeed.samplers import BatchSampler, RandomSampler
        index = build_index(f"{sys.argv[1]}/*.tar", f"{sys.argv[1]}/x.index")
        ids = np.random.default_rng(0).permutation(1000)
        with Reader(index) as reader, ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda part: reader.read(part)["txt"], np.split(ids, 20)))
            stream = Schedule(BatchSampler(RandomSampler(1000, seed=0), batch_size=500))
            with ReadStep(reader, 0, start_pass(reader, stream, ["txt"], 0, 10**9)):
                pass
        assert sum(got, []) == [b"%d" % n for n in ids]
        print("all", len(index))
    """
    done = run_code(code, tmp_path)
    assert done.stdout == "all 1000\n", done.stderr


def test_fault_56_shard_that_shrinks_while_reading_is_refused(index: Index) -> None:
    """An error, where a mapped file would kill the process."""
    with Reader(index) as reader:
        reader.read([10])
        os.truncate(Path(index.root, index.shard_paths[1]), 100)
        with pytest.raises(TruncatedShardError, match="the shard ends within field 'image'"):
            reader.read([19], ["image"])
    with Reader(index, checksums=False) as reader, pytest.raises(StaleIndexError):
        reader.read([19], ["image"])


def test_shard_replaced_by_rename_while_reading_is_refused(index: Index) -> None:
    """An open shard is the old file, whose bytes are right. A new reader refuses the new file."""
    shard = Path(index.root, index.shard_paths[1])
    other = write_tfrecord(shard.with_suffix(".new"), reversed(numbered(10, 20)))
    assert other.stat().st_size == shard.stat().st_size
    with Reader(index) as reader:
        before = reader.read(range(10, 20))
        os.replace(other, shard)
        assert reader.read(range(10, 20)) == before
    with Reader(index) as reader, pytest.raises(DataCorruptionError):
        reader.read(range(10, 20))
    shutil.copy(Path(index.root, index.shard_paths[0]), other)
    with other.open("ab") as file:
        file.write(b"more")
    os.replace(other, shard)
    with Reader(index) as reader, pytest.raises(StaleIndexError):
        reader.read(range(10, 20))


# Part G.


def test_fault_61_pickled_fields_are_only_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    bomb = pickle.dumps(Bomb())
    write_tar(tmp_path / "a.tar", [("k", {"pkl": bomb, "pth": bomb, "npy": bomb})])
    index = build_index(tmp_path / "a.tar", tmp_path / "x.index")
    with Reader(index) as reader:
        assert reader.read([0])["pkl"] == [bomb]
    again = pack(index, tmp_path / "out", container="tar")["data"]
    assert verify(again).ok
    show = (
        "import sys; from twinfeed.loaders.command_line import main; main(['cat', *sys.argv[1:]])"
    )
    assert run_code(show, index.path, "0").returncode == 0
    assert not marker.exists()


def test_fault_62_pipe_commands_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for run in (
        lambda: build_index(f"pipe:touch {marker}", tmp_path / "x.index"),
        lambda: build_index([f"PIPE:touch {marker}", "{a,b}.tar"], tmp_path / "x.index"),
        lambda: verify([f"pipe:touch {marker}"], root=tmp_path),
    ):
        with pytest.raises(UnsafeContentError, match=r"(?i)pipe:"):
            run()
    assert not marker.exists()


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../secret.tfrecord", "a/../../secret", "file:///etc/passwd", "pipe:id"]
)
def test_fault_65_paths_that_leave_root_are_refused(
    index: Index, tmp_path: Path, path: str
) -> None:
    """A manifest from elsewhere cannot make the reader open what is not below its root."""
    (tmp_path.parent / "secret.tfrecord").touch()
    paths = StringColumn.of([path, *index.shard_paths.tolist()[1:]])
    for name, array in paths.arrays("shardpaths").items():
        with_array(index.path, name, array)
    with pytest.raises(UnsafeContentError, match="unsafe path"):
        open_index(index.path)
