"""The public names, parameters and options are those of the golden file of this version."""

import importlib
import re
from pathlib import Path

import pytest
from lint_files import PUBLIC
from public_api import REFERENCE, breaking, lines, reference
from support import GOLDEN

import twinfeed

pytestmark = pytest.mark.frameworks
API = GOLDEN / "api.txt"


def test_public_names_equal_golden_list() -> None:
    before, now = API.read_text().splitlines(), lines()
    assert breaking(before, now) == [], (
        "these break programs of users: docs/versions.md says what such a change takes; then "
        f"`python tests/public_api.py > {API}`"
    )
    added = sorted(set(now) - set(before))
    assert added == [], f"new: name them in CHANGELOG.md; `python tests/public_api.py > {API}`"


def test_breaking_lists_only_incompatible_changes() -> None:
    before = ["f", "f(0)", "f(x) = 1"]
    assert breaking(before, [*before, "g", "g(0) required", "f(y) = 2"]) == []
    assert breaking(before, ["f", "f(0)"]) == ["f(x) = 1"]
    assert breaking(before, ["f", "f(0)", "f(x) = 2"]) == ["f(x) = 1"]
    assert breaking(before, [*before, "f(y) required"]) == ["f(y) required"]


def test_the_reference_shows_every_name_of_twinfeed_once() -> None:
    stub = Path(twinfeed.__file__ or "").with_suffix(".pyi").read_text()
    shown = [path.rpartition(".") for path in reference()]
    names = [name for module, _, name in shown if module == "twinfeed"]
    assert sorted(names) == sorted(re.findall(r" as (\w+)$", stub, re.MULTILINE))
    assert len({name for _, _, name in shown}) == len(shown)
    for module, _, name in shown:
        assert module in PUBLIC
        assert name in dir(importlib.import_module(module))


def test_the_reference_lists_the_names_that_are_not_in_twinfeed() -> None:
    page = (REFERENCE.parent / "reference.md").read_text()
    rows = re.findall(r"^\| `(twinfeed\.[\w.]+)` \| (.*) \|$", page, re.MULTILINE)
    listed = [f"{module}.{name}" for module, names in rows for name in re.findall(r"\w+", names)]
    assert listed == sorted(path for path in reference() if path.rpartition(".")[0] != "twinfeed")


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_names_of_modules_are_shown_where_they_are_imported_from(module: str) -> None:
    """A name is one of `twinfeed`, or of the module that the reference names."""
    where, shown = importlib.import_module(module), reference()
    for name in where.__all__:
        if f"twinfeed.{name}" in shown:
            assert getattr(twinfeed, name) is getattr(where, name), name
        else:
            assert f"{module}.{name}" in shown, name
