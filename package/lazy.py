"""Import the names of a package at their first use, so that an import costs what it needs.

The names and their modules are listed once, in the package's stub, which type checkers read.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach(package: str, file: str, /) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of the package at `file`, as the stub beside it says."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    stub = ast.parse(loader.get_data(f"{file.rpartition('.')[0]}.pyi"))  # also from a zip
    where = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, sorted(where)
