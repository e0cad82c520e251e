"""What each command of the command line does, given its options."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from twinfeed.loaders.command_line.preview import preview
from twinfeed.loaders.command_line.wording import built_with, explain, in_options
from twinfeed.loaders.command_line.workers import workers
from twinfeed.loaders.compare import compare
from twinfeed.loaders.decode import DecodeImage
from twinfeed.loaders.errors import LoaderError, WorkerDiedError
from twinfeed.loaders.formats._sniff import MANIFEST, is_index
from twinfeed.loaders.index import Index, open_index
from twinfeed.loaders.index._store import read_manifest
from twinfeed.loaders.index.bad_records import BadRecord
from twinfeed.loaders.index.build import build_index
from twinfeed.loaders.index.labels import FromFolder, FromJson, FromTable, LabelSource
from twinfeed.loaders.index.options import Reading
from twinfeed.loaders.packing.pack import pack
from twinfeed.loaders.packing.samples import ImageFolder
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.verify import verify
from twinfeed.samplers import BatchSampler, PKBatchSampler, RandomSampler

_SHOWN = 20
_NUMBER = re.compile(r"-?(0|[1-9]\d*)", re.ASCII)
_RESTORE = (
    "what to do: restore what is missing or has changed, or index what is there "
    "(twinfeed info tells the options that an index was built with); what is bad in it is listed "
    "with twinfeed verify SHARDS --bad-list FILE, and left out with index --exclude FILE"
)
_LEAVE_OUT = (
    "what to do: restore the shards, or list what is bad with --bad-list FILE and leave it out "
    "with index --exclude FILE"
)
_LISTED = "what to do: restore the shards, or leave out what is listed with index --exclude {}"


def run_pack(options: argparse.Namespace) -> int:
    """Run `pack`."""
    indexed = Path(options.source, MANIFEST).exists()
    packed = pack(
        open_index(options.source) if indexed else ImageFolder(options.source),
        options.out,
        container=options.container,
        split=dict(options.split) if options.split else None,
        seed=options.seed,
        shards=options.shards,
        shard_bytes=options.shard_size,
        shard_records=options.shard_records,
        names=options.names,
        overwrite=options.overwrite,
        progress=not options.quiet,
    )
    for index in packed.values():
        print(f"{index.path}: {_summary(index)}")
    return 0


def run_index(options: argparse.Namespace) -> int:
    """Run `index`."""
    fields = dict(options.field) if options.field else None
    with workers(options.jobs) as executor:
        index = build_index(
            _one_or_all(options.shards),
            options.out,
            label=_label(options),
            classes=_classes(options.classes),
            fields=fields,
            reading=_reading(
                options,
                background=options.background,
                key=options.key,
                missing=options.missing,
                lists=options.list or (),
            ),
            exclude=options.exclude or (),
            root=options.root,
            executor=executor,
            progress=not options.quiet,
        )
    print(f"{index.path}: {_summary(index)}")
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Run `verify`: each index by itself, the shards together, all of them whatever is bad."""
    indexes = [path for path in options.target if Path(path, MANIFEST).exists()]
    shards = [path for path in options.target if path not in indexes]
    targets = [*indexes, *([_one_or_all(shards)] if shards else [])]
    if options.bad_list is not None and len(targets) > 1:
        raise ValueError("--bad-list is of one index, or of shards: verify each by itself")
    with workers(options.jobs) as executor:
        bad = [one for target in targets for one in _verify(target, options, executor)]
    if any(one and one.record < 0 and one.offset is None for one in bad):  # no parts apart
        print(_RESTORE)
    if any(one and one.record >= 0 for one in bad):
        print(_LISTED.format(options.bad_list) if options.bad_list else _LEAVE_OUT)
    return 1 if bad else 0


def _verify(
    target: str | list[str], options: argparse.Namespace, executor: Executor | None
) -> list[BadRecord | None]:
    """Verify one index, or shards, print what is bad, and return it; None stands for a target that
    could not be verified at all.
    """
    try:
        report = verify(
            target,
            bad_list=options.bad_list,
            reading=_reading(options),
            root=options.root,
            executor=executor,
            progress=not options.quiet,
        )
    except (BrokenPipeError, WorkerDiedError):
        raise
    except (LoaderError, OSError) as error:
        print(f"twinfeed: error: {explain(error)}", file=sys.stderr)
        return [None]
    for bad in report.bad[:_SHOWN]:
        where = "" if bad.record < 0 else f", record {bad.record}"
        where += " and all behind it" if bad.rest else ""
        print(f"{bad.shard}{where}: {in_options(bad.problem)}")
    if len(report.bad) > _SHOWN:
        print(f"... and {len(report.bad) - _SHOWN} more")
    what = f"{target}: " if isinstance(target, str) and len(options.target) > 1 else ""
    result = "all is well" if report.ok else f"{len(report.bad)} bad"
    print(f"{what}{report.records} records in {report.shards} shards: {result}")
    return [*report.bad]


def _reading(options: argparse.Namespace, **more: Any) -> Reading:
    """Return how shards are to be read."""
    return Reading(
        container=options.container,
        example=not options.raw,
        join=options.join,
        max_record_bytes=options.max_record_bytes,
        **more,
    )


def run_info(options: argparse.Namespace) -> int:
    """Run `info`; the options are told even where the shards no longer fit."""
    built = dict(read_manifest(Path(options.index).absolute())["options"])
    left_out, broken = built.pop("left_out", 0), built.pop("broken", 0)
    facts: dict[str, Any] = {}
    try:
        facts = _facts(open_index(options.index, root=options.root)) | {"left out": left_out}
        if broken:
            facts["shards that break off"] = broken
    finally:
        facts["built with"] = built if options.json else built_with(built, options.index)
        if options.json:
            print(json.dumps(facts, indent=1))
        else:
            for name, value in facts.items():
                print(f"{name}: {_shown(value)}")
    return 0


