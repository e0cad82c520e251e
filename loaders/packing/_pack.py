"""Write records to shards and index them: from a folder, an iterable, or another index."""

from __future__ import annotations

import copy
import math
import os
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from twinfeed.loaders.building.build import build_index
from twinfeed.loaders.building.classes import Classes, assign_classes
from twinfeed.loaders.building.labels import FromJson, LabelSource
from twinfeed.loaders.building.shards import expand
from twinfeed.loaders.building.sources import PathLike, find_source
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.formats.sniff import has_image_extension
from twinfeed.loaders.index import Index, open_index
from twinfeed.loaders.index.options import Missing
from twinfeed.loaders.index.paths import output_path
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.index.sizes import field_bytes
from twinfeed.loaders.packing._compressed import decompressed_samples
from twinfeed.loaders.packing._inputs import (
    RandomAccess,
    UserSample,
    read_samples,
    source_bytes,
)
from twinfeed.loaders.packing._publish import check_free, publish
from twinfeed.loaders.packing._shard_writer import (
    SHARD_BYTES,
    FieldKinds,
    PackedSplit,
    ShardContainer,
    write_shards,
)
from twinfeed.loaders.packing._split import Split, check_split, counts_of
from twinfeed.loaders.storage.disk_cache import DiskCache
from twinfeed.loaders.support.atomic import explain_full_disk
from twinfeed.loaders.support.pool import interrupts_deferred
from twinfeed.loaders.support.temporary import temporary_folder
from twinfeed.samplers import validate
from twinfeed.samplers.drawing.permutation import permute
from twinfeed.samplers.drawing.random_words import root_key
from twinfeed.samplers.validate import counted

Records = RandomAccess | Iterable[UserSample]

_RANDOM_ACCESS = (Index, Sequence)
_ADVICE = "nothing can be written here: give another folder to pack to"
_SPARE_BYTES = 1 << 26
"""Room in a disk cache beyond the bytes of the shards, since it stores whole chunks of a file."""


