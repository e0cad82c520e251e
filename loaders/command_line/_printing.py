"""Print lines, with the control sequences of terminals escaped."""

from __future__ import annotations

import sys
from typing import Any

from twinfeed.loaders.errors import printable


def print_lines(*lines: str, error: bool = False) -> None:
    """Print lines, with terminal controls in names and values escaped."""
    for line in lines:
        print(printable(line), file=sys.stderr if error else sys.stdout)


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
