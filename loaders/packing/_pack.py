"""Write records to shards and index them: from a folder, an iterable, or another index."""

from __future__ import annotations

import copy
import math
import os
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from twinfeed.loaders.building.build import build_index
from twinfeed.loaders.building.labels import FromJson, LabelSource
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index import Index, open_index
from twinfeed.loaders.index.options import Missing
from twinfeed.loaders.index.paths import output_path
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.index.sizes import field_bytes
from twinfeed.loaders.packing._compressed import CompressedShards, Shards, samples_of
from twinfeed.loaders.packing._inputs import (
    ImageFolder,
    InAnyOrder,
    LooseFiles,
    Sample,
    size_of,
    taken,
)
from twinfeed.loaders.packing._publish import check_free, publish, staging
from twinfeed.loaders.packing._shard_writer import (
    SHARD_BYTES,
    Kinds,
    ShardContainer,
    Written,
    write_shards,
)
from twinfeed.loaders.packing._split import Split, check_split, counts_of
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.argument_hints import hint_arguments
from twinfeed.loaders.support.atomic import locked, naming_full_disk
from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import root_key
from twinfeed.samplers.validate import counted

Records = InAnyOrder | Iterable[Sample] | CompressedShards

_IN_ANY_ORDER = (Index, LooseFiles, Sequence)
_SPARE = 1 << 26  # bytes of a cache beyond those that are stored, as chunks overlap the ends


@hint_arguments()
def pack(
    source: Records | Shards,
    out: str | os.PathLike[str],
    /,
    *,
    container: ShardContainer = "tfrecord",
    split: Split | None = None,
    seed: int | None = None,
    shards: int = 1,
    shard_bytes: int = SHARD_BYTES,
    shard_records: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Index]:
    """Write `source` to shards in the folder `out`, index them, and return the index of each split.

    A TFRecord holds integers as int64 and floats as float32, since an Example has no other numbers.
    The values of a field must be of one kind in all records. A field that a record lacks is read as
    empty, and a ShardWarning counts the records that lack it. A tar holds numbers as text, and the
    label as the member `cls`. A record of a tar must have a field, and a key that no other record
    of its shard has; dots in the name of a key become "_", as in `LooseFiles`. Bytes, such as an
    array's `tobytes()`, are kept as they are.

    The index has a SHA-256 of each shard, which `verify` compares.

    Everything is written to a hidden folder in `out`, and put in place at the end by one switch for
    all splits. After a kill, `out` has the old files or the new files, or everything refuses `out`
    until the next `pack` finishes the work. Files that no packer named are never deleted. An
    iterable that is shuffled, split or cut to several `shards` is written twice, first as it comes.

    Args:
        source: an `ImageFolder`, `LooseFiles`, an `Index`, `CompressedShards`, an iterable of
            dicts, or the path of an image folder, of an index or of compressed shards. A dict has
            bytes, str, numbers or arrays by field name, `__key__` (a str) for the key, and `label`
            (an int or a str) for the class. The fields and columns of an index are packed as they
            are, whatever the index was made of.
        out: the folder of the shards (`train-00000-of-00010.tfrecord`) and of the indexes
            (`train.index`).
        container: "tfrecord", or "tar" (webdataset).
        split: the name of each split, with its number of records, or its fraction of them. Numbers
            add up to all records, fractions to 1. By default there is one split, "data".
        seed: shuffles the records; None keeps their order. A split needs a seed.
        shards: the least number of shards of each split.
        shard_bytes: about how many bytes a shard has.
        shard_records: the most records of a shard.
        overwrite: whether to replace what was packed under the same names.
        progress: whether to show a progress bar.

    Raises:
        TypeError: arguments or samples have another type (the record is named).
        ValueError: arguments or samples do not fit (the record is named).
        FileExistsError: files of the same names lie in `out`.
        TimeoutError: another process holds the lock of `out`.
        OSError: the disk is full.

    >>> import tempfile
    >>> words = [{"word": word, "label": word[0]} for word in ("to", "be", "or", "not", "to", "be")]
    >>> packed = pack(words, tempfile.mkdtemp(), split={"train": 4, "eval": 2}, seed=0)
    >>> len(packed["train"]), packed["eval"].classes
    (4, ('b', 'n', 'o', 't'))
    """
    seed = None if seed is None else validate.seed(seed)
    validate.flag("overwrite", overwrite)
    validate.choice("container", container, get_args(ShardContainer))
    validate.integer("shards", shards, minimum=1)
    validate.integer("shard_bytes", shard_bytes, minimum=1)
    if shard_records is not None:
        validate.integer("shard_records", shard_records, minimum=1)
    if split is not None:
        check_split(split, seed)
    records = _open_source(source)
    folder = output_path(out)
    with staging(folder) as work, naming_full_disk(folder):
        source = samples_of(records, work) if isinstance(records, CompressedShards) else records
        check_free(folder, split or {"data": 1}, overwrite)
        random_access = seed is not None or split is not None or shards > 1
        samples = _samples(source, work if random_access else None)
        new = partial(Written, work, container)
        splits = _splits(new, samples, split, seed, shards, shard_bytes)
        known, kinds = size_of(samples), Kinds()
        # Shards of a known size are cut evenly, at the stops.
        most = shard_bytes if known is None else math.inf
        for each in splits:
            write_shards(each, kinds, most, shard_records, progress=progress)
        classes = _classes(samples, splits)
        for each in splits:
            _index(each, classes, progress)
            _warn_of_gaps(each)
        with locked(folder):
            # Another packer may have written here meanwhile.
            check_free(folder, [each.name for each in splits], overwrite)
            publish(work, folder)
            # Without the lock, the next packer may be replacing these files already.
            return {each.name: open_index(folder / f"{each.name}.index") for each in splits}