@validate.show_call(
    "pack(source, out)",
    label="pack an index with labels: build_index(…, label=…)",
    lists="an index made by build_index(…, lists=…) is packed so",
)
def pack(
    source: Records | PathLike | Sequence[PathLike],
    out: str | os.PathLike[str],
    /,
    *,
    container: ShardContainer = "tfrecord",
    split: Split | None = None,
    seed: int | None = None,
    shards: int = 1,
    shard_bytes: int = SHARD_BYTES,
    shard_records: int | None = None,
    progress: bool = False,
) -> dict[str, Index]:
    """Write `source` to shards in the folder `out`, index them, and return the index of each split.

    A TFRecord holds integers as int64 and floats as float32, since an Example has no other numbers.
    The values of a field must be of one kind in all records. A field that a record lacks is read as
    empty, and a ShardWarning counts the records that lack it. A tar holds numbers as text, and the
    label as the member `cls`. A record of a tar must have a field, and a key that no other record
    of its shard has; dots in the name of a key become "_". A member is of the same field in all
    records. Bytes, such as an array's `tobytes()`, are kept as they are.

    The index has a SHA-256 of each shard, which `verify` compares.

    Everything is written to a hidden folder in `out`, and moved to its place at the end. Nothing is
    replaced. A kill leaves nothing of a split, or all of it, or, in this last moment, shards
    without an index: remove them then, and pack again. An iterable that is shuffled, split or cut
    to several `shards` is written twice, first as it comes.

    Args:
        source: the path of a folder of images, with a folder for each class, of an index or of
            shards; a list of paths of images or shards; an `Index`, or an iterable of
            dicts. A dict has bytes, str, numbers or arrays by field name, `__key__` (a str) for the
            key, and `label` (an int or a str) for the class. A str is a number if every label is an
            integer, as in `build_index`. The fields, columns and class names of an index are packed
            as they are, whatever the index was made of. Shards may be compressed by gzip, bzip2, xz
            or zlib, and a TFRecord must hold Examples.
        out: the folder of the shards (`train-00000-of-00010.tfrecord`) and of the indexes
            (`train.index`).
        container: "tfrecord", or "tar" (webdataset).
        split: the name of each split, with its number of records, or its fraction of them. Numbers
            add up to all records, fractions to 1. By default there is one split, "data".
        seed: shuffles the records; None keeps their order. A split needs a seed.
        shards: the least number of shards of each split.
        shard_bytes: about how many bytes a shard has.
        shard_records: the most records of a shard.
        progress: whether to show a progress bar.

    Raises:
        TypeError: arguments or samples have another type (the record is named).
        ValueError: arguments or samples do not fit (the record is named).
        FileExistsError: files of the same names lie in `out`.
        OSError: the disk is full.

    >>> import tempfile
    >>> words = [{"word": word, "label": word[0]} for word in ("to", "be", "or", "not", "to", "be")]
    >>> packed = pack(words, tempfile.mkdtemp(), split={"train": 4, "eval": 2}, seed=0)
    >>> len(packed["train"]), packed["eval"].classes
    (4, ('b', 'n', 'o', 't'))
    """
    seed = None if seed is None else validate.seed(seed)
    validate.choice("container", container, get_args(ShardContainer))
    validate.integer("shards", shards, minimum=1)
    validate.integer("shard_bytes", shard_bytes, minimum=1)
    if shard_records is not None:
        validate.integer("shard_records", shard_records, minimum=1)
    if split is not None:
        check_split(split, seed)
    folder = output_path(out)
    with explain_full_disk(folder), temporary_folder(folder, _ADVICE) as staging:
        records = _open_source(source, staging)
        check_free(folder, split or ["data"])
        random_access = seed is not None or split is not None or shards > 1
        samples = _with_random_access(records, staging) if random_access else records
        make_split = partial(PackedSplit, staging, container)
        splits = _make_splits(make_split, samples, split, seed, shards, shard_bytes)
        kinds = FieldKinds()
        # If the size of the source is known, `_make_splits` has divided it evenly already.
        max_bytes = shard_bytes if source_bytes(samples) is None else math.inf
        for packed in splits:
            write_shards(packed, kinds, max_bytes, shard_records, progress=progress)
        classes = _class_names(records, splits)
        for packed in splits:
            _build_index(packed, classes, progress, _list_names(samples))
            _warn_of_missing_fields(packed)
        names = [packed.name for packed in splits]
        with interrupts_deferred():
            check_free(folder, names)  # another packer may have written here meanwhile
            publish(staging, folder, names)
        return {name: open_index(folder / f"{name}.index") for name in names}


def _open_source(source: Any, staging: Path) -> Records:
    """Return what `pack` reads records from; for paths, by what is stored there."""
    if isinstance(source, (list, tuple)) and source:
        if all(map(has_image_extension, source)):
            root = find_source(source, None, container=None, root=None).root
            return build_index(source, staging / "files.index", root=str(root))
        if all(isinstance(path, (str, os.PathLike)) for path in source):
            return decompressed_samples(expand(source), staging)
    elif isinstance(source, (str, os.PathLike)):
        if is_index_path(source):
            return open_index(source)
        if os.path.isdir(source):
            return build_index(source, staging / "files.index", root=source)
        return decompressed_samples(expand(source), staging)
    if isinstance(source, Mapping) or not isinstance(source, (Index, Iterable)):
        raise TypeError(
            "source must be a folder of images, an Index or an iterable of samples, "
            f"got {reprlib.repr(source)}"
        )
    return source


def _with_random_access(source: RandomAccess | Iterable[UserSample], folder: Path) -> RandomAccess:
    """Return the samples for any order: an iterable as a TFRecord, a remote index cached."""
    if isinstance(source, Index) and source.remote and source.cache is None:
        cached = copy.copy(source)
        # There is room for everything, so that nothing is requested twice. `shards` counts loose
        # files as 0 bytes, and the sizes of the fields are known of all.
        stored = field_bytes(source) + int(source.shards["bytes"].sum())
        cached.cache = DiskCache(folder / "cache", bytes=stored + _SPARE_BYTES)
        return cached
    if isinstance(source, _RANDOM_ACCESS):
        return source
    # An iterable can be read only once, in its order. So write its samples to a file.
    spool_folder = folder / "spool"
    spool_folder.mkdir()
    spooled = PackedSplit(spool_folder, "tfrecord", "data", samples=enumerate(source))
    write_shards(spooled, kinds=FieldKinds())
    _build_index(spooled, "names", progress=False)
    return open_index(spool_folder / "data.index")


