"""The keys of a tar's samples, by webdataset's naming rule.

- The key is the member's path up to the first dot of its base name.
- The rest, in lower case, is the extension, which names the field.
- Consecutive members of one key make a stretch. A sample is one stretch.
- Directories, names without an extension and `__meta__` names are left out.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import BinaryIO

from twinfeed.loaders.formats._tarheader import LINKS, REGULAR, Member, members

META = re.compile(r"__[^/]*__($|/)")


def split_name(name: str, /) -> tuple[str, str] | None:
    """Split a member's name into (key, extension) as webdataset does; None without an extension.

    >>> split_name("train/0001.seg.PNG"), split_name("README"), split_name("a.b/c")
    (('train/0001', 'seg.png'), None, None)
    """
    # webdataset's ^((?:.*/|)[^.]+)[.]([^/]*)$, without the quadratic time of the expression
    end = name.find(".", name.rfind("/") + 1)
    dot = name.rfind(".", 0, max(end, 0))
    start = 0 if dot < 0 else name.find("/", dot) + 1
    if not start < end or "\n" in name[:start]:
        return None
    return name[:end], name[end + 1 :].lower()


def field_of(member: Member) -> tuple[str, str] | None:
    """Return (key, extension) of a member that is a field, or a link to a field; else None."""
    name = member.name.decode("utf-8", "surrogateescape")
    fit = member.kind in (*REGULAR, *LINKS) and not META.match(name)
    return split_name(name) if fit else None


def is_nameless(member: Member) -> bool:
    """Return whether a member that is no field is a file whose name lacks an extension."""
    return member.kind in REGULAR and not META.match(member.name.decode("utf-8", "replace"))


def stretches_of(file: BinaryIO, path: str, /) -> Counter[str]:
    """Return how many stretches each key of an archive has. Only headers are read."""
    stretches = Counter[str]()
    last = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scan itself warns
        for member in members(file, path):
            split = field_of(member)
            if split is not None and split[0] != last:
                last = split[0]
                stretches[last] += 1
    return stretches
