"""Every example in a docstring runs, and every public name has one."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import twinfeed.loaders
import twinfeed.samplers


def modules() -> list[str]:
    found = []
    for package in (twinfeed.samplers, twinfeed.loaders):
        walked = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        found += [package.__name__, *(m.name for m in walked if not m.name.endswith("__main__"))]
    return found


@pytest.mark.parametrize("name", modules())
def test_examples_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


def public_names() -> list[tuple[ModuleType, str]]:
    packages = [importlib.import_module(name) for name in modules()]
    return [(package, name) for package in packages for name in getattr(package, "__all__", ())]


@pytest.mark.parametrize(
    ("package", "name"), public_names(), ids=lambda value: getattr(value, "__name__", value)
)
def test_every_public_name_has_an_example(package: ModuleType, name: str) -> None:
    thing = getattr(package, name)
    error = inspect.isclass(thing) and issubclass(thing, Exception)
    if not error and (inspect.isclass(thing) or inspect.isroutine(thing)):
        assert ">>>" in (inspect.getdoc(thing) or "")


@pytest.mark.parametrize("package", [twinfeed.samplers, twinfeed.loaders])
def test_public_names_are_sorted(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(package.__all__)
