"""The `repr` of objects, as the call that makes them, and their tables in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from inspect import signature
from typing import Any


def call_repr(instance: object, /) -> str:
    """Return the call that makes an object whose attributes have the names of the arguments.

    >>> class Point:
    ...     def __init__(self, x, y=0):
    ...         self.x, self.y = x, y
    >>> call_repr(Point(3)), call_repr(Point(3, y=4))
    ('Point(3)', 'Point(3, y=4)')
    """
    arguments = []
    for parameter in signature(type(instance)).parameters.values():
        value = getattr(instance, parameter.name)
        if parameter.default is parameter.empty:
            arguments.append(short_repr(value))
        elif value != parameter.default:
            arguments.append(f"{parameter.name}={short_repr(value)}")
    return f"{type(instance).__name__}({', '.join(arguments)})"


def short_repr(value: Any, /) -> str:
    """Return the name of a function, and the `repr` of anything else.

    >>> short_repr(len), short_repr((224, 224))
    ('len', '(224, 224)')
    """
    return getattr(value, "__qualname__", None) or repr(value)


def html_table(title: str, rows: Iterable[Sequence[object]], /) -> str:
    """Return a table for a notebook, in which all text is escaped.

    >>> html_table("<Index>", [("x", "bytes")])
    '<table><caption>&lt;Index&gt;</caption><tr><td>x</td><td>bytes</td></tr></table>'
    """
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
