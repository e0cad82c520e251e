"""What the tests of the formats share: small shards, faults made in them, others' readers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from webdataset.tariterators import group_by_keys, tar_file_expander

from support.inside import Record, TFRecordWriter

Parts = dict[str, bytes]
OWN = ("__key__", "__url__", "__local_path__")


@contextmanager
def no_hang(seconds: float = 30) -> Iterator[None]:
    """Turn a hang into an error; nothing here takes a hundredth of the limit."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def write_records(path: Path, *records: bytes) -> bytes:
    """Write a TFRecord shard and return its bytes."""
    with TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path.read_bytes()


def flipped(data: bytes, at: int, bits: int = 1) -> bytes:
    """Return `data` with some bits of one byte changed."""
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]


def tensorflow_records(path: Path) -> list[bytes]:
    """Return the records TensorFlow reads."""
    import tensorflow as tf

    return list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())


def tensorflow_values(data: bytes) -> dict[str, list[Any]]:
    """Return the values TensorFlow's own message class reads; features without a list left out."""
    import tensorflow as tf

    features = tf.train.Example.FromString(data).features.feature
    return {
        name: list(getattr(feature, feature.WhichOneof("kind")).value)
        for name, feature in features.items()
        if feature.WhichOneof("kind")
    }


def webdataset_samples(path: Path) -> list[tuple[str, Parts]]:
    """Return the (key, parts) webdataset reads."""
    with path.open("rb") as stream:
        files = tar_file_expander([{"url": str(path), "stream": stream}])
        return [
            (sample["__key__"], {k: v for k, v in sample.items() if k not in OWN})
            for sample in group_by_keys(files)
        ]


def contents(records: Iterator[Record]) -> list[tuple[str | None, Parts]]:
    """Return the (key, parts) of scanned records."""
    return [
        (record.key, {name: bytes(part.data) for name, part in record.fields.items()})
        for record in records
    ]


def block(
    name: bytes = b"0001.txt",
    size: int | bytes = 0,
    kind: bytes = b"0",
    *,
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
) -> bytes:
    """Return one tar header block, its checksum right."""
    number = size if isinstance(size, bytes) else b"%011o\0" % size
    head = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + number + b"%011o\0" % 0
    tail = kind + link.ljust(100, b"\0") + magic + bytes(80) + prefix.ljust(155, b"\0") + bytes(12)
    total = sum(head) + sum(tail) + 8 * 32
    return head + b"%06o\0 " % total + tail


def member(name: bytes, data: bytes, kind: bytes = b"0", **facts: Any) -> bytes:
    """Return one tar member, header and padded data."""
    size = facts.pop("size", len(data))
    return block(name, size, kind, **facts) + data + bytes(-len(data) % 512)


def pax(records: dict[bytes, bytes], kind: bytes = b"x") -> bytes:
    """Return a PAX extended header."""
    text = b""
    for key, value in records.items():
        rest = len(key) + len(value) + 3
        length = next(n for n in range(rest, rest + 20) if n == rest + len(str(n)))
        text += b"%d %s=%s\n" % (length, key, value)
    return member(b"pax", text, kind)


END = bytes(1024)


def archive(path: Path, *pieces: bytes, end: bytes = END) -> Path:
    """Write a tar archive of ready-made members."""
    path.write_bytes(b"".join(pieces) + end)
    return path
