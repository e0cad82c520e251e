"""Lazy imports (PEP 562): a package imports each of its names at the first use.

The names and their modules are listed once, in the package's stub, which type checkers read.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach(package: str, file: str, /) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of the package at `file`, from the stub beside it."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    stub = ast.parse(loader.get_data(f"{file.rpartition('.')[0]}.pyi"))  # also from a zip
    module_of = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, sorted(module_of)
