"""What a room refuses, as a table: a call, the class of the error, a word of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from support.shards import tree

Call = Callable[..., object]
"""A call on what its test has: a world of files, an index, or nothing."""
Refused = list[tuple[Call, type[Exception], str]]


def check_refused(world: Path, call: Call, kind: type[Exception], word: str) -> None:
    """A call in the world raises the error, and neither writes nor deletes there, but for `made`.

    The word is a regular expression, in which "." is any character.
    """

    def kept() -> set[str]:
        return {name for name in tree(world) if not name.startswith("made/")}

    before = kept()
    with chdir(world), pytest.raises(kind, match=re.compile(word, re.DOTALL)):
        call(world)
    assert kept() == before
