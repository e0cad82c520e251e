"""The public names, parameters and options are those of the golden file of this version."""

import importlib
from pathlib import Path

import pytest
from public_api import MODULES, REFERENCE, breaking, lines, reference

pytestmark = pytest.mark.frameworks
GOLDEN = Path(__file__).parent / "golden" / "api.txt"


def test_what_is_public_changes_only_on_purpose() -> None:
    before, now = GOLDEN.read_text().splitlines(), lines()
    assert breaking(before, now) == [], (
        "these break programs of users: docs/versions.md says what such a change takes; then "
        f"`python tests/public_api.py > {GOLDEN}`"
    )
    added = sorted(set(now) - set(before))
    assert added == [], f"new: name them in CHANGELOG.md; `python tests/public_api.py > {GOLDEN}`"


def test_only_what_breaks_programs_is_called_breaking() -> None:
    before = ["f", "f(0)", "f(x) = 1"]
    assert breaking(before, [*before, "g", "g(0) required", "f(y) = 2"]) == []
    assert breaking(before, ["f", "f(0)"]) == ["f(x) = 1"]
    assert breaking(before, ["f", "f(0)", "f(x) = 2"]) == ["f(x) = 1"]
    assert breaking(before, [*before, "f(y) required"]) == ["f(y) required"]


def test_the_reference_shows_every_public_name_once() -> None:
    shown = reference()
    assert sorted(set(shown)) == sorted(shown)
    names = {name.rpartition(".")[2] for name in shown}  # an alias is shown where it is defined
    for module in MODULES:
        assert set(importlib.import_module(module).__all__) - names == set(), module


def test_the_reference_lists_the_names_of_everyday_use() -> None:
    text = REFERENCE.with_suffix(".md").read_text()
    listed = text.partition("from `twinfeed` itself:")[2].split("\n\n")[1]
    names = [name.strip("`") for name in listed.rstrip(".").replace(",", " ").split()]
    assert sorted(names) == importlib.import_module("twinfeed").__all__
