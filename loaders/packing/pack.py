"""Write records to shards and index them: from a folder, an iterable, or another index."""

from __future__ import annotations

import itertools
import math
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from twinfeed.loaders.atomic import locked, room_for
from twinfeed.loaders.errors import LoaderError
from twinfeed.loaders.index import Index, open_index
from twinfeed.loaders.index._paths import to_write
from twinfeed.loaders.index.build import build_index
from twinfeed.loaders.index.labels import FromJson, LabelSource
from twinfeed.loaders.index.options import Reading
from twinfeed.loaders.packing.place import check_free, named, put_in_place, workplace
from twinfeed.loaders.packing.samples import (
    ImageFolder,
    IndexSamples,
    LooseFiles,
    Sample,
    Samples,
    SequenceSamples,
)
from twinfeed.loaders.packing.shard_writer import Container, Kinds, Written, write_shards
from twinfeed.loaders.packing.split import Split, check_split, counts_of
from twinfeed.loaders.progress import bar
from twinfeed.samplers import _validate
from twinfeed.samplers._bits import root_key
from twinfeed.samplers._permutation import permute

__all__ = ["ImageFolder", "LooseFiles", "pack"]

Source = Samples | Index | Iterable[Sample]

SHARD_BYTES = 200_000_000


class _Piece(NamedTuple):
    """Name one split and give its samples, with their numbers in the source; `stops` are where its
    shards end, if that is known.
    """

    name: str
    numbers: Iterable[int]
    samples: Iterable[Sample]
    records: int | None
    stops: Sequence[int]


def pack(
    source: Source | str | os.PathLike[str],
    out: str | os.PathLike[str],
    /,
    *,
    container: Container = "tfrecord",
    split: Split | None = None,
    seed: int | None = None,
    shards: int = 1,
    shard_bytes: int = SHARD_BYTES,
    shard_records: int | None = None,
    names: Literal["of", "numbered"] = "of",
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Index]:
    """Write `source` to shards in the folder `out`, index them, and return the index of each split.

    `source` is an `ImageFolder` or its path, `LooseFiles`, an `Index`, or an iterable of dicts
    (bytes, str, numbers, arrays by field name; `__key__` is the key, a str, and `label` the class,
    an int or a str). An index's fields and columns are packed as they are, whatever it was made
    of. `container` is "tfrecord" or "tar" (webdataset). A TFRecord's numbers are int64 and
    float32, since an Example has no others: floats are rounded to float32 (bytes, such as an
    array's `tobytes()`, are kept as they are); a field's values are of one kind in all records. In
    a tar, numbers are text, in full, the label is the member `cls`, and a record has some field and
    a key that no other of its shard has. `split` maps names to numbers of records that add up to
    all, or to fractions that add up to 1; by default there is one, "data". `seed` shuffles the
    records, and a split needs one. Each split has at least `shards` shards, of about `shard_bytes`
    bytes and `shard_records` records at most. `names` is "of" (`train-00000-of-00010.tfrecord`) or
    "numbered" (`train-000000.tar`, for brace patterns).

    Everything is written to a hidden folder in `out` and moved into place at the end, the index
    last. Files of the same names are only replaced with `overwrite`. An iterable that is to be
    shuffled or split is first written as it comes, then again.

    Raises TypeError and ValueError for arguments or samples that do not fit (the record is named),
    FileExistsError, OSError where the disk is full.

    >>> import tempfile
    >>> words = [{"word": word, "label": word[0]} for word in ("to", "be", "or", "not", "to", "be")]
    >>> packed = pack(words, tempfile.mkdtemp(), split={"train": 4, "eval": 2}, seed=0)
    >>> len(packed["train"]), packed["eval"].classes
    (4, ('b', 'n', 'o', 't'))
    """
    seed = None if seed is None else _validate.seed(seed)
    _check(container, split, seed, shards, shard_bytes, shard_records, names)
    if isinstance(source, (str, os.PathLike)):
        source = ImageFolder(source)
    _check_source(source)
    folder = to_write(out)
    with workplace(folder) as work:
        if not overwrite:
            check_free(folder, split or {"data": 1})
        random_access = seed is not None or split is not None or shards > 1
        with room_for(folder, None, work=work):
            samples = _samples(source, work if random_access else None)
        pieces = _pieces(samples, split, seed, shards, shard_bytes)
        written: dict[str, Written] = {}
        kinds: Kinds = {}
        with room_for(folder, _nbytes(samples), work=work):
            for piece in pieces:
                doing = f"packing {piece.name}"
                written[piece.name] = write_shards(
                    bar(piece.samples, doing, "record", progress, total=piece.records),
                    work,
                    piece.name,
                    numbers=piece.numbers,
                    container=container,
                    stops=piece.stops,
                    most_bytes=_limit(samples, shard_bytes),
                    most_records=shard_records,
                    kinds=kinds,
                )
            classes = _classes(samples, written.values())
            for name, done in written.items():
                files = named(work, name, done.files, container, names)
                _index(work, name, files, done, container, classes, progress)
        with locked(folder):
            if not overwrite:  # another packer may have been here meanwhile
                check_free(folder, written)
            put_in_place(work, folder)
            # Without the lock, the next packer may be replacing these files already.
            return {name: open_index(folder / f"{name}.index") for name in written}


