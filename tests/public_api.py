"""List what is public, a line for each name, method, attribute, parameter and option.

python tests/public_api.py > tests/golden/api.txt
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
OWN = ("__call__", "__getitem__", "__iter__", "__len__")


def lines() -> list[str]:
    """Return every line, sorted."""
    out = set(options())
    for path in reference():
        module, _, name = path.rpartition(".")
        out |= set(described(path, getattr(importlib.import_module(module), name)))
    return sorted(out)


def reference() -> list[str]:
    """Return the names that the pages of the reference show, each with the module to import from.

    This is the `currentmodule` above the name.
    """
    shown = re.compile(
        r"^\.\. (?:currentmodule:: (\S+)|(?:auto|py:)\w+:: (?:[\w.]+\.)?(\w+))$", re.MULTILINE
    )
    module, names = "", []
    for page in sorted(REFERENCE.glob("*.md")):
        for found, name in shown.findall(page.read_text()):
            module = found or module
            names += [f"{module}.{name}"] if name else []
    return names


def breaking(before: list[str], now: list[str]) -> list[str]:
    """Return the lines that break programs: those that went, and what callables newly require."""
    gone = set(before) - set(now)
    required = {
        line
        for line in set(now) - set(before)
        if line.endswith(" required") and line.partition("(")[0] in before
    }
    return sorted(gone | required)


def described(path: str, value: Any) -> Iterator[str]:
    """Yield the lines of a public name."""
    yield path
    if inspect.isclass(value):
        yield from parameters(path, value)
        for name in dir(value):
            member = inspect.getattr_static(value, name)
            if (name.startswith("_") and name not in OWN) or not ours(value, name):
                continue
            yield f"{path}.{name}"
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if inspect.isfunction(member):
                yield from parameters(f"{path}.{name}", member)
    elif inspect.isfunction(value):
        yield from parameters(path, value)


def ours(cls: type, name: str) -> bool:
    """Return whether a class has a member from this library, and not from a framework's class."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    return owner.__module__.startswith("twinfeed")


def parameters(path: str, function: Any) -> Iterator[str]:
    """Yield a line for each parameter: how it is given, and its default."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a class that is made in C
        return
    place = 0
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        kind = parameter.kind
        given = {
            kind.POSITIONAL_ONLY: str(place),
            kind.POSITIONAL_OR_KEYWORD: f"{place} or {parameter.name}",
            kind.KEYWORD_ONLY: parameter.name,
            kind.VAR_POSITIONAL: "*",
            kind.VAR_KEYWORD: "**",
        }[kind]
        place += 1
        default = parameter.default
        if default is parameter.empty:
            yield f"{path}({given})" + " required" * (
                kind not in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL)
            )
        else:
            shown = default.__name__ if inspect.isfunction(default) else repr(default)
            yield f"{path}({given}) = {shown}"


def options() -> Iterator[str]:
    """Yield a line for each command, and for each of its arguments."""
    from support.inside import _parser

    (commands,) = (
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    for name, command in commands.choices.items():
        yield f"$ twinfeed {name}"
        for action in command._actions:
            given = " ".join(action.option_strings) or action.dest
            yield f"$ twinfeed {name} {given}{' required' * bool(action.required)}"


if __name__ == "__main__":
    print(*lines(), sep="\n")
