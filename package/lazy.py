"""Lazy imports (PEP 562): a package imports each of its names at the first use.

The names and their modules are listed once, in the package's stub, which type checkers read.
`import *` imports all but the names that need a framework or an extra. `dir` and `help` leave out
names whose package is not installed: to use one is a ModuleNotFoundError that names the extra.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# The extras that a module may need, which is in its name, and the package where that differs.
_EXTRAS = {"torch", "tensorflow", "keras", "jax", "grain", "webdataset", "pictures"}
_PACKAGES = {"pictures": "matplotlib"}


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

    def names_without(extras: set[str]) -> list[str]:
        """Return the names whose module needs none of these extras."""
        return [name for name in module_of if extras.isdisjoint(module_of[name].split("."))]

    def names() -> list[str]:
        missing = {extra for extra in _EXTRAS if find_spec(_PACKAGES.get(extra, extra)) is None}
        found = {*vars(sys.modules[package]), *names_without(missing)}
        return sorted(found - {"attach", "lazy"})

    return get, names, sorted(names_without(_EXTRAS))
