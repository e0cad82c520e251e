"""The functions that run the commands of the command line, with parsed options."""

from __future__ import annotations

import argparse
import io
import re
import reprlib
import shlex
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twinfeed.loaders.audit.examination import audit
from twinfeed.loaders.building.build import build_index
from twinfeed.loaders.command_line._feeds import load_feed, load_name, load_state
from twinfeed.loaders.command_line._printing import print_lines, show_warning
from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.index import Index, open_index
from twinfeed.loaders.index.index import load_index
from twinfeed.loaders.index.options import IndexOptions, ReadingOptions
from twinfeed.loaders.index.remote_index import is_index_path
from twinfeed.loaders.packing import pack
from twinfeed.loaders.reading.missing import StoredFields
from twinfeed.loaders.reading.reader import Reader
from twinfeed.loaders.support.atomic import replace_file
from twinfeed.loaders.support.limits import LIMITS
from twinfeed.loaders.support.pool import Pool
from twinfeed.loaders.support.regular import read_file
from twinfeed.loaders.tools.compare import compare
from twinfeed.loaders.tools.overlap import overlap
from twinfeed.loaders.tools.planning import plan
from twinfeed.loaders.tools.verify import verify
from twinfeed.loaders.tools.who import diff, records_of, when, who
from twinfeed.samplers import validate
from twinfeed.samplers.validate import counted

_MAX_CHARACTERS = 500  # of the names of classes
_ADVISE_RESTORE_OR_EXCLUDE = (
    "what to do: restore the shards; or twinfeed verify SHARDS --bad-list {0}, and index them "
    "again with --exclude {0}"
)


def run_pack(options: argparse.Namespace) -> None:
    """Run `twinfeed pack`: write shards and their index, and print its path and size."""
    source: str | list[str] | Index = _unwrap_single(options.source)
    if options.root is not None:
        source = open_index(options.source[0], root=options.root)
    options.split = _unique_names("--split", options.split)
    for index in pack(source, options.out, **_arguments(pack, options)).values():
        print_lines(f"{index.path}: {_summary(index)}")


def _process_pool(jobs: int) -> AbstractContextManager[Executor | None]:
    """Return a pool of `jobs` worker processes, or None if `jobs` is 1, for a `with` block."""
    return nullcontext() if validate.integer("jobs", jobs, minimum=1) == 1 else Pool(jobs)


def run_index(options: argparse.Namespace) -> None:
    """Run `twinfeed index`: build an index, and print its path and size."""
    options.classes = "names" if options.label_names else _class_names(options.classes)
    options.fields = _unique_names("--field", options.field)
    arguments, shards = _arguments(build_index, options), _unwrap_single(options.shards)
    with _process_pool(options.jobs) as executor:
        index = build_index(shards, options.out, executor=executor, **arguments)
    print_lines(f"{index.path}: {_summary(index)}")


def run_verify(options: argparse.Namespace) -> int:
    """Run `twinfeed verify`; return the exit status, 1 if there are bad records or warnings."""
    # A warning that was shown before counts too.
    with (
        warnings.catch_warnings(record=True, action="always", category=ShardWarning) as warned,
        _process_pool(options.jobs) as executor,
    ):
        target = _unwrap_single(options.target)
        report = verify(target, executor=executor, **_arguments(verify, options))
    for warning in warned:
        show_warning(warning.message)
    text = str(report)
    if warned:
        text = text.replace("all is well", "nothing is bad")
        text += f", {counted(len(warned), 'warning')}"
    print_lines(*text.split("\n"))
    # A part of a tar sample has an offset, and no number: its own text says what to do.
    if any(finding.record >= 0 or finding.offset is None for finding in report.findings):
        print_lines(_ADVISE_RESTORE_OR_EXCLUDE.format(shlex.quote(options.bad_list or "FILE")))
    return 0 if report.ok and not warned else 1


