"""What must hold of the files of this project, the code's and the documents'."""

import importlib.util
import re

import pytest
from lint_files import ROOT, broken

from benchmarks.figures import PAGES, tables


def test_files_pass_lint_files() -> None:
    """`python tests/lint_files.py` says the same."""
    assert broken() == []


def test_drawings_equal_output_of_script() -> None:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.drawings().items():
        assert (ROOT / "docs" / name).read_text() == text, f"python docs/drawings.py writes {name}"


def test_every_public_sampler_is_in_its_table() -> None:
    import twinfeed.samplers as samplers

    text = (ROOT / "README.md").read_text()
    missing = [name for name in samplers.__all__ if name.endswith("Sampler") and name not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_figures_equal_figures_json(page: str) -> None:
    assert f"\n{tables()[page]}\n\n" in (ROOT / page).read_text(), "python benchmarks/figures.py"


def test_contributing_names_functions_that_exist() -> None:
    """Each word of a code span in the list of calls is a class or a function of the code."""
    code = "\n".join(
        path.read_text() for part in ("samplers", "loaders") for path in (ROOT / part).rglob("*.py")
    )
    defined = set(re.findall(r"\b(?:def|class) (\w+)", code))
    calls = (ROOT / "CONTRIBUTING.md").read_text().partition("as a list of calls")[2]
    spans = re.findall("`([^`]+)`", calls.partition("\n## ")[0])
    assert len(spans) > 20
    assert {word for span in spans for word in re.findall(r"\w+", span)} - defined == set()
