"""The documents for contributors hold what the tests cite."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests").glob("*.py")))


def numbered(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text, re.MULTILINE)}


def test_every_fault_that_names_a_test_is_in_the_list() -> None:
    listed = (ROOT / "docs" / "faults.md").read_text()
    sections = re.split(r"^## ", listed, flags=re.MULTILINE)[1:]
    by_letter = {section[0].lower(): numbered(r"^\| (\d+) \|", section) for section in sections}
    cited = re.findall(r"def test_(?:([a-g])\d\d_)*([a-g])(\d\d)_", TESTS)
    assert len(cited) > 30
    assert [name for name in cited if int(name[2]) not in by_letter[name[1]]] == []
    assert numbered(r"def test_fault_(\d+)_", TESTS) <= set().union(*by_letter.values())


def test_every_law_that_a_test_cites_is_in_the_design() -> None:
    laws = numbered(r"^(\d+)\. \*", (ROOT / "docs" / "design.md").read_text())
    assert laws == set(range(1, 12))
    assert numbered(r'"""Laws? (\d+)', TESTS) <= laws


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    for path in documents:
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
        assert [target for target in targets if not (path.parent / target).exists()] == [], path


def test_the_drawings_are_those_of_the_streams() -> None:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.drawings().items():
        assert (ROOT / "docs" / name).read_text() == text, f"python docs/drawings.py writes {name}"
