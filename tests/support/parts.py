"""Parts of an index by themselves: built, and merged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from support.inside import (
    BuildPlan,
    IndexStats,
    Reading,
    ReadingOptions,
    build,
    find_source,
    load_part,
    write_index,
)
from twinfeed.loaders import Index, open_index


def made_parts(
    shards: list[Path], folder: Path, *, label: Any = None, **options: Unpack[ReadingOptions]
) -> list[Path]:
    """The files of the parts of shards, in a folder beside the shards."""
    folder.mkdir(exist_ok=True)
    source = find_source(shards, folder, container=None, root=None)
    plan = BuildPlan.of(source, label, None, Reading(**options))
    return [part.file for part in build._parts(plan, source.jobs, folder, None, False)]


def merged(files: Iterable[Path], path: Path) -> Index:
    """The index of parts."""
    write_index(path, IndexStats(map(load_part, files), None), classes=None)
    return open_index(path)
