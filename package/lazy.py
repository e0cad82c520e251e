"""Lazy imports (PEP 562): a package imports each of its names at the first use.

The names and their modules are listed once, in the package's stub, which type checkers read.
`import *` imports all but the names that need a framework or an extra.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_EXTRAS = {"torch", "tensorflow", "keras", "jax", "grain", "webdataset", "pictures"}


def attach(
    package: str, file: str, /
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of the package at `file`, from its stub."""
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

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    listed = [name for name, module in module_of.items() if _EXTRAS.isdisjoint(module.split("."))]
    return get, names, sorted(listed)
