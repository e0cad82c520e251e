"""The corpus of damaged shards: the bytes of each, and the error that they are to raise."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from support.formats import END, block, flipped, member, pax, write_records
from support.inside import LIMITS, TarWriter, masked_crc32c
from support.shards import write_tfrecord
from twinfeed.loaders import DataCorruptionError, TruncatedShardError


class Damage(NamedTuple):
    """Bytes in place of a shard, and the error that names `offset` and holds `words`.

    `beside` has the numbers of the records that are read where bad records are left out, and `bad`
    those of the bad ones. None: the scan ends with the error. `record` is None if any number will
    do.
    """

    what: str
    data: bytes
    offset: int | None
    words: str | tuple[str, ...]
    record: int | None = None
    beside: tuple[int, ...] | None = None
    kind: type[DataCorruptionError] = DataCorruptionError
    options: dict[str, Any] = {}  # noqa: RUF012
    bad: tuple[int, ...] = ()


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zlib": zlib.compress,
}
RECORDS = (b"one", b"", b"three" * 5)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
HTML = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head>" + b" " * 500
XML = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchKey</Code></Error>'
ZSTD = b"\x28\xb5\x2f\xfd" + bytes(600)
ONE = member(b"1.txt", b"one")
LONG = member(b"././@LongLink", b"a.txt\0", b"L")
LINE = "malformed PAX record"


def of_records(*records: bytes) -> bytes:
    """The bytes of a TFRecord file."""
    with TemporaryDirectory() as folder:
        return write_records(Path(folder, "a"), *records)


def of_members() -> bytes:
    """A small archive: two samples, three members, one name in a PAX header."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.tar")
        with TarWriter(path) as writer:
            writer.write("1", {"txt": b"one", "cls": b"7"})
            writer.write("n" * 120, {"txt": b"x" * 600})
        return path.read_bytes()


def foreign() -> Iterator[Damage]:
    """What is no shard of any kind."""
    from PIL import Image

    for data, word in ((LFS, "git lfs pull"), (HTML, "HTML page"), (XML, "XML page")):
        yield Damage("a pointer or an error page", data, 0, word)
    for kind in ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF"):
        Image.new("RGB", (64, 64)).save(file := io.BytesIO(), kind)
        words = f": a {kind} image", "loose images are indexed as they are: give the folder"
        yield Damage(kind, file.getvalue(), 0, words)
    yield Damage("Parquet", b"PAR1" + bytes(600), 0, ": a Parquet file")
    words = ": zstd-compressed", "decompress the shard with zstd -d"
    yield Damage("zstd", ZSTD, 0, words)
    for text in ("d-00000.tar\nd-00001.tar é\n", "x{}".format("é" * 300)):
        yield Damage("a text", text.encode(), 0, ": a text file")
    for kind, compress in COMPRESS.items():
        for data in (of_members(), of_records(*RECORDS * 10)):
            words = f"{kind}-compressed", "convert it with twinfeed pack SHARD FOLDER"
            yield Damage(kind, compress(data), 0, words)


