"""Examples in docstrings run, public names have examples, and sections are true."""

import builtins
import doctest
import importlib
import inspect
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from public_api import reference

import twinfeed
import twinfeed.loaders
import twinfeed.samplers

BACKENDS = tuple(
    f"twinfeed.loaders.{name}"
    for name in ("grain", "jax", "keras", "pictures", "torch", "tensorflow", "webdataset")
)


def modules() -> list[object]:
    """The names of all modules, those of a backend marked: they import its framework."""
    found: list[object] = []
    for package in (twinfeed, twinfeed.samplers, twinfeed.loaders):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join([package.__name__, *parts]).removesuffix(".__init__")
            needs = [pytest.mark.frameworks] if name.startswith(BACKENDS) else []
            if path.name != "__main__.py":
                found.append(pytest.param(name, marks=needs))
    return found


def lacks_example(thing: object) -> bool:
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return False
    shown = inspect.isclass(thing) or inspect.isroutine(thing)
    return shown and ">>>" not in (inspect.getdoc(thing) or "")


@pytest.mark.parametrize("name", modules())
def test_examples_run_and_every_public_name_has_one(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", ())
    assert [name for name in public if lacks_example(getattr(module, name))] == []
    if ">>>" in Path(module.__file__ or "").read_text():
        linecache.clearcache()  # whose every file doctest would look at, for each example
        assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


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
    for one in members(exports(module).values()):
        yield one, get_type_hints(one, localns=known)


def members(names: Iterable[Any]) -> Iterator[Any]:
    """Classes and functions, and the methods and properties of the classes.

    A class with attributes is what functions return: nobody calls its constructor.
    """
    for public in names:
        found, returned = [public], bool(section(public, "Attributes"))
        for owner in inspect.getmro(public) if inspect.isclass(public) else ():
            if owner.__module__.startswith("twinfeed"):
                own = {name: each for name, each in vars(owner).items() if shown(name)}
                found += [each for name, each in own.items() if name != "__init__" or not returned]
        for one in found:
            one = getattr(one, "fget", getattr(one, "func", getattr(one, "__func__", one)))
            if inspect.isclass(one) or inspect.isroutine(one):
                yield one


def shown(name: str) -> bool:
    return name in ("__init__", "__iter__", "__call__", "__getitem__") or name[0] != "_"


def exported(module: ModuleType) -> dict[str, Any]:
    """What a user of a facade may import."""
    return {**exports(twinfeed.samplers), **exports(twinfeed.loaders), **exports(module)}


def exports(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


FACADES = [
    "twinfeed.samplers",
    "twinfeed.loaders",
    *(pytest.param(name, marks=pytest.mark.frameworks) for name in BACKENDS),
]


@pytest.mark.parametrize("facade", FACADES)
def test_classes_named_in_signatures_are_public(facade: str) -> None:
    """Each is exported, a base of what is, or on the page of the reference, by its module."""
    named = {
        kind.__name__: f"{kind.__module__}.{kind.__name__}"
        for _, hints in signatures(facade)
        for name, hint in hints.items()
        for kind in named_by(hint)
        if name[0] != "_" and kind.__module__.startswith("twinfeed")
    }
    public = exported(importlib.import_module(facade))
    bases = {base.__name__ for one in public.values() for base in getattr(one, "__mro__", ())}
    hidden = {where for name, where in named.items() if name not in public.keys() | bases}
    shown = {path.rpartition(".")[2] for path in reference()}
    assert {where for where in hidden if where.rpartition(".")[2] not in shown} == set()


@pytest.mark.parametrize("facade", FACADES)
def test_strings_with_fixed_choices_are_literals(facade: str) -> None:
    """Names of fields and keys are free, and sentences."""
    for one, hints in signatures(facade):
        if inspect.isroutine(one):
            defaults = {p.name: p.default for p in inspect.signature(one).parameters.values()}
            given = {name for name, default in defaults.items() if isinstance(default, str)}
            assert {name for name in given if hints[name] is str} <= {"field", "key"}, one


@pytest.mark.parametrize("package", [twinfeed, twinfeed.samplers, twinfeed.loaders])
def test_public_names_are_importable(package: ModuleType) -> None:
    """A stub lists them, and each is imported when it is asked for."""
    assert package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Fed'"):
        package.Fed  # noqa: B018


def page() -> list[Any]:
    """The classes of `twinfeed` that need no framework."""
    return [thing for thing in exports(twinfeed).values() if inspect.isclass(thing)]


def lines(thing: Any) -> list[str]:
    """The lines of its own docstring."""
    return inspect.cleandoc(thing.__doc__ or "").splitlines()


def section(thing: Any, title: str) -> list[str]:
    """The names in a section of a docstring, in order."""
    if f"{title}:" not in lines(thing):
        return []
    rest = lines(thing)[lines(thing).index(f"{title}:") + 1 :]
    body = takewhile(lambda line: line.startswith("    "), rest)
    return [line.partition(":")[0].strip(" *") for line in body if line[4] != " "]


def parameters(thing: Any) -> list[str]:
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def constructs(thing: Any) -> bool:
    """Whether it is a function or a class that users call, and no method or result."""
    if inspect.isclass(thing):
        made = is_dataclass(thing) or section(thing, "Attributes")
        return "__init__" in vars(thing) and not made
    return "." not in thing.__qualname__


@pytest.mark.parametrize("facade", [*FACADES, "twinfeed.loaders.formats", "docs/reference"])
def test_sections_name_parameters_and_errors(facade: str) -> None:
    """In the order of the signature, and from three parameters on all of them."""
    names = (
        page() if facade.startswith("docs") else exports(importlib.import_module(facade)).values()
    )
    errors = {**vars(builtins), **exported(twinfeed.loaders)}
    for one in members(names):
        named = section(one, "Args")
        if named:
            assert named == [name for name in parameters(one) if name in named], one
        if constructs(one) and len(parameters(one)) > 2:
            assert named == parameters(one), one
        held = section(one, "Attributes")
        fields = getattr(one, "__annotations__", None) or held  # an Index has no list of its own
        assert held == [name for name in fields if name in held], one
        assert set(section(one, "Raises")) <= errors.keys(), one
        titles = ["Args:", "Attributes:", "Returns:", "Raises:"]
        places = [lines(one).index(title) for title in titles if title in lines(one)]
        examples = [n for n, line in enumerate(lines(one)) if line.startswith(">>>")][:1]
        assert places + examples == sorted(places + examples), one
