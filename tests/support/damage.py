"""The corpus of damage: what is done to the bytes of a shard, an index or a part, and the error.

A shard is bytes, an index a folder that is changed with the right checksums, and a part an archive
whose entries are changed.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from support.formats import END, block, flip, member, pax, write_records, write_tar
from support.inside import (
    LIMITS,
    MANIFEST,
    VERSION,
    StringColumn,
    TarWriter,
    file_digest,
    json_digest,
    masked_crc32c,
)
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
ONE = member(b"1.txt", b"one")
LONG = member(b"././@LongLink", b"a.txt\0", b"L")
LINE = "malformed PAX record"


OTHERS = [
    ("zstd", b"\x28\xb5\x2f\xfd", (": zstd-compressed", "decompress the shard with zstd -d")),
    ("lz4", b"\x04\x22\x4d\x18", (": lz4-compressed", "decompress the shard with lz4 -d")),
    (".Z", b"\x1f\x9d\x90", (": compress-compressed", "decompress the shard with gzip -d")),
    (".lz", b"LZIP\x01", (": lzip-compressed", "decompress the shard with lzip -d")),
    (
        ".lzma",
        lzma.compress(b"shard", lzma.FORMAT_ALONE),
        (": lzma-compressed", "decompress the shard with xz -d"),
    ),
    (
        "ArrayRecord",
        bytes.fromhex("83af70d10d884a3f") + bytes(8) + b"\x40" + bytes(7),
        (": an ArrayRecord file", "ArrayRecordDataSource, which loaders.DatasetSource takes"),
    ),
    ("idx", b"\x00\x00\x08\x03" + b"\x00\x00\x00\x1c" * 3, ": an idx array, as of MNIST"),
]
"""How files begin that are no shards and that no library here writes."""


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
    yield Damage("HDF5", b"\x89HDF\r\n\x1a\n" + bytes(600), 0, ": an HDF5 file")
    for what, head, words in OTHERS:
        yield Damage(what, head + bytes(600), 0, words)
    for text in ("d-00000.tar\nd-00001.tar é\n", "x{}".format("é" * 300)):
        yield Damage("a text", text.encode(), 0, ": a text file")
    for kind, compress in COMPRESS.items():
        for data in (of_members(), of_records(*RECORDS * 10)):
            words = f"{kind}-compressed", "convert it with twinfeed pack SHARD FOLDER"
            yield Damage(kind, compress(data), 0, words)


def tfrecords() -> Iterator[Damage]:
    yield from foreign()
    shard = of_records(*RECORDS)
    yield Damage("length", flip(shard, 19 + 9), 19, "corrupted length at offset 19", 1)
    words = "corrupted data at offset 0", "expected: data CRC 0x"
    yield Damage("data", flip(shard, 12), 0, words, 0, (1, 2), bad=(0,))
    shard = of_records(b"zero", b"one", b"two", b"three")
    twice = flip(flip(shard, 20 + 12), len(shard) - 5)
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
    with TemporaryDirectory() as folder:
        data = write_tar(Path(folder, "a"), {"1.txt": b"one"}).read_bytes()
    words = ": a tar archive", "index it with container='tar'"
    yield Damage("a tar", data, 0, words, 0)


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
    huge = member(b"1.txt", b"one", size=(0x80 << 88 | 1 << 70).to_bytes(12, "big"))
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
    yield "checksum", ONE + flip(ONE, 3), 1024, "bad header checksum at offset 1024"
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
    for size in (b"\xff" * 12, b"\xff" * 11 + b"\x01", b"\xc0" + bytes(11)):
        for kind in (b"0", b"x", b"L", b"5"):
            yield "negative", member(b"1.txt", b"one", kind, size=size), 0, "negative size"
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
    one = pax({b"comment": b"x" * 100_000}, b"g")
    yield "global headers pile up", one * 11 + ONE, 11 * len(one), "global PAX headers"
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
            ("a damaged head", flip(first, 1), {}),
            ("a damaged body", flip(first, most // 2), {}),
            ("a damaged end", flip(first, most - 4), {}),
            ("garbage", b"garbage" * 9, {}),
            ("zeros", bytes(1024), {}),
            ("half a stream", first[: most // 2], cut),
            ("one byte", first[:1], cut),
        ):
            words = "cannot be decompressed", "restore the shard"
            yield Damage(f"{how}: {what}", first + after, most, words, **kind)
    packed = bz2.compress(plain)
    yield Damage("a cut stream", packed[:-200], 0, "", kind=TruncatedShardError)
    yield Damage("a damaged stream", flip(packed, 60), 0, "")
    tar = ONE + END
    yield Damage("no shard within", gzip.compress(b"no shard" * 200), 0, ", decompressed")
    cut = gzip.compress(tar[:600])
    yield Damage("a cut tar within", cut, 0, ", decompressed", kind=TruncatedShardError)
    yield Damage("more than a tar within", gzip.compress(tar + b"more"), 2048, ", decompressed")
    zstandard = b"\x28\xb5\x2f\xfd" + bytes(600)
    yield Damage("another kind", zstandard, None, "only gzip, bzip2, xz and zlib")


SHARDS: dict[str, Callable[[], Iterator[Damage]]] = {
    "tfrecord": tfrecords,
    "tar": tars,
    "compressed": compressed,
}


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of an index, with the right checksum."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    change(manifest)
    file.write_text(json.dumps(manifest | {"checksum": json_digest(manifest)}))


def with_array(folder: Path, name: str, array: np.ndarray[Any, Any]) -> None:
    """Put another array into an index, with the right checksums."""
    (file,) = folder.glob(f"columns-*/{name}.npy")
    np.save(file, array)
    entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    entry |= {"shape": list(array.shape), "dtype": np.lib.format.dtype_to_descr(array.dtype)}
    rewrite(folder, lambda manifest: manifest["arrays"].update({name: entry}))


def with_shard_names(folder: Path, *names: str) -> None:
    """Have an index name these shards, with the right checksums."""
    for array, values in StringColumn.of(names).arrays("shardpaths").items():
        with_array(folder, array, values)


def with_root(folder: Path, root: str) -> Path:
    """Have an index name this root, with the right checksum."""
    rewrite(folder, lambda manifest: manifest["options"].update(root=root))
    return folder


GONE = object()


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        if value is GONE:
            del manifest[path[-1]]
        else:
            manifest[path[-1]] = value

    return change


MANIFESTS: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("arrays", "shards"): ([], None, "x", 1, GONE),
    ("arrays", "shardlengths"): (GONE,),
    ("arrays", "shardsums"): (GONE,),
    ("arrays", "field-0"): (GONE,),
    ("arrays", "classes-text"): (GONE,),
    ("arrays", "keys-text"): (GONE,),
    ("arrays",): ([], None, "x", {"../x": {}}),
    ("arrays", "shards", "bytes"): (float("inf"), -1, 1 << 64, True, 1.5, "9", None, []),
    ("arrays", "shardsums", "shape"): ([3, 16], [-3, -32]),
    ("arrays", "shards", "shape"): (1, [], [-1], [1.0], [[1]], [1, 1, 1], "1", None),
    ("arrays", "shards", "dtype"): ([], None, "x", {}, [["bytes"]], "O", [[[]]]),
    ("arrays", "shards", "sha256"): ([], None, 0),
    ("records",): (float("inf"), -1, 1.0, None, [], "3", 1 << 63, 10**15, 29, GONE),
    ("columns",): ([[]], None, "label", [1], ["x", "x"], ["a", "b"]),
    ("fields",): ([[]], None, "x", {}, [None], [{}], [{"name": []}]),
    ("fields", 0, "name"): ([], None, 1),
    ("fields", 0, "kind"): ([], None, 1, "x", True),
    ("fields", 0, "missing"): ([], None, -1, float("inf")),
    ("class_order",): ([], 1, {}),
    ("digests",): ([], None, {"a": []}),
    ("fingerprint",): ([], None),
    ("folder",): ([], None, "columns-../../../../x", "/etc", "columns-0123456789abcdeF"),
    ("options",): ([], None, {}, {"root": None, "what": 1}, {"missing": "never"}),
    ("options", "root"): ([], 1, {}),
    ("container",): ([], None, "zip"),
}


ORDERS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "one more": lambda a: np.append(a, a[-1:]),
    "one less": lambda a: a[:-1],
    "none": lambda a: a[:0],
    "of floats": lambda a: a.astype(np.float64),
    "of unsigned": lambda a: a.astype(np.uint32),
    "of bytes": lambda a: a.astype("S4"),
    "of two dimensions": lambda a: np.stack([a, a]),
    "of one number": lambda a: a[0],
    "huge": lambda a: np.append(a[:-1].astype(np.int64), 1 << 62),
    "negative": lambda a: np.append(a[:-1], -1),
    "doubled": lambda a: np.append(a[:-1], a[0]),
    "shifted": lambda a: a + 1,
}

ARRAYS: dict[str, tuple[str, ...]] = {
    "array[:-1]": ("shardlengths", "classes-text", "shardpaths-text", "keys-ends", "field-0"),
    "array[1:]": ("column-0", "shardsums"),
    "np.stack([array, array], axis=1)": ("shards", "shardstops", "field-0", "keys-ends"),
    "array[0]": ("shards", "shardstops", "field-0", "keys-ends", "keys-text"),
    "array[['bytes']].copy()": ("shards",),
    "array[['offset', 'length']].copy()": ("field-0",),
    "array.astype('<f8')": ("shardstops",),
    "array.astype('<u2')": ("shardpaths-ends", "classes-ends"),
    "array.astype('<i4')": ("column-0",),
    "array - 1": ("shardstops",),
}


def archived(folder: Path) -> None:
    """Put an archive in place of an array: numpy.load would unpack much from a few bytes."""
    (file,) = folder.glob("columns-*/column-0.npy")
    with file.open("wb") as out:
        np.savez_compressed(out, np.zeros(1000))
    entry = {"bytes": file.stat().st_size, "sha256": file_digest(file)}
    rewrite(folder, lambda manifest: manifest["arrays"]["column-0"].update(entry))


def with_many_arrays(manifest: dict[str, Any]) -> None:
    entry = manifest["arrays"]["shards"]
    manifest["arrays"] |= {f"more-{n}": entry for n in range(LIMITS.arrays)}


def changed_indexes() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    """What is wrong, how an index is changed, a word of the error."""
    for path, values in MANIFESTS.items():
        for value in values:
            change = at(*path, value=value)
            what = f"{'.'.join(map(str, path))}={value!r:.20}"
            yield what, lambda folder, change=change: rewrite(folder, change), ""
    for name, how in product(("records", "starts", "sizes"), ORDERS):

        def reorder(folder: Path, name: str = f"classorder-{name}", how: str = how) -> None:
            with_array(folder, name, ORDERS[how](array_of(folder, name)))

        yield f"classorder-{name} {how}", reorder, ""
    for expression, names in ARRAYS.items():
        for name in names:

            def rearrange(folder: Path, name: str = name, expression: str = expression) -> None:
                found = eval(expression, {"np": np, "array": array_of(folder, name)})
                with_array(folder, name, found)

            yield f"{name}: {expression}", rearrange, "damaged index"
    objects = at("arrays", "shardsums", "dtype", value="|O")
    yield "objects", lambda folder: rewrite(folder, objects), "shardsums.npy cannot be read"
    yield "an archive", archived, "column-0.npy cannot be read"
    yield "many arrays", lambda folder: rewrite(folder, with_many_arrays), "bad arrays"
    newer = at("version", value=VERSION + 2)
    word = f"index version {VERSION + 2}, and this library reads version {VERSION}"
    yield "a newer version", lambda folder: rewrite(folder, newer), word
    for text, word in (("[]", "not an index"), ("[" * 200_000, "is not JSON")):
        yield text[:2], lambda folder, text=text: (folder / MANIFEST).write_text(text), word


INDEXES = {what: (change, word) for what, change, word in changed_indexes()}


def array_of(folder: Path, name: str) -> np.ndarray[Any, Any]:
    (file,) = folder.glob(f"columns-*/{name}.npy")
    return np.load(file)


PARTS = [
    ("0/rows-0.npy", b"(10,)", b"(99,)"),
    ("0/rows-0.npy", b"'<u4'", b"'|O' "),
    ("facts.json", b'"num_records": 10', b'"num_records": 11'),
    ("facts.json", b'"keys-text"', b'"keys-next"'),
    ("facts.json", b'"bytes", 29184, 1, 0', b'"bytes", 29184, 1, 1'),
    ("facts.json", b'"options": {', b'"options": {"nobody": 1, '),
]


def flipped(part: float, bit: int) -> Callable[[bytes], bytes]:
    """Return what flips a bit after this part of the bytes."""
    return lambda data: flip(data, int(part * len(data)), 1 << bit)


def stated(**values: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | values).encode()


def arrays_bomb(_: bytes) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **{str(n): np.zeros(1 << 20) for n in range(4)})
    return file.getvalue()


def weights(odd: bool) -> Callable[[bytes], bytes]:
    """Return what writes floats that numpy lacks, or a huge array. h5py comes with Keras."""

    def write(_: bytes) -> bytes:
        import h5py

        memory = io.BytesIO()
        with h5py.File(memory, "w") as file:
            if odd:
                floats = h5py.h5t.IEEE_F32LE.copy()
                floats.set_ebias(1 << 20)
                h5py.h5d.create(file.id, b"weights", floats, h5py.h5s.create(h5py.h5s.SCALAR))
            else:
                file.create_dataset("0", (1 << 20, 1 << 10), "f4", chunks=(1 << 10, 1))
        return memory.getvalue()

    return write


FILES = "state.json", "arrays.npz", "model.weights.h5", "checksums.json"
DRAW = random.Random(0)

# A file of a save of Keras, how it is changed, whether its checksum is right, a word of the error.
SAVES: list[tuple[str, Callable[[bytes], bytes], bool, str]] = [
    *(
        (name, flipped(DRAW.random(), DRAW.randrange(8)), False, "")
        for name in FILES
        for _ in range(40)
    ),
    *((name, lambda data: data[: len(data) // 2], False, "cannot be read") for name in FILES),
    *((name, lambda _: b"", False, "cannot be read") for name in FILES),
    *((name, lambda _: b"[]", False, "cannot be read") for name in FILES),
    ("state.json", stated(version=1), False, "is of version 1"),
    ("state.json", stated(weights=[["dense/kernel", 3]]), True, "must have a path and a shape"),
    ("state.json", stated(weights=1), True, "'weights' of its state is of type int"),
    ("state.json", stated(optimizer=True), True, "'optimizer' of its state is of type bool"),
    ("state.json", stated(random=None), True, "'random' of its state is of type NoneType"),
    ("state.json", stated(random=["no array"]), True, "another model"),
    (
        "state.json",
        lambda data: data.replace(b'"step": 0', b'"step": %d' % (1 << 62), 1),
        True,
        "must be below",
    ),
    ("arrays.npz", arrays_bomb, True, "claim more bytes than the file has"),
    ("model.weights.h5", weights(odd=False), True, "claim more bytes than the file has"),
    ("model.weights.h5", weights(odd=True), True, "another model"),
]
