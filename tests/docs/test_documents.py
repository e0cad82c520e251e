"""What must hold of the files of this project, the code's and the documents'."""

import importlib.util
import re

import pytest
from lint_files import ROOT, broken


def test_the_files_keep_their_rules() -> None:
    """`python tests/lint_files.py` says the same."""
    assert broken() == []


def test_the_drawings_are_those_of_the_streams() -> None:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.drawings().items():
        assert (ROOT / "docs" / name).read_text() == text, f"python docs/drawings.py writes {name}"


README = ROOT / "README.md"

# A first batch of the class files: what is built, and the first batch after.
SUMS = {"34 s": ("20 s", "14 s"), "0.45 s": ("0.37 s", "0.08 s")}
FIGURE = re.compile(r"\b\d[\d.]*[kM](?=/s)|\b\d[\d.]* m?s\b|\b0\.\d\d\b(?! s)")


def test_every_public_sampler_is_in_its_table() -> None:
    import twinfeed.samplers as samplers

    text = README.read_text()
    missing = [name for name in samplers.__all__ if name.endswith("Sampler") and name not in text]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_its_figures_are_those_of_the_benchmarks(page: str) -> None:
    text = (ROOT / page).read_text()
    table = text[text.index("| what | alternative") :].partition("\n\n")[0]
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    figures = FIGURE.findall(table)
    assert len(figures) >= 4
    parts = [part for figure in figures for part in SUMS.get(figure, (figure,))]
    assert [part for part in parts if not re.search(rf"\b{re.escape(part)}\b", measured)] == []