def _arguments(function: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a command that are keyword arguments of a function, by name."""
    parameters = signature(function).parameters.values()
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # how records are read
        names |= ReadingOptions.__annotations__.keys()
    return {name: getattr(options, name) for name in names & vars(options).keys()}


def run_info(options: argparse.Namespace) -> None:
    """Run `twinfeed info`: print what an index contains, also if its shards are missing."""
    index = load_index(options.index, options.root)
    names, defaults = index.shard_paths, vars(IndexOptions())
    changed = [f"{n}={v!r}" for n, v in vars(index.options).items() if v != defaults[n]]
    lines = [*index.summary().split("\n")]
    classes = ", ".join(index.classes)
    more = " ..." * (len(classes) > _MAX_CHARACTERS)
    lines += [f"class names: {classes[:_MAX_CHARACTERS]}{more}"] if classes else []
    lines += [f"shards: {names[0]} to {names[-1]}", f"fingerprint: {index.fingerprint}"]
    print_lines(*lines, f"options: {', '.join(changed)}")
    open_index(options.index, root=options.root)  # raises an error for missing or changed shards


def run_cat(options: argparse.Namespace) -> None:
    """Run `twinfeed cat`: print records, or write the bytes of one field."""
    index = open_index(options.index, root=options.root)
    stored = StoredFields(index, (options.field,))
    with Reader(index) as reader:
        for record in chain.from_iterable(records_of(index, name) for name in _names(options)):
            if options.field is None:
                lines = [f"  {name}: {_shown(value)}" for name, value in index[record].items()]
                print_lines(index.describe(record), *lines)
            else:
                (value,) = stored.read(reader, np.array([record]))[options.field]
                data = value if isinstance(value, bytes) else f"{value}\n".encode()
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


def _shown(value: Any) -> str:
    """Return a value of a record in one short line."""
    if isinstance(value, bytes):
        return f"{counted(len(value), 'byte')}, {reprlib.repr(value)}"
    return "missing" if value is None else reprlib.repr(getattr(value, "tolist", lambda: value)())


def run_compare(options: argparse.Namespace) -> int:
    """Run `twinfeed compare`; return the exit status, 1 if the frameworks' batches differ."""
    feed = load_feed(options.feed)
    batches = min(options.batches, len(feed))
    return _print_result(compare(feed, backends=options.backends, batches=batches))


def run_show(options: argparse.Namespace) -> None:
    """Run `twinfeed show`: save a picture of a batch of images."""
    from twinfeed.loaders.pictures import show_batch

    _save_figure(show_batch(load_feed(options.feed), step=options.step), options.out)


def run_plan(options: argparse.Namespace) -> None:
    """Run `twinfeed plan`: print what an epoch of a feed reads."""
    _print_result(plan(load_feed(options.feed)))


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
    return _print_result(diff(*map(load_feed, options.feed)))


def run_overlap(options: argparse.Namespace) -> int:
    """Run `twinfeed overlap` on one index or two; return the exit status, 1 if records overlap."""
    paths = [path for path in (options.train, options.evaluation) if path is not None]
    indexes = [open_index(path) for path in paths]
    found = overlap(*indexes, field=options.field, group=options.group, progress=options.progress)
    return _print_result(found)


def run_audit(options: argparse.Namespace) -> int:
    """Run `twinfeed audit` on a function; return the exit status, 1 if there are faults."""
    if options.labels is not None:
        options.labels = _saved_array(options.labels)
    result = audit(
        load_name(options.make, "make"),
        num_records=options.records,
        world_size=options.world,
        max_seconds=options.seconds,
        **_arguments(audit, options),
    )
    return _print_result(result)


def part_of(keys: list[str], item: Any) -> Any:
    """Return what lies below keys: `item[0]["id"]` of "0" and "id"."""
    for key in keys:
        item = item[int(key) if key.isdecimal() else key]
    return item


def _saved_array(path: str) -> Any:
    """Return the array in a .npy file."""
    try:
        return np.load(path, allow_pickle=False)
    except ValueError:
        raise ValueError(f"{path} holds no array: write the labels by numpy.save") from None


def _print_result(result: object) -> int:
    """Print a result; return the exit status, 1 if it has findings."""
    print_lines(*str(result).split("\n"))
    return 0 if getattr(result, "ok", True) else 1


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
        raise ValueError("no record is given: give the number of each (see --help), or --key KEY")
    return names


def _class_names(path: str | None) -> list[str] | None:
    """Return the class names of an index, or of a text file with one on each line."""
    if path is None:
        return None
    if is_index_path(path):
        return list(load_index(path, None).classes)
    return read_file(path, LIMITS.table_bytes).decode().splitlines()


def _summary(index: Index) -> str:
    """Return a line with the counts of an index."""
    options = index.options
    counts = {"record": len(index), "shard": len(index.shards), "class": len(index.classes)}
    counts |= {"excluded record": options.left_out, "incomplete shard": options.broken}
    return ", ".join(counted(n, noun) for noun, n in counts.items() if n or noun == "record")


def _unique_names(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the pairs of a repeated option as a dict, or None; refuse a name that occurs twice."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{option} gives a name twice, among {[name for name, _ in pairs]}")
    return dict(pairs) or None


def _unwrap_single(paths: list[str]) -> str | list[str]:
    """Return the path if there is only one, or else the list: a single path may be a pattern."""
    return paths[0] if len(paths) == 1 else paths
