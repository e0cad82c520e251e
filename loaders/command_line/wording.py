"""What the library says, in the words of the command line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from twinfeed.loaders.limits import LIMITS

OPTIONS = {
    "background": "--background",
    "classes": "--classes",
    "container": "--container",
    "exclude": "--exclude",
    "fields": "--field",
    "key": "--key",
    "label": "--label",
    "lists": "--list",
    "max_record_bytes": "--max-record-bytes",
    "missing": "--missing",
    "root": "--root",
    "seed": "--seed",
    "shard_bytes": "--shard-size",
    "shard_records": "--shard-records",
    "shards": "--shards",
    "split": "--split",
}
"""The option that stands for an argument of the library."""

_PHRASES = {
    "build_index(exclude=...)": "twinfeed index --exclude FILE",
    "overwrite=True": "--overwrite",
    "example=False": "--raw",
    "fields={'text': 'label'}": "--field text=label",
    "join=True": "--join",
    "join= is": "--join is",
    "raise max_record_bytes": "raise --max-record-bytes",
    "seed must": "--seed must",
    "shard_bytes must": "--shard-size must",
    "shard_records must": "--shard-records must",
    "shards must be at least": "--shards must be at least",
}
_ARGUMENT = re.compile(rf"(?<![^\s(])({'|'.join(OPTIONS)})=('?)([\w.]*)\2(?!\S*/)")
_LABELS: dict[Any, tuple[str, ...]] = {
    "field": ("--label",),
    "folder": ("--label-folder",),
    "json": ("--label-json",),
    "table": ("--label-table", "CSV"),
}
_USUAL = {"missing": "error", "max_record_bytes": LIMITS.record_bytes}


def in_options(text: str) -> str:
    """Return a message with options in place of arguments; paths stay as they are.

    >>> in_options("give root= the folder, or missing='skip': label=3/key=7.tar")
    'give --root the folder, or --missing skip: label=3/key=7.tar'
    """
    for phrase, option in _PHRASES.items():
        text = text.replace(phrase, option)
    return _ARGUMENT.sub(lambda found: f"{OPTIONS[found[1]]} {found[3]}".rstrip(), text)


def built_with(options: Mapping[str, Any], index: str = "INDEX") -> str:
    """Return the options that an index was built with as they are given, the usual ones left out.
    Class names that it was given are to be had from the index itself.

    >>> built_with({"container": "tar", "fields": {"image": "jpg;png"}, "label_from": "folder"})
    "--container tar --field 'image=jpg;png' --label-folder"
    """
    words: list[str] = []
    if options.get("example") is False:
        words.append("--raw")
    if options.get("join"):
        words.append("--join")
    for name in ("background", "container", "key", "max_record_bytes", "missing"):
        value = options.get(name)
        if value not in (None, _USUAL.get(name)):
            words += [OPTIONS[name], str(value)]
    for name, aliases in (options.get("fields") or {}).items():
        words += [OPTIONS["fields"], name if name == aliases else f"{name}={aliases}"]
    for name in options.get("lists", ()):
        words += [OPTIONS["lists"], name]
    words += _LABELS.get(options.get("label_from"), ())
    if options.get("label") is not None:
        words.append(options["label"])
    if options.get("classes_given"):
        words += [OPTIONS["classes"], index]
    note = "(and labels by a function, which build_index takes)"
    return shlex.join(words) + (f" {note}" if options.get("label_from") == "function" else "")


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line."""
    print(f"twinfeed: warning: {one_line(message)}", file=sys.stderr)


def explain(error: Exception) -> str:
    """Return what an error says in one line.

    >>> explain(FileNotFoundError(2, "No such file or directory", "a.tar"))
    'a.tar: No such file or directory'
    """
    text = error.args[0] if isinstance(error, KeyError) else error
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return one_line(text)


def one_line(message: object) -> str:
    """Return a message in one line, in the words of the command line."""
    return in_options("; ".join(part.strip() for part in str(message).splitlines()))
