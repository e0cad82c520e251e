"""Every example in a docstring runs, and every public name has one."""

import doctest
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any, get_args, get_type_hints

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


def named_by(hint: Any) -> Iterator[type]:
    """The classes that a type is made of."""
    if isinstance(hint, (list, tuple)) or get_args(hint):
        for part in hint if isinstance(hint, (list, tuple)) else get_args(hint):
            yield from named_by(part)
    elif inspect.isclass(hint):
        yield hint


def signatures(public: Any) -> Iterator[Any]:
    """A function, or a class with its public attributes, methods and properties."""
    yield public
    for owner in inspect.getmro(public) if inspect.isclass(public) else ():
        if not owner.__module__.startswith("twinfeed"):
            continue
        for name, value in vars(owner).items():
            if name in ("__init__", "__iter__", "__call__", "__getitem__") or name[0] != "_":
                yield getattr(value, "fget", getattr(value, "func", inspect.unwrap(value)))


FACADES = [
    "twinfeed.samplers",
    "twinfeed.loaders",
    *(pytest.param(name, marks=pytest.mark.frameworks) for name in BACKENDS),
]


@pytest.mark.parametrize("facade", FACADES)
def test_classes_that_signatures_name_are_public(facade: str) -> None:
    module = importlib.import_module(facade)
    modules = {module, twinfeed.samplers, twinfeed.loaders}
    known = {name: getattr(one, name) for one in modules for name in one.__all__}
    private = set()
    for name in module.__all__:
        for one in signatures(getattr(module, name)):
            if inspect.isclass(one) or inspect.isroutine(one):
                hints = get_type_hints(getattr(one, "__func__", one), localns=known)
                private |= {
                    kind.__name__
                    for attribute, hint in hints.items()
                    for kind in named_by(hint)
                    if attribute[0] != "_" and kind.__module__.startswith("twinfeed")
                }
    assert private <= known.keys()


@pytest.mark.parametrize("package", [twinfeed.samplers, twinfeed.loaders])
def test_public_names_are_sorted(package: ModuleType) -> None:
    """Constants first, as the linter has them."""
    names = list(package.__all__)
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
