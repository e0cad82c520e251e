"""The page that specifies the format has every byte of its example."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT
from support.inside import crc32c

from twinfeed.loaders import Index, open_index

PAGE = (ROOT / "docs" / "index-format.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """The index of the page's example."""
    subprocess.run([sys.executable, "-c", blocks("python")[0]], check=True, cwd=tmp_path)
    return open_index(tmp_path / "a.index")


def canonical(value: Any) -> bytes:
    """JSON as the page describes it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_every_array_has_bytes_of_page(index: Index) -> None:
    documented = dict(line.split(maxsplit=1) for line in blocks("text")[1].splitlines())
    files = {file.stem: file.read_bytes() for file in index.path.glob("columns-*/*.npy")}
    assert documented.keys() == files.keys()
    for name, data in files.items():
        header = 10 + int.from_bytes(data[8:10], "little")
        assert data[:8] == b"\x93NUMPY\x01\x00"
        assert data[header:] == bytes.fromhex(documented[name]), name


def test_manifest_equals_page(index: Index) -> None:
    (documented,) = blocks("json")
    manifest = json.loads((index.path / "manifest.json").read_text())
    assert documented.replace("\n", "").encode() == canonical(manifest)
    keys = re.findall(r"^\| (`[a-z_`, ]+`) \| ", PAGE.partition("## The manifest")[2], re.MULTILINE)
    assert set(re.findall("`([a-z_]+)`", "".join(keys))) == manifest.keys()
    arrays = re.findall(r"^\| (.*?) \| ", PAGE.partition("## Arrays")[2], re.MULTILINE)
    assert manifest["arrays"].keys() <= set(re.findall("`([a-z0-9-]+)`", "".join(arrays)))


def test_digests_follow_page(index: Index) -> None:
    manifest = json.loads((index.path / "manifest.json").read_text())
    assert manifest.pop("checksum") == sha(canonical(manifest)) == index.digest
    assert manifest["folder"] == f"columns-{sha(canonical(manifest['arrays']))[:16]}"
    for name, entry in manifest["arrays"].items():
        data = (index.path / manifest["folder"] / f"{name}.npy").read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), sha(data))
    crcs = np.array([crc32c(b"to"), -1], "<i8")
    assert manifest["digests"]["txt"] == sha(b"crc32c [2]\n" + crcs.tobytes())
    labels = np.array([0, 1], "<i8").tobytes()
    assert manifest["digests"]["label"] == sha(b"<i8 [2]\n" + labels)
    content = hashlib.blake2b(labels, digest_size=16).hexdigest()
    assert manifest["class_order"] == f"2 values {content}"
    facts = {k: v for k, v in manifest.items() if k not in ("folder", "options", "fingerprint")}
    assert manifest["fingerprint"] == sha(canonical(facts))


def test_checksum_of_headers_follows_page(index: Index) -> None:
    shard = (index.path.parent / "a.tar").read_bytes()
    assert shard[512:514] == b"to"
    assert shard[1536:1539] == b"cat"
    one = shard[:512] + crc(b"to") + shard[1024:1536] + crc(b"cat")
    two = shard[2048:2560] + crc(b"dog")
    found = crc32c(bytes(4) + one)
    found = crc32c(found.to_bytes(4, "little") + two)
    assert index.shards["headers"].tolist() == [found]


def crc(data: bytes) -> bytes:
    return crc32c(data).to_bytes(4, "little")
