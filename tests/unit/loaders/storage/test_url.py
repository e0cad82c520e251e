"""Locations: a URL means one object, whatever characters its key has."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import pytest
from support.cases import mark_long
from support.servers import RangeServer, put_folder
from support.shards import read_images, shard_of_text, tars, tfrecords, write_tar

from twinfeed.loaders import (
    DiskCache,
    Index,
    LoaderError,
    Reader,
    build_index,
    open_index,
    verify,
)
from twinfeed.loaders.storage import open_store, retries
from twinfeed.loaders.storage.url import Location, quoted, unquoted

pytestmark = pytest.mark.usefixtures("impatient")


ODD = (
    "run#1",
    "dir?1",
    "pct%20dir",
    "a%2Fb",
    "%2e%2e",
    "x+y",
    "x y",
    " edges ",
    "ünï",
    "back\\slash",
    "star*",
    "[1]",
    "q?",
    "{a,b}",
    "{n}",
    "a:b@c",
    "quote\"'<>&",
    "%zz",
    "semi;colon=1,2",
    "tilde~^|`$!()",
    "c::d",
)

"""A name for each class of characters that a URL, a glob, a shell or XML gives a meaning."""


def decoys(key: str) -> set[str]:
    """What a key would become if somebody cut, decoded, encoded, globbed or normalised it."""
    wrong = {key.partition("#")[0], key.partition("?")[0], unquote(key), quote(key), quoted(key)}
    wrong |= {key.replace("+", " "), key.replace(" ", "+"), key.replace("\\", "/"), key.strip()}
    wrong |= {key.replace("*", "x"), key.replace("?", "x"), key.replace("[1]", "1")}
    wrong |= {key.replace("{a,b}", "a"), key.replace("{n}", "n"), key.partition("::")[2]}
    parts = {"/".join(part for part in one.split("/") if part not in ("", "..")) for one in wrong}
    return {one for one in parts if one and one != key and not one.endswith("/")}


def put(folder: Path, bucket: Any, key: str) -> None:
    """Write a shard at a key, and others at all keys that it might be mistaken for."""
    for decoy in decoys(key):
        bucket.put_object(Key=decoy, Body=shard_of_text(folder, "a decoy"))
    bucket.put_object(Key=key, Body=shard_of_text(folder, key))


def read(index: Index) -> list[str]:
    """What the records of an index say."""
    with Reader(index) as reader:
        return [bytes(one).decode() for one in reader.read(range(len(index)))["x"]]


@pytest.mark.parametrize("odd", mark_long(ODD, but_every=7))
def test_odd_key_is_read_exactly(tmp_path: Path, bucket: Any, odd: str) -> None:
    """In a folder, a name, a glob's folder, a root, and in the place of the index."""
    put(tmp_path, bucket, f"top/{odd}/s.tfrecord")
    for key in (f"{odd}/s.tfrecord", f"{odd}.tfrecord"):
        put(tmp_path, bucket, key)
        index = build_index([f"s3://bucket/{key}"], tmp_path / "x.index")
        assert read(index) == [key]
        assert read(open_index(index.path, root=index.root)) == [key]
        assert index.root == f"s3://bucket/{key}".rpartition("/")[0]
        assert read(pickle.loads(pickle.dumps(index))) == [key]
        assert verify(f"s3://bucket/{key}").ok
    index = build_index([f"s3://bucket/top/{odd}/s.tfrecord"], tmp_path / "x", root="s3://bucket")
    assert read(index) == [f"top/{odd}/s.tfrecord"]
    cached = DiskCache(tmp_path / "cache", bytes=10**8)
    assert read(open_index(index.path, root="s3://bucket", cache=cached)) == read(index)


