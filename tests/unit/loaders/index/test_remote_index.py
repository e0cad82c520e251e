"""Indexes at URLs, and shards in a store that speaks S3."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store
from support.batches import expected
from support.damage import rewrite
from support.servers import RangeServer
from support.shards import tars, tfrecords

from twinfeed.loaders import (
    DiskCache,
    Index,
    IndexFormatError,
    LoaderError,
    Reader,
    build_index,
    open_index,
    verify,
)
from twinfeed.loaders.command_line import main
from twinfeed.loaders.index import remote_index
from twinfeed.loaders.support.limits import Limits
from twinfeed.samplers import BatchSampler, RandomSampler


def upload(url: str, paths: list[Path]) -> None:
    store = S3Store.from_url(url)
    for path in paths:
        for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
            obstore.put(store, file.relative_to(path.parent).as_posix(), file)


def same_batches(one: Index, other: Index) -> None:
    sampler = BatchSampler(RandomSampler(len(one), seed=0), batch_size=16)
    assert expected(one, sampler) == expected(other, sampler)


def test_index_at_url_opens_and_reads(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards in a bucket, named by a pattern; the index beside them; batches as from a disk."""
    shards = tfrecords(tmp_path, shards=5, each=20)
    upload(f"{s3}/plain", shards)
    local = build_index(tmp_path / "*.tfrecord", tmp_path / "l.index")
    built = build_index(f"{s3}/plain/*.tfrecord", tmp_path / "x.index")
    upload(f"{s3}/plain", [built.path])
    assert built.fingerprint == local.fingerprint
    assert None not in map(built.tag, range(len(built.shard_lengths)))
    opened = open_index(f"{s3}/plain/x.index")
    assert opened.root == f"{s3}/plain"
    same_batches(opened, local)
    assert verify(opened).ok
    same_batches(open_index(local.path, root=f"{s3}/plain"), local)


def test_braces_expand_to_shards_of_a_bucket(tmp_path: Path, s3: str) -> None:
    upload(f"{s3}/tars", tars(tmp_path, shards=3))
    built = build_index(f"{s3}/tars/d-00000{{0,2}}.t*r", tmp_path / "x.index")
    assert built.keys([0, 19]) == ["k0", "k29"]


def test_braces_expand_to_shards_of_a_web_server(tmp_path: Path, server: RangeServer) -> None:
    tars(tmp_path, shards=2)
    assert len(build_index(f"{server.url}/d-00000{{0,1}}.tar", tmp_path / "x.index")) == 20


def test_quoted_question_mark_belongs_to_the_file_name(tmp_path: Path, server: RangeServer) -> None:
    tfrecords(tmp_path, shards=1, each=4)[0].rename(tmp_path / "what?.tfrecord")
    built = build_index(f"{server.url}/what%3F.tfrecord", tmp_path / "x.index")
    same_batches(built, build_index(f"{tmp_path}/what?.tfrecord", tmp_path / "l.index"))


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(["obstore", "fsspec", "urllib3"]))
from twinfeed.loaders import LoaderError, build_index, open_index
for scheme in ("s3", "memory", "http"):
    for use in (open_index, lambda url: build_index(url + "*.tar", "x.index")):
        try:
            use(f"{scheme}://bucket/x.index")
        except LoaderError as error:
            print(error)
