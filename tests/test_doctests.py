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


def signatures(facade: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What a facade exports, its classes' methods and properties too, with the types of each."""
    module = importlib.import_module(facade)
    known = exported(module)
    for public in (getattr(module, name) for name in module.__all__):
        found = [public]
        for owner in inspect.getmro(public) if inspect.isclass(public) else ():
            if owner.__module__.startswith("twinfeed"):
                found += [each for name, each in vars(owner).items() if shown(name)]
        for one in found:
            one = getattr(one, "fget", getattr(one, "func", getattr(one, "__func__", one)))
            if inspect.isclass(one) or inspect.isroutine(one):
                yield one, get_type_hints(one, localns=known)


def shown(name: str) -> bool:
    return name in ("__init__", "__iter__", "__call__", "__getitem__") or name[0] != "_"


def exported(module: ModuleType) -> dict[str, Any]:
    """What a user of a facade may import."""
    modules = {module, twinfeed.samplers, twinfeed.loaders}
    return {name: getattr(one, name) for one in modules for name in one.__all__}


FACADES = [
    "twinfeed.samplers",
    "twinfeed.loaders",
    *(pytest.param(name, marks=pytest.mark.frameworks) for name in BACKENDS),
]


@pytest.mark.parametrize("facade", FACADES)
def test_classes_that_signatures_name_are_public(facade: str) -> None:
    private = {
        kind.__name__
        for _, hints in signatures(facade)
        for name, hint in hints.items()
        for kind in named_by(hint)
        if name[0] != "_" and kind.__module__.startswith("twinfeed")
    }
    assert private <= exported(importlib.import_module(facade)).keys()


@pytest.mark.parametrize("facade", FACADES)
def test_strings_that_are_chosen_from_are_literals(facade: str) -> None:
    """Names of fields and keys are free."""
    for one, hints in signatures(facade):
        if inspect.isroutine(one):
            defaults = {p.name: p.default for p in inspect.signature(one).parameters.values()}
            given = {name for name, default in defaults.items() if isinstance(default, str)}
            assert {name for name in given if hints[name] is str} <= {"field", "key"}, one


@pytest.mark.parametrize("package", [twinfeed.samplers, twinfeed.loaders])
def test_public_names_are_sorted(package: ModuleType) -> None:
    """Constants first, as the linter has them."""
    names = list(package.__all__)
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