def _facts(index: Index) -> dict[str, Any]:
    """Return what an index holds."""
    lengths = index.shard_lengths
    facts: dict[str, Any] = {
        "records": len(index),
        "shards": len(index.shards),
        "container": index.container,
        "bytes": int(index.shards["bytes"].sum()),
        "records a shard": [int(lengths.min()), int(lengths.max())],
        "fields": {
            name: field.kind + (f", {field.missing} missing" if field.missing else "")
            for name, field in index.fields.items()
        },
        "columns": {
            name: f"{column.dtype}{list(column.shape[1:]) or ''}"
            for name, column in index.columns.items()
        },
        "fingerprint": index.fingerprint,
    }
    if index.labels is not None:
        _, counts = np.unique(index.labels, return_counts=True)
        facts["classes"] = len(counts)
        facts["records a class"] = [int(counts.min()), int(counts.max())]
        facts["class names"] = list(index.classes)
    return facts


def run_cat(options: argparse.Namespace) -> int:
    """Run `cat`."""
    index = open_index(options.index, root=options.root)
    with Reader(index) as reader:
        for record in _records(index, options.records, options.key or ()):
            if options.field is not None:
                (value,) = reader.read([record], [options.field])[options.field]
                sys.stdout.buffer.write(
                    value if isinstance(value, bytes) else f"{value}\n".encode()
                )
                sys.stdout.buffer.flush()
                continue
            print(index.describe(record))
            for line in preview(index, reader, record):
                print(f"  {line}")
    return 0


def run_compare(options: argparse.Namespace) -> int:
    """Run `compare`."""
    index = open_index(options.index, root=options.root)
    if options.p is None:
        order = RandomSampler(len(index), seed=options.seed)
        sampler: Any = BatchSampler(order, batch_size=options.batch_size)
    elif index.labels is None:
        raise ValueError("--p needs labels, and this index has none: index again with --label")
    else:
        sampler = PKBatchSampler(index.labels, p=options.p, k=options.k, seed=options.seed)
    decode = None if options.size is None else DecodeImage(size=(options.size, options.size))
    batches = min(options.batches, len(sampler))
    found = compare(index, sampler, backends=options.backends, batches=batches, decode=decode)
    print(found)
    return 0 if found.equal else 1


def _records(index: Index, wanted: Sequence[str], keys: Sequence[str]) -> list[int]:
    """Return the records that numbers or keys name, all of those that have a key; text that is no
    number as Python writes it is a key.
    """
    if not wanted and not keys:
        raise ValueError("which records: give numbers, keys, or --key")
    named = [(one, not _NUMBER.fullmatch(one)) for one in wanted] + [(key, True) for key in keys]
    found: dict[str, list[int]] = {one: [] for one, is_key in named if is_key}
    if found:
        for record, key in enumerate(index.keys(range(len(index)))):
            if key in found:
                found[key].append(record)
    missing = [key for key, records in found.items() if not records]
    if missing:
        raise KeyError(f"no record has the key {missing[0]!r}; see twinfeed info, or give a number")
    chosen: list[int] = []
    for one, is_key in named:
        chosen += found[one] if is_key else [_numbered(index, one)]
    return chosen


def _numbered(index: Index, number: str) -> int:
    """Return the record of a number, which counts from the end if it is negative."""
    n = len(index)
    if len(number) > 20 or not -n <= int(number) < n:
        raise IndexError(
            f"no record {number}: there are {n}, from 0 to {n - 1}, or -{n} to -1 from the end; "
            "give a key that is a number with --key"
        )
    return int(number) % n


def _label(options: argparse.Namespace) -> LabelSource | None:
    """Return where labels come from."""
    if options.label_json:
        field, _, key = options.label_json.partition(":")
        return FromJson(field, key)
    if options.label_table:
        return FromTable(options.label_table)
    if options.label_folder:
        return FromFolder()
    label: str | None = options.label
    return label


def _classes(path: str | None) -> list[str] | None:
    """Return the class names that a file or an index has."""
    if path is None:
        return None
    if is_index(Path(path)):
        names: list[str] = read_manifest(Path(path))["classes"]
        return names
    return Path(path).read_text(encoding="utf-8").splitlines()


def _summary(index: Index) -> str:
    """Return one line on an index."""
    classes = f", {len(index.classes)} classes" if index.classes else ""
    left_out, broken = index.options.left_out, index.options.broken
    without = f", {left_out} left out" if left_out else ""
    without += f", and the rest of {broken} shards that break off" if broken else ""
    return f"{len(index)} records, {len(index.shards)} shards{classes}{without}"


def _shown(value: Any) -> str:
    """Return a fact as a person wants to see it."""
    if isinstance(value, dict):
        return ", ".join(f"{name} ({kind})" for name, kind in value.items()) or "none"
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return str(value[0]) if value[0] == value[1] else f"{value[0]} to {value[1]}"
    if isinstance(value, list):
        rest = f", ... ({len(value)} in all)" if len(value) > _SHOWN else ""
        return ", ".join(map(str, value[:_SHOWN])) + rest if value else "none"
    return str(value)


def _one_or_all(given: list[str]) -> str | list[str]:
    """Return the one path given, or all of them."""
    return given[0] if len(given) == 1 else given