def _open_source(source: Any) -> Records:
    """Return the source of samples; open it if it is a path."""
    if isinstance(source, (list, tuple)) and source:
        if all(isinstance(path, (str, os.PathLike)) for path in source):
            return CompressedShards(source)
    elif isinstance(source, (str, os.PathLike)):
        if is_index_path(source):
            return open_index(source)
        return ImageFolder(source) if os.path.isdir(source) else CompressedShards(source)
    known = (LooseFiles, Index, CompressedShards, Iterable)
    if isinstance(source, Mapping) or not isinstance(source, known):
        raise TypeError(
            "source must be a folder of images, LooseFiles, an Index or an iterable of samples, "
            f"got {reprlib.repr(source)}"
        )
    return source


def _samples(
    source: InAnyOrder | Iterable[Sample], spool: Path | None
) -> InAnyOrder | Iterable[Sample]:
    """Return samples that can be taken in any order.

    An iterable is first written to `spool`, and shards at a URL are read through a cache there. If
    `spool` is None, the source stays as it is.
    """
    if spool is None:
        return source
    if isinstance(source, Index) and source.remote and source.cache is None:
        cached = copy.copy(source)
        stored = field_bytes(source) + int(source.shards["bytes"].sum())
        cached.cache = DiskCache(spool / "cache", bytes=stored + _SPARE)
        return cached
    if isinstance(source, _IN_ANY_ORDER):
        return source
    spool = spool / "spool"
    spool.mkdir()
    done = Written(spool, "tfrecord", "data", enumerate(source))
    write_shards(done, {})
    _index(done, tuple(sorted(done.named)), progress=False)
    return open_index(spool / "data.index")


def _splits(
    new: Callable[..., Written],
    samples: InAnyOrder | Iterable[Sample],
    split: Split | None,
    seed: int | None,
    shards: int,
    shard_bytes: int,
) -> list[Written]:
    """Return the splits with their samples in the order they are written."""
    if not isinstance(samples, _IN_ANY_ORDER):
        return [new("data", enumerate(samples))]
    n = len(samples)
    order = np.arange(n)
    if seed is not None:
        order = permute(n, root_key(seed, "pack"), order)
    splits, start = [], 0
    for name, records in counts_of(split or {"data": n}, n).items():
        share = (size_of(samples) or 0) * records / max(n, 1)
        number = max(shards, math.ceil(share / shard_bytes))
        if records < shards:
            raise ValueError(
                f"{counted(records, 'record')} of {name!r} cannot fill shards={shards}"
            )
        number = min(number, records)
        stops = {records * (shard + 1) // number for shard in range(number)}
        chosen = order[start : start + records]
        numbered = zip(chosen.tolist(), taken(samples, chosen), strict=True)
        splits.append(new(name, numbered, records, stops))
        start += records
    return splits


def _classes(source: object, splits: Iterable[Written]) -> tuple[str, ...]:
    """Return the class names of all splits together. The names of an index keep their order."""
    known = source.classes if isinstance(source, (Index, LooseFiles)) else ()
    return tuple(known) or tuple(sorted(set().union(*(each.named for each in splits))))


def _index(written: Written, classes: tuple[str, ...], progress: bool) -> None:
    """Name the shards of one split, now that their number is known, and index them there."""
    work, name, container = written.folder, written.name, written.container
    if written.records == 0:
        raise ValueError(f"there is nothing to pack: {name!r} has no records")
    for what, number in (("__key__", written.keyed), ("label", written.counts["label"])):
        if 0 < number < written.records:
            raise ValueError(
                f"{number} of {written.records} samples have a {what}: give all one, or none"
            )
    fields = {field: ";".join(ext) for field, ext in written.fields.items()}
    label: LabelSource = "label"
    if container == "tar":
        label = "cls" if written.named else FromJson("cls")  # a number, not text
    missing: Missing = "empty" if written.lacked else "error"
    key = "key" if written.keyed and container == "tfrecord" else None
    shards = len(written.files)
    build_index(
        [
            file.rename(work / f"{name}-{number:05d}-of-{shards:05d}.{container}")
            for number, file in enumerate(written.files)
        ],
        work / f"{name}.index",
        label=label if written.counts["label"] else None,
        classes=classes if written.named else None,
        fields=fields if container == "tar" else None,
        missing=missing,
        key=key,
        digest=True,
        progress=progress,
    )


def _warn_of_gaps(written: Written) -> None:
    """Warn of fields that some records lack, since a wrong name makes such a field."""
    lacks = [f"{field!r} by {number}" for field, number in written.lacked.items()]
    if lacks:
        warnings.warn(
            f"fields that some of the {written.records} records of {written.name!r} lack read as "
            f"empty there: {', '.join(lacks)}",
            ShardWarning,
            stacklevel=4,
        )