def _make_splits(
    make_split: Callable[..., PackedSplit],
    samples: RandomAccess | Iterable[UserSample],
    split: Split | None,
    seed: int | None,
    shards: int,
    shard_bytes: int,
) -> list[PackedSplit]:
    """Divide the samples over splits and shards, evenly, in the order in which they are written."""
    if not isinstance(samples, _RANDOM_ACCESS):
        return [make_split("data", enumerate(samples))]
    num_records = len(samples)
    order = np.arange(num_records)
    if seed is not None:
        order = permute(num_records, root_key(seed, "pack"), order)
    splits, start = [], 0
    for name, size in counts_of(split or {"data": num_records}, num_records).items():
        if size < shards:
            raise ValueError(f"{counted(size, 'record')} of {name!r} cannot fill shards={shards}")
        split_bytes = (source_bytes(samples) or 0) * size / max(num_records, 1)
        num_shards = min(max(shards, math.ceil(split_bytes / shard_bytes)), size)
        # 10 records in 3 shards: the shards end after 3, 6 and 10 records.
        stops = {size * shard // num_shards for shard in range(1, num_shards + 1)}
        numbers = order[start : start + size]
        numbered = zip(numbers.tolist(), read_samples(samples, numbers), strict=True)
        splits.append(make_split(name, numbered, num_samples=size, shard_stops=stops))
        start += size
    return splits


def _class_names(source: object, splits: Sequence[PackedSplit]) -> Classes:
    """Return the class names of all splits, or of an index; none if labels are integers."""
    if isinstance(source, Index):
        return source.classes
    firsts = {name: record for packed in splits for name, record in packed.first_records.items()}
    return assign_classes(firsts, classes=None, background=None)[1]


def _list_names(source: object) -> set[str]:
    """Return the features that an index has as lists, which its copy has too, whatever its data."""
    fields = source.fields.items() if isinstance(source, Index) else ()
    return {name for name, field in fields if field.kind != "bytes"}


def _build_index(
    packed: PackedSplit, classes: Classes, progress: bool, lists: Collection[str] = ()
) -> None:
    """Give the shards of a split their final names, with their number, and index them."""
    staging, name, container = packed.folder, packed.name, packed.container
    if packed.num_records == 0:
        raise ValueError(f"there is nothing to pack: {name!r} has no records")
    for member, count in (("__key__", packed.num_keys), ("label", packed.field_counts["label"])):
        if 0 < count < packed.num_records:
            raise ValueError(
                f"{count} of {packed.num_records} samples have a {member}: give one to all of "
                "them, or to none"
            )
    label: LabelSource = "label"
    fields, key = None, "key" if packed.num_keys else None
    if container == "tar":
        # Integers are stored as JSON, and must be read as integers, not as text.
        label = "cls" if packed.first_records else FromJson("cls")
        fields = dict[str, str]()
        for suffix, field in packed.field_of_suffix.items():
            if field != "label":
                fields[field] = f"{fields[field]};{suffix}" if field in fields else suffix
        key = None  # the index reads it from the names of the members
    missing: Missing = "empty" if packed.missing_counts else "error"
    num_shards = len(packed.shard_files)
    build_index(
        [
            file.rename(staging / f"{name}-{number:05d}-of-{num_shards:05d}.{container}")
            for number, file in enumerate(packed.shard_files)
        ],
        staging / f"{name}.index",
        label=label if packed.field_counts["label"] else None,
        classes=classes if packed.first_records else None,
        fields=fields,
        missing=missing,
        lists=[name for name in lists if name in packed.field_counts] if fields is None else (),
        key=key,
        digest=True,
        progress=progress,
    )


def _warn_of_missing_fields(packed: PackedSplit) -> None:
    """Warn about fields that some records of a split lack, since a name may be misspelt."""
    missing = [f"{field!r} by {count}" for field, count in packed.missing_counts.items()]
    if missing:
        warnings.warn(
            f"fields that some of the {packed.num_records} records of {packed.name!r} lack are "
            f"read as empty: {', '.join(missing)}",
            ShardWarning,
            stacklevel=4,
        )
