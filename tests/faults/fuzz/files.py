"""The targets of the fuzzer that are files: changed shards, images, side tables, parts."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from faults.fuzz.mutations import Corpus, must_name
from support.damage import mutated, with_entry
from support.inside import IMAGES as FORMATS
from support.inside import encode

from twinfeed import TarWriter, TFRecordWriter
from twinfeed.loaders import (
    DecodeImage,
    Feed,
    FromExample,
    FromTable,
    Index,
    LoaderError,
    NumpyLoader,
    Ragged,
    Reader,
    Results,
    SideTable,
    build_index,
    open_index,
    pack,
)
from twinfeed.samplers import BatchSampler, SequentialSampler

IMAGES = ("c/1.png", "c/2.jpg", "d/3.bmp")
TEXTS = [
    *"0123abcd",
    "7",
    "007",
    "7.0",
    "7.",
    "10",
    "-1",
    "-0",
    "7,",
    "\ufeff7",
    "\u0663",
    "1e3",
    "+7",
]
TEXTS += ["9" * 18, "9" * 19, str(2**63 - 1), str(-(2**63)), f"{2**53}.0", "0" * 5000 + "7"]


def changed(corpus: Corpus, draw: random.Random) -> None:
    """Read an index of which a file has changed: the old bytes, or an error that names the file."""
    corpus.restore()
    name = draw.choice(("x.index", "tar/data.index", "tfrecord/data.index", "y.index"))
    if name == "y.index":
        build_index("images", name)
    opened = open_index(name)
    wanted = values(opened)
    shard = Path(draw.choice(opened.shard_paths.tolist()))
    path = Path(opened.root) / shard
    before = path.read_bytes()
    data = mutated(before, draw)
    if draw.random() < 0.7:  # of the old size, and with the old time
        data = data[: len(before)].ljust(len(before), b"\0")
    with contextlib.ExitStack() as stack:
        early = stack.enter_context(Reader(opened)) if draw.random() < 0.5 else None
        path.write_bytes(data)
        reader = early or stack.enter_context(Reader(open_index(name)))
        for record in range(len(opened)):
            try:
                found = reader.read([record])
            except LoaderError as error:
                must_name(error, path.name)
            else:
                assert [column[0] for column in found.values()] == wanted[record]


def labels(_: Corpus, draw: random.Random) -> None:
    """Take texts as labels: from everywhere the same numbers or names, or an error with one."""
    texts = [draw.choice(TEXTS) for _ in range(draw.randrange(1, 7))]
    texts = [*(str(draw.randrange(99)) for _ in range(draw.randrange(5))), *texts]
    texts *= draw.choice((1, 1, 20))  # many records are scanned in chunks
    some = tuple(sorted({*draw.sample(texts, draw.randrange(len(texts)))}))
    classes: Any = draw.choice((None, None, "names", (), some, tuple(sorted({*texts}))))
    with TarWriter("m.tar") as writer:
        for n, text in enumerate(texts):
            writer.write(str(n), {"cls": text.encode(), "json": json.dumps([text]).encode()})
    with TFRecordWriter("m.tfrecord") as records:
        for text in texts:
            records.write(encode({"x": text}))
    Path("m.csv").write_text(
        "key,label\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(texts))
    )
    calls: list[Callable[[], Index]] = [
        lambda: build_index("m.tar", "m.index", label="cls", classes=classes),
        lambda: build_index("m.tar", "m.index", label=from_json, classes=classes),
        lambda: build_index("m.tar", "m.index", label=FromTable("m.csv"), classes=classes),
        lambda: build_index("m.tfrecord", "m.index", label="x", classes=classes),
        lambda: build_index(
            "m.tfrecord", "m.index", label=FromExample("x"), example=False, classes=classes
        ),
    ]
    if classes is None:
        samples = [{"x": b"1", "label": text} for text in texts]
        shutil.rmtree("m", ignore_errors=True)
        calls.append(lambda: pack(samples, "m")["data"])
    outcomes = [label_outcome(call, texts) for call in calls]
    assert outcomes == outcomes[:1] * len(outcomes), outcomes


def label_outcome(call: Callable[[], Index], texts: list[str]) -> Any:
    """Return the labels and classes of an index: the texts, as numbers or by name; or "refused"."""
    try:
        index = call()
    except ValueError as error:
        return "refused" if any(repr(text) in str(error) for text in texts) else str(error)
    numbers = index.labels.tolist()
    if [index.classes[n] for n in numbers if -1 < n < len(index.classes)] != texts:
        assert numbers == [int(Decimal(text)) for text in texts]
        plain = {text.partition(".")[0] for text in texts}
        assert len({*numbers}) == len(plain), "two texts of one number"
    return numbers, index.classes


def from_json(sample: dict[str, Any]) -> str:
    """Return the label of a sample."""
    return str(json.loads(sample["json"])[0])


def values(index: Index) -> list[list[Any]]:
    """Return the bytes of every record."""
    with Reader(index) as reader:
        return [[column[0] for column in reader.read([n]).values()] for n in range(len(index))]


def image(corpus: Corpus, draw: random.Random) -> None:
    """Decode a mutated image: pixels, or an error that names its record."""
    corpus.restore()
    name = draw.choice(IMAGES)
    for one in IMAGES:
        path = Path("images", one)
        path.parent.mkdir(exist_ok=True)
        data = picture(path.suffix)
        path.write_bytes(mutated(data, draw) if one == name else data)
    index = build_index("images", "y.index")
    sampler = BatchSampler(SequentialSampler(len(index)), batch_size=3)
    try:
        next(iter(NumpyLoader(Feed(index, sampler, decode=DecodeImage(size=(4, 4))))))
    except LoaderError as error:
        must_name(error, Path(name).stem)


def pixels(_: Corpus, draw: random.Random) -> None:
    """Decode an image of any mode of Pillow in any format: its pixels, or a refusal."""
    from PIL import Image

    size = draw.randrange(1, 9), draw.randrange(1, 9)
    data = draw.randbytes(size[0] * size[1] * 4)
    image = Image.frombytes("RGBA", size, data)
    if draw.random() < 0.5:
        image = Image.frombytes("I;16", size, data[: len(data) // 2])
    out, options = io.BytesIO(), {"mode": draw.choice(("RGB", "L"))}
    exif = Image.Exif()
    exif[274] = draw.randrange(10)
    try:
        if image.mode == "RGBA":
            image = image.convert(draw.choice(Image.MODES))
        image.save(out, draw.choice(tuple(FORMATS)), exif=exif)
    except (OSError, ValueError, KeyError):  # no such image
        return
    if draw.random() < 0.5:
        options |= {"dtype": "native"}
    if draw.random() < 0.3:
        options |= {"background": (9, 9, 9)}
    if draw.random() < 0.3:
        options |= {"apply_exif_orientation": True, "size": (3, 5)}
    try:
        array = DecodeImage(**options)({"image": out.getvalue()})["image"]
    except ValueError:  # documented
        return
    opened = Image.open(out)
    wide = opened.mode[0] in "IF"
    assert array.ndim == (3 if options["mode"] == "RGB" else 2)
    assert (array.dtype != np.uint8) == (wide and "dtype" in options), (opened.mode, array.dtype)
    if wide and "size" not in options and opened.format != "TIFF":
        theirs = np.asarray(opened)
        mine = array if array.ndim == 2 else array[..., 1]
        assert np.array_equal(mine, theirs if "dtype" in options else theirs >> 8)


def picture(suffix: str) -> bytes:
    """Return an image of 4 times 4 pixels."""
    from PIL import Image

    out = io.BytesIO()
    kind = {".jpg": "JPEG"}.get(suffix, suffix[1:].upper())
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(out, kind)
    return out.getvalue()


def side(_: Corpus, draw: random.Random) -> None:
    """Read a mutated side table."""
    kind = draw.choice(("u1", "<f4", ">i8", "<c16", "bool", "<U3", "M8[s]"))
    table = np.zeros(draw.choice(((7,), (7, 3), (0, 2), ())), kind)
    out = io.BytesIO()
    np.save(out, np.asfortranarray(table) if draw.random() < 0.2 else table)
    Path("side.npy").write_bytes(mutated(out.getvalue(), draw))
    try:
        opened = SideTable("side.npy")
        opened[np.arange(min(len(opened), 7))]
    except LoaderError as error:
        must_name(error, "side.npy")


def damage_zip(file: Path, draw: random.Random) -> None:
    """Mutate a zip, or a member of it with the right CRC."""
    if draw.random() < 0.5:
        file.write_bytes(mutated(file.read_bytes(), draw))
        return
    with zipfile.ZipFile(file) as archive:
        name = draw.choice(sorted(archive.namelist()))
    with_entry(file, name, lambda data: mutated(data, draw))


def collected(_: Corpus, draw: random.Random) -> None:
    """Load mutated results."""
    feed = Feed(open_index("x.index"), BatchSampler(SequentialSampler(3), batch_size=1))
    results = Results(feed)
    boxes = Ragged(np.ones([4, 4]), np.array([0, 1, 3]))
    results.add(np.arange(3), box=boxes, point=np.ones([3, 2]), name=np.array(list("abc")))
    results.save("rank.npz")
    damage_zip(Path("rank.npz"), draw)
    with contextlib.suppress(ValueError):  # documented: results that do not fit together
        try:
            Results.load(["rank.npz"]).gather()
        except LoaderError as error:
            must_name(error, "rank.npz", " records ")


NUMBERS = (0, 1, -1, 2**31, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, -(2**63), 2**64)
VALUES = (*NUMBERS, 0.5, -0.0, np.nan, np.inf, True, "", "a", "é\0", b"", b"a\0", b"\xff", None, 1j)
DTYPES = ("i1", "u1", "i4", "i8", "u8", "f2", "f4", "f8", "?", "c8", "U3", "S3", "M8[s]", "m8[s]")


def results(_: Corpus, draw: random.Random) -> None:
    """Add results of all kinds in batches of several ranks: they come back as they are, or none."""
    ranks = [Results(6) for _ in range(draw.randrange(1, 4))]
    kinds = [draw.randrange(5) for _ in range(draw.choice((1, 1, 2)))]
    dtypes, wanted = draw.choices(DTYPES, k=draw.choice((1, 1, 2))), list[Any]()
    with contextlib.suppress(OverflowError, TypeError, ValueError):  # documented, or numpy's own
        while len(wanted) < 6:
            count = draw.randrange(1, 7 - len(wanted))
            rows = batch_of(draw, count, draw.choice(kinds), draw.choice(dtypes))
            values = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
            ids = np.arange(len(wanted), len(wanted) + count)
            if isinstance(rows, np.ndarray) or draw.random() < 0.8 or np.ndim(rows[0]) == 0:
                value = rows
            else:
                value = Ragged(np.concatenate(rows), np.array([len(row) for row in rows]))
            draw.choice(ranks).add(ids, x=value)
            wanted += values
        parts = [rank.part() for rank in ranks]
        found = ranks[0].gather(lambda _: parts)["x"]
        if isinstance(found, Ragged):
            found = np.split(found.values, np.cumsum(found.lengths)[:-1])
        for row, value in zip(found, wanted, strict=True):
            old, new = np.array(value, object).ravel(), np.array(row.tolist(), object).ravel()
            assert len(old) == len(new), (value, row)
            for a, b in zip(old, new, strict=True):
                assert a == b or (a != a and b != b), (value, row)


def batch_of(draw: random.Random, count: int, kind: int, dtype: str) -> Any:
    """Return rows of results: Python's own, an array, a masked array, or arrays of any length."""
    if kind == 0:
        return [draw.choice(VALUES) for _ in range(count)]
    numbers = [draw.choice(NUMBERS[:3]) for _ in range(count)]
    if kind == 1:
        return np.array([draw.choice(VALUES) for _ in range(count)], dtype)
    if kind == 2:
        return np.array(numbers).astype(dtype)
    if kind == 3 and draw.random() < 0.1:
        return [np.ma.array(numbers, mask=[1] * count)] * count
    tail = draw.choice(((), (), (2,), (0,)))
    return [
        np.array(numbers[0]).astype(dtype) * np.ones((draw.randrange(3), *tail), dtype)
        if dtype[0] not in "USMm"
        else np.full(draw.randrange(3), numbers[0]).astype(dtype)
        for _ in range(count)
    ]


TARGETS: dict[str, Callable[[Corpus, random.Random], None]] = {
    "changed": changed,
    "image": image,
    "labels": labels,
    "pixels": pixels,
    "side": side,
    "collect": collected,
    "results": results,
}
