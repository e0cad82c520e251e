"""Locations: a URL means one object, an index leads nowhere else, and no secret is kept."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import boto3
import fsspec
import pytest
from support.cases import mark_long
from support.servers import RangeServer, at_https, serving_securely
from support.shards import tars, tfrecords, write_tar, write_tfrecord

from twinfeed.loaders import (
    DiskCache,
    Index,
    LoaderError,
    Reader,
    UnsafeContentError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.command_line import main
from twinfeed.loaders.index.manifest import json_digest
from twinfeed.loaders.storage import _http_connections, open_store, retries
from twinfeed.loaders.storage.url import Location, allowed, quoted, unquoted

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


def shard(folder: Path, text: str) -> bytes:
    """The bytes of a shard whose only record says `text`."""
    return write_tfrecord(folder / "one", [{"x": text.encode()}]).read_bytes()


def put(folder: Path, bucket: Any, key: str) -> None:
    """Write a shard at a key, and others at all keys that it might be mistaken for."""
    for decoy in decoys(key):
        bucket.put_object(Key=decoy, Body=shard(folder, "a decoy"))
    bucket.put_object(Key=key, Body=shard(folder, key))


def read(index: Index) -> list[str]:
    """What the records of an index say."""
    with Reader(index) as reader:
        return [bytes(one).decode() for one in reader.read(range(len(index)))["x"]]


@pytest.fixture(scope="module")
def other_client(s3: str) -> Any:
    return boto3.resource("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


@pytest.fixture
def bucket(other_client: Any) -> Iterator[Any]:
    """The bucket, empty, by another client."""
    found = other_client.Bucket("bucket")
    found.objects.delete()
    yield found
    found.objects.delete()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFEED_PATIENCE", "0")
    monkeypatch.setattr(open_store, "_stores", {})


@pytest.mark.parametrize("odd", mark_long(ODD, but_every=5))
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
        bucket.put_object(Key=key, Body=shard(tmp_path, key))
    for key in ("a*.tfrecord", "{c,d}.tfrecord", "e?.tfrecord"):
        assert read(build_index(f"s3://bucket/{key}", tmp_path / "x.index")) == [key]
    found = build_index("s3://bucket/[ac]*.tfrecord", tmp_path / "x.index")
    assert read(found) == ["a*.tfrecord", "ab.tfrecord", "c.tfrecord"]


@pytest.mark.parametrize("odd", mark_long(ODD, but_every=5, first=2))
def test_index_at_an_odd_key_overwrites_no_other(tmp_path: Path, bucket: Any, odd: str) -> None:
    """And no other index is overwritten, in the store or in the cache."""
    cache = DiskCache(tmp_path / "cache", bytes=10**8)
    places = [odd, *sorted(decoys(odd))[:1]]
    for place in places:
        bucket.put_object(Key=f"data/{place}/s.tfrecord", Body=shard(tmp_path, place))
        build_index([f"s3://bucket/data/{place}/s.tfrecord"], f"s3://bucket/data/{place}/x.index")
    for place in places:
        assert read(open_index(f"s3://bucket/data/{place}/x.index", cache=cache)) == [place]
    keys = {one.key for one in bucket.objects.all()}
    assert {f"data/{place}/x.index/manifest.json" for place in places} <= keys
    build_index([f"s3://bucket/data/{odd}/s.tfrecord"], f"s3://bucket/data/{odd}/x.index")
    assert {one.key for one in bucket.objects.all()} == keys, "a second build deletes no others'"


@pytest.mark.parametrize(
    "url", ["az://box", "abfss://box@account.dfs.core.windows.net", "gs://box"]
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
        file.write_bytes(shard(tmp_path, key))
        assert read(build_index([f"{url}/{key}"], tmp_path / "x.index")) == [key]


@pytest.mark.parametrize("odd", ODD)
def test_a_url_of_a_web_server_is_sent_as_the_standard_has_it(
    tmp_path: Path, server: RangeServer, odd: str
) -> None:
    key = f"{odd}/{odd}.tfrecord"
    for one in (*decoys(key), key):
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        if not (tmp_path / one).is_dir():
            (tmp_path / one).write_bytes(shard(tmp_path, "a decoy" if one != key else key))
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
        (tmp_path / "ü ber" / name).write_bytes(shard(tmp_path, name))
    spelled = [f"{server.url}/ü ber/d é.tfrecord", f"{server.url}/%C3%BC%20ber/d%20é.tfrecord"]
    for url in spelled:
        assert read(build_index([url], tmp_path / "x.index")) == ["d é.tfrecord"]
    with pytest.raises(ValueError, match="named twice"):
        build_index(spelled, tmp_path / "x.index")


HOSTILE = ["%2e%2e/s", "a//b", "a%00b", "a\udc80", "../s", "/s", "a/../../s", "a\0b", "s#", "s?"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_shard_names_stay_below_the_root(
    tmp_path: Path, server: RangeServer, s3: str, name: str
) -> None:
    """Exactly the name, or a LoaderError: on every kind of root."""
    (tmp_path / "in").mkdir()
    shards = tfrecords(tmp_path / "in", shards=1)
    index = build_index(shards, tmp_path / "in" / "x.index")
    forged = forge(index, shard_name=name)
    for root in (f"{server.url}/deep", "s3://bucket/deep", "memory://bucket/deep"):
        with (
            pytest.raises((LoaderError, FileNotFoundError)),
            Reader(open_index(forged, root=root)) as reader,
        ):
            reader.read([0])
    assert all(path.startswith("/deep/") and "/../" not in path for path in server.paths)


def forge(index: Index, *, root: str | None = None, shard_name: str | None = None) -> Path:
    """Write another index in its place, with checksums that fit."""
    import hashlib

    import numpy as np

    file = index.path / "manifest.json"
    manifest: Any = json.loads(file.read_text())
    if root is not None:
        manifest["options"]["root"] = root
    if shard_name is not None:
        text = shard_name.encode("utf-8", "surrogateescape")
        folder = index.path / manifest["folder"]
        for name, array in (
            ("shardpaths-text", np.frombuffer(text, np.uint8)),
            ("shardpaths-ends", np.array([len(text)], np.uint32)),
        ):
            np.save(folder / f"{name}.npy", array)
            data = (folder / f"{name}.npy").read_bytes()
            manifest["arrays"][name] |= {
                "shape": list(array.shape),
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
    del manifest["checksum"]
    manifest["checksum"] = json_digest(manifest)
    file.write_text(json.dumps(manifest))
    return index.path


def test_local_index_connects_to_no_host_without_root(
    tmp_path: Path, server: RangeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by the commands too; allowed by root=."""
    shards = tfrecords(tmp_path, shards=2)
    (tmp_path / "in").mkdir()
    built = build_index([f"{server.url}/{one.name}" for one in shards], tmp_path / "in" / "x.index")
    assert built.root == server.url, "what build_index returns is followed"
    assert len(read_all(built)) == 20
    server.clear()
    assert main(["info", str(built.path)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("records: 20\n")
    assert "the shards of this index lie elsewhere" in said.err
    assert main(["cat", str(built.path), "0"]) != 0
    assert not server.asked
    assert read_all(open_index(built.path, root=server.url)) == read_all(built)
    assert read_all(pickle.loads(pickle.dumps(built))) == read_all(built)


def read_all(index: Index) -> list[bytes]:
    with Reader(index) as reader:
        return [bytes(one) for one in reader.read(range(len(index)))["image"]]


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
    bucket.put_object(Key="old/s.tfrecord", Body=shard(tmp_path, "s"))
    built = build_index(["s3://bucket/old/s.tfrecord"], "s3://bucket/old/x.index")
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
            forge(index, root=place)
            with pytest.raises(UnsafeContentError, match="lie elsewhere") as caught:
                open_index(f"{server.url}/in/x.index")
            assert repr(place) in str(caught.value)
        assert not other.asked
        forge(index, root=server.url)
        assert open_index(f"{server.url}/in/x.index").root == server.url, "on the same host"


SECRET = "S3CRET"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@HOST/a.tar",
        f"http://{SECRET}@HOST/a.tar",
        f"http://user:pass/{SECRET}@HOST/a.tar",
        f"https://user:a?b{SECRET}@HOST/a.tar",
        f"simplecache::http://user:{SECRET}@HOST/a.tar",
        f"s3://user:{SECRET}@bucket/a.tar",
        f"s3://{SECRET}@bucket/a.tar",
        f"gs://{SECRET}@bucket/a.tar",
        f"az://{SECRET}@bucket/a.tar",
        f"abfss://box:{SECRET}@account.dfs.core.windows.net/a.tar",
        f"ftp://user:{SECRET}@HOST/a.tar",
        f"s3://bucket/a.tar?X-Amz-Signature={SECRET}",
        f"gs://bucket/a.tar?x-goog-signature={SECRET}",
        f"az://box/a.tar?sv=1&sig={SECRET}",
        f"http://HOST/a.tar?Signature={SECRET}",
        f"http://HOST/a.tar?X-Amz-Credential=a@b&X-Amz-Signature={SECRET}",
        f"http://HOST?sig={SECRET}",
        f"s3://bucket/*.tar?X-Amz-Signature={SECRET}",
        f"s3://bucket/a.tar?response-content-type=a b&X-Amz-Signature={SECRET}",
        f"s3://bucket/{{a,b}}.tar?X-Amz-Signature={SECRET}",
        f"s3://bucket/a.tar;token={SECRET}",
        f"https://HOST/a.tar#access_token={SECRET}",
        f"memory://bucket/a.tar#X-Amz-Signature={SECRET}",
        f"simplecache::http://HOST/a.tar?sig={SECRET}",
    ],
)
def test_secret_in_a_url_is_refused_and_masked(
    tmp_path: Path,
    server: RangeServer,
    url: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anybody looks for the package that reads it."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    url = url.replace("HOST", server.url.removeprefix("http://"))
    index = build_index(tars(tmp_path, shards=1), tmp_path / "x.index")
    calls: list[Callable[[], object]] = [
        lambda: build_index(url, tmp_path / "y.index"),
        lambda: build_index([url], tmp_path / "y.index"),
        lambda: build_index(tmp_path / "*.tar", url),
        lambda: build_index(tmp_path / "*.tar", tmp_path / "y.index", root=url),
        lambda: open_index(url),
        lambda: open_index(index.path, root=url),
        lambda: verify(url),
        lambda: verify(index.path, root=url),
        lambda: pack(index, url),
        lambda: open_index(forge(index, root=url)),
    ]
    for call in calls:
        with pytest.raises((LoaderError, ValueError)) as caught:
            call()
        told = f"{caught.value}{caught.value!r}{vars(caught.value)}"
        assert SECRET not in told
        if isinstance(caught.value, LoaderError):
            assert "credentials belong in the environment" in told
    for command in (["info"], ["verify"], ["index", "--out", str(tmp_path / "z")], ["cat"]):
        assert main([command[0], url, *command[1:], *(["0"] if command == ["cat"] else [])]) != 0
    out = capsys.readouterr()
    assert SECRET not in out.out + out.err + caplog.text
    assert not (tmp_path / "y.index").exists()
    assert not server.asked


@pytest.mark.parametrize("odd", ["?", "/a", "a::", "@", ":", "%", "#", "//", "[", "{", "*", "\0"])
def test_fault_97_long_url_takes_linear_time(odd: str) -> None:
    """An index of 8 MB may hold such a root; its length squared would be hours."""
    for url in (f"s3://bucket/{odd * 10**5}", f"http://host/{odd * 10**5}", f"s3://{odd * 10**5}"):
        with contextlib.suppress(LoaderError):
            Location.of(url)


def test_url_without_a_secret_is_not_masked(tmp_path: Path) -> None:
    for url in ("s3://bucket/a:b@c", "abfss://box@acc.dfs.core.windows.net/x", "s3://b/a?design=1"):
        assert str(Location.of(url)) == url
        assert pickle.loads(pickle.dumps(Location.of(url))) == Location.of(url)


def test_credentials_are_not_sent_to_a_web_server(
    tmp_path: Path, server: RangeServer, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of the environment nor those of ~/.netrc, and no cookies."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    server.headers["Set-Cookie"] = "a=b"
    shards = tfrecords(tmp_path, shards=2)
    index = build_index([f"{server.url}/{one.name}" for one in shards], tmp_path / "x.index")
    assert len(read_all(index)) == 20
    assert server.carried == {"host", "accept-encoding", "user-agent", "range"}


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    with serving_securely(tmp_path, monkeypatch) as serving:
        yield serving


def test_url_given_by_the_user_may_redirect_over_https(
    tmp_path: Path, server: RangeServer, secure: RangeServer
) -> None:
    """As Hugging Face and GitHub redirect to the hosts of their downloads."""
    name = tfrecords(tmp_path, shards=1)[0].name
    server.moved[f"/d/{name}"] = f"{at_https(secure)}/{name}?signature=S3CRET"
    index = build_index([f"{server.url}/d/{name}"], tmp_path / "x.index")
    assert len(read_all(index)) == 10
    assert secure.asked["GET"] >= 2
    assert index.root == f"{server.url}/d"
    secure.fail = lambda _path, _start: 403
    with pytest.raises(LoaderError) as caught:
        read_all(index)
    assert "S3CRET" not in str(caught.value)


def test_untrusted_certificate_is_an_error(
    tmp_path: Path, secure: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    _http_connections.tls_context.cache_clear()
    with pytest.raises(LoaderError, match="certificate"):
        build_index([f"{at_https(secure)}/a.tar"], tmp_path / "x.index")


def test_stored_root_may_not_redirect(
    tmp_path: Path,
    server: RangeServer,
    secure: RangeServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = tfrecords(tmp_path, shards=1)[0].name
    (tmp_path / "in").mkdir()
    built = build_index([f"{server.url}/{name}"], tmp_path / "in" / "x.index")
    monkeypatch.setenv("TWINFEED_ROOTS", server.url)
    opened = open_index(built.path)
    server.moved[f"/{name}"] = f"{at_https(secure)}/{name}"
    for index in (opened, pickle.loads(pickle.dumps(opened))):
        with pytest.raises(LoaderError, match="for the shards of an index, as root="):
            read_all(index)
    assert not verify(built.path).ok
    assert not secure.asked
    assert len(read_all(open_index(built.path, root=server.url))) == 10
    assert secure.asked


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("2002:a9fe:a9fe::", "link-local"),
        ("169.254.169.254", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("10.0.0.1", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "private"),
        ("0.0.0.0", "loopback"),
        ("::", "loopback"),
        ("127.1", "loopback"),
        ("2130706433", "loopback"),
        ("0x7f000001", "loopback"),
        ("[::1]", "loopback"),
        ("LOCALHOST.", "loopback"),
        ("a.localhost", "loopback"),
        ("0xa9fea9fe", "link-local"),
        ("localhost.example", "public"),
        ("fd00::1", "private"),
        ("localhost", "loopback"),
        ("8.8.8.8", "public"),
        ("2606:4700::1", "public"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("64:ff9b::808:808", "public"),
        ("64:ff9b:1::a00:1", "private"),
        ("::127.0.0.1", "loopback"),
        ("::ffff:0:10.0.0.1", "private"),
        ("2001:0:808:808::f5ff:fffe", "private"),
        ("2606:4700::5efe:10.0.0.1", "private"),
        ("2606:4700::200:5efe:127.0.0.1", "loopback"),
        ("fe80::5efe:10.0.0.1", "link-local"),
    ],
)
def test_address_kinds_are_classified(address: str, kind: str) -> None:
    assert _http_connections.network_of(address) == kind


def test_sizes_are_found_without_head(tmp_path: Path, server: RangeServer) -> None:
    """A server may forbid HEAD: nobody asks for it."""
    shards = tfrecords(tmp_path, shards=2)
    (tmp_path / "empty.tfrecord").touch()
    index = build_index(f"{server.url}/{{{','.join(one.name for one in shards)}}}", tmp_path / "x")
    assert len(read_all(index)) == 20
    assert not server.asked["HEAD"]
    assert open_store.store_of(Location.of(server.url)).stat(["empty.tfrecord"])[0].bytes == 0


@pytest.mark.parametrize(("asks", "pauses"), [("2", [2.0, 1.0]), ("99", [3.0]), ("soon", None)])
def test_retry_after_is_followed_within_patience(
    tmp_path: Path,
    server: RangeServer,
    asks: str,
    pauses: list[float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as it asks, and no longer than the patience."""
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
    damaged: Any = json.loads(whole)
    damaged["options"]["label"] = damaged["records"] = "x"
    del damaged["checksum"]
    damaged["checksum"] = json_digest(damaged)
    file.write_text(json.dumps(damaged))
    with pytest.raises(LoaderError) as caught:
        open_index(f"{server.url}/x.index")
    assert "twinfeed-" not in str(caught.value)


def test_quoted_names_round_trip() -> None:
    for name in ODD:
        assert unquoted(quoted(name)) == name


def test_file_system_that_changes_keys_or_ignores_ranges_is_refused(tmp_path: Path) -> None:
    """What fsspec takes a path for is compared with the key."""
    memory = fsspec.filesystem("memory")
    for name in ("a", "a#b", "a?b", "a%20b"):
        memory.pipe_file(f"/cut/{name}.tfrecord", shard(tmp_path, name))
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
