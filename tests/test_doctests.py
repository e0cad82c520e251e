"""Every example in a docstring runs, and every public name has one."""

import doctest
import importlib
import inspect
from pathlib import Path
from types import GenericAlias, ModuleType

import pytest

import twinfeed.loaders
import twinfeed.samplers

BACKENDS = tuple(
    f"twinfeed.loaders.{name}" for name in ("keras", "pictures", "torch", "tensorflow")
)


def modules() -> list[object]:
    """The names of all modules, those of a backend marked: they import its framework."""
    found: list[object] = []
    for package in (twinfeed.samplers, twinfeed.loaders):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join([package.__name__, *parts]).removesuffix(".__init__")
            needs = [pytest.mark.frameworks] if name.startswith(BACKENDS) else []
            if path.name != "__main__.py":
                found.append(pytest.param(name, marks=needs))
    return found


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def lacks_example(thing: object) -> bool:
    if isinstance(thing, GenericAlias):  # which Python 3.10 takes for a class
        return False
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return False
    shown = inspect.isclass(thing) or inspect.isroutine(thing)
    return shown and ">>>" not in (inspect.getdoc(thing) or "")


@pytest.mark.parametrize("name", modules())
def test_every_public_name_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", ())
    assert [name for name in public if lacks_example(getattr(module, name))] == []


@pytest.mark.parametrize("package", [twinfeed.samplers, twinfeed.loaders])
def test_public_names_are_sorted(package: ModuleType) -> None:
    """Constants first, as the linter has them."""
    names = list(package.__all__)
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
