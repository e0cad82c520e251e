"""Mutate every kind of input, and see that nothing but the library's own errors comes of it.

    PYTHONPATH=tests python tests/faults/fuzz/fuzz.py --seconds 60
    PYTHONPATH=tests python tests/faults/fuzz/fuzz.py --case tar:1234

A case is a target and a number, and always the same mutation. What a run finds is printed as such a
case. `FOUND` keeps the cases that once failed; test_fuzz.py runs them again.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import io
import json
import lzma
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faults.fuzz.buffers import buffer
from faults.fuzz.files import TARGETS as FILES
from faults.fuzz.mutations import Corpus, change_index, read_some
from faults.fuzz.stores import TARGETS as STORES
from faults.fuzz.tables import by_key, column
from support.damage import change, mutated
from support.foreign import FOREIGN, word
from support.inside import MANIFEST, decompressed_samples, encode, tar, tfrecord
from support.inside import main as command_line

from twinfeed.loaders import (
    DecodeExample,
    Index,
    LoaderError,
    Reader,
    build_index,
    open_index,
    pack,
    verify,
)
from twinfeed.samplers import BatchSampler, ExactOnceBatchSampler, PKBatchSampler, RandomSampler

FOUND = ["buffer:123", "classes:502866", "collect:880763", "location:41", "url:5058", "url:9077"]
FOUND += [f"index:{number}" for number in (4, 21, 31, 46, 58, 79, 351, 401, 433)]

DOCUMENTED = (LoaderError, OSError)
SECONDS = 20
MEMORY = 4 << 30
TEXT = """
    pack index verify info cat images a.tar a.tfrecord x.index y.index out bad.jsonl
    --out --label --label-json --label-folder --label-table --classes --background
    --field --key --list --missing --exclude --container --join --raw --max-record-bytes
    --root --split --seed --shards --shard-bytes --shard-records --bad-list
    -q 0 1 -1 7 1e9 1k tar tfrecord files skip empty cls image label a=1 a=0.5
    labels.csv classes.txt a{0..9}.tar {a,b}.tar *.tar ** [ json:a.b x=a;b . \u202e \x1b[2J
"""
WORDS = (*TEXT.split(), "")


def shard(corpus: Corpus, name: str, draw: random.Random) -> None:
    """Scan a mutated shard, its checksums right half of the time."""
    data = corpus.shards[name]
    if name == "tar" and draw.random() < 0.7:
        data = tar_with_field(data, draw)
    elif name == "tfrecord" and draw.random() < 0.7:
        data = framed(mutated(first_record(data), draw))
    else:
        data = mutated(data, draw)
    path = f"m.{name}"
    Path(path).write_bytes(data)
    scan: Any = tar.scan if name == "tar" else tfrecord.scan
    errors: list[Exception] = []
    for record in scan(path, max_record_bytes=1 << 20, on_bad=errors.append):
        assert record.offset >= 0
        assert record.offset + record.length <= len(data)
    if draw.random() < 0.05:
        label = "cls" if name == "tar" else None
        with contextlib.suppress(ValueError):  # documented: no records, labels that do not fit
            with Reader(build_index(path, "m.index", label=label)) as reader:
                reader.read(range(len(reader.index)))
            assert verify("m.index").ok


def tar_with_field(data: bytes, draw: random.Random) -> bytes:
    """Return a tar of which a header has a mutated field and the right checksum."""
    out = bytearray(data)
    start = draw.randrange(max(len(out) // 512, 1)) * 512
    header = bytearray(out[start : start + 512])
    begin, stop = draw.choice(
        ((0, 100), (100, 124), (124, 136), (156, 157), (157, 257), (345, 500))
    )
    header[begin:stop] = mutated(bytes(header[begin:stop]), draw)[: stop - begin].ljust(
        stop - begin, b"\0"
    )
    if draw.random() < 0.3:
        header[156:157] = draw.choice((b"x", b"g", b"L", b"K", b"S", b"1", b"2", b"5", b"D"))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    out[start : start + 512] = header
    if draw.random() < 0.5:
        text = mutated(b"30 mtime=1.5\n27 path=k\n19 size=9\n", draw)
        out[start + 512 : start + 512 + len(text)] = text
    return bytes(out)


def first_record(data: bytes) -> bytes:
    """Return the bytes of the first record of a TFRecord file."""
    return data[12 : 12 + int.from_bytes(data[:8], "little")]


def framed(data: bytes) -> bytes:
    """Return a record as a TFRecord file has it."""
    head = len(data).to_bytes(8, "little")
    checksums = (tfrecord.masked_crc32c(part).to_bytes(4, "little") for part in (head, data))
    return head + next(checksums) + data + next(checksums)


def compressed(corpus: Corpus, draw: random.Random) -> None:
    """Decompress a mutated shard of two streams: all records come, or an error that names it."""
    plain = corpus.shards[draw.choice(("tfrecord", "tar"))]
    name, compress = draw.choice(
        (
            ("gz", gzip.compress),
            ("bz2", bz2.compress),
            ("xz", lzma.compress),
            ("zlib", zlib.compress),
        )
    )
    half = draw.randrange(1, len(plain))
    first, second = compress(plain[:half]), compress(plain[half:])
    changed = draw.choice((mutated(first + second, draw), first + mutated(second, draw)))
    error, path = None, f"m.{name}"
    try:
        found = repr(packed(path, changed))
    except (LoaderError, OSError) as caught:
        error = caught
    if error is None:
        # A file that is cut between two streams, or to nothing, is whole by its format.
        assert found == repr(packed("m.gz", plain)) or changed in (first, b"")
    else:
        assert isinstance(error, LoaderError), error
        assert str(error.path).removesuffix(", decompressed") == path, error


def packed(path: str, data: bytes) -> list[dict[str, Any]]:
    """Return the samples of a shard of these bytes, as `pack` reads them."""
    Path(path).write_bytes(data)
    with tempfile.TemporaryDirectory(dir=".") as work:
        return list(decompressed_samples([str(path)], Path(work)))


def proto(_: Corpus, draw: random.Random) -> None:
    """Read a message that is no Example, or is one: an error or the right values, by every way."""
    kind = draw.choice((*FOREIGN, "example"))
    want = {word(draw).decode(): word(draw) for _ in range(draw.randrange(1, 4))}
    data = encode(want) if kind == "example" else FOREIGN[kind](draw)
    changed = draw.random() < 0.5
    if changed:
        data = mutated(data, draw)
    found, errors = list[dict[str, Any]](), list[Exception]()
    for read in (values_by_index, values_by_pack, lambda data: DecodeExample()({"data": data})):
        try:
            found.append(read(data))
        except (LoaderError, ValueError) as error:  # documented: records without a field
            errors.append(error)
    for error in errors:
        assert isinstance(error, LoaderError) or "no field and no label" in str(error), error
    if not changed:
        assert found == ([want] * 3 if kind == "example" else []), (kind, found)
    elif len(found) == 3:
        assert repr(found[0]) == repr(found[1]), found
        assert found[0].keys() == found[2].keys(), found


def values_by_index(data: bytes) -> dict[str, Any]:
    """Return the fields and columns of the one record of a shard, by its index."""
    Path("m.tfrecord").write_bytes(framed(data))
    return values_of(build_index("m.tfrecord", "m.index"))


def values_by_pack(data: bytes) -> dict[str, Any]:
    """Return the same, of what `pack` makes of the shard in gzip."""
    Path("m.gz").write_bytes(gzip.compress(framed(data)))
    shutil.rmtree("m", ignore_errors=True)
    return values_of(pack("m.gz", "m")["data"])


def values_of(opened: Index) -> dict[str, Any]:
    """Return the fields and columns of the first record."""
    with Reader(opened) as reader:
        fields = {name: values[0] for name, values in reader.read([0]).items()}
    columns = {name: column[0].tolist() for name, column in opened.columns.items()}
    return dict(sorted((fields | columns).items()))


def index(corpus: Corpus, draw: random.Random) -> None:
    """Open and read an index of which a file is mutated, with the right checksums most times."""
    corpus.restore()
    folder = Path(draw.choice(("x.index", "tar/data.index", "tfrecord/data.index")))
    change_index(folder, draw)
    read_some(open_index(folder))


def state(_: Corpus, draw: random.Random) -> None:
    """Load a mutated state into a sampler."""
    sampler = draw.choice(SAMPLERS)()
    held = json.loads(json.dumps(sampler.state_dict()))
    for _ in range(draw.choice((1, 1, 2))):
        change(held, draw)
    with contextlib.suppress(TypeError, ValueError):  # a StateMismatchError is both
        sampler.load_state_dict(held)
        next(iter(sampler), None)
        sampler.state_dict()


SAMPLERS: tuple[Callable[[], Any], ...] = (
    lambda: BatchSampler(RandomSampler(9, seed=1), batch_size=2),
    lambda: ExactOnceBatchSampler(9, batch_size=2),
    lambda: PKBatchSampler([0, 0, 1, 1, 2, 2], p=2, k=2, seed=1),
)


def command(corpus: Corpus, draw: random.Random) -> None:
    """Run a command line of words that belong together, or do not."""
    if draw.random() < 0.2:
        name = draw.choice(
            ("a.tar", "labels.csv", "classes.txt", "bad.jsonl", f"x.index/{MANIFEST}")
        )
        data = corpus.files.get(Path(name), b'{"shard": "a.tar", "record": 1}\n')
        Path(name).write_bytes(mutated(data, draw))
    words = [draw.choice(WORDS[:5])]
    words += [draw.choice(WORDS) for _ in range(draw.randrange(7))]
    if draw.random() < 0.2:
        place = draw.randrange(len(words))
        words[place] = mutated(words[place].encode(), draw).decode("utf-8", "surrogateescape")
    if any(word.startswith(("/", "~")) or ".." in word or "://" in word for word in words):
        return
    words[1:1] = ["-q"] * (words[0] in ("pack", "index", "verify"))  # a bar goes back in its line
    out, error = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = command_line(words)
        except SystemExit as stop:  # argparse
            status = stop.code
    assert status in (0, 1, 2), status
    if "--field" not in words:  # which writes bytes as they are
        out.flush()
        printed = out.buffer.getvalue().decode() + error.getvalue()  # type: ignore[attr-defined]
        data = [char for char in printed if not char.isprintable() and char != "\n"]
        assert not data or "usage: " in printed, data
    if any(path not in corpus.files for path in Path().rglob("*") if path.is_file()) or words[
        :1
    ] not in (["info"], ["cat"]):
        corpus.restore()


TARGETS: dict[str, Callable[[Corpus, random.Random], None]] = {
    "tar": lambda corpus, draw: shard(corpus, "tar", draw),
    "tfrecord": lambda corpus, draw: shard(corpus, "tfrecord", draw),
    "compressed": compressed,
    "proto": proto,
    "index": index,
    "state": state,
    "command": command,
    "buffer": buffer,
    "by_key": by_key,
    "column": column,
    **STORES,
    **FILES,
}


def run(corpus: Corpus, case: str) -> str | None:
    """Run one case, and return the traceback of what should not come of it."""
    target, _, _ = case.partition(":")
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TARGETS[target](corpus, random.Random(case))
    except DOCUMENTED as error:
        if isinstance(error, TimeoutError):
            return traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    return None


@contextlib.contextmanager
def workshop() -> Iterator[Corpus]:
    """Give the corpus in a temporary folder; what hangs, or takes all memory, is a finding too."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} seconds")

    before, limits = Path.cwd(), resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        corpus = Corpus()
        statm = Path("/proc/self/statm")
        if statm.exists():  # else the system does not say what is in use
            used = int(statm.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
        try:
            yield corpus
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
            signal.signal(signal.SIGALRM, handler)
            os.chdir(before)


def main() -> int:
    """Run cases until the time is over, or one case alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=float, default=math.inf, help="of cases, at most")
    parser.add_argument("--start", type=int, default=0, help="the first number, as a seed")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--case", help="run this case alone")
    options = parser.parse_args()
    done, found = Counter[str](), dict[str, str]()
    spent = dict.fromkeys(options.targets, 0.0)
    with workshop() as corpus:
        if options.case:
            print(run(corpus, options.case) or "nothing is wrong")
            return 0
        while sum(spent.values()) < options.seconds and done.total() < options.count:
            target = min(spent, key=spent.__getitem__)  # the same time for each
            case = f"{target}:{options.start + done[target]}"
            begin = time.monotonic()
            problem = run(corpus, case)
            spent[target] += time.monotonic() - begin
            done[target] += 1
            if problem is not None:
                corpus.restore()
                place = "\n".join(problem.splitlines()[-3:])
                if place not in found:
                    found[place] = case
                    print(f"{case}\n{problem}", flush=True)
    print(f"{sum(done.values())} cases ({dict(done)}), {len(found)} kinds of findings")
    print(*found.values(), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