@pytest.mark.parametrize(
    "odd", mark_long([odd for odd in ODD if not set("*?[{") & {*odd}], but_every=5, first=1)
)
def test_glob_below_an_odd_folder_lists_that_folder(tmp_path: Path, bucket: Any, odd: str) -> None:
    for name in ("a", "b"):
        put(tmp_path, bucket, f"{odd}/{name}.tfrecord")
    index = build_index(f"s3://bucket/{odd}/*.tfrecord", tmp_path / "x.index")
    assert read(index) == [f"{odd}/a.tfrecord", f"{odd}/b.tfrecord"]
    again = build_index(f"s3://bucket/{odd}/[a].t?record", tmp_path / "x.index")
    assert read(again) == [f"{odd}/a.tfrecord"]


def test_literal_key_wins_over_a_pattern(tmp_path: Path, bucket: Any) -> None:
    for key in ("a*.tfrecord", "ab.tfrecord", "{c,d}.tfrecord", "c.tfrecord", "e?.tfrecord"):
        bucket.put_object(Key=key, Body=shard_of_text(tmp_path, key))
    for key in ("a*.tfrecord", "{c,d}.tfrecord", "e?.tfrecord"):
        assert read(build_index(f"s3://bucket/{key}", tmp_path / "x.index")) == [key]
    found = build_index("s3://bucket/[ac]*.tfrecord", tmp_path / "x.index")
    assert read(found) == ["a*.tfrecord", "ab.tfrecord", "c.tfrecord"]


@pytest.mark.parametrize("odd", mark_long(ODD, but_every=7, first=2))
def test_index_at_an_odd_key_is_no_other_in_the_cache(
    tmp_path: Path, bucket: Any, odd: str
) -> None:
    cache = DiskCache(tmp_path / "cache", bytes=10**8)
    places = [odd, *sorted(decoys(odd))[:1]]
    for place in places:
        bucket.put_object(Key=f"data/{place}/s.tfrecord", Body=shard_of_text(tmp_path, place))
        index = build_index([f"s3://bucket/data/{place}/s.tfrecord"], tmp_path / "x.index")
        put_folder(bucket, index.path, f"data/{place}/x.index")
    for place in places:
        assert read(open_index(f"s3://bucket/data/{place}/x.index", cache=cache)) == [place]


