"""What the command line prints: one thing a line, and nothing that a terminal would obey."""

from __future__ import annotations

import re
import shlex
import sys
from typing import Any

from twinfeed.loaders.errors import DecodeError, printable
from twinfeed.loaders.index.options import IndexOptions, Reading

_LABELS: dict[str | None, tuple[str, ...]] = {
    "field": ("--label",),
    "folder": ("--label-folder",),
    "json": ("--label-json",),
    "table": ("--label-table", "CSV"),
}


_RECORD = (
    "what to do: look at the record with twinfeed cat, name another field with --field, or draw "
    "other records with --seed"
)

# What messages call an argument of the library, and the option of the command for it.
_FLAGS = {
    "complete=False": "--incomplete",
    "digest=True": "--digest",
    "example=False": "--raw",
    "join=True": "--join",
    "overwrite=True": "--overwrite",
}
_OTHER = {"buffer_size": "--buffer", "fields": "--field", "lists": "--list"}
_NAMES = (
    "backends|background|batch_size|block|buffer_size|cache_bytes|classes|container|exclude|fields|"
    "k|key|label|lists|max_record_bytes|missing|p|root|seed|shard_bytes|shard_records|shards|split|"
    "window"
)
_PYTHON = re.compile(
    r" \((?:in Python|in a terminal) [^)]*\)| \(--[a-z]+ in a terminal\)|: --[a-z]+ in a terminal"
)
_JSON = re.compile(r"(?:label=)?FromJson\((?:field=)?'([^']*)', (?:key='([^']*)'|…)\)")
_RENAMED = re.compile(r"fields=\{'([^']*)': '([^']*)'\}")
_ARGUMENT = re.compile(
    rf"(?<![\w./-])(?:({'|'.join(_FLAGS)})|^({_NAMES})(?= must be at )"
    rf"|({_NAMES})=('[^']*'|\d+(?![\w./])|(?=[\s,.:;)]|$)))"
)


def say(*lines: str, error: bool = False) -> None:
    """Print lines, with everything escaped that is not printable."""
    # Names, keys, classes and texts may hold commands for a terminal. Nothing else prints them.
    for line in lines:
        print(printable(line), file=sys.stderr if error else sys.stdout)


def built_with(options: IndexOptions, index: str, /) -> str:
    """Return the options of `twinfeed index` that build an index again, without the usual ones.

    Class names that were listed are taken from the index itself. The list of what is left out has
    to be given anew.
    """
    words = ["--raw"] * (not options.example) + ["--join"] * options.join
    words += ["--digest"] * options.digest + ["--incomplete"] * (not options.complete)
    for name in ("background", "container", "key", "max_record_bytes", "missing"):
        value = getattr(options, name)
        if value != getattr(Reading, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name, aliases in (options.fields or {}).items():
        words += ["--field", name if name == aliases else f"{name}={aliases}"]
    for name in options.lists:
        words += ["--list", name]
    words += _LABELS.get(options.label_from, ())
    words += [] if options.label is None else [options.label]
    words += ["--classes", index] if options.classes_given else []
    words += ["--root", options.root] if options.root else []
    listed = options.broken or (options.left_out and options.missing != "skip")
    words += ["--exclude", "FILE"] if listed else []
    note = "(and labels by a function, which build_index takes)"
    return shlex.join(words) + (f" {note}" if options.label_from == "function" else "")


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line."""
    say(f"twinfeed: warning: {one_line(message)}", error=True)


def explain(error: Exception) -> str:
    """Return what an error says in one line."""
    text = error.args[0] if isinstance(error, KeyError) else error
    if isinstance(error, DecodeError):  # of the images of `show` and `compare`
        text = f"{error.problem}; {_RECORD}"
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    return one_line(text)


def one_line(message: object) -> str:
    """Return a message in one line, with the options of the command for the library's arguments."""
    return as_options("; ".join(line.strip() for line in str(message).splitlines()))


def as_options(text: str, /) -> str:
    """Return a message of the library with the options that the command has for its arguments.

    >>> as_options("leave such records out with missing='skip', or give root='my data'")
    "leave such records out with --missing skip, or give --root 'my data'"
    """
    text = _PYTHON.sub("", text)
    text = _JSON.sub(_label_json, text)
    text = _RENAMED.sub(lambda m: shlex.join(["--field", f"{m[1]}={m[2]}"]), text)
    return _ARGUMENT.sub(_option, text)


def _label_json(found: re.Match[str]) -> str:
    field, key = found.groups("KEY")
    return shlex.join(["--label-json", f"{field}:{key}" if key else field])


def _option(found: re.Match[str]) -> str:
    flag, subject, name, value = found.groups()
    if flag:
        return _FLAGS[flag]
    name = subject or name
    option = _OTHER.get(name, f"--{name.replace('_', '-')}")
    return f"{option} {shlex.quote(value.strip(chr(39)))}" if value else option
