"""A web server at https, whose certificate this machine trusts."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.inside import _http_connections
from support.servers import RangeServer


@contextmanager
def serving_securely(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """Serve the files of a folder as localhost. SSL_CERT_FILE names the certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + private)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    _http_connections.tls_context.cache_clear()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with RangeServer(folder) as serving:
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        yield serving
    _http_connections.tls_context.cache_clear()


def at_https(server: RangeServer) -> str:
    return f"https://localhost:{server.server_address[1]}"
