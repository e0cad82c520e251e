"""The targets of the fuzzer behind a URL: manifests, class orders, locations, the disk cache."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.fuzz.mutations import Corpus, change_index, read_some
from support.damage import mutated
from support.inside import expand
from support.servers import RangeServer

from twinfeed.loaders import DiskCache, LoaderError, Reader, build_index, open_index
from twinfeed.samplers import PKBatchSampler

FATES = (404, 403, "short", "whole", "reset")
SCHEMES = ("http", "s3", "memory", "file", "pipe", "x", "S3", "")
PIECES = r"""
    a.tar x.index a b / // . .. % %2e %2e%2e %2F %00 ? # ?a=b #1 * ** [ ] [ab] { } {a,b} {0..3}
    : ::
    @ user:word@ @host \\ \u202e \udcff é + ~ | & ;  \n \t \0 columns-0123456789abcdef
    manifest.json
"""

SECRET = "S3CRET"
SECRETS = ("user:{}@", "?sig={}", "?a=b c&X-Amz-Signature={}", "?X-Goog-Signature={}#1")


def server() -> RangeServer:
    """Return a server of the current folder. S3 leads there too, with credentials made up."""
    serving = _server()
    serving.folder = Path.cwd()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "made-up",
        "AWS_SECRET_ACCESS_KEY": "made-up",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": serving.url,
        "AWS_ALLOW_HTTP": "true",
        "TWINFEED_PATIENCE": "0.1",
    }
    return serving


@functools.cache
def _server() -> RangeServer:
    """Start a server."""
    serving = RangeServer(Path.cwd())
    threading.Thread(target=serving.serve_forever, args=(0.02,), daemon=True).start()
    return serving


def disk_cache() -> DiskCache:
    return DiskCache("cache", bytes=1 << 20)


def manifest_at_url(corpus: Corpus, draw: random.Random) -> None:
    """Open a mutated index at a URL, from a server that misbehaves at times."""
    corpus.restore()
    name = draw.choice(("x.index", "tar/data.index", "tfrecord/data.index"))
    change_index(Path(name), draw)
    fates = [draw.choice(FATES) if draw.random() < 0.1 else None for _ in range(64)]
    server().fail = lambda _path, _start: fates.pop() if fates else None
    try:
        read_some(
            open_index(f"{server().url}/{name}", cache=draw.choice((None, None, disk_cache())))
        )
    finally:
        server().fail = lambda _path, _start: None


def class_order(corpus: Corpus, draw: random.Random) -> None:
    """Draw batches by a mutated class order: no record lies beyond the index."""
    corpus.restore()
    change_index(Path("tar/data.index"), draw, "classorder-*")
    opened = open_index("tar/data.index")
    with contextlib.suppress(ValueError):  # documented: fewer classes or records than asked for
        order = opened.class_order
        if order is None:
            return
        for batch in PKBatchSampler(order, p=2, k=2, seed=1):
            assert set(batch) <= set(range(len(opened)))


def location(corpus: Corpus, draw: random.Random) -> None:
    """Read from a location that is made of pieces, or is mutated."""
    corpus.restore()
    pieces = [piece.encode().decode("unicode_escape") for piece in PIECES.split()]
    key = "".join(draw.choice(pieces) for _ in range(draw.randrange(5)))
    scheme = draw.choice(SCHEMES)
    host = server().url.removeprefix("http://") if scheme == "http" else "bkt"
    url = f"{scheme}://{host}/{key}" if scheme else key
    whole = draw.random() >= 0.2
    if not whole:
        url = mutated(url.encode("utf-8", "surrogatepass"), draw).decode("utf-8", "surrogateescape")
    if "://" in url and url.partition("://")[2].partition("/")[0] not in (host, "bkt"):
        return  # it would lead to another machine
    use: Any = draw.choice(
        (
            open_index,
            expand,
            lambda url: build_index([url], "y.index"),
            lambda url: read_some(open_index("x.index", root=url)),
            lambda url: build_index(["a.tar"], url, root="."),
        )
    )
    if scheme and whole and draw.random() < 0.2:
        secret = draw.choice(SECRETS).format(SECRET)
        url = url + secret if secret[0] == "?" else f"{scheme}://{secret}{host}/{key}"
    try:
        use(url)
    except (LoaderError, OSError, ValueError) as error:  # ValueError: patterns, names twice
        shown = [*traceback.format_exception(error), repr(error), str(vars(error))]
        assert SECRET not in "".join(shown)
    else:
        assert SECRET not in url
    assert not any(SECRET.encode() in file.read_bytes() for file in Path().glob("*.index/*.json"))


def cache(corpus: Corpus, draw: random.Random) -> None:
    """Read through a cache of which a file is mutated, or is no file: the bytes stay right."""
    corpus.restore()
    shutil.rmtree("cache", ignore_errors=True)
    index = open_index(f"{server().url}/tar/data.index", cache=disk_cache())
    with Reader(index) as reader:
        expected = reader.read(range(len(index)))
    for _ in range(draw.choice((1, 1, 3))):
        damage(draw.choice(sorted(Path("cache").rglob("*"))), draw)
    index = open_index(f"{server().url}/tar/data.index", cache=disk_cache())
    with Reader(index) as reader:
        assert reader.read(range(len(index))) == expected


def damage(path: Path, draw: random.Random) -> None:
    """Change the bytes of a file, or put something else in its place."""
    kind = draw.randrange(6)
    if kind < 3 and path.is_file() and not path.is_symlink():
        path.write_bytes(mutated(path.read_bytes(), draw))
        return
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if kind == 3:
        os.mkfifo(path)
    elif kind == 4:
        path.symlink_to(draw.choice(("/dev/zero", path.absolute(), "/")))
    elif kind == 5:
        path.mkdir()


TARGETS: dict[str, Callable[[Corpus, random.Random], None]] = {
    "url": manifest_at_url,
    "classes": class_order,
    "location": location,
    "cache": cache,
}
