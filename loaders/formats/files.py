"""Loose files as records: list them in an order of their own, and scan them.

A listing is a list of `Entry`s, with paths relative to one root and written with `/`; `scan` reads
it. Folders are listed in the order of the paths' code points, the same on every machine; tables and
lists keep their own order.
"""

from __future__ import annotations

import csv
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from twinfeed.loaders._checks import choice
from twinfeed.loaders.errors import DataCorruptionError, ShardWarning, UnsafeContentError
from twinfeed.loaders.formats._opening import open_regular
from twinfeed.loaders.formats._sniff import is_index
from twinfeed.loaders.formats.records import TOO_LONG, OnBad, Part, Record
from twinfeed.loaders.limits import LIMITS

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm")
"""The extensions that `folder` takes for images."""


class Entry(NamedTuple):
    """One record of loose files: key, path of each field relative to the root, and label, if known.

    >>> Entry("cat/1", {"image": "cat/1.jpg"}, "cat").label
    'cat'
    """

    key: str
    paths: dict[str, str]
    label: str | None = None


def folder(
    root: str | os.PathLike[str],
    /,
    *,
    field: str = "image",
    extensions: Iterable[str] = IMAGES,
) -> list[Entry]:
    """List the files of a directory tree, one record each, labelled by their folder below `root`.

    The label is the first folder of the path, as in torchvision's ImageFolder; a file of `root`
    itself has none. The key is the path without its extension, or with it where two files differ in
    nothing else. Hidden files, indexes and other extensions (compared in lower case) are left out;
    files that are no images are counted in a ShardWarning, unless the caller has named extensions.

    Raises FileNotFoundError for a missing root, NotADirectoryError where it is a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     Path(root, "cat").mkdir()
    ...     Path(root, "cat", "1.jpg").touch()
    ...     folder(root)
    [Entry(key='cat/1', paths={'image': 'cat/1.jpg'}, label='cat')]
    """
    wanted = {extension.lower().lstrip(".") for extension in extensions}
    found = walk(root)
    paths = [path for path in found if _extension(path) in wanted]
    if extensions is IMAGES and len(paths) < len(found):
        _warn_of_others(root, [path for path in found if _extension(path) not in wanted])
    return listed(((path, _first_folder(path)) for path in paths), field=field)


def pairs(
    root: str | os.PathLike[str],
    fields: Mapping[str, str | Sequence[str]],
    /,
    *,
    missing: str = "error",
) -> list[Entry]:
    """List records of several files each, such as an image and its annotation.

    The files of a record share a part of their paths. Each field has a pattern, or several, with
    one `*`: what it stands for, slashes included, is the record's key, and the key's first folder
    its label. A record that lacks a field is an error, or left out with `missing="skip"`.

    Raises ValueError for a pattern without exactly one `*`, for records that lack a field (with
    their number and the first five), and for two files of one field and key.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     for name in ("images/1.jpg", "boxes/1.xml"):
    ...         Path(root, name).parent.mkdir()
    ...         Path(root, name).touch()
    ...     pairs(root, {"image": "images/*.jpg", "boxes": "boxes/*.xml"})
    [Entry(key='1', paths={'image': 'images/1.jpg', 'boxes': 'boxes/1.xml'}, label=None)]
    """
    choice("missing", missing, ("error", "skip"))
    patterns = {name: _pattern(name, wanted) for name, wanted in fields.items()}
    found: dict[str, dict[str, str]] = {}
    for path in walk(root):
        for name, pattern in patterns.items():
            if match := pattern.fullmatch(path):
                key = next(text for text in match.groups() if text is not None)
                other = found.setdefault(key, {}).setdefault(name, path)
                if other != path:
                    raise ValueError(f"field {name!r} of record {key!r} is both {other} and {path}")
    lacking = [key for key, paths in found.items() if len(paths) < len(fields)]
    if lacking and missing == "error":
        raise ValueError(
            f"{len(lacking)} of {len(found)} records lack one of the fields {sorted(fields)}, "
            f"first: {', '.join(sorted(lacking)[:5])}; leave them out with missing='skip'"
        )
    return [
        Entry(key, {name: paths[name] for name in fields}, _first_folder(key))
        for key, paths in sorted(found.items())
        if len(paths) == len(fields)
    ]


