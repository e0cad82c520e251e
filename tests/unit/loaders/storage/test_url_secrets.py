"""Secrets in URLs are refused and masked, and credentials stay here."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.damage import with_root
from support.servers import RangeServer
from support.shards import read_images, tars, tfrecords

from twinfeed.loaders import (
    LoaderError,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.loaders.command_line import main
from twinfeed.loaders.storage.url import Location

pytestmark = pytest.mark.usefixtures("impatient")


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
        lambda: open_index(with_root(index.path, url)),
    ]
    for call in calls:
        with pytest.raises((LoaderError, ValueError)) as caught:
            call()
        shown = f"{caught.value}{caught.value!r}{vars(caught.value)}"
        assert SECRET not in shown
        if isinstance(caught.value, LoaderError):
            assert "credentials belong in the environment" in shown
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
    assert len(read_images(index)) == 20
    assert server.carried == {"host", "accept-encoding", "user-agent", "range"}
