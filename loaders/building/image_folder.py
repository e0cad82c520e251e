"""List images in folders of classes as records, in the same order on every machine."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from twinfeed.loaders.errors import ShardWarning
from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.sniff import IMAGE_EXTENSIONS
from twinfeed.loaders.index.manifest import is_index

SYSTEM_FOLDERS = frozenset(
    {"__MACOSX", "@eaDir", "@Recycle", "@Recently-Snapshot", "@tmp", "#recycle", "#snapshot"}
    | {"$RECYCLE.BIN", "RECYCLER", "System Volume Information", "lost+found"}
)
"""Folders that macOS, Synology, QNAP, Windows and Linux put beside files: no class is called so."""


def list_images(root: str | os.PathLike[str], /) -> list[Entry]:
    """List the images of a directory tree, one record each, labelled by their folder below `root`.

    The label is the first folder of the path, as in torchvision's ImageFolder. A file of `root`
    itself has no label. The key is the path without its extension. Where two files differ only in
    the extension, their keys keep the extension. Hidden files, indexes, `SYSTEM_FOLDERS` and other
    files than images are left out. Links to folders are not followed. A ShardWarning counts the
    files that are not images, the system's folders, links to folders, and folders without files.

    Raises:
        FileNotFoundError: a missing root.
        NotADirectoryError: a root that is a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     Path(root, "cat").mkdir()
    ...     Path(root, "cat", "1.jpg").touch()
    ...     list_images(root)
    [Entry(key='cat/1', paths={'image': 'cat/1.jpg'}, label='cat')]
    """
    files = _files_below(root)
    paths = [path for path in files if os.path.splitext(path)[1][1:].lower() in IMAGE_EXTENSIONS]
    if len(paths) < len(files):
        ignored = sorted(set(files).difference(paths))
        warnings.warn(
            f"files below {os.fspath(root)} are not images and are left out ({len(ignored)}, "
            f"first: {', '.join(ignored[:5])})",
            ShardWarning,
            stacklevel=2,
        )
    return [
        entry._replace(label=path.partition("/")[0] if "/" in path else None)
        for path, entry in zip(paths, image_entries(paths), strict=True)
    ]


def image_entries(paths: Sequence[str], /) -> list[Entry]:
    """Return a record for each image, without a label; `list_images` says what the key is."""
    stems = [os.path.splitext(path)[0] for path in paths]
    counts = Counter(stems)
    return [
        Entry(stem if counts[stem] == 1 else path, {"image": path})
        for stem, path in zip(stems, paths, strict=True)
    ]


def _files_below(root: str | os.PathLike[str]) -> list[str]:
    """Return the sorted paths of the files below `root`, and of folders left out ("a/more/")."""
    paths = []
    for folder, folders, names in os.walk(root, onerror=_raise):
        left_out = [f"{name}/" for name in folders if name in SYSTEM_FOLDERS]
        visible = [n for n in folders if not n.startswith(".") and n not in SYSTEM_FOLDERS]
        left_out += [f"{name}/" for name in visible if Path(folder, name).is_symlink()]
        relative = os.path.relpath(folder, root)
        prefix = "" if relative == "." else f"{relative}/"  # "" for `root` itself
        if prefix and not folders and not names:
            left_out.append("")
        # `os.walk` descends only into the folders that stay in its list.
        folders[:] = [name for name in visible if not is_index(Path(folder, name))]
        paths += [prefix + name for name in names + left_out if not name.startswith(".")]
    return sorted(paths)


def _raise(error: OSError) -> None:
    """Raise the error of a folder that cannot be read, which `os.walk` would ignore."""
    raise error