def table(
    path: str | os.PathLike[str],
    /,
    *,
    column: str = "path",
    label: str | None = "label",
    field: str = "image",
    delimiter: str = ",",
) -> list[Entry]:
    r"""List the files that a CSV table names, with their labels; its first line names the columns.

    Paths are relative to the root given to `scan`, by habit the table's own folder. `label=None`
    takes none.

    Raises ValueError for a column that is not there, a row of another length, an empty path or
    label, and a path named twice, with the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     _ = Path(root, "all.csv").write_text("path,label\n1.jpg,cat\n")
    ...     table(f"{root}/all.csv")
    [Entry(key='1', paths={'image': '1.jpg'}, label='cat')]
    """
    with open(path, newline="", encoding="utf-8-sig") as file, table_errors(path):
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        wanted = [column] if label is None else [column, label]
        lacking = [name for name in wanted if name not in (rows.fieldnames or ())]
        if lacking:
            raise ValueError(f"{path} has no column {lacking[0]!r}, only {rows.fieldnames}")
        named = []
        for row in rows:
            values = [row[name] for name in wanted]
            if None in row or None in row.values() or "" in values:
                raise ValueError(f"{path}, line {rows.line_num}: needs a {' and a '.join(wanted)}")
            named.append((values[0], None if label is None else values[1]))
    return listed(named, field=field)


@contextmanager
def table_errors(path: str | os.PathLike[str], /) -> Iterator[None]:
    """Raise ValueError, with the path, for what is no table.

    >>> with table_errors("a.csv"):
    ...     raise csv.Error("line contains NUL")
    Traceback (most recent call last):
    ValueError: a.csv is no table: line contains NUL
    """
    try:
        yield
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{os.fspath(path)} is no table: {error}") from None


