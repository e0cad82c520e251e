"""What must hold of the files of this project, the code's and the documents'."""

import importlib.util

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
