"""Split the names of tar members into keys and fields, by webdataset's naming rule.

- The key is the member's path up to the first dot of its base name.
- What follows the dot, in lower case, is the extension, which names the field.
- Consecutive members of one key are a run. A sample is one run.
- Directories, names without an extension and `__meta__` names are skipped. So are the files that
  macOS puts beside each file, such as `cats/._1.png` and `__MACOSX/cats/._1.png`, with a warning.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.formats._tarheader import LINKS, REGULAR, HeaderReader, Member

FORBIDDEN = re.compile("[\x00\n\r\udc80-\udcff]")
"""Characters that the name of a field's member may not contain: NUL, newlines, and the surrogates
that represent bytes that are not UTF-8."""

METADATA_NAME = re.compile(r"__[^/]*__($|/)")
MACOS_NAME = re.compile(r"(.*/)?(\._|__MACOSX/)", re.DOTALL)


def split_name(name: str, /) -> tuple[str, str] | None:
    """Split a member's name into (key, extension) as webdataset does; None without an extension.

    >>> split_name("train/0001.seg.PNG"), split_name("README"), split_name("a.b/c")
    (('train/0001', 'seg.png'), None, None)
    >>> split_name("a/.txt"), split_name("a.b/.txt")
    (('a/', 'txt'), None)
    """
    # webdataset uses the regular expression ^((?:.*/|)[^.]+)[.]([^/]*)$, which can take quadratic
    # time. This computes the same result; the comments show it for "a.b/c.d.txt".
    folder, slash, base_name = name.rpartition("/")  # "a.b", "/", "c.d.txt"
    stem, dot, extension = base_name.partition(".")  # "c", ".", "d.txt"
    key = folder + slash + stem  # "a.b/c"
    # `.*/` matches the folders up to the last one with a dot in its name, "a.b/". `[^.]+` matches
    # the characters of the key after these: there must be one or more.
    _, folder_dot, after_dot = key.rpartition(".")  # "a", ".", "b/c"
    without_dot = after_dot.partition("/")[2] if folder_dot else key  # "c"
    dotted_folders = key.removesuffix(without_dot)  # "a.b/"
    if not dot or not without_dot or "\n" in dotted_folders:  # `.*` does not match a newline
        return None
    return key, extension.lower()


def field_members(headers: HeaderReader, /) -> Iterator[tuple[Member, str, str]]:
    """Yield (member, key, extension) of each member that is a field: a file or a link.

    Raises:
        DataCorruptionError: a header is broken, or no file of the archive has an extension.
    """
    without_extension: Member | None = None
    has_fields, of_macos = False, list[str]()
    for member in headers.members():
        name = member.name.decode("utf-8", "surrogateescape")
        if member.kind not in (*REGULAR, *LINKS) or METADATA_NAME.match(name):
            continue
        if MACOS_NAME.match(name):
            of_macos.append(name)
            continue
        parts = split_name(name)
        if parts is not None:
            has_fields = True
            yield member, *parts
        elif member.kind in REGULAR and without_extension is None:
            without_extension = member
    if of_macos:
        headers.warn(
            f"files of macOS are left out ({len(of_macos)}, first: {of_macos[0]!r}): archive "
            f"without them by COPYFILE_DISABLE=1 tar …"
        )
    if without_extension is not None and not has_fields:
        name = repr(without_extension.name)
        raise DataCorruptionError(
            f"no file of the archive is called KEY.EXTENSION, such as {name}",
            path=headers.path,
            offset=without_extension.start,
            advice="write the archive again with such names, as 0001.jpg and 0001.cls",
        )


def count_runs(headers: HeaderReader, /) -> Counter[str]:
    """Count for each key its runs, which are consecutive members. Only headers are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scan itself warns
        return Counter(key for key, _ in groupby(field_members(headers), key=itemgetter(1)))
