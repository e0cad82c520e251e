"""Expand patterns to the names of shards: globs, braces, and numbered sets."""

from __future__ import annotations

import glob
import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from twinfeed.loaders.errors import DataCorruptionError
from twinfeed.loaders.storage.open_store import store_and_name, store_of
from twinfeed.loaders.storage.retries import RefusedError
from twinfeed.loaders.storage.url import Location, is_url
from twinfeed.loaders.support.regular import refuse_command

MAX_NAMES = 1_000_000
"""The maximum number of names that a pattern may expand to."""

_MAGIC = re.compile(r"[*?[]")
_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(.*)", re.DOTALL)


def expand(
    shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    /,
    *,
    complete: bool = True,
) -> list[str]:
    """Return the names of the shards that match a pattern or several patterns.

    - Braces are expanded first, then globs. The matches of each glob are sorted, and so is a set.
    - A pattern that is the name of an existing file or object is not expanded.
    - With `complete`, numbered sets (`-00003-of-00010`) must have every number.

    Raises:
        FileNotFoundError: a glob without a match.
        UnsafeContentError: `pipe:` commands.
        ValueError: a broken brace pattern, an empty list, and a shard that is named twice (in any
            spelling, or through a link).
        DataCorruptionError: an incomplete set. It is a ValueError.
    """
    paths = [shards] if isinstance(shards, (str, os.PathLike)) else list(shards)
    patterns = [os.fspath(path) for path in paths]
    found: list[str] = []
    for pattern in sorted(patterns) if isinstance(shards, (set, frozenset)) else patterns:
        refuse_command(pattern)
        for name in [pattern] if _exists(pattern) else expand_braces(pattern):
            found += _glob(name)
    if not found:
        raise ValueError(f"shards must name at least one file, got {shards!r}")
    check_distinct(found)
    if complete:
        check_complete(found)
    return found


def expand_braces(pattern: str, /) -> list[str]:
    """Return the names that a brace pattern expands to, in bash's order.

    Patterns: `{000..009}`, `{0..9..3}`, `{train,val}`, and products of them. A brace without a
    comma or a range is literal text.

    Raises:
        ValueError: braces are unbalanced or nested, or the pattern expands to more than `MAX_NAMES`
            names. They are counted first, so that a huge number of names takes no memory.
    """
    segments = re.split(r"\{([^{}]*)\}", pattern)
    if any("{" in text or "}" in text for text in segments[::2]):
        raise ValueError(f"unbalanced or nested braces in the shard pattern {pattern!r}")
    alternatives: list[Sequence[str]] = [[text] for text in segments]
    alternatives[1::2] = [_expand_brace(text, pattern) for text in segments[1::2]]
    _check_count(math.prod(map(len, alternatives)), pattern)
    return ["".join(parts) for parts in itertools.product(*alternatives)]


def check_complete(paths: Iterable[str], /) -> None:
    """Raise DataCorruptionError if a numbered set of shards (`-00003-of-00010`) is incomplete."""
    sets = defaultdict[tuple[str, str, str], set[int]](set)
    for path in paths:
        if match := _NUMBERED.fullmatch(path):
            prefix, number, total, suffix = match.groups()
            sets[prefix, total, suffix].add(int(number))
    for (prefix, total, suffix), numbers in sets.items():
        name, count = f"{prefix}-*-of-{total}{suffix}", int(total)
        if max(numbers) >= count:
            raise DataCorruptionError(f"shard number {max(numbers)} of {name} is not below {count}")
        if missing := count - len(numbers):
            first = next(number for number in range(count) if number not in numbers)
            raise DataCorruptionError(
                f"incomplete shards {name}: {missing} of {count} missing, first: "
                f"{first:0{len(total)}d}",
                advice="give all of them, or index those that exist with complete=False "
                "(--incomplete in a terminal)",
            )


def check_distinct(names: Iterable[str], /) -> None:
    """Raise ValueError for a shard that is named twice, in any spelling or through a link."""
    by_path = defaultdict[str, list[str]](list)
    for name in names:
        by_path[str(Location.of(name)) if is_url(name) else os.path.realpath(name)].append(name)
    twice = [" and ".join(spellings) for spellings in by_path.values() if len(spellings) > 1]
    if twice:
        raise ValueError(f"shards are named twice ({len(twice)}: {', '.join(twice[:5])})")


def _exists(name: str) -> bool:
    """Return whether a file or an object has exactly this name, such as `a[1].tar`.

    For a URL without `*?[{` this is False at once, without a request.
    """
    if not is_url(name):
        return os.path.exists(name)
    location = Location.of(name)
    if name.endswith("/") or not re.search(r"[*?[{]", location.key):  # expands to itself
        return False
    store, path = store_and_name(location)
    with suppress(RefusedError):  # a store may refuse a name that is not there
        return store.exists(path)
    return False


def _glob(name: str) -> list[str]:
    """Return the files or URLs that match a glob, or the name itself if it is not a glob."""
    if not _MAGIC.search(name) or _exists(name):
        return [name]
    matches = _glob_store(name) if is_url(name) else sorted(glob.glob(name, recursive=True))
    if not matches:
        if not is_url(name) and os.path.isdir(folder := os.path.dirname(name) or "."):
            os.listdir(folder)  # raises an error if the folder cannot be read, which glob ignores
        raise FileNotFoundError(f"no shard matches {name!r}: check the name")
    return matches


def _glob_store(name: str) -> list[str]:
    """Return the URLs that match a glob in a URL, by listing its folder in the object store."""
    pattern = folder = Location.of(name)
    while _MAGIC.search(folder.key):
        folder = folder.parent
    store = store_of(folder)
    with suppress(FileNotFoundError):
        return [store.url(path) for path in store.glob(str(pattern.below(folder)))]
    return []


def _expand_brace(text: str, pattern: str) -> Sequence[str]:
    """Return the strings that `{text}` expands to: a range of numbers, or a list with commas."""
    match = _RANGE.fullmatch(text)
    if not match:
        return text.split(",") if "," in text else [f"{{{text}}}"]
    first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
    _check_count(abs(last - first) // step + 1, pattern)
    has_zeros = any(re.match(r"-?0\d", number) for number in (match[1], match[2]))
    width = max(len(match[1]), len(match[2])) if has_zeros else 0
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [f"{number:0{width}d}" for number in numbers]


def _check_count(count: int, pattern: str) -> None:
    """Raise ValueError if a pattern expands to more than `MAX_NAMES` names."""
    if count > MAX_NAMES:
        raise ValueError(
            f"the shard pattern {pattern!r} names {count} files, more than {MAX_NAMES}"
        )
