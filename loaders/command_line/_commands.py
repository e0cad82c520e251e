"""What each command of the command line does, given its options."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from twinfeed.loaders.building.build import build_index
from twinfeed.loaders.building.labels import FromTable
from twinfeed.loaders.command_line._feeds import feed_of, image_field, sampler_of
from twinfeed.loaders.command_line._preview import lacks, preview
from twinfeed.loaders.command_line._printing import (
    built_with,
    explain,
    print_lines,
    show_warning,
)
from twinfeed.loaders.errors import LoaderError, ShardWarning, WorkerDiedError
from twinfeed.loaders.feed.shuffling import shuffled
from twinfeed.loaders.index import Index, open_index
from twinfeed.loaders.index.index import load_index
from twinfeed.loaders.index.open import open_without_checks
from twinfeed.loaders.index.options import ReadingOptions
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.index.sizes import field_bytes
from twinfeed.loaders.making.feed import Feed
from twinfeed.loaders.packing import CompressedShards, pack
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.storage.url import is_url
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.pool import Pool
from twinfeed.loaders.support.regular import read_file
from twinfeed.loaders.tools.compare import compare
from twinfeed.loaders.tools.planning import plan
from twinfeed.loaders.tools.verify import Report, verify
from twinfeed.samplers import BatchSampler, RandomSampler, Sampler, ShardShuffleSampler, validate
from twinfeed.samplers.validate import counted

_SHOWN = 20
_NUMBER = re.compile(r"-?(0|[1-9]\d*)", re.ASCII)
_RESTORE = (
    "what to do: restore what is missing or has changed; or list what is bad in the shards that "
    "are there with twinfeed verify SHARDS --bad-list FILE, and index them again with --exclude "
    "FILE (twinfeed info tells the options that an index was built with)"
)
_LEAVE_OUT = (
    "what to do: restore the shards, or list what is bad with --bad-list FILE and leave it out "
    "with index --exclude FILE"
)
_LISTED = "what to do: restore the shards, or leave out what is listed with index --exclude {}"


def run_pack(options: argparse.Namespace) -> None:
    source: str | list[str] | Index = _one_or_all(options.source)
    if options.root is not None:
        if not isinstance(source, str) or not is_index_path(source):
            raise ValueError("--root is the root of an index, and the source is not an index")
        source = open_index(source, root=options.root)
    how = {name: getattr(options, name) for name in ("label", "key", "example")}
    chosen = [*how.values()] != [None, None, True]
    packed = pack(
        CompressedShards(options.source, **how) if chosen else source,
        options.out,
        container=options.container,
        split=_unique_names("--split", options.split),
        seed=options.seed,
        shards=options.shards,
        shard_bytes=options.shard_bytes,
        shard_records=options.shard_records,
        overwrite=options.overwrite,
        progress=not options.quiet,
    )
    for index in packed.values():
        print_lines(f"{index.path}: {_summary(index)}")


@contextmanager
def workers(jobs: int) -> Iterator[Executor | None]:
    """Give the processes that share the work; None for a single job."""
    if validate.integer("jobs", jobs, minimum=1) == 1:
        yield None
        return
    try:
        with Pool(jobs) as pool:
            yield pool
    except BrokenProcessPool as error:
        advice = "lower --jobs if the memory ran out (see dmesg); --jobs 1 shows where it happens"
        raise WorkerDiedError(str(error), advice=advice) from error


def run_index(options: argparse.Namespace) -> None:
    table = options.label_table
    with workers(options.jobs) as executor:
        index = build_index(
            _one_or_all(options.shards),
            options.out,
            label=options.label if table is None else FromTable(table),
            classes=_classes(options.classes),
            fields=_unique_names("--field", options.field),
            **_reading(options),
            exclude=options.exclude,
            root=options.root,
            executor=executor,
            progress=not options.quiet,
        )
    print_lines(f"{options.out if is_url(options.out) else index.path}: {_summary(index)}")


def run_verify(options: argparse.Namespace) -> int:
    """Run `verify`: each index by itself, and all shards together. Go on after what is bad.

    A warning ends with the status of bad data.
    """
    indexes = [path for path in options.target if is_index_path(path)]
    shards = [path for path in options.target if path not in indexes]
    targets = [*indexes, *([_one_or_all(shards)] if shards else [])]
    if options.bad_list is not None and len(targets) > 1:
        raise ValueError("--bad-list is of one index, or of shards: verify each by itself")
    warned: list[ShardWarning] = []

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        show_warning(message)
        if isinstance(message, ShardWarning):
            warned.append(message)

    warnings.simplefilter("always", ShardWarning)  # also of a shard that is verified twice
    warnings.showwarning = show
    with workers(options.jobs) as executor:
        reports = [_verify(target, options, executor, warned) for target in targets]
    findings = [finding for report in reports if report for finding in report.findings]
    if any(bad.record < 0 and bad.offset is None for bad in findings):  # no half sample
        print_lines(_RESTORE)
    elif any(bad.record >= 0 for bad in findings):
        listed = options.bad_list and _LISTED.format(shlex.quote(options.bad_list))
        print_lines(listed or _LEAVE_OUT)
    return 0 if all(report and report.ok for report in reports) and not warned else 1


def _verify(
    target: str | list[str],
    options: argparse.Namespace,
    executor: Executor | None,
    warned: Sequence[ShardWarning],
) -> Report | None:
    """Verify one target and print the report; None if the target could not be verified."""
    warned_before = len(warned)
    try:
        report = verify(
            target,
            bad_list=options.bad_list,
            **_reading(options),
            root=options.root,
            executor=executor,
            progress=not options.quiet,
        )
    except (LoaderError, OSError) as error:
        print_lines(f"twinfeed: error: {explain(error)}", error=True)
        return None
    *findings, summary = str(report).split("\n")
    if isinstance(target, str) and len(options.target) > 1:
        summary = f"{target}: {summary}"
    if len(warned) > warned_before:
        summary = summary.replace("all is well", "nothing is bad")
        summary += f", {counted(len(warned) - warned_before, 'warning')}"
    print_lines(*findings, summary)
    return report


def _reading(options: argparse.Namespace) -> ReadingOptions:
    """Return how shards are to be read."""
    names = ReadingOptions.__annotations__.keys() & vars(options).keys()
    return cast(ReadingOptions, {name: getattr(options, name) for name in names})


def run_info(options: argparse.Namespace) -> None:
    """Run `info`, also if the shards are not here, or no longer fit."""
    index = load_index(options.index, options.root)
    built = index.options
    facts = _facts(index) | {"left out": built.left_out}
    if built.broken:
        facts["shards that break off"] = built.broken
    facts["built with"] = vars(built) if options.json else built_with(built, options.index)
    lines = json.dumps(facts, indent=1).splitlines()
    if not options.json:
        lines = [f"{name}: {_shown(value)}" for name, value in facts.items()]
    print_lines(*lines)
    open_index(options.index, root=options.root)


def _facts(index: Index) -> dict[str, Any]:
    """Return the facts of an index."""
    lengths, loose, names = index.shard_lengths, index.container == "files", index.shard_paths
    read_as = ", read as empty" if index.options.missing == "empty" else ""
    facts: dict[str, Any] = {
        "records": len(index),
        "shards": len(index.shards),
        **({} if loose else {"first shard": names[0], "last shard": names[-1]}),
        "container": index.container,
        "bytes": field_bytes(index) if loose else int(index.shards["bytes"].sum()),
        "records a shard": [int(lengths.min()), int(lengths.max())],
        "fields": {
            name: field.kind + (f", {field.missing} missing{read_as}" if field.missing else "")
            for name, field in index.fields.items()
        },
        "columns": {
            name: f"{column.dtype}{list(column.shape[1:]) or ''}"
            for name, column in index.columns.items()
        },
        "fingerprint": index.fingerprint,
    }
    if index.has_labels:
        labels, counts = np.unique(index.labels, return_counts=True)
        facts["classes"] = index.num_classes
        facts["labels"] = [int(labels[0]), int(labels[-1])]
        least = int(counts.min()) if index.num_classes == len(counts) else 0  # or none here
        facts["records a class"] = [least, int(counts.max())]
        facts["class names"] = list(index.classes)
    return facts


def run_cat(options: argparse.Namespace) -> None:
    index = open_index(options.index, root=options.root)
    with Reader(index) as reader:
        for record in _records(index, options.records, options.key):
            if options.field is not None:
                if lacks(index, options.field, record) and index.options.missing != "empty":
                    raise LoaderError(
                        f"{index.describe(record)} lacks the field {options.field!r}",
                        advice="leave --field out to see what it has",
                    )
                (value,) = reader.read([record], [options.field])[options.field]
                data = value if isinstance(value, bytes) else f"{value}\n".encode()
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
                continue
            print_lines(
                index.describe(record), *(f"  {line}" for line in preview(index, reader, record))
            )


def run_compare(options: argparse.Namespace) -> int:
    index = open_index(options.index, root=options.root)
    sampler = sampler_of(options, index)
    image = None if options.size is None else image_field(index, options.field)
    feed = feed_of(options, index, sampler, image)
    found = compare(feed, backends=options.backends, batches=min(options.batches, len(feed)))
    print_lines(*str(found).splitlines())
    return 0 if found.ok else 1


def run_show(options: argparse.Namespace) -> None:
    from twinfeed.loaders.pictures import show_batch

    index = open_index(options.index, root=options.root)
    sampler, image = sampler_of(options, index), image_field(index, options.field)
    feed = feed_of(options, index, sampler, image, fit="pad")
    _draw(show_batch(feed, step=options.step), options.out)


def run_mixing(options: argparse.Namespace) -> None:
    from twinfeed.loaders.pictures import plot_mixing

    index, streams = _shuffles(options)
    buffers = options.buffer or [max(1, len(index) // 10)]
    labels = index.labels if index.has_labels else None
    _draw(plot_mixing(streams, labels=labels, buffers=buffers), options.out)


def run_plan(options: argparse.Namespace) -> int:
    index, streams = _shuffles(options)
    for name, stream in reversed(streams.items()):  # the shard-aware shuffle comes last
        # A decode of nothing: what a batch could hold does not matter, since nothing is read.
        found = plan(Feed(index, stream, decode=dict, missing="late"))
        print_lines(*f"{name}: {found}".splitlines())
    return 0 if found.ok else 1


def _shuffles(options: argparse.Namespace) -> tuple[Index, dict[str, BatchSampler]]:
    """Return the index, and the batches of the shard-aware and of the uniform shuffle.

    The index alone says how long records and shards are, so the shards need not be here.
    """
    index = open_without_checks(options.index, options.root)
    if len(index) == 0:
        raise ValueError("the index holds no records")
    blocks = shuffled(index, seed=options.seed)
    assert isinstance(blocks, ShardShuffleSampler)  # as no records were chosen
    if options.block is not None or options.window is not None:
        block = blocks.block if options.block is None else options.block
        window = blocks.window if options.window is None else options.window
        lengths, seed = index.shard_lengths, options.seed
        blocks = ShardShuffleSampler(lengths, block=block, window=window, seed=seed)
    orders: dict[str, Sampler] = {
        f"blocks of {blocks.block:,}, {blocks.window:,} at once": blocks,
        "uniform": RandomSampler(len(index), seed=options.seed),
    }
    size = options.batch_size
    return index, {name: BatchSampler(order, batch_size=size) for name, order in orders.items()}


def _draw(figure: Any, path: str) -> None:
    path += "" if Path(path).suffix else ".png"  # matplotlib would add this extension too
    endings = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in endings:
        raise ValueError(f"--out must end in one of {', '.join(endings)}, got {path}")
    figure.savefig(path, dpi=100)
    print_lines(path)


def _records(index: Index, wanted: Sequence[str], keys: Sequence[str]) -> list[int]:
    """Return the records of numbers, and all of each key; text that is no plain number is a key."""
    if not wanted and not keys:
        raise ValueError("which records: give numbers, keys, or --key")
    named = [one for one in wanted if not _NUMBER.fullmatch(one)] + [*keys]
    found: dict[str, list[int]] = {key: [] for key in named}
    for record, key in enumerate(index.keys() if named else ()):
        if key in found:
            found[key].append(record)
    for key, records in found.items():
        if not records:
            some = ", ".join(map(repr, index.keys(range(min(3, len(index))))))
            raise KeyError(
                f"no record has the key {key!r}: give a key, such as {some}, or a number"
            )
    chosen = [[_numbered(index, one)] if _NUMBER.fullmatch(one) else found[one] for one in wanted]
    return [record for records in chosen + [found[key] for key in keys] for record in records]


def _numbered(index: Index, number: str) -> int:
    """Return the record of a number, which counts from the end if it is negative."""
    n = len(index)
    if len(number) > 20 or not -n <= int(number) < n:
        raise IndexError(
            f"no record {number}: there are {n}, from 0 to {n - 1}, or -{n} to -1 from the end; "
            "give a key that is a number with --key"
        )
    return int(number) % n


def _classes(path: str | None) -> list[str] | None:
    """Return the class names that a file or an index has."""
    if path is None:
        return None
    if is_index_path(path):
        return list(load_index(path, None).classes)
    return read_file(path, LIMITS.table_bytes).decode().splitlines()


def _summary(index: Index) -> str:
    """Return one line on an index."""
    classes = f", {counted(len(index.classes), 'class')}" if index.classes else ""
    left_out, broken = index.options.left_out, index.options.broken
    without = f", {left_out} left out" if left_out else ""
    without += f", and the rest of {counted(broken, 'broken shard')}" if broken else ""
    found = f"{counted(len(index), 'record')}, {counted(len(index.shards), 'shard')}"
    return f"{found}{classes}{without}"


def _shown(value: Any) -> str:
    """Return a fact in a form for people."""
    if isinstance(value, dict):
        return ", ".join(f"{name} ({kind})" for name, kind in value.items()) or "none"
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return str(value[0]) if value[0] == value[1] else f"{value[0]} to {value[1]}"
    if isinstance(value, list):
        rest = f", ... ({len(value)} in all)" if len(value) > _SHOWN else ""
        return ", ".join(map(str, value[:_SHOWN])) + rest if value else "none"
    return str(value)


def _unique_names(option: str, given: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return what an option gives by name, None for nothing; refuse a name that is given twice."""
    names = [name for name, _ in given]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{option} gives {name!r} {names.count(name)} times: give it once")
    return dict(given) or None


def _one_or_all(given: list[str]) -> str | list[str]:
    return given[0] if len(given) == 1 else given