def listed(
    pairs: Iterable[tuple[str, str | int | None]], /, *, field: str = "image"
) -> list[Entry]:
    """List the files of (path, label) pairs, in their order; a label may be None.

    Raises ValueError for a path named twice, with the number of such paths and the first five.

    >>> listed([("b/1.jpg", "cat"), ("a.jpg", 7)])[1]
    Entry(key='a', paths={'image': 'a.jpg'}, label='7')
    """
    pairs = [(path.replace(os.sep, "/"), label) for path, label in pairs]
    twice = [path for path, count in Counter(path for path, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{len(twice)} paths are named twice, first: {', '.join(twice[:5])}")
    stems = Counter(_stem(path) for path, _ in pairs)
    return [
        Entry(
            _stem(path) if stems[_stem(path)] == 1 else path,
            {field: path},
            None if label is None else str(label),
        )
        for path, label in pairs
    ]


def walk(root: str | os.PathLike[str], /) -> list[str]:
    """List the files below `root`, hidden ones left out, as sorted relative paths with `/`.

    Folders that are symbolic links, or indexes, are not entered.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     Path(root, "a.txt").touch()
    ...     walk(root)
    ['a.txt']
    """
    found = []
    for place, folders, names in os.walk(root, onerror=_raise):
        folders[:] = [
            name for name in folders if not name.startswith(".") and not is_index(Path(place, name))
        ]
        inside = os.path.relpath(place, root).replace(os.sep, "/")
        prefix = "" if inside == "." else f"{inside}/"
        found += [prefix + name for name in names if not name.startswith(".")]
    return sorted(found)


def scan(
    root: str | os.PathLike[str],
    entries: Iterable[Entry],
    /,
    *,
    max_record_bytes: int = LIMITS.record_bytes,
    on_bad: OnBad | None = None,
) -> Iterator[Record]:
    """Yield every entry as a record, its files read, in memory bounded by the longest record.

    `header` is made of the paths and sizes. Given `on_bad`, a record that is too long goes there,
    and the scan goes on.

    Raises FileNotFoundError, UnsafeContentError for a path that leaves `root` (links followed), and
    DataCorruptionError for a record longer than `max_record_bytes`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     _ = Path(root, "1.txt").write_bytes(b"abc")
    ...     record = next(scan(root, [Entry("1", {"text": "1.txt"})]))
    >>> record.key, record.paths, record.parts["text"].data
    ('1', ('1.txt',), b'abc')
    """
    places = Places(root)
    for number, entry in enumerate(entries):
        paths = tuple(entry.paths.values())
        full = [places.find(path) for path in paths]
        sizes = [os.stat(path).st_size for path in full]
        if sum(sizes) > max_record_bytes:
            error = DataCorruptionError(
                f"record longer than max_record_bytes={max_record_bytes}",
                path=paths[0],
                record=number,
                key=entry.key,
                found=f"{sum(sizes)} bytes",
                advice=TOO_LONG,
            )
            if on_bad is None:
                raise error
            on_bad(error)
            continue
        parts = {
            field: _whole(place, path)
            for place, (field, path) in enumerate(zip(entry.paths, full, strict=True))
        }
        header = "".join(f"{path}\0{size}\n" for path, size in zip(paths, sizes, strict=True))
        octets = header.encode("utf-8", "surrogateescape")
        yield Record(0, sum(sizes), entry.key, parts, octets, number, paths, entry.label)


class Places:
    """Find files below a root, with the folders' own places remembered."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self.folders: dict[str, str] = {}

    def find(self, path: str) -> str:
        """Return the full path of a file, which must lie below the root when links are followed."""
        folder, name = os.path.split(path)
        if folder not in self.folders:
            self.folders[folder] = os.path.realpath(os.path.join(self.root, folder))
        full = os.path.join(self.folders[folder], name)
        if os.path.islink(full) or name in (".", ".."):
            full = os.path.realpath(full)
        if os.path.isabs(path) or not full.startswith(self.root.rstrip("/") + "/"):
            raise UnsafeContentError(
                f"path leaves its root: {path!r}",
                path=self.root,
                advice="give a root that holds all the files, those that links lead to too",
            )
        return full


def _whole(place: int, path: str) -> Part:
    """Return a whole file as a part."""
    with open(open_regular(path), "rb", buffering=0) as file:
        data = file.read()
    return Part("bytes", place, 0, len(data), data, 0)


def _pattern(name: str, wanted: str | Sequence[str]) -> re.Pattern[str]:
    """Compile the patterns of one field, each with one `*`."""
    patterns = [wanted] if isinstance(wanted, str) else list(wanted)
    for pattern in patterns:
        if pattern.count("*") != 1:
            raise ValueError(f"the pattern of field {name!r} must have one *, not {pattern!r}")
    return re.compile("|".join(re.escape(each).replace(r"\*", "(.+)") for each in patterns))


def _stem(path: str) -> str:
    """Return a path without its extension."""
    stem, extension = os.path.splitext(path)
    return stem if extension else path


def _extension(path: str) -> str:
    """Return a path's extension in lower case, without the dot."""
    return os.path.splitext(path)[1][1:].lower()


def _warn_of_others(root: str | os.PathLike[str], others: Sequence[str]) -> None:
    """Warn that files which are no images are left out."""
    kinds = Counter(os.path.splitext(path)[1].lower() or "no extension" for path in others)
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(5))
    warnings.warn(
        f"{len(others)} files below {os.fspath(root)} are no images and are left out ({counts})",
        ShardWarning,
        stacklevel=4,
    )


def _first_folder(path: str) -> str | None:
    """Return the first folder of a path."""
    first, slash, _ = path.partition("/")
    return first if slash else None


def _raise(error: OSError) -> None:
    """Let a folder that cannot be read be an error."""
    raise error