def tfrecords() -> Iterator[Damage]:
    yield from foreign()
    shard = of_records(*RECORDS)
    yield Damage("length", flipped(shard, 19 + 9), 19, "corrupted length at offset 19", 1)
    words = "corrupted data at offset 0", "expected: data CRC 0x"
    yield Damage("data", flipped(shard, 12), 0, words, 0, (1, 2), bad=(0,))
    shard = of_records(b"zero", b"one", b"two", b"three")
    twice = flipped(flipped(shard, 20 + 12), len(shard) - 5)
    words = "corrupted data at offset 20"
    yield Damage("data of two", twice, 20, words, 1, (0, 2), bad=(1, 3))
    message = of_records(b"", b"\x0a\x7f", b"")
    examples: dict[str, Any] = {"example": True}
    words = "not a valid tf.train.Example"
    yield Damage("message", message, 28, words, 1, (0, 2), options=examples, bad=(1,))
    for length in (1 << 30, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
        head = struct.pack("<Q", length)
        data = head + struct.pack("<I", masked_crc32c(head)) + bytes(100)
        most = {"max_record_bytes": 1 << 61}
        kind = TruncatedShardError if length < 1 << 61 else DataCorruptionError
        yield Damage("absurd", data, 0, "", 0, None, kind, most)
        most = {"max_record_bytes": 1000}
        yield Damage("absurd", data, 0, "max_record_bytes=1000", 0, options=most)
    rng = random.Random(0)
    many = bytearray(of_records(*[rng.randbytes(100) for _ in range(200)]))
    for record in range(200):
        many[record * 116 + 12 + rng.randrange(100)] ^= 1
    every = tuple(range(200))
    yield Damage("every record", bytes(many), 0, "corrupted data", 0, (), bad=every)
    words = ": a tar archive", "index it with container='tar'"
    yield Damage("a tar", ONE + END, 0, words, 0)


def tars() -> Iterator[Damage]:
    yield from foreign()
    words = ": a TFRecord file", "index it with container='tfrecord'"
    yield Damage("a TFRecord file", of_records(*RECORDS), 0, words)
    for what, data, offset, word in damaged_members():
        cut = "ends within" in word or what.startswith("no ")
        kind = TruncatedShardError if cut else DataCorruptionError
        beside = {"link": (0,), "name": (0,), "key in two places": (0, 1)}.get(what)
        end = b"" if "cut" in what or what.startswith("no ") else END
        bad = () if beside is None else (len(beside),)
        yield Damage(what, data + end, offset, word, None, beside, kind, bad=bad)
    twice = member(b"1.jpg", b"one") + member(b"1.JPG", b"two")
    words = "field 'jpg' twice in one sample: offsets 512 and 1536", "key: 1"
    yield Damage("an extension twice", twice + END, 1024, words, 0, (), bad=(0,))
    apart = (member(b"1.jpg", b"") + member(b"2.a", b"")) * 2
    join: dict[str, Any] = {"join": True}
    words = "'jpg' twice"
    yield Damage(
        "an extension twice, joined", apart + END, 1024, words, 0, (), options=join, bad=(0, 1)
    )
    names = (b"0.txt", b"1.txt", b"1.TXT", b"2.txt", b"0.cls", b"4.txt")
    data = b"".join(member(name, b"data") for name in names)
    yield Damage("two samples", data + END, 2048, "'txt' twice", 1, (0, 2, 4), bad=(1, 3))
    far = pax({b"linkpath": b"far/away"}) + member(b"1.txt", b"", b"2", link=b"near")
    yield Damage("a PAX link", far + END, 0, "link to 'far/away'", 0, (), bad=(0,))
    huge = member(b"1.txt", b"one", size=8**11 - 1)
    yield Damage("a huge size", huge + END, 0, "", kind=TruncatedShardError)
    name = b"a/" * 3000 + b"1.txt"
    words = f"name longer than {LIMITS.name_bytes} bytes", f"found: {len(name)} bytes"
    yield Damage("a long name", pax({b"path": name}) + member(b"x", b"one") + END, 7168, words)
    for after in (bytes(5000) + b"junk", b"x"):
        zeros = len(after) - len(after.lstrip(b"\0"))
        yield Damage("something after the end", ONE + END + after, 2048 + zeros, "")
    long = member(b"1.txt", b"x" * 600) + member(b"1.cls", b"x" * 600)
    most = {"max_record_bytes": 1199}
    yield Damage(
        "a long sample", long + END, 0, "max_record_bytes=1199", 0, (), options=most, bad=(0,)
    )


def damaged_members() -> Iterator[tuple[str, bytes, int, str]]:
    """Yield (what is wrong, the archive, the offset of the error, a word of its message)."""
    yield "cut in a member", ONE + block(b"2.txt", 10) + b"12345", 1024, "ends within member"
    yield "cut in the padding", ONE[:-1], 0, "ends within member"
    yield "cut in an extended header", pax({b"path": b"b"})[:600], 512, "ends within an extended"
    for end in (END, b"", bytes(100)):
        yield "no member after a header", pax({b"path": b"b"}) + end, 1024, "no member after it"
    yield "checksum", ONE + flipped(ONE, 3), 1024, "bad header checksum at offset 1024"
    for text in (b"0 path=x\n", b"path=x\n", b"5 x=\njunk", b"9 path=x", b"99999 path=x\n"):
        yield "pax", member(b"pax", text, b"x") + ONE, 1024, LINE
    for text in (b"10 path=xy\n", b"9" * 22 + b" path=x\n", b"-10 path=x\n", b"7 path\n"):
        yield "pax", member(b"pax", text, b"x") + ONE, 1024, LINE
    for text in (b"6 =x\n\n", b"5\n", bytes(20), b"5 a=\n" + bytes(10)):
        yield "pax", member(b"pax", text, b"x") + ONE, 1024, LINE
    for kind in (b"x", b"g", b"L", b"K"):
        yield "empty header", block(b"long", 0, kind) + ONE, 512, "extended header at offset 0"
    for digits in (b"-1", b"1e3", b"0x10", b" 3", b"9" * 30, b"1_0", "٣".encode()):
        yield "pax size", pax({b"size": digits}) + ONE, 1536, "PAX size that is not a number"
    names = [pax({b"path": name}) for name in (b"b.txt", b"c.txt")]
    yield "PAX and GNU names", names[0] + LONG + ONE, 2560, "names differ"
    yield "two GNU names", LONG + LONG + ONE, 2048, "two GNU long names"
    yield "two PAX headers", names[0] + names[1] + ONE, 2048, "two PAX headers"
    for size in (b"\xff" * 12, b"\xc0" + bytes(11), b"\x80" + bytes(10) + b"\x03"):
        for kind in (b"0", b"x", b"L", b"5"):
            yield "binary", member(b"1.txt", b"one", kind, size=size), 0, "tar --format=pax"
    for size in (
        b"-0000000012 ",
        b"-1" + bytes(10),
        b"0000000000x\0",
        b"0o7" + bytes(9),
        b"9" * 12,
        b"\0" + b"0000000003\0",
        bytes(9) + b"3 \0",
    ):
        for kind in (b"0", b"x", b"L", b"5"):
            yield "octal", member(b"1.txt", b"one", kind, size=size), 0, "not an octal number"
    one = pax({b"comment": b"x"}, b"g")
    yield "small headers pile up", one * 4000 + ONE, len(one) * 2048 + 1024, "headers of more than"
    for kind in (b"1", b"2"):
        link = block(b"3.txt", 0, kind, link=b"1.txt")
        yield "link", ONE + link, 1024, "field 'txt' is a link to '1.txt', not a file"
    for name in (b"a\nb.txt", b"a.t\nxt", b"a\0b.txt", b"\xff.txt", b"a.t\xffxt"):
        yield (
            "name",
            ONE + pax({b"path": name}) + ONE,
            1024,
            "contains NUL, a newline or invalid",
        )
    bare = member(b"__meta__", b"") + member(b"a/0001", b"one") + member(b"a/0002", b"two")
    yield "names", bare, 512, "no file of the archive is called KEY.EXTENSION, such as b'a/0"
    apart = ONE + member(b"2.jpg", b"two") + member(b"1.cls", b"1")
    yield "key in two places", apart, 2048, "key '1' occurs again, first at offset 0"
    yield "joined", ONE + END + member(b"2.txt", b""), 2048, "more data begin at offset 2048"
    yield "joined and cut", ONE + END + ONE[:600], 2048, "more data begin at offset 2048"
    yield "overwritten by zeros", ONE + bytes(1024) + ONE, 2048, "more data begin at offset 2048"


def compressed() -> Iterator[Damage]:
    rows = [{"label": n, "image": random.Random(n).randbytes(50)} for n in range(20)]
    with TemporaryDirectory() as folder:
        plain = write_tfrecord(Path(folder, "a"), rows).read_bytes()
    for how, compress in COMPRESS.items():
        first = compress(plain)
        cut, most = {"kind": TruncatedShardError}, len(first)
        for what, after, kind in (
            ("a damaged head", flipped(first, 1), {}),
            ("a damaged body", flipped(first, most // 2), {}),
            ("a damaged end", flipped(first, most - 4), {}),
            ("garbage", b"garbage" * 9, {}),
            ("half a stream", first[: most // 2], cut),
            ("one byte", first[:1], cut),
        ):
            words = "cannot be decompressed", "restore the shard"
            yield Damage(f"{how}: {what}", first + after, most, words, **kind)
    packed = bz2.compress(plain)
    yield Damage("a cut stream", packed[:-200], 0, "", kind=TruncatedShardError)
    yield Damage("a damaged stream", flipped(packed, 60), 0, "")
    tar = ONE + END
    yield Damage("no shard within", gzip.compress(b"no shard" * 200), 0, ", decompressed")
    cut = gzip.compress(tar[:600])
    yield Damage("a cut tar within", cut, 0, ", decompressed", kind=TruncatedShardError)
    yield Damage("more than a tar within", gzip.compress(tar + b"more"), 2048, ", decompressed")
    yield Damage("another kind", ZSTD, 0, "decompress the shard with zstd -d")


SHARDS: dict[str, Callable[[], Iterator[Damage]]] = {
    "tfrecord": tfrecords,
    "tar": tars,
    "compressed": compressed,
}
