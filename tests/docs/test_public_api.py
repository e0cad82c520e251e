"""The public names, parameters and options are those of the golden file of this version."""

import importlib
import re
from pathlib import Path

import pytest
from lint_files import PUBLIC
from public_api import breaking, lines, reference
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
    assert sorted(reference()) == sorted(re.findall(r" as (\w+)$", stub, re.MULTILINE))
    assert set(reference()) <= set(dir(twinfeed))


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_names_of_modules_are_names_of_twinfeed(module: str) -> None:
    where = importlib.import_module(module)
    for name in where.__all__:
        assert getattr(twinfeed, name) is getattr(where, name), name
