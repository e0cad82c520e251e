"""What the targets of the fuzzer share: the files to mutate, and the checks of the outcome."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
from support.damage import change, mutated
from support.inside import MANIFEST, json_digest

from twinfeed.loaders import Index, Reader, build_index, pack


class Corpus:
    """The files to mutate, in a folder of their own, which becomes the current folder."""

    def __init__(self) -> None:
        samples = [
            {"__key__": f"k{n}", "image": bytes([n] * 9), "label": f"c{n % 3}", "n": [n, 0.5]}
            for n in range(6)
        ]
        for container in ("tfrecord", "tar"):
            index = pack(samples, container, container=container, shards=2)["data"]  # type: ignore[arg-type]
            shutil.copy(f"{container}/{index.shard_paths[0]}", f"a.{container}")
        build_index("a.tar", "x.index", label="cls")
        Path("images/c").mkdir(parents=True)
        Path("images/c/1.png").write_bytes(b"...")
        Path("labels.csv").write_text("key,label\nk0,a\nk1,b\n")
        Path("classes.txt").write_text("c0\nc1\n")
        self.shards = {name: Path(f"a.{name}").read_bytes() for name in ("tfrecord", "tar")}
        self.files = {
            path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()
        }

    def restore(self) -> None:
        """Put everything back as it was. Who has written to a file has changed its time."""
        for path in sorted(Path().rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif path not in self.files or path.is_symlink():
                path.unlink()
        for path, data in self.files.items():
            if not path.exists() or path.stat().st_mtime_ns:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                os.utime(path, ns=(0, 0))


def change_index(folder: Path, draw: random.Random, arrays: str = "*") -> None:
    """Mutate a file of an index, with the right checksums most times."""
    manifest = json.loads((folder / MANIFEST).read_text())
    if draw.random() < 0.5:
        file = draw.choice(sorted(folder.rglob(f"{arrays}.npy")))
        head = draw.choice((0, 128))
        data = file.read_bytes()
        file.write_bytes(data[:head] + mutated(data[head:], draw))
        facts = manifest["arrays"][file.stem]
        facts["bytes"] = file.stat().st_size
        facts["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    else:
        change(manifest, draw)
    if isinstance(manifest, dict):
        manifest.pop("checksum", None)
        manifest["checksum"] = json_digest(manifest)
    text = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(mutated(text, draw) if draw.random() < 0.1 else text)


def must_name(error: Exception, *names: str) -> None:
    """Raise where the message has none of these names."""
    if not any(name in str(error) for name in names):
        raise AssertionError(f"the error does not name {names}") from error


def read_some(opened: Index) -> None:
    """Ask an open index for everything that it gives."""
    with Reader(opened) as reader:
        ids = range(min(len(opened), 8))
        _ = opened.labels, [np.asarray(column).sum() for column in opened.columns.values()]
        opened.keys(ids)
        for record in ids:
            opened.describe(record)
        reader.read(ids)
