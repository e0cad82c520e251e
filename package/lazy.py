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

# For each part of a module's name that needs a package: that package.
_PACKAGES = {"pictures": "matplotlib"} | {
    name: name for name in ("torch", "tensorflow", "keras", "jax", "grain", "webdataset")
}


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

    def names_without(packages: set[str]) -> set[str]:
        """Return the names whose modules need none of these packages."""
        return {
            name
            for name, module in module_of.items()
            if packages.isdisjoint(_PACKAGES.get(part) for part in module.split("."))
        }

    def names() -> list[str]:
        missing = {name for name in _PACKAGES.values() if find_spec(name) is None}
        return sorted({*vars(sys.modules[package]), *names_without(missing)} - {"attach", "lazy"})

    return get, names, sorted(names_without(set(_PACKAGES.values())))