def _check(
    container: str,
    split: Split | None,
    seed: int | None,
    shards: int,
    shard_bytes: int,
    shard_records: int | None,
    names: str,
) -> None:
    """Check the arguments of `pack`."""
    if container not in ("tfrecord", "tar"):
        raise ValueError(f"container must be 'tfrecord' or 'tar', not {container!r}")
    if names not in ("of", "numbered"):
        raise ValueError(f"names must be 'of' or 'numbered', not {names!r}")
    _validate.integer("shards", shards, minimum=1)
    _validate.integer("shard_bytes", shard_bytes, minimum=1)
    if shard_records is not None:
        _validate.integer("shard_records", shard_records, minimum=1)
    if split is not None:
        check_split(split)
        if seed is None:
            raise ValueError("split= needs a seed=: which records go where is drawn at random")


def _check_source(source: object) -> None:
    """Check that there may be samples in `source`."""
    if isinstance(source, Mapping) or not isinstance(source, (Samples, Index, Iterable)):
        raise TypeError(
            "pack takes a folder of images, LooseFiles, an Index or an iterable of samples, not "
            f"{reprlib.repr(source)}"
        )


def _samples(source: Source, spool: Path | None) -> Samples | Iterable[Sample]:
    """Return the source as samples in any order; an iterable as it is, unless there is a place to
    spool it to.
    """
    if isinstance(source, Index):
        return IndexSamples(source)
    if isinstance(source, Samples):
        return source
    if isinstance(source, Sequence):
        return SequenceSamples(source)
    if spool is None:
        return source
    spool = spool / "spool"
    spool.mkdir()
    done = write_shards(
        source,
        spool,
        "data",
        numbers=itertools.count(),
        container="tfrecord",
        stops=(),
        most_bytes=SHARD_BYTES,
        most_records=None,
        kinds={},
    )
    files = named(spool, "data", done.files, "tfrecord", "of")
    _index(spool, "data", files, done, "tfrecord", tuple(sorted(done.named)), progress=False)
    return IndexSamples(open_index(spool / "data.index"))


def _pieces(
    samples: Samples | Iterable[Sample],
    split: Split | None,
    seed: int | None,
    shards: int,
    shard_bytes: int,
) -> list[_Piece]:
    """Return the splits with their samples in the order they are written."""
    if not isinstance(samples, Samples):
        return [_Piece("data", itertools.count(), samples, None, ())]
    n = len(samples)
    order = np.arange(n)
    if seed is not None:
        order = permute(n, root_key(seed, "pack"), order)
    pieces, start = [], 0
    for name, count in counts_of(split or {"data": n}, n).items():
        share = (samples.nbytes or 0) * count / max(n, 1)
        number = max(shards, math.ceil(share / shard_bytes))
        if count < shards:
            raise ValueError(f"{count} records of {name!r} cannot fill shards={shards}")
        number = min(number, count)
        stops = [count * (shard + 1) // number for shard in range(number)]
        chosen = order[start : start + count]
        pieces.append(_Piece(name, chosen.tolist(), samples.at(chosen), count, stops))
        start += count
    return pieces


def _limit(samples: Samples | Iterable[Sample], shard_bytes: int) -> int:
    """Return when to close a shard by its bytes: never where they were cut evenly before."""
    return shard_bytes if _nbytes(samples) is None else 1 << 62


def _nbytes(samples: Samples | Iterable[Sample]) -> int | None:
    """Return about how many bytes there are to write, if that is known."""
    return samples.nbytes if isinstance(samples, Samples) else None


def _classes(samples: Samples | Iterable[Sample], written: Collection[Written]) -> tuple[str, ...]:
    """Return the class names of all splits together."""
    if len({bool(done.named) for done in written if done.labelled}) > 1:
        raise ValueError("labels are names in one split and integers in another: give all one kind")
    named: set[str] = set()
    for done in written:
        named |= done.named
    known = samples.classes if isinstance(samples, Samples) else ()
    return tuple(sorted(named)) or known


def _index(
    work: Path,
    name: str,
    files: Sequence[Path],
    written: Written,
    container: Container,
    classes: tuple[str, ...],
    progress: bool,
) -> None:
    """Index the shards of one split, where they were written."""
    if written.records == 0:
        raise ValueError(f"there is nothing to pack: {name!r} has no records")
    if 0 < written.keyed < written.records:
        raise ValueError(
            f"{written.keyed} of {written.records} samples have a __key__: give all one, or none"
        )
    if 0 < written.labelled < written.records:
        raise ValueError(
            f"{written.labelled} of {written.records} samples have a label: give all one, or none"
        )
    named = bool(written.named)
    path = work / f"{name}.index"
    missing: Literal["empty", "error"] = "empty" if written.optional else "error"
    if container == "tar":
        cls: LabelSource = "cls" if named else FromJson("cls")  # a number, whatever the names
        index = build_index(
            files,
            path,
            fields={field: ";".join(ext) for field, ext in written.fields.items()},
            label=cls if written.labelled else None,
            classes=classes if written.labelled else None,
            reading=Reading(missing=missing),
            progress=progress,
        )
    else:
        index = build_index(
            files,
            path,
            label="label" if written.labelled else None,
            classes=classes if written.labelled and classes else None,
            reading=Reading(missing=missing, key="key" if written.keyed else None),
            progress=progress,
        )
    if len(index) != written.records:
        raise LoaderError(
            f"{written.records} records of {name!r} were written, and {len(index)} are read back",
            advice="report this as a fault of twinfeed; nothing was packed",
        )
