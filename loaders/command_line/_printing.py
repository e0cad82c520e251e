"""Print lines, with the control sequences of terminals escaped."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from twinfeed.loaders.building.labels import label_options
from twinfeed.loaders.errors import printable
from twinfeed.loaders.index.options import IndexOptions, Reading


def print_lines(*lines: str, error: bool = False) -> None:
    """Print lines, with terminal controls in names and values escaped. All output goes through
    here.
    """
    for line in lines:
        print(printable(line), file=sys.stderr if error else sys.stdout)


def options_built_with(options: IndexOptions, index: str, /) -> str:
    """Return the options of `twinfeed index` that an index was built with, as a command line.

    For `--classes`, the argument is the index itself. The file of `--exclude` is not known: FILE.
    """
    flags = {"--raw": not options.example, "--join": options.join}
    flags |= {"--digest": options.digest, "--incomplete": not options.complete}
    arguments = [flag for flag, is_set in flags.items() if is_set]
    for name in ("background", "container", "key", "max_record_bytes", "missing"):
        value = getattr(options, name)
        if value != getattr(Reading, name):  # `Reading` has the defaults
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    # {"image": "jpg;png"}: the field "image" of the index has the name jpg or png in a record.
    for name, aliases in (options.fields or {}).items():
        arguments += ["--field", name if name == aliases else f"{name}={aliases}"]
    for name in options.lists:
        arguments += ["--list", name]
    arguments += label_options(options.label_from, options.label)
    arguments += ["--classes", index] if options.classes_given else []
    arguments += ["--root", options.root] if options.root else []
    # Whether `--exclude` was used is not stored, but follows from two numbers: `left_out` counts
    # the records that are not in the index, and `broken` the shards of which only the beginning is
    # in the index. Only `--exclude` cuts off a shard. It also excludes single records, but so does
    # `--missing skip`, and then it is not known which of the two has excluded them.
    has_exclude_list = options.broken or (options.left_out and options.missing != "skip")
    arguments += ["--exclude", "FILE"] if has_exclude_list else []
    note = "(and labels by a function, which build_index takes)"
    return shlex.join(arguments) + (f" {note}" if options.label_from == "function" else "")


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning to standard error, in one line. It replaces `warnings.showwarning`."""
    print_lines(f"twinfeed: warning: {one_line(message)}", error=True)


def error_line(error: Exception) -> str:
    """Return the message of an error and its notes, but for a traceback, in one line."""
    text = error.args[0] if isinstance(error, KeyError) else error  # str(KeyError) adds quotes
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]
    return one_line("\n".join([str(text), *notes]))


def one_line(message: object) -> str:
    """Join the lines of a message by "; "."""
    return "; ".join(line.strip() for line in str(message).splitlines())
