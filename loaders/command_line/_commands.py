"""The functions that run the commands of the command line, with parsed options."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from twinfeed.loaders.audit.examination import audit
from twinfeed.loaders.batches.feed import Feed
from twinfeed.loaders.building.build import build_index
from twinfeed.loaders.building.labels import FromTable
from twinfeed.loaders.command_line._feeds import (
    feed_of,
    load_feed,
    load_name,
    load_state,
    sampler_of,
)
from twinfeed.loaders.command_line._preview import is_missing, preview
from twinfeed.loaders.command_line._printing import (
    options_built_with,
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
from twinfeed.loaders.packing import CompressedShards, pack
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.storage.url import is_url
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.pool import Pool
from twinfeed.loaders.support.regular import read_file
from twinfeed.loaders.tools.compare import compare
from twinfeed.loaders.tools.planning import plan
from twinfeed.loaders.tools.verify import verify
from twinfeed.loaders.tools.who import diff, records_of, when, who
from twinfeed.samplers import BatchSampler, RandomSampler, Sampler, ShardShuffleSampler, validate
from twinfeed.samplers.validate import counted

_MAX_SHOWN_ITEMS = 20
_ADVISE_RESTORE_OR_EXCLUDE = (
    "what to do: restore the shards; or twinfeed verify SHARDS --bad-list {0}, and index them "
    "again with --exclude {0}"
)


class TablePath(str):
    """The path of a table of labels, which is not the name of a field."""


def run_pack(options: argparse.Namespace) -> None:
    """Run `twinfeed pack`; options that say how records are read mean that the source is shards."""
    source: str | list[str] | Index | CompressedShards = _unwrap_single(options.source)
    if options.root is not None:
        if not isinstance(source, str) or not is_index_path(source):
            raise ValueError("--root needs an index as the source, and the source is not an index")
        source = open_index(source, root=options.root)
    if options.label is not None or options.key is not None or not options.example:
        # Take this class for all shards: it decompresses only those that are compressed.
        source = CompressedShards(
            options.source, label=options.label, key=options.key, example=options.example
        )
    packed = pack(
        source,
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
def process_pool(jobs: int) -> Iterator[Executor | None]:
    """Yield a pool of `jobs` worker processes, or None if `jobs` is 1."""
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
    """Run `twinfeed index`: build an index, and print its path and size."""
    label = options.label
    with process_pool(options.jobs) as executor:
        index = build_index(
            _unwrap_single(options.shards),
            options.out,
            label=FromTable(label) if isinstance(label, TablePath) else label,
            classes="names" if options.label_names else _class_names(options.classes),
            fields=_unique_names("--field", options.field),
            **_reading_options(options),
            exclude=options.exclude,
            root=options.root,
            executor=executor,
            progress=not options.quiet,
        )
    print_lines(f"{options.out if is_url(options.out) else index.path}: {_summary(index)}")


def run_verify(options: argparse.Namespace) -> int:
    """Run `twinfeed verify`; return the exit status, 1 if there are bad records or warnings."""
    shown: list[Warning | str] = []

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        shown.append(message)
        show_warning(message)

    # `main` restores both. Python shows a warning only once for each place in the code.
    warnings.simplefilter("always", ShardWarning)
    warnings.showwarning = show
    with process_pool(options.jobs) as executor:
        report = verify(
            _unwrap_single(options.target),
            decode=options.decode,
            bad_list=options.bad_list,
            **_reading_options(options),
            root=options.root,
            executor=executor,
            progress=not options.quiet,
        )
    text = str(report)
    if shown:
        text = text.replace("all is well", "nothing is bad")
        text += f", {counted(len(shown), 'warning')}"
    print_lines(*text.split("\n"))
    # A part of a tar sample has an offset, and no number: its own text says what to do.
    if any(finding.record >= 0 or finding.offset is None for finding in report.findings):
        print_lines(_ADVISE_RESTORE_OR_EXCLUDE.format(shlex.quote(options.bad_list or "FILE")))
    return 0 if report.ok and not shown else 1


def _reading_options(options: argparse.Namespace) -> ReadingOptions:
    """Return the options of a command that say how records are read, for `build_index`."""
    names = ReadingOptions.__annotations__.keys() & vars(options).keys()
    return cast(ReadingOptions, {name: getattr(options, name) for name in names})


def run_info(options: argparse.Namespace) -> None:
    """Run `twinfeed info`: print what an index contains, also if its shards are missing."""
    index = load_index(options.index, options.root)
    built, names = index.options, index.shard_paths
    details = {
        "container": index.container,
        "fingerprint": index.fingerprint,
        "excluded records": f"{built.left_out}, incomplete shards: {built.broken}",
        "built with": options_built_with(built, options.index),
    }
    if index.container != "files":
        details = {"shards": f"{names[0]} to {names[-1]}", **details}
    if index.classes:
        details = {"class names": _listed(index.classes), **details}
    lines = [*index.summary().split("\n"), *(f"{name}: {text}" for name, text in details.items())]
    print_lines(*lines)
    open_index(options.index, root=options.root)  # raises an error for missing or changed shards


def run_cat(options: argparse.Namespace) -> None:
    """Run `twinfeed cat`: print a preview of records, or write the bytes of one field."""
    index = open_index(options.index, root=options.root)
    with Reader(index) as reader:
        for record in chain.from_iterable(records_of(index, name) for name in _names(options)):
            if options.field is None:
                lines = preview(index, reader, record)
                print_lines(index.describe(record), *(f"  {line}" for line in lines))
            else:
                _write_field(index, reader, record, options.field)


def _write_field(index: Index, reader: Reader, record: int, field: str) -> None:
    """Write a field of a record to standard output: its bytes, or its numbers as text."""
    if is_missing(index, field, record) and index.options.missing != "empty":
        raise LoaderError(
            f"{index.describe(record)} lacks the field {field!r}",
            advice="run cat without --field to see its fields",
        )
    (value,) = reader.read([record], [field])[field]
    sys.stdout.buffer.write(value if isinstance(value, bytes) else f"{value}\n".encode())
    sys.stdout.buffer.flush()


def run_compare(options: argparse.Namespace) -> int:
    """Run `twinfeed compare`; return the exit status, 1 if the frameworks' batches differ."""
    index = open_index(options.index, root=options.root)
    sampler = sampler_of(options, index)
    feed = feed_of(options, index, sampler, None if options.size is None else options.field)
    result = compare(feed, backends=options.backends, batches=min(options.batches, len(feed)))
    print_lines(*str(result).splitlines())
    return 0 if result.ok else 1


