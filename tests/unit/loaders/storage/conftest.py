"""Servers and limits of the tests of URLs and HTTP."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import RangeServer, serving_securely

from twinfeed.loaders.storage import open_store


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try each request once, through stores of the test's own."""
    monkeypatch.setenv("TWINFEED_PATIENCE", "0")
    monkeypatch.setattr(open_store, "_stores", {})


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """A server of the test's folder over TLS."""
    with serving_securely(tmp_path, monkeypatch) as serving:
        yield serving


@pytest.fixture(scope="module")
def other_client(s3: str) -> Any:
    import boto3

    return boto3.resource("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


@pytest.fixture
def bucket(other_client: Any) -> Iterator[Any]:
    """The bucket, empty, by another client."""
    found = other_client.Bucket("bucket")
    found.objects.delete()
    yield found
    found.objects.delete()
