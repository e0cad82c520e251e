"""Redirects: followed from a URL that the user gave, and from no other."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.servers import RangeServer, at_https
from support.shards import read_images, tfrecords

from twinfeed.loaders import (
    LoaderError,
    build_index,
    open_index,
    verify,
)
from twinfeed.loaders.storage import _http_connections

pytestmark = pytest.mark.usefixtures("impatient")


def test_url_given_by_the_user_may_redirect_over_https(
    tmp_path: Path, server: RangeServer, secure: RangeServer
) -> None:
    """As Hugging Face and GitHub redirect to the hosts of their downloads."""
    name = tfrecords(tmp_path, shards=1)[0].name
    server.moved[f"/d/{name}"] = f"{at_https(secure)}/{name}?signature=S3CRET"
    index = build_index([f"{server.url}/d/{name}"], tmp_path / "x.index")
    assert len(read_images(index)) == 10
    assert secure.asked["GET"] >= 2
    assert index.root == f"{server.url}/d"
    secure.fail = lambda _path, _start: 403
    with pytest.raises(LoaderError) as caught:
        read_images(index)
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
            read_images(index)
    assert not verify(built.path).ok
    assert not secure.asked
    assert len(read_images(open_index(built.path, root=server.url))) == 10
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