def run_show(options: argparse.Namespace) -> None:
    """Run `twinfeed show`: save a picture of a batch of images."""
    from twinfeed.loaders.pictures import show_batch

    index = open_index(options.index, root=options.root)
    feed = feed_of(options, index, sampler_of(options, index), options.field, fit="pad")
    _save_figure(show_batch(feed, step=options.step), options.out)


def run_mixing(options: argparse.Namespace) -> None:
    """Run `twinfeed mixing`: save a plot of how well shuffles mix the records of an index."""
    from twinfeed.loaders.pictures import plot_mixing

    index, samplers = _compared_samplers(options)
    buffers = options.buffer or [max(1, len(index) // 10)]
    labels = index.labels if index.has_labels else None
    _save_figure(plot_mixing(samplers, labels=labels, buffers=buffers), options.out)


def run_plan(options: argparse.Namespace) -> None:
    """Run `twinfeed plan`: print what an epoch reads, for a uniform and for the block shuffle."""
    index, samplers = _compared_samplers(options)
    for name, sampler in reversed(samplers.items()):  # the block shuffle comes last
        # A plan needs a feed, but reads no fields. Two checks of `Feed` would refuse some indexes
        # for their fields, so turn them off. With a decode function, it is not checked that fields
        # can be stacked to batches. With missing="late", a record that lacks a field is an error
        # only when it is read.
        result = plan(Feed(index, sampler, decode=dict, missing="late"))
        print_lines(*f"{name}: {result}".splitlines())


def run_who(options: argparse.Namespace) -> None:
    """Run `twinfeed who`: print the records of a step of a feed."""
    state = None if options.state is None else load_state(options.state)
    ranks = {"rank": options.rank, "world_size": options.world_size}
    _print_result(who(load_feed(options.feed), options.step, **ranks, state=state))


def run_when(options: argparse.Namespace) -> None:
    """Run `twinfeed when`: print the steps of a feed whose batch has a record."""
    feed = load_feed(options.feed)
    for name in _names(options):
        _print_result(when(feed, name, until=options.until))


def run_diff(options: argparse.Namespace) -> int:
    """Run `twinfeed diff` on two feeds; return the exit status, 1 if they differ."""
    result = diff(*map(load_feed, options.feed))
    _print_result(result)
    return 0 if result.ok else 1


def run_audit(options: argparse.Namespace) -> int:
    """Run `twinfeed audit` on a function; return the exit status, 1 if there are faults."""
    result = audit(
        load_name(options.make, "make"),
        num_records=options.records,
        labels=None if options.labels is None else _saved_array(options.labels),
        world_size=options.world,
        epochs=options.epochs,
        batch_size=options.batch_size,
        expect=options.expect,
        max_seconds=options.seconds,
    )
    _print_result(result)
    return 0 if result.ok else 1


def _saved_array(path: str) -> Any:
    """Return the array in a .npy file."""
    try:
        return np.load(path, allow_pickle=False)
    except ValueError:
        raise ValueError(f"{path} holds no array: write the labels by numpy.save") from None


def _print_result(result: object) -> None:
    print_lines(*str(result).split("\n"))


def _compared_samplers(options: argparse.Namespace) -> tuple[Index, dict[str, BatchSampler]]:
    """Return an index, whose shards are not opened, and a block and a uniform shuffle by title."""
    index = open_without_checks(options.index, options.root)
    if len(index) == 0:
        raise ValueError("the index has no records")
    default = shuffled(index, seed=options.seed)
    assert isinstance(default, ShardShuffleSampler)  # as `shuffled` got no records=
    block = default.block if options.block is None else options.block
    window = default.window if options.window is None else options.window
    lengths, seed = index.shard_lengths, options.seed
    samplers: dict[str, Sampler] = {
        f"blocks of {block:,}, {window:,} at once": ShardShuffleSampler(
            lengths, block=block, window=window, seed=seed
        ),
        "uniform": RandomSampler(len(index), seed=seed),
    }
    size = options.batch_size
    return index, {name: BatchSampler(s, batch_size=size) for name, s in samplers.items()}


def _save_figure(figure: Any, path: str) -> None:
    """Save a figure of matplotlib, and print its path."""
    extension, file = Path(path).suffix[1:].lower(), io.BytesIO()
    if extension not in ("png", "svg", "pdf"):  # these can say who made them
        raise ValueError(f"--out must end in .png, .svg or .pdf, got {path}")
    figure.savefig(file, format=extension, dpi=100, metadata={"Creator": "twinfeed"})
    replace_file(Path(path), file.getvalue(), "a picture of this command", _is_picture)
    print_lines(path)


def _is_picture(file: BinaryIO) -> bool:
    """Return whether `_save_figure` has written a file."""
    return re.search(rb"(?si)creator.{1,60}twinfeed", file.read()) is not None


def _names(options: argparse.Namespace) -> list[int | str]:
    """Return the numbers and keys of records that the arguments of a command name."""
    names = [*options.records, *options.key]
    if not names:
        raise ValueError("no record is given: give the numbers of records, or --key KEY")
    return names


def _class_names(path: str | None) -> list[str] | None:
    """Return the class names of an index, or of a text file with one on each line."""
    if path is None:
        return None
    if is_index_path(path):
        return list(load_index(path, None).classes)
    return read_file(path, LIMITS.table_bytes).decode().splitlines()


def _summary(index: Index) -> str:
    """Return a line with the counts of an index, and its features that are columns."""
    excluded, incomplete = index.options.left_out, index.options.broken
    parts = [counted(len(index), "record"), counted(len(index.shards), "shard")]
    parts += [counted(len(index.classes), "class")] if index.classes else []
    columns = [name for name in index.columns if name != "label"]
    parts += [f"columns {_listed(columns)}"] if columns else []
    parts += [f"{excluded} excluded"] if excluded else []
    parts += [counted(incomplete, "incomplete shard")] if incomplete else []
    return ", ".join(parts)


def _listed(names: Sequence[str]) -> str:
    """Return the first names as text, and how many there are if there are more."""
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_SHOWN_ITEMS else ""
    return ", ".join(names[:_MAX_SHOWN_ITEMS]) + more


def _unique_names(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the pairs of a repeated option as a dict, or None; refuse a name that occurs twice."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{option} gives {name!r} {names.count(name)} times: give it once")
    return dict(pairs) or None


def _unwrap_single(paths: list[str]) -> str | list[str]:
    """Return the path if there is only one, or else the list: a single path may be a pattern."""
    return paths[0] if len(paths) == 1 else paths
