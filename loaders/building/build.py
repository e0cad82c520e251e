"""Build an index: scan each shard into a part, then merge all parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Unpack

from twinfeed.loaders.building._merge import write_index
from twinfeed.loaders.building._part_stats import IndexStats
from twinfeed.loaders.building._parts import ShardPart, load_part
from twinfeed.loaders.building._scan_shard import build_part
from twinfeed.loaders.building.bad_records import Exclude, exclude_records
from twinfeed.loaders.building.classes import Classes, check_classes
from twinfeed.loaders.building.labels import FromTable, LabelSource
from twinfeed.loaders.building.plan import BuildPlan, Fields
from twinfeed.loaders.building.sources import Job, PathLike, Shards, check_present, find_source
from twinfeed.loaders.building.writer import UNWRITABLE_ADVICE, check_own_folder
from twinfeed.loaders.index.index import Index
from twinfeed.loaders.index.open import open_index
from twinfeed.loaders.index.options import ReadingOptions, parse_reading_options
from twinfeed.loaders.index.paths import output_path
from twinfeed.loaders.storage.url import Location
from twinfeed.loaders.support.atomic import explain_full_disk
from twinfeed.loaders.support.progress import progress_bar
from twinfeed.loaders.support.temporary import temporary_folder
from twinfeed.samplers.validate import counted

_COPY_THREADS = 4
"""The number of threads that each download a remote shard and then scan the local copy."""


def build_index(
    shards: Shards,
    path: PathLike,
    /,
    *,
    label: LabelSource | None = None,
    classes: Classes = None,
    fields: Fields | None = None,
    exclude: Exclude = (),
    root: PathLike | None = None,
    executor: Executor | None = None,
    progress: bool = False,
    **options: Unpack[ReadingOptions],
) -> Index:
    """Build the index of `shards` in the folder `path`, and return it opened.

    Each shard is read once, with every checksum. The new index is made in a hidden folder in
    `path`, and replaces an older index by a rename at the end.

    Args:
        shards: a path, a pattern (globs, braces) or a list of these, of shards or of images; a
            folder of images, with a folder for each class; or a list of `Entry`.
        path: the folder of the index, on this machine.
        label: a field (an Example's feature, a tar member such as "cls"), `FromJson`, `FromFolder`,
            `FromFile`, `FromTable`, `FromExample`, or a function. The function is given a record's
            dict (its fields by name, `__key__`, `__shard__`, `__number__`) and returns an int, a
            str or None. An empty label is an error, and so is another field called "label".
        classes: the names of the labels, by their number. By default text that is an integer in
            every record is a number, wherever it was read, also as the name of a folder: "7", "7.0"
            and "007". Other names are numbered in sorted order. Some integers among names are an
            error. "names" takes every text as a name.
        fields: the fields to keep: a list, or a mapping to the names that a field may have in the
            records (`{"image": "jpg;jpeg;png"}`). By default all fields are kept.
        exclude: the bad records to leave out: (shard, number) pairs, or the list that `verify`
            writes. If the list says that a shard cannot be read after a record, all later records
            of the shard are left out too.
        root: the folder that holds all shards, by default the folder that holds the index.
        executor: any executor of concurrent.futures' kind, which builds the parts in parallel. By
            default, a few threads copy and index remote shards in parallel.
        progress: whether to show a progress bar.
        **options: how the records are read, such as `missing="skip"`; see `ReadingOptions`.

    Raises:
        FileNotFoundError: a shard is missing.
        LoaderError: something in a shard is wrong (DataCorruptionError and others).
        DecodeError: the function of `label` fails or returns a value that is not a label.
        KeyError: no record has a field that is named, with `missing="empty"`.
        ValueError: labels, classes, tables or fields do not fit.
        FileExistsError: `path` holds other files.
        OSError: the index cannot be written.

    >>> import tempfile
    >>> from twinfeed.loaders.formats.tar import TarWriter
    >>> folder = tempfile.mkdtemp()
    >>> with TarWriter(f"{folder}/a.tar") as writer:
    ...     writer.write("0001", {"jpg": b"...", "cls": b"cat"})
    >>> index = build_index(f"{folder}/a.tar", f"{folder}/a.index", label="cls")
    >>> index.classes, index.labels, index.keys([0])
    (('cat',), array([0]), ['0001'])
    """
    folder = check_own_folder(output_path(path))
    classes = check_classes(classes)
    reading = parse_reading_options(build_index, options)
    source = find_source(
        shards, folder, container=reading.container, root=root, complete=reading.complete
    )
    plan, jobs = BuildPlan.of(source, label, fields, reading), exclude_records(source, exclude)
    check_present(source)
    table = label if isinstance(label, FromTable) else None
    with explain_full_disk(folder), temporary_folder(folder, UNWRITABLE_ADVICE) as work:
        build_parts = partial(_build_parts, jobs, work, executor, progress)
        stats = IndexStats(build_parts(plan))
        if mixed := stats.mixed_features():  # read all values of these features as lists
            stats = IndexStats(build_parts(plan.with_lists(mixed)))
        write_index(folder, work, stats, classes, table)
    return open_index(path, root=str(source.root))


def _build_parts(
    jobs: Sequence[Job], folder: Path, executor: Executor | None, progress: bool, plan: BuildPlan
) -> Iterator[ShardPart]:
    """Build the part of every job in `folder`, and yield the parts.

    Functions for labels are never called on threads, which they may not support.
    """
    tasks = [(plan, job, f"{folder}/{number}.part") for number, job in enumerate(jobs)]
    use_threads = executor is None and isinstance(plan.root, Location) and not callable(plan.label)
    with ThreadPoolExecutor(_COPY_THREADS) if use_threads else nullcontext(executor) as pool:
        finished = starmap(build_part, tasks) if pool is None else _run_on(pool, tasks)
        for _ in progress_bar(finished, "indexing", "shard", progress, total=len(tasks)):
            pass
    for _, job, file in tasks:
        part = load_part(file)
        if part.num_excluded < len(job.exclude):
            raise ValueError(
                f"exclude= lists {counted(len(job.exclude), 'record')} of {job.shard}, and "
                f"{part.num_excluded} of them exist: make the list again with twinfeed verify"
            )
        yield part


def _run_on(executor: Executor, tasks: Sequence[tuple[BuildPlan, Job, str]]) -> Iterator[None]:
    """Run `build_part` for all tasks on an executor; after an error, cancel those not started."""
    futures = [executor.submit(build_part, *task) for task in tasks]
    try:
        # In order: a KeyboardInterrupt in `as_completed` may leave locks of the futures locked.
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