"""


def test_missing_package_error_names_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.count("the package that reads this URL is not installed\n") == 6
    assert done.stdout.count("what to do: pip install 'twinfeed[remote]'") == 6
    assert all(done.stdout.count(name) >= 2 for name in ("obstore", "fsspec", "urllib3"))


def test_shards_are_read_from_gcs(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GCS is asked for objects and lists as S3 is, here without signatures."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    key = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": ""}
    key |= {"private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    shards = tars(tmp_path, shards=2)
    upload(f"{s3}/as-gcs", shards)
    with pytest.raises(LoaderError, match="GOOGLE_SERVICE_ACCOUNT"):
        build_index("gs://bucket/as-gcs/d-000000.tar", tmp_path / "x.index")
    for path in ("bucket?acl", *(f"bucket/as-gcs/{shard.name}?acl" for shard in shards)):
        signed = "AWS4-HMAC-SHA256 Credential=made-up/20260101/us-east-1/s3/aws4_request"
        public = {"x-amz-acl": "public-read", "Authorization": signed}
        ask = urllib.request.Request(f"{endpoint}/{path}", method="PUT", headers=public)
        urllib.request.urlopen(ask).close()
    built = build_index("gs://bucket/as-gcs/*.tar", tmp_path / "x.index")
    same_batches(built, build_index(tmp_path / "*.tar", tmp_path / "l.index"))


def test_index_at_url_is_downloaded_once_into_cache(tmp_path: Path, server: RangeServer) -> None:
    tars(tmp_path, shards=2)
    local = build_index(tmp_path / "*.tar", tmp_path / "x.index")
    cache = DiskCache(tmp_path / "cache", bytes=10**6)
    opened = open_index(f"{server.url}/x.index", cache=cache)
    assert opened.fingerprint == local.fingerprint
    assert opened.root == server.url
    server.clear()
    again = open_index(f"{server.url}/x.index", cache=cache)
    assert again.path == opened.path
    assert [name for name, _, _ in server.ranges] == ["x.index/manifest.json"]
    array = next(again.path.glob("columns-*/shards.npy"))
    array.write_bytes(array.read_bytes()[:-1])
    assert len(open_index(f"{server.url}/x.index", cache=cache)) == len(local)


def test_download_without_cache_is_deleted_with_the_index(
    tmp_path: Path, server: RangeServer
) -> None:
    tars(tmp_path, shards=1)
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    opened = open_index(f"{server.url}/x.index")
    folder = opened.path
    with Reader(opened) as reader:
        assert len(reader.read([0])) == 3
    assert folder.exists()
    child = multiprocessing.get_context("fork").Process(target=os.listdir, args=(folder,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert folder.exists(), "a child that ends takes nothing with it"
    del opened, reader
    gc.collect()
    assert not folder.parent.parent.exists()


def test_index_files_are_requested_concurrently(tmp_path: Path, server: RangeServer) -> None:
    tars(tmp_path, shards=1)
    index = build_index(tmp_path / "*.tar", tmp_path / "x.index")
    server.delay = 0.3
    opened = open_index(f"{server.url}/x.index")
    assert server.most == len(index.manifest["arrays"]) > 5
    assert repr(opened).startswith(f"<Index '{server.url}/x.index': 10 records")
    assert repr(pickle.loads(pickle.dumps(opened))) == repr(opened)


KILLED = """
import os, signal, sys
from twinfeed.loaders import open_index
opened = open_index(sys.argv[1])
print(opened.path, flush=True)
if len(sys.argv) > 2:
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.readline()
"""


def test_downloads_of_killed_processes_only_are_removed(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars(tmp_path, shards=1)
    build_index(tmp_path / "*.tar", tmp_path / "x.index")
    folder = tmp_path / "temporary"
    (folder / ".twinfeed-of-others").mkdir(parents=True)
    (folder / ".twinfeed-of-others" / "lock").touch()  # that nobody holds
    monkeypatch.setenv("TMPDIR", str(folder))
    command = [sys.executable, "-c", KILLED, f"{server.url}/x.index"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as living:
        kept = Path(living.stdout.readline().strip())  # type: ignore[union-attr]
        dead = subprocess.run([*command, "kill"], capture_output=True, text=True, check=False)
        stale = Path(dead.stdout.strip())
        assert kept.exists()
        assert stale.exists()
        subprocess.run(command, input="", capture_output=True, text=True, check=True)
        assert kept.exists()
        assert not stale.parent.parent.exists()
        living.communicate("")
    left = [path.name for path in folder.glob(".twinfeed-*")]
    assert left == [".twinfeed-of-others"]


@pytest.mark.parametrize("damage", ["name", "bytes", "json"])
def test_hostile_manifest_writes_no_file_elsewhere(
    tmp_path: Path, server: RangeServer, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars(tmp_path, shards=1)
    index = build_index(tmp_path / "*.tar", tmp_path / "x.index")
    file, shards = index.path / "manifest.json", index.manifest["arrays"]["shards"]
    if damage == "name":
        rewrite(index.path, lambda manifest: manifest["arrays"].update({"../../x": shards}))
    elif damage == "bytes":
        monkeypatch.setattr(remote_index, "LIMITS", Limits(download_bytes=1000))
    else:
        file.write_text(json.dumps(index.manifest | {"checksum": "x"}))
    with pytest.raises((IndexFormatError, LoaderError)) as caught:
        open_index(f"{server.url}/x.index", cache=DiskCache(tmp_path / "cache", bytes=10**6))
    assert caught.value.path == f"{server.url}/x.index"
    left = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left == {"CACHEDIR.TAG"}


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_index_replaced_during_download_is_read_anew_or_fails(
    tmp_path: Path,
    server: RangeServer,
    cached: bool,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tars(tmp_path, shards=2)
    build_index(tmp_path / "d-000000.tar", tmp_path / "x.index")
    (tmp_path / "new").mkdir()
    new = build_index(tmp_path / "*.tar", tmp_path / "new" / "x.index", root=tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    lock = threading.Lock()

    def replaced(path: str, _start: int) -> int | None:
        with lock:
            if path != "manifest.json" and new.path.exists():
                shutil.rmtree(tmp_path / "x.index")
                new.path.rename(tmp_path / "x.index")
        return None if whole or path != "shards.npy" else 404

    server.fail = replaced
    cache = DiskCache(tmp_path / "c", bytes=10**6) if cached else None
    if whole:
        assert open_index(f"{server.url}/x.index", cache=cache).fingerprint == new.fingerprint
    else:
        with pytest.raises(FileNotFoundError, match=r"shards\.npy"):
            open_index(f"{server.url}/x.index", cache=cache)
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_commands_accept_urls(tmp_path: Path, s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    upload(f"{s3}/command", tars(tmp_path, shards=2))
    url, out = f"{s3}/command/x.index", str(tmp_path / "x.index")
    assert main(["index", f"{s3}/command/*.tar", "--out", out, "--label", "cls", "--quiet"]) == 0
    assert main(["index", f"{s3}/command/*.tar", "--out", url]) == 2
    assert "write to a local folder, and upload the folder" in capsys.readouterr().err
    upload(f"{s3}/command", [tmp_path / "x.index"])
    for command in (["info", url], ["verify", url], ["cat", url, "3"]):
        assert main(command) == 0, command
    assert main(["index", f"{s3}/command/", "--out", out, "-q"]) == 1
    assert f"and not a shard; path: {s3}/command/;" in capsys.readouterr().err
    assert main(["index", f"{s3}/command", "--out", out, "-q"]) == 1
    assert f"{s3}/command: no such file" in capsys.readouterr().err
    assert main(["verify", f"{s3}/command/d-000000.tar"]) == 0
    capsys.readouterr()
    assert main(["verify", url, "--root", f"{s3}/wrong", "-q"]) == 1
    assert "d-000001.tar: no such file; check the URL" in capsys.readouterr().out
    assert main(["info", f"{s3}/command/y.index"]) == 1
    assert f"{s3}/command/y.index: no index here" in capsys.readouterr().err
