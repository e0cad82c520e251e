"""The keys of a tar's samples, by webdataset's naming rule, and the keys that come again.

- The key is the member's path up to the first dot of its base name.
- The rest, in lower case, is the extension, which names the field.
- Consecutive members of one key make a stretch. A sample is one stretch.
- Directories, names without an extension and `__meta__` names are passed over.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import BinaryIO

import numpy as np

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.formats._tarheader import LINKS, REGULAR, Member, members

META = re.compile(r"__[^/]*__($|/)")

_RECENT = 1 << 16
"""Up to this many hashes, or an eighth of all, wait in a set before they are sorted in."""


def split_name(name: str, /) -> tuple[str, str] | None:
    """Split a member's name into (key, extension) as webdataset does; None where it has none.

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
    """Return (key, extension) of a member that is a field, or a link for one; None for others."""
    name = member.name.decode("utf-8", "surrogateescape")
    fit = member.kind in (*REGULAR, *LINKS) and not META.match(name)
    return split_name(name) if fit else None


def repeated(file: BinaryIO, path: str, *, until_break: bool = False) -> dict[str, tuple[int, int]]:
    """Return the keys that have several stretches: where the first begins, and how many there are.

    The headers are read twice. Memory holds eight bytes for each other key. A broken header raises
    DataCorruptionError; with `until_break`, what lies after the header is not counted.
    """
    keys = (key for key, _ in _stretches(file, path, until_break))
    hashes = np.fromiter(map(hash, keys), np.int64)
    hashes.sort()
    alike = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    found: dict[str, tuple[int, int]] = {}
    for key, start in _stretches(file, path, until_break) if alike else ():
        if hash(key) in alike:
            first, times = found.get(key, (start, 0))
            found[key] = first, times + 1
    return found


def _stretches(file: BinaryIO, path: str, until_break: bool) -> Iterator[tuple[str, int]]:
    """Yield the key of each stretch, and where the stretch begins. Only headers are read."""
    last = None
    with again(until_break):
        for member in members(file, path):
            split = field_of(member)
            if split is not None and split[0] != last:
                last = split[0]
                yield last, member.start


@contextmanager
def again(until_break: bool = True) -> Iterator[None]:
    """Silence warnings, with `until_break` errors too, that the scan itself gives as well."""
    with warnings.catch_warnings(), suppress(*[DataCorruptionError] * until_break):
        warnings.simplefilter("ignore")
        yield


class KnownKeys:
    """Find the keys that were met before, without holding every key.

    - While keys ascend, as in an archive that is sorted by name, only the last key is held.
    - From the first key on that does not ascend, a hash of each key is held, in about eight bytes.
    - Where two hashes agree, the headers are read again. The headers tell which keys really come
      again. From then on only the keys that come again are held.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._greatest = ""
        self._hashes: _Hashes | None = None
        self._repeated: dict[str, tuple[int, int]] | None = None

    def first(self, key: str, start: int) -> int | None:
        """Return where a key was met before its stretch at `start`; None for a new key."""
        if self._hashes is None:
            if key > self._greatest:
                self._greatest = key
                return None
            self._hashes = _Hashes()
            before = takewhile(lambda one: one[1] < start, _stretches(self._file, self._path, True))
            for other, _ in before:
                self._hashes.add(hash(other))
        if self._repeated is None:
            if not self._hashes.add(hash(key)):
                return None
            self._hashes = _Hashes()
            self._repeated = repeated(self._file, self._path, until_break=True)
        first, _ = self._repeated.get(key, (start, 1))
        return first if first < start else None


class _Hashes:
    """Hold integers of 64 bits: most in a sorted array, the latest in a set."""

    def __init__(self) -> None:
        self._sorted = np.zeros(0, np.int64)
        self._recent: set[int] = set()

    def add(self, number: int) -> bool:
        """Add an integer, and tell whether it is there already."""
        if number in self._recent:
            return True
        if len(self._sorted):
            place = self._sorted.searchsorted(number)
            if place < len(self._sorted) and self._sorted[place] == number:
                return True
        self._recent.add(number)
        if len(self._recent) >= max(_RECENT, len(self._sorted) // 8):
            recent = np.fromiter(self._recent, np.int64, len(self._recent))
            self._sorted = np.concatenate([self._sorted, recent])
            self._sorted.sort()
            self._recent.clear()
        return False
