"""Where the shards of an index are read: beside it, at root=, and nowhere else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from support.damage import rewrite, with_root, with_shard_names
from support.servers import RangeServer, put_folder
from support.shards import read_images, shard_of_text, tfrecords

from twinfeed.loaders import (
    LoaderError,
    Reader,
    UnsafeContentError,
    build_index,
    open_index,
)
from twinfeed.loaders.command_line import main
from twinfeed.loaders.storage.url import Location, allowed

pytestmark = pytest.mark.usefixtures("impatient")


HOSTILE = ["%2e%2e/s", "a//b", "a%00b", "a\udc80", "../s", "/s", "a/../../s", "a\0b", "s#", "s?"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shard_names_stay_below_the_root(
    tmp_path: Path, server: RangeServer, s3: str, name: str
) -> None:
    """Exactly the name, or a LoaderError: on every kind of root."""
    (tmp_path / "in").mkdir()
    shards = tfrecords(tmp_path / "in", shards=1)
    index = build_index(shards, tmp_path / "in" / "x.index")
    with_shard_names(index.path, name)
    for root in (f"{server.url}/deep", "s3://bucket/deep", "memory://bucket/deep"):
        with (
            pytest.raises((LoaderError, FileNotFoundError)),
            Reader(open_index(index.path, root=root)) as reader,
        ):
            reader.read([0])
    assert all(path.startswith("/deep/") and "/../" not in path for path in server.paths)


def test_local_index_connects_to_no_host_without_root(
    tmp_path: Path, server: RangeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by the commands too; allowed by root=."""
    shards = tfrecords(tmp_path, shards=2)
    (tmp_path / "in").mkdir()
    built = build_index([f"{server.url}/{one.name}" for one in shards], tmp_path / "in" / "x.index")
    assert built.root == server.url, "what build_index returns is followed"
    assert len(read_images(built)) == 20
    server.clear()
    assert main(["info", str(built.path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("20 records in 2 shards")
    assert "the shards of this index lie elsewhere" in said.err
    assert main(["cat", str(built.path), "0"]) != 0
    assert not server.asked
    assert read_images(open_index(built.path, root=server.url)) == read_images(built)
    assert read_images(pickle.loads(pickle.dumps(built))) == read_images(built)


def test_environment_variable_allows_roots(
    tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "in").mkdir()
    shards = tfrecords(tmp_path / "data", shards=2)
    urls = [f"{server.url}/data/{one.name}" for one in shards]
    index = build_index(urls, tmp_path / "in" / "x.index")
    for roots in (server.url, f"s3://other {server.url}/data/"):
        monkeypatch.setenv("TWINFEED_ROOTS", roots)
        assert open_index(index.path).root == f"{server.url}/data"


def test_environment_variable_allows_a_root_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Location.of("s3://bucket/some data #1/a%20b", from_user=False)
    for roots in (str(place), f"s3://other  {place} \n", f"{place}\nsimplecache::https://host/x y"):
        monkeypatch.setenv("TWINFEED_ROOTS", roots)
        assert allowed(place), roots
    monkeypatch.setenv("TWINFEED_ROOTS", "s3://bucket/some /data")
    assert not allowed(place)
    monkeypatch.setenv("TWINFEED_ROOTS", "/data")
    with pytest.raises(LoaderError, match="TWINFEED_ROOTS in the environment: not a URL"):
        allowed(place)


def test_shards_beside_the_index_win_over_its_stored_root(tmp_path: Path, bucket: Any) -> None:
    """An index copied with its shards, to another folder or to this machine, reads the copies."""
    bucket.put_object(Key="old/s.tfrecord", Body=shard_of_text(tmp_path, "s"))
    built = build_index(["s3://bucket/old/s.tfrecord"], tmp_path / "x.index")
    put_folder(bucket, built.path, "old/x.index")
    for one in list(bucket.objects.all()):
        copy = one.key.replace("old/", "new/")
        bucket.put_object(Key=copy, Body=one.get()["Body"].read())
        file = tmp_path / copy
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(one.get()["Body"].read())
    assert built.root == open_index("s3://bucket/old/x.index").root == "s3://bucket/old"
    assert open_index("s3://bucket/new/x.index").root == "s3://bucket/new"
    assert open_index(tmp_path / "new/x.index").root == str(tmp_path / "new")
    bucket.Object("new/s.tfrecord").delete()
    assert open_index("s3://bucket/new/x.index").root == "s3://bucket/old", "in the same bucket"


def test_index_of_one_host_connects_to_no_other(tmp_path: Path, server: RangeServer) -> None:
    shards = tfrecords(tmp_path, shards=1)
    with RangeServer(tmp_path) as other:
        (tmp_path / "in").mkdir()
        index = build_index([f"{other.url}/{shards[0].name}"], tmp_path / "in" / "x.index")
        other.clear()
        places = [other.url, "s3://attacker", "gs://attacker/x", "http://169.254.169.254/latest"]
        places += ["file:///etc", "local:///etc", "hf://datasets/a/b"]
        for place in places:
            with_root(index.path, place)
            with pytest.raises(UnsafeContentError, match="lie elsewhere") as caught:
                open_index(f"{server.url}/in/x.index")
            assert repr(place) in str(caught.value)
        assert not other.asked
        with_root(index.path, server.url)
        assert open_index(f"{server.url}/in/x.index").root == server.url, "on the same host"


def test_error_of_remote_index_shows_no_temporary_path(tmp_path: Path, server: RangeServer) -> None:
    """Neither in the error nor in its parts is the temporary folder of the copy."""
    index = build_index(tfrecords(tmp_path, shards=1), tmp_path / "x.index")
    file = index.path / "manifest.json"
    whole = file.read_text()
    for text in ("{", "[]", whole.replace("1", "2"), '{"format": "x"}'):
        file.write_text(text)
        with pytest.raises(LoaderError) as caught:
            open_index(f"{server.url}/x.index")
        assert caught.value.path == f"{server.url}/x.index"
        assert "twinfeed-" not in str(caught.value)
        assert "columns" not in str(caught.value.advice)
    file.write_text(whole)
    rewrite(index.path, lambda manifest: manifest["options"].update(label="x"))
    rewrite(index.path, lambda manifest: manifest.update(records="x"))
    with pytest.raises(LoaderError) as caught:
        open_index(f"{server.url}/x.index")
    assert "twinfeed-" not in str(caught.value)