@pytest.mark.parametrize(
    "url",
    [
        "az://box",
        pytest.param("abfss://box@account.dfs.core.windows.net", marks=pytest.mark.long),
        "gs://box",
    ],
)
def test_keys_are_raw_in_every_store(
    tmp_path: Path, server: RangeServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (("AZURE", "AZURE_STORAGE_ENDPOINT"), ("GOOGLE", "GOOGLE_BASE_URL")):
        monkeypatch.setenv(f"{kind}_SKIP_SIGNATURE", "true")
        monkeypatch.setenv(f"{kind}_ALLOW_HTTP", "true")
        monkeypatch.setenv(name, server.url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    server.headers["Last-Modified"] = "Wed, 21 Oct 2015 07:28:00 GMT"
    for odd in ODD:
        key = f"{odd}/{odd}.tfrecord"
        file = tmp_path / "box" / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(shard_of_text(tmp_path, key))
        assert read(build_index([f"{url}/{key}"], tmp_path / "x.index")) == [key]


@pytest.mark.parametrize("odd", ODD)
def test_a_url_of_a_web_server_is_sent_as_the_standard_has_it(
    tmp_path: Path, server: RangeServer, odd: str
) -> None:
    key = f"{odd}/{odd}.tfrecord"
    for one in (*decoys(key), key):
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        if not (tmp_path / one).is_dir():
            (tmp_path / one).write_bytes(shard_of_text(tmp_path, "a decoy" if one != key else key))
    index = build_index([f"{server.url}/{quoted(key)}"], tmp_path / "x.index")
    assert read(index) == [key]
    assert {*server.paths} == {f"/{quoted(key)}"}
    if ":" in odd:  # a local path may not begin as a scheme does
        return
    assert read(open_index(index.path, root=tmp_path / odd)) == [key], "a name is no URL there"
    local = build_index([tmp_path / key], tmp_path / "l.index")
    assert read(open_index(local.path, root=server.url)) == [key]


def test_unquoted_url_is_quoted(tmp_path: Path, server: RangeServer) -> None:
    (tmp_path / "ü ber").mkdir()
    for name in ("d é.tfrecord", "d f.tfrecord"):
        (tmp_path / "ü ber" / name).write_bytes(shard_of_text(tmp_path, name))
    spelled = [f"{server.url}/ü ber/d é.tfrecord", f"{server.url}/%C3%BC%20ber/d%20é.tfrecord"]
    for url in spelled:
        assert read(build_index([url], tmp_path / "x.index")) == ["d é.tfrecord"]
    with pytest.raises(ValueError, match="named twice"):
        build_index(spelled, tmp_path / "x.index")


def test_sizes_are_found_without_head(tmp_path: Path, server: RangeServer) -> None:
    """A server may forbid HEAD: nobody asks for it."""
    shards = tfrecords(tmp_path, shards=2)
    (tmp_path / "empty.tfrecord").touch()
    index = build_index(f"{server.url}/{{{','.join(one.name for one in shards)}}}", tmp_path / "x")
    assert len(read_images(index)) == 20
    assert not server.asked["HEAD"]
    assert open_store.store_of(Location.of(server.url)).stat(["empty.tfrecord"])[0].bytes == 0


@pytest.mark.parametrize(("asks", "pauses"), [("2", [2.0, 1.0]), ("99", [3.0]), ("soon", None)])
def test_retry_after_is_followed_within_retry_budget(
    tmp_path: Path,
    server: RangeServer,
    asks: str,
    pauses: list[float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as it asks, and no longer than the retry budget."""
    slept: list[float] = []
    monkeypatch.setenv("TWINFEED_PATIENCE", "3")
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: seconds and slept.append(seconds))
    server.headers["Retry-After"] = asks
    server.fail = lambda _path, _start: 503
    with pytest.raises(LoaderError) as caught:
        build_index(f"{server.url}/{tars(tmp_path, shards=1)[0].name}", tmp_path / "x.index")
    if pauses is None:
        assert 1.5 <= sum(slept) <= 3
    else:
        assert slept == pytest.approx(pauses)
        assert f"the server asks to wait {asks} seconds" in str(caught.value)


def test_quoted_names_round_trip() -> None:
    for name in ODD:
        assert unquoted(quoted(name)) == name


def test_file_system_that_alters_keys_or_ranges_is_refused(tmp_path: Path) -> None:
    """What fsspec takes a path for is compared with the key."""
    memory = fsspec.filesystem("memory")
    for name in ("a", "a#b", "a?b", "a%20b"):
        memory.pipe_file(f"/cut/{name}.tfrecord", shard_of_text(tmp_path, name))
    for name in ("a#b", "a?b", "a%20b"):
        found = build_index([f"memory://cut/{name}.tfrecord"], tmp_path / "x.index")
        assert read(found) == [name]

    class Cutting(type(memory)):  # type: ignore[misc]
        protocol = "cutting"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.replace("cutting", "memory").partition("?")[0]))

    fsspec.register_implementation("cutting", Cutting, clobber=True)
    assert read(build_index(["cutting://cut/a.tfrecord"], tmp_path / "x.index")) == ["a"]
    with pytest.raises(LoaderError, match="would read another file"):
        build_index(["cutting://cut/a?b.tfrecord"], tmp_path / "x.index")
    index = build_index(["cutting://cut/a.tfrecord"], tmp_path / "x.index")
    Cutting.cat_file = lambda self, path, **_: memory.cat_file(path)
    with pytest.raises(LoaderError, match="does not support range requests"):
        read(index)


def test_tar_is_read_from_an_odd_key(tmp_path: Path, bucket: Any) -> None:
    file = write_tar(tmp_path / "a.tar", [("k", {"x": b"here"})])
    bucket.put_object(Key="a#?%20/a #.tar", Body=file.read_bytes())
    bucket.put_object(Key="a", Body=b"")
    assert read(build_index("s3://bucket/a#?%20/a #.tar", tmp_path / "x.index")) == ["here"]
